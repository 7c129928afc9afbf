"""Code that runs in a parameter-server process."""
