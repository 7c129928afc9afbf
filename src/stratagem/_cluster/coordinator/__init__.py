"""Code that runs in the coordinator process: scheduling closures on workers."""
