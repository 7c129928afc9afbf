"""Values, variables and replicas in one process; independent of other processes and sockets."""
