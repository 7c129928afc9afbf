"""Loads the leak police for every test of the session, doctests of ``src`` included."""

pytest_plugins = ["police"]
