"""The strategies, which decide where variables are stored and where computation runs."""
