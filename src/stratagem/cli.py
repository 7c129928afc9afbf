"""The ``stratagem`` command: parse the arguments, run one command, return an exit code.

Exit codes: 0 success; 1 the command failed; 2 wrong arguments; 3 `doctor` found a problem; 130 stopped by
Ctrl-C. An error is one line of text; ``--debug`` shows the traceback.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from stratagem import config
from stratagem._commands.command_parser import make_parser

__all__ = ["main"]

_EXIT_FAILED = 1
_EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Example:
        >>> main(["version"])  # doctest: +ELLIPSIS
        stratagem ... (torch ...)
        0
    """
    options = _parse(sys.argv[1:] if arguments is None else list(arguments))
    _set_up_logging(debug=options.debug)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("stratagem: stopped", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except SystemExit:
        raise
    except Exception as error:  # any error is one readable line
        if options.debug:
            raise
        note = "".join(f"\n  {line}" for line in getattr(error, "__notes__", ()))
        print(
            f"stratagem: {type(error).__name__}: {error}{note}\n  (--debug shows the traceback)",
            file=sys.stderr,
        )
        return _EXIT_FAILED


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Parse our own arguments; unknown ones are for the script of `train`, else an error."""
    # Everything after "--" is for the script, even if it looks like an option of ours.
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    ours, separator, rest = arguments[:cut], arguments[cut : cut + 1], arguments[cut + 1 :]
    parser = make_parser()
    options, left_over = parser.parse_known_args(ours)
    if options.command == "train":
        options.arguments = left_over + rest
    elif left_over or separator:
        parser.error(f"unrecognized arguments: {' '.join(left_over + separator + rest)}")
    return options


def _set_up_logging(*, debug: bool) -> None:
    level = "debug" if debug else (config.environment("STRATAGEM_LOG") or "warning")
    config.set_up_logging(level)


_MODULES = {
    "train": "train",
    "cluster": "clusters",
    "server": "serve",
    "doctor": "doctor",
    "top": "top",
    "checkpoint": "checkpoint_tool",
    "certificates": "certificates",
}
"""Modules of `_commands` whose `run` runs a command; a command loads no other one."""


def _run(options: argparse.Namespace) -> int:
    if options.command == "version":
        return _version()
    if options.command == "demo":
        from stratagem._demo.run import run_demo

        return run_demo(options)
    module = importlib.import_module(f"stratagem._commands.{_MODULES[options.command]}")
    return int(module.run(options))


def _version() -> int:
    import torch

    import stratagem

    python = ".".join(map(str, sys.version_info[:3]))
    print(f"stratagem {stratagem.__version__} (torch {torch.__version__}, Python {python})")
    return 0
