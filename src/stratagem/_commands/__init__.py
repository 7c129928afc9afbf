"""What each sub-command of ``stratagem`` does; `cli.py` only parses the words."""
