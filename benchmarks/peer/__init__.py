"""The peer: the same work in TensorFlow, in an environment of its own that holds nothing of the project."""
