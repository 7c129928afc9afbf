"""Start and stop the processes of a cluster."""
