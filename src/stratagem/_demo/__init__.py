"""Demonstration behind ``make demo``: a click-through model on a local cluster, with a live view."""
