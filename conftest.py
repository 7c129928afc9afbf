"""Loads the leak police, and the number of orders to try, for every test of the session."""

pytest_plugins = ["police", "orders"]
