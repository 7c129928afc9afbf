"""Types of command-line arguments: texts that become numbers and resources."""

from __future__ import annotations

import argparse

__all__ = ["positive", "positive_or_range", "resources"]


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def positive_or_range(text: str) -> int | tuple[int, int]:
    """Return a whole number of at least 1, or two of them for "2:8".

    Example:
        >>> positive_or_range("4"), positive_or_range("2:8")
        (4, (2, 8))
    """
    least, colon, most = text.partition(":")
    return (positive(least), positive(most)) if colon else positive(text)


def resources(text: str) -> dict[str, float]:
    """Return the amounts of resources by name.

    Example:
        >>> resources("CPU=2,memory=8e9")
        {'CPU': 2.0, 'memory': 8000000000.0}
    """
    found = {}
    for part in text.split(","):
        name, equals, amount = part.partition("=")
        try:
            found[name.strip()] = float(amount)
        except ValueError:
            equals = ""
        if not equals or not name.strip():
            raise argparse.ArgumentTypeError(
                f"{text!r}: expected resources such as CPU=2,memory=8e9"
            )
    return found
