"""Processes and the closures they run: coordinator, workers, servers, local clusters."""
