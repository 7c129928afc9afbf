"""Every optimizer of ``keras.optimizers`` gives the numbers of plain Keras under every strategy of one machine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras_models import STRATEGIES, compare, dense, rows

import stratagem as sg

X, Y = rows()


def of_keras() -> dict[str, Any]:
    """Return all optimizer classes that Keras exports, base classes aside."""
    return {
        name: value
        for name, value in vars(keras.optimizers).items()
        if inspect.isclass(value)
        and issubclass(value, keras.optimizers.Optimizer)
        and value is not keras.optimizers.Optimizer
    }


WRAPPERS: dict[str, Callable[[], Any]] = {
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    "MultiOptimizer": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.1), {".*kernel": keras.optimizers.Adam(0.01)}
        )
    ),
}


def fit(model: Any) -> Any:
    """Fit with a last batch of 2 rows, fewer than the replicas."""
    return model.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False).history


@pytest.mark.soak
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("name", of_keras())
def test_every_optimizer_gives_the_numbers_of_plain_keras(name: str, kind: str) -> None:
    strategy: sg.Strategy = STRATEGIES[kind]()
    make = WRAPPERS.get(name, lambda: of_keras()[name](learning_rate=0.01))
    compare(lambda: dense(optimizer=make()), fit, strategy, name)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(of_keras().keys() - WRAPPERS.keys()))
def test_every_optimizer_gives_the_numbers_of_plain_keras_on_one_worker(
    name: str, cluster: Any
) -> None:
    """Parameter servers run the update of Keras itself; they refuse optimizers around others."""
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        compare(lambda: dense(optimizer=of_keras()[name](learning_rate=0.01)), fit, strategy, name)
