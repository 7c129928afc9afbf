"""Check the arguments of `CheckpointManager` and `Evaluator`."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping
from typing import Any

from torch import nn

from stratagem._checkpoint.checkpoint import Checkpoint


def check_manager_arguments(
    checkpoint: object,
    *,
    keep_best: object,
    on_server_loss: object,
    every_s: object,
    counts: Mapping[str, object],
) -> None:
    """Refuse arguments of a wrong type or value.

    Raises:
        TypeError: a wrong type.
        ValueError: a wrong value.
    """
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"checkpoint={checkpoint!r} has type {type(checkpoint).__name__}: expected an sg.Checkpoint, such as "
            "sg.Checkpoint(model=model, optimizer=optimizer)."
        )
    if on_server_loss not in ("partial", "rewind", "raise"):
        raise ValueError(
            f"on_server_loss={on_server_loss!r}: expected 'partial', 'rewind' or 'raise'."
        )
    if keep_best is not None and not isinstance(keep_best, str):
        raise TypeError(
            f"keep_best={keep_best!r}: expected the name of a metric, such as 'auc' or '-loss', or None. "
            "best_to_keep is the number of checkpoints."
        )
    if keep_best is not None and not keep_best.lstrip("-"):
        raise ValueError(f"keep_best={keep_best!r}: expected the name of a metric, such as 'auc'.")
    for name, value in counts.items():
        _check_positive(name, value, numbers.Integral, "a whole number ≥ 1, or None")
    _check_positive("every_s", every_s, numbers.Real, "a positive number of seconds, or None")


def check_evaluator_arguments(
    *, build: object, evaluate: object, max_evaluations: object, poll_s: object, timeout_s: object
) -> None:
    """Refuse arguments of an `Evaluator` of a wrong type or value.

    Raises:
        TypeError: a wrong type.
        ValueError: a wrong value.
    """
    if not callable(build) or isinstance(build, nn.Module):
        raise TypeError(
            f"build has type {type(build).__name__}: expected a function that returns a new model, such as "
            "`lambda: Clicks()`."
        )
    if not callable(evaluate):
        raise TypeError(
            f"evaluate has type {type(evaluate).__name__}: expected a function that takes the model and returns "
            "numbers by name."
        )
    expected = "a whole number ≥ 1, or None"
    _check_positive("max_evaluations", max_evaluations, numbers.Integral, expected)
    for name, value in (("poll_s", poll_s), ("timeout_s", timeout_s)):
        if value is None:
            raise TypeError(f"{name}=None: expected a positive number of seconds.")
        _check_positive(name, value, numbers.Real, "a positive number of seconds")


def _check_positive(name: str, value: object, kind: type, expected: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name}={value!r} has type {type(value).__name__}: expected {expected}.")
    if not value > 0:  # type: ignore[operator]
        raise ValueError(f"{name}={value!r}: expected {expected}.")


def checked_step(step: Any) -> int:
    """Return a number of steps."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"step={step!r}: expected the number of steps made, a whole number ≥ 0.")
    return number


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as numbers by name."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics={metrics!r}: expected numbers by name, such as {{'auc': 0.71}}.")
    found = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"metric {name!r} is {value!r}: expected a number.") from error
    return found
