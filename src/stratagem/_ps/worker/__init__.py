"""Code that runs in a worker process: the worker's view of a strategy's objects."""
