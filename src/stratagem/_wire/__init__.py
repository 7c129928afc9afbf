"""Messages, tensors and shared memory between processes; independent of training."""
