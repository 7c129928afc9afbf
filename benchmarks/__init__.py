"""Benchmarks of Stratagem, TensorFlow and the limit of the machine, in one run.

``python -m benchmarks`` measures; the product imports nothing of this package. Interpreters with and
without torch import the package, so this file imports nothing.
"""
