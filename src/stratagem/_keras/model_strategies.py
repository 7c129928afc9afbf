"""The strategy of a Keras model: the one that was current when the model was constructed (KER-1).

``fit``, ``evaluate``, ``predict`` and their one-batch forms run under it, wherever they are called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stratagem._core import context
from stratagem._keras.dataset_inputs import convert_inputs
from stratagem._keras.keras_names import names
from stratagem._strategies.base import Strategy
from stratagem.errors import MisuseError

METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")

_ATTRIBUTE = "_stratagem_strategy"


def is_torch_backend() -> bool:
    """Return whether Keras computes with torch."""
    import keras

    return str(keras.backend.backend()) == "torch"


def strategy_of(model: Any) -> Strategy | None:
    """Return the strategy of a model, or None."""
    found: Strategy | None = getattr(model, _ATTRIBUTE, None)
    return found


def is_on_servers(strategy: Strategy) -> bool:
    """Return whether a strategy keeps variables on parameter servers and computes on workers."""
    return strategy.cluster_resolver is not None


@contextmanager
def at_work(model: Any, method: str) -> Iterator[Strategy | None]:
    """Enter the scope of a model's strategy, and its device; return the strategy, or None.

    Raises:
        RuntimeError: called in a replica.
        ValueError: under the scope of a strategy that is not the model's.
    """
    strategy = strategy_of(model)
    current = context.current_strategy()
    if current is not None and current is not strategy:
        raise ValueError(
            f"{method}() of Keras model {model.name!r} was called under {context.describe_context()}, but the model "
            f"was constructed {_where(strategy)}. Construct and compile the model under the scope that trains it: "
            "`with strategy.scope(): model = ...; model.compile(...)`, or load it there with keras.saving.load_model."
        )
    if strategy is None:
        yield None
        return
    if context.current_replica() is not None:
        raise MisuseError(
            f"{method}() of Keras model {model.name!r} was called inside {context.describe_context()}. It runs on all "
            "replicas by itself: call it outside the function given to run()."
        )
    if strategy.gradient_aggregation != "mean":
        raise ValueError(
            f"{method}() of a Keras model computes the gradients of the whole batch, as on one device; "
            f"{strategy!r} asks for their sum over replicas. Use gradient_aggregation='mean', and a loss with "
            "reduction='sum' if you want sums."
        )
    with strategy.scope(), names().keras.device(str(strategy._central_device)):
        yield strategy


def _where(strategy: Strategy | None) -> str:
    return "outside any scope" if strategy is None else f"under {strategy!r}"


def apply_patch() -> None:
    """Note the strategy of new models; check it in ``compile``; wrap the methods of Keras' trainer."""
    # Keras compares a model's ``compile`` with that of its own base class: it must be the one that is replaced.
    model_class, trainer = names().Model, names().BaseTrainer
    create, compile_model = model_class.__new__, trainer.compile

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        made = create(cls, *args, **kwargs)
        strategy = context.current_strategy()
        if strategy is not None:
            object.__setattr__(made, _ATTRIBUTE, strategy)
        return made

    @functools.wraps(compile_model)
    def compile_at_work(self: Any, *args: Any, **kwargs: Any) -> Any:
        with at_work(self, "compile"):
            return compile_model(self, *args, **kwargs)

    model_class.__new__ = __new__
    trainer.compile = compile_at_work
    for method in METHODS:
        setattr(names().Trainer, method, _under_strategy(getattr(names().Trainer, method)))


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


def refuse_other_backends() -> None:
    """Raise when a model is constructed under a scope, because Keras does not compute with torch."""
    from keras import Model

    create = Model.__new__

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if context.current_strategy() is not None:
            import keras

            raise MisuseError(
                f"a Keras model was constructed under {context.describe_context()}, but Keras uses its "
                f"{keras.backend.backend()!r} backend. Strategies need the torch backend: set the environment variable "
                "KERAS_BACKEND=torch before the program imports keras."
            )
        return create(cls, *args, **kwargs)

    Model.__new__ = __new__
