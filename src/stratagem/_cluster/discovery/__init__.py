"""Find the tasks of a cluster and their addresses."""
