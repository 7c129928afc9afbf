"""Code that runs in a worker process: executing closures."""
