"""Run the ``stratagem`` command as ``python -m stratagem``."""

from stratagem.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
