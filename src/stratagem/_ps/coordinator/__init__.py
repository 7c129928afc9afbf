"""Code that runs in the coordinator process: variables, optimizers and modules on parameter servers."""
