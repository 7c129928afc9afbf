"""Run ``fit``, ``evaluate``, ``predict`` and their one-batch forms under the strategy of their model (KER-1)."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from stratagem._keras.dataset_inputs import convert_inputs
from stratagem._keras.keras_names import names
from stratagem._keras.model_strategies import at_work, is_on_servers

METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def apply_patch() -> None:
    """Wrap the methods of Keras' trainer."""
    trainer = names().Trainer
    for method in METHODS:
        setattr(trainer, method, _under_strategy(getattr(trainer, method)))


def _under_strategy(method: Any) -> Any:
    name = method.__name__
    signature = inspect.signature(method)

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with at_work(self, name) as strategy:
            if strategy is None:
                return method(self, *args, **kwargs)
            bound = signature.bind(self, *args, **kwargs)
            if is_on_servers(strategy):
                from stratagem._keras import server_steps  # and with it the cluster

                return server_steps.run(self, method, bound)
            convert_inputs(name, bound.arguments)
            return method(*bound.args, **bound.kwargs)

    return run
