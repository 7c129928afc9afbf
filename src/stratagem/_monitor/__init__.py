"""Monitoring of a cluster: the live page, reports, Prometheus and ``stratagem top``."""
