"""Implementation of the ``stratagem`` commands; `cli.py` parses their arguments."""
