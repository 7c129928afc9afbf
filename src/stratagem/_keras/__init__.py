"""Keras 3 on its torch backend: ``fit``, ``evaluate`` and ``predict`` under the strategy of a model."""
