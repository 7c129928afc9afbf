"""Load the plugins of `tests/plugins` for every test of the session."""

pytest_plugins = [
    "user_files",
    "kinds",
    "police",
    "guardian",
    "warm_start",
    "orders",
    "waiting",
    "addresses",
]
