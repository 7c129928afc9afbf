"""Keras models, data and comparisons for the tests of Keras under strategies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import stratagem as sg

ROWS = 50
"""Of the data: with batches of 16 the last one has 2 rows, fewer than three replicas."""


def rows(count: int = ROWS, features: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and two classes of labels, always the same."""
    random = np.random.default_rng(0)
    x = random.normal(size=(count, features)).astype("float32")
    return x, (x[:, 0] + x[:, 1] ** 2 > 0.5).astype("int64")


def dense(**compile_arguments: Any) -> Any:
    """Return a compiled classifier of two layers."""
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)]
    )
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), **classifier(), **compile_arguments})
    return model


def classifier() -> dict[str, Any]:
    """Return the arguments of ``compile`` for two classes."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"loss": loss, "metrics": ["accuracy"]}


STRATEGIES: dict[str, Callable[[], sg.Strategy]] = {
    "one device": lambda: sg.OneDeviceStrategy("cpu:0"),
    "central": lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "mirrored": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]),
}
"""Two and three replicas: 16 rows divide among them evenly and unevenly."""


def trained(
    strategy: sg.Strategy | None, build: Callable[[], Any], use: Callable[[Any], Any]
) -> tuple[list[np.ndarray], Any]:
    """Build a model under a strategy (None: plain Keras); return its weights and the result of ``use``, called outside."""
    keras.utils.set_random_seed(7)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = build()
    result = use(model)
    return model.get_weights(), result


_plain: dict[str, Any] = {}


def compare(
    build: Callable[[], Any], use: Callable[[Any], Any], strategy: sg.Strategy, key: str = ""
) -> None:
    """Assert that a strategy gives the weights and results of plain Keras, to 1e-5 relative.

    ``key`` names the build and use: plain Keras then runs them once for all strategies.
    """
    if not key or key not in _plain:
        _plain[key] = trained(None, build, use)
    expected_weights, expected = _plain[key]
    with strategy:
        weights, result = trained(strategy, build, use)
    for one, other in zip(expected_weights, weights, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
    assert_close(result, expected)


def assert_close(result: Any, expected: Any) -> None:
    """Compare nests of numbers and arrays."""
    if isinstance(expected, dict):
        assert result.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(result[key], value)
    elif isinstance(expected, list | tuple):
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            assert_close(one, other)
    else:
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
