"""Bytes between processes; this room knows nothing of training."""
