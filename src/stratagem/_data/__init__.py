"""Input: the lazy dataset pipeline and how its batches reach the replicas."""
