"""Figures of a cluster for the live page, the report, Prometheus and ``stratagem top``."""
