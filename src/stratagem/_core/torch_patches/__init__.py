"""Every change this package makes to the behaviour of torch itself."""
