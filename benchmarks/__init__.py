"""Stratagem side by side with TensorFlow and with the limit, in one run.

``python -m benchmarks`` measures; nothing in this package is imported by the product. The package is
imported by three interpreters (the project's, and the peer's own without torch), so this file stays empty.
"""
