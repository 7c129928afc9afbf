"""Input: the lazy dataset pipeline, and the distribution of its batches to replicas."""
