"""Loads the leak police, the guardian, the number of orders to try and gates for every test of the session."""

pytest_plugins = ["police", "guardian", "orders", "waiting"]
