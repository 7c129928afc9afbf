"""The strategies: where variables live and where computation runs."""
