"""Costs of a cluster's parts, a model of larger clusters, and a comparison of the model with this machine.

``python -m benchmarks.scaling`` measures and writes the tables of ``docs/scaling.md``. ``simulation.py`` and
``costs.py`` are pure and need neither torch nor Stratagem.
"""
