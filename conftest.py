"""Loads the leak police, the guardian, the number of orders to try, gates and addresses for every test of the session."""

pytest_plugins = ["police", "guardian", "orders", "waiting", "addresses"]
