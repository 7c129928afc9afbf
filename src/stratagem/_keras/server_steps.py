"""Keras' loops under parameter servers: the methods that run them, with their steps and logs."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from stratagem._data.dataset import Dataset
from stratagem._data.node import UNKNOWN
from stratagem._keras.dataset_inputs import (
    convert_inputs,
    data_adapter,
    dataset_of,
    is_dataset_fn,
    refuse_beside,
)
from stratagem._keras.keras_names import names
from stratagem._keras.model_strategies import is_on_servers, strategy_of

ON_BATCH = ("train_on_batch", "test_on_batch", "predict_on_batch")


def apply_patch() -> None:
    """Let metrics be those of finished steps."""
    trainer = names().BaseTrainer
    reset, result = trainer.reset_metrics, trainer._get_metrics_result_or_logs

    @functools.wraps(reset)
    def reset_metrics(self: Any) -> None:
        if is_remote(self):
            remote_part_of(self).begin()
        reset(self)

    @functools.wraps(result)
    def logs_of_all_steps(self: Any, logs: Any) -> Any:
        return remote_part_of(self).end_of_epoch() if is_remote(self) else result(self, logs)

    trainer.reset_metrics = reset_metrics
    trainer._get_metrics_result_or_logs = logs_of_all_steps


def is_remote(model: Any) -> bool:
    """Return whether a model has its variables on parameter servers."""
    strategy = strategy_of(model)
    return strategy is not None and is_on_servers(strategy)


def remote_part_of(model: Any) -> Any:
    """Return the coordinator's side of a model on parameter servers."""
    from stratagem._keras.fit_on_servers import on_servers_of  # loads the cluster

    return on_servers_of(model)


def step_function(model: Any, kind: str) -> Callable[[Any], Any]:
    """Return the train, test or predict function of a model."""
    step = getattr(remote_part_of(model), kind)
    return lambda data: step(data[0])


def run(model: Any, method: Any, bound: inspect.BoundArguments) -> Any:
    """Run a method of Keras' trainer with steps on the workers."""
    on_servers = remote_part_of(model)
    given = bound.arguments
    name = method.__name__
    on_servers.waits = name in ON_BATCH
    on_servers.changed()
    try:
        _convert_shared(model, name, given)
        if name == "fit" and is_dataset_fn(given.get("x")):
            _read_on_workers(model, on_servers, given)
        convert_inputs(name, given)
        if name == "predict":
            _predict_ahead(model, on_servers, given)
        if name == "predict_on_batch":
            _build(model, given["x"])
        return method(*bound.args, **bound.kwargs)
    except BaseException:  # Ctrl-C too: no step of this call may run on into the next one
        on_servers.give_up()
        raise
    finally:
        if name == "fit":
            on_servers.set_backup(None)


_IN_ELEMENTS = ("y", "sample_weight", "class_weight", "validation_split")
"""Arguments that the elements of a dataset must contain if workers read it."""


def _convert_shared(model: Any, method: str, given: dict[str, Any]) -> None:
    """Replace shared datasets in the arguments by a form that Keras reads."""
    from stratagem._cluster.coordinator.shared_dataset import SharedDataset

    for name in ("x", "validation_data"):
        dataset = given.get(name)
        if not isinstance(dataset, SharedDataset):
            continue
        if method == "predict":
            raise ValueError(
                f"predict() got {dataset!r}: workers read a shared dataset in no fixed order. Give the dataset itself."
            )
        # Workers read the batches: each step gets the dataset itself.
        given[name] = data_adapter(
            functools.partial(_repeat_for_epoch, dataset), functools.partial(len, dataset)
        )
        if name == "x":
            refuse_beside(method, given, _IN_ELEMENTS, "a shared dataset")
            example = next(iter(Dataset(dataset._dataset.node)))
            model._symbolic_build(data_batch=example)


def _repeat_for_epoch(dataset: Any) -> Iterator[Any]:
    return itertools.repeat(dataset, len(dataset))


def _read_on_workers(model: Any, on_servers: Any, given: dict[str, Any]) -> None:
    """Let every worker read the dataset that a function returns; the coordinator only counts the batches."""
    from stratagem._keras.fit_on_servers import NEXT_OF_WORKER

    dataset_fn = given["x"]
    if given.get("steps_per_epoch") is None:
        raise ValueError(
            "fit(dataset_fn) needs steps_per_epoch: every worker reads its own dataset, so that the end of an epoch is "
            "not known otherwise."
        )
    refuse_beside("fit", given, _IN_ELEMENTS, "a dataset function")
    model._symbolic_build(data_batch=next(iter(dataset_of(dataset_fn))))
    on_servers.read_on_workers(dataset_fn)
    given["x"] = data_adapter(lambda: itertools.repeat(NEXT_OF_WORKER), lambda: UNKNOWN)


def _build(model: Any, x: Any) -> None:
    from stratagem._keras.split_calls import build_for

    build_for(model, x)


def _predict_ahead(model: Any, on_servers: Any, given: dict[str, Any]) -> None:
    """Replace the input of ``predict`` by the predictions of its batches, which are scheduled ahead of Keras' loop."""
    batches = names().EpochIterator(
        x=given["x"],
        batch_size=given.get("batch_size"),
        steps_per_epoch=given.get("steps"),
        shuffle=False,
    )
    for _, _, data in batches:
        _build(model, data[0][0] if isinstance(data[0], tuple | list) else data[0])
        break
    batches.reset()
    count = UNKNOWN if batches.num_batches is None else batches.num_batches
    predictions = lambda: on_servers.predictions(data[0] for _, _, data in batches)
    given.update(batch_size=None, steps=None, x=data_adapter(predictions, lambda: count))
