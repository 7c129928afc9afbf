"""What the coordinator sends so that a worker can build a Keras model: the program's own classes, and checks."""

from __future__ import annotations

from typing import Any

from stratagem._keras.keras_names import names
from stratagem._keras.model_on_worker import ModelRecipe, WorkerModel
from stratagem.errors import WrongArgumentType


def build_worker_model(recipe: ModelRecipe) -> WorkerModel:
    """Build the model on a worker. Runs there, once for each worker."""
    return WorkerModel(recipe)


def custom_objects_of(model: Any) -> dict[str, Any]:
    """Return the program's own classes and functions in a model, by the names that Keras gives them."""
    found: dict[str, Any] = {}
    for layer in model._flatten_layers():
        _add(found, type(layer))
        for value in vars(layer).values():
            if not isinstance(value, type) and callable(value):
                _add(found, value if _is_function(value) else type(value))
    config = getattr(model, "_compile_config", None)
    for value in names().tree.flatten(dict(config.config) if config is not None else {}):
        if callable(value):
            _add(found, value if _is_function(value) or isinstance(value, type) else type(value))
    return found


def _is_function(value: Any) -> bool:
    return type(value).__name__ == "function"


def _add(found: dict[str, Any], one: Any) -> None:
    module = str(getattr(one, "__module__", ""))
    if module.split(".", maxsplit=1)[0] in ("keras", "builtins", "torch", "stratagem", "numpy"):
        return
    found[one.__name__] = one
    registered = names().keras.saving.get_registered_name(one)
    found[registered] = one


def refuse_metrics(model: Any) -> None:
    """Refuse metrics whose states of several workers do not add up.

    Raises:
        WrongArgumentType: a metric has an ``update_state`` of its own.
    """
    for metric in _flat_metrics(model):
        owner = next(kind for kind in type(metric).__mro__ if "update_state" in vars(kind))
        if not owner.__module__.startswith("keras."):
            raise WrongArgumentType(
                f"metric {metric.name!r} ({type(metric).__name__}) has an update_state of its own. Under parameter servers the "
                "states of all workers are added up, which is known to be right for Keras' own metrics only. Derive it from "
                "keras.metrics.MeanMetricWrapper with a function, or evaluate the saved model without the servers."
            )


def _flat_metrics(model: Any) -> list[Any]:
    flat: list[Any] = []
    for metric in model.metrics:
        inner = getattr(metric, "metrics", None)
        flat.extend(inner if isinstance(inner, list) and inner else [metric])
    return flat
