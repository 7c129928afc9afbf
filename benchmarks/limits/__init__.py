"""The limit: the same work in bare PyTorch on one thread, and plain memory traffic."""
