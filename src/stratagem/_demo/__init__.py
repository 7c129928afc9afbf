"""The demonstration behind ``make demo``: a click-through model on a local cluster, watched live."""
