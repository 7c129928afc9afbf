"""Checkpoints: saving, restoring, keeping and evaluating the state of a training run."""
