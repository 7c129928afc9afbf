"""The metrics of a Keras model under parameter servers: their variables, and a check that their changes add up.

Every step starts with reset metrics on its worker, and the coordinator adds up the changes of all steps. This is right for metrics
whose variables are sums over rows, as those of Keras' own metrics are.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from stratagem.errors import WrongArgumentType


def metric_variables(model: Any) -> list[Any]:
    """Return the variables of all metrics of a model, in order."""
    return [variable for metric in model.metrics for variable in metric.variables]


def flat_metrics(model: Any) -> list[Any]:
    """Return all metrics of a model, and those inside them, in order."""
    flat: list[Any] = []
    for metric in model.metrics:
        inner = getattr(metric, "metrics", None)
        flat.extend(inner if isinstance(inner, list) and inner else [metric])
    return flat


def check_metrics(model: Any) -> None:
    """Check, in their first update, the metrics that have an ``update_state`` of their own."""
    for metric in flat_metrics(model):
        owner = next(kind for kind in type(metric).__mro__ if "update_state" in vars(kind))
        if not owner.__module__.startswith("keras."):
            first = functools.partial(_first_update, metric)
            object.__setattr__(metric, "update_state", first)


def _first_update(metric: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the first update of a metric twice, and see whether the second one adds the same."""
    del vars(metric)["update_state"]
    attributes = _attributes_of(metric)
    values = [_values_of(metric)]
    for _ in range(2):
        result = metric.update_state(*args, **kwargs)
        values.append(_values_of(metric))
    adds_up = [
        np.allclose(twice - once, once - start, rtol=1e-3, atol=1e-6)
        for start, once, twice in zip(*values, strict=True)
    ]
    if not adds_up or not all(adds_up) or _attributes_of(metric) != attributes:
        raise WrongArgumentType(
            f"metric {metric.name!r} ({type(metric).__name__}) cannot be computed on several workers: its state is not a sum "
            "over rows in variables of the metric (add_variable), so that the changes of all steps do not add up. Keep sums "
            "and counts in variables, or compute the metric from model.predict() in a callback."
        )
    with torch.no_grad():
        for variable, value in zip(metric.variables, values[1], strict=True):
            variable.assign(value)
    return result


def _values_of(metric: Any) -> list[np.ndarray]:
    return [np.array(variable.numpy()) for variable in metric.variables]


def _attributes_of(metric: Any) -> dict[str, Any]:
    """Return the attributes by identity and length."""
    return {
        name: (id(value), len(value) if isinstance(value, list | dict | set) else 0)
        for name, value in vars(metric).items()
    }
