"""Option objects, and the only place that reads the environment.

Every option object is frozen, keyword-only and checks itself. Precedence everywhere:
an explicit argument, then the environment, then the default stated here.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

ENVIRONMENT_PREFIX = "STRATAGEM_"


def environment(name: str, default: str | None = None) -> str | None:
    """Value of one environment variable, read anew at every call.

    Example:
        >>> from stratagem import config
        >>> config.environment("STRATAGEM_NO_SUCH_SETTING", "fallback")
        'fallback'
    """
    return os.environ.get(name, default)


def seconds_from_environment(name: str, default: float) -> float:
    """A duration in seconds from the environment; refuses what is not a positive number."""
    text = environment(name)
    if text is None or text == "":
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise ValueError(
            f"{name}={text!r} is not a duration: expected a positive number of seconds, "
            f"such as {default:g}. Unset it to use the default."
        )
    return value


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `Strategy.run`, kept so that code written for tf.distribute runs unchanged.

    Example:
        >>> import stratagem as sg
        >>> sg.RunOptions()
        RunOptions(dynamic_batch_size=True, bucketizing=False, xla_options=None)
    """

    dynamic_batch_size: bool = True
    """Accepted and ignored: PyTorch needs no static batch size."""

    bucketizing: bool = False
    """Accepted and ignored: there is no padding to buckets."""

    xla_options: object = None
    """Accepted and ignored: there is no XLA here."""


def replica_timeout_s() -> float:
    """How long a replica waits for the others in a collective before it is an error.

    Ten minutes: longer than any sane first step (compilation included), shorter than a night.
    Set ``STRATAGEM_REPLICA_TIMEOUT_S`` to change it.
    """
    return seconds_from_environment("STRATAGEM_REPLICA_TIMEOUT_S", 600.0)


def set_up_logging(level: str) -> None:
    """Print the records of the ``stratagem`` logger (the one documented namespace) to stderr.

    Only commands call this; as a library Stratagem leaves logging to the program.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(
            f"log level {level!r} (STRATAGEM_LOG) is not known; expected debug, info, warning "
            "or error."
        )
    logger = logging.getLogger("stratagem")
    logger.setLevel(number)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname).1s %(name)s: %(message)s"))
        logger.addHandler(handler)
