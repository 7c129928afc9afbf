"""What the live page, the report, Prometheus and ``stratagem top`` show about a cluster."""
