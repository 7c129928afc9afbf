"""Keras 3 on its torch backend: models whose ``fit``, ``evaluate`` and ``predict`` run as their strategy says."""
