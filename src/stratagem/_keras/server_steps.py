"""Keras' loops under parameter servers: the methods that run them, and the steps and logs that they ask for."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from stratagem._keras.entry_points import as_input
from stratagem._keras.keras_names import names
from stratagem._keras.model_strategies import is_on_servers, strategy_of

ON_BATCH = ("train_on_batch", "test_on_batch", "predict_on_batch")


def apply_patch() -> None:
    """Let metrics be those of finished steps."""
    trainer = names().BaseTrainer
    reset, result = trainer.reset_metrics, trainer._get_metrics_result_or_logs

    @functools.wraps(reset)
    def reset_metrics(self: Any) -> None:
        if _is_remote(self):
            _on_servers(self).begin()
        reset(self)

    @functools.wraps(result)
    def logs_of_all_steps(self: Any, logs: Any) -> Any:
        return _on_servers(self).end_of_epoch() if _is_remote(self) else result(self, logs)

    trainer.reset_metrics = reset_metrics
    trainer._get_metrics_result_or_logs = logs_of_all_steps


def _is_remote(model: Any) -> bool:
    strategy = strategy_of(model)
    return strategy is not None and is_on_servers(strategy)


def _on_servers(model: Any) -> Any:
    from stratagem._keras.fit_on_servers import on_servers_of  # loads the cluster

    return on_servers_of(model)


def step_function(model: Any, kind: str) -> Callable[[Any], Any]:
    """Return the train, test or predict function of a model."""
    on_servers = _on_servers(model)
    if kind == "predict":
        return lambda data: next(iter(on_servers.predict(iter(data))))
    step = getattr(on_servers, kind)
    return lambda data: step(data[0])


def run(model: Any, method: Any, args: Any, kwargs: Any) -> Any:
    """Run a method of Keras' trainer with steps on the workers."""
    on_servers = _on_servers(model)
    bound = inspect.signature(method).bind(model, *args, **kwargs)
    given = bound.arguments
    name = method.__name__
    on_servers.waits = name in ON_BATCH
    on_servers.changed()
    try:
        if name == "fit":
            _prepare_fit(model, on_servers, given)
        else:
            if name == "predict" and (shared := _as_shared(given["x"])) is not None:
                raise ValueError(
                    f"predict() got {shared.shared!r}: workers read a shared dataset in no fixed order. Give the dataset itself."
                )
            given["x"] = _here(given.get("x"))
        if name == "predict":
            return _predict(model, on_servers, **dict(list(given.items())[1:]))
        if name == "predict_on_batch":
            _build(model, given["x"])
        return method(*bound.args, **bound.kwargs)
    except BaseException:  # Ctrl-C too: no step of this call may run on into the next one
        on_servers.give_up()
        raise
    finally:
        if name == "fit":
            on_servers.set_backup(None)


def _is_dataset_fn(x: Any) -> bool:
    return inspect.isroutine(x) or isinstance(x, functools.partial)


def _prepare_fit(model: Any, on_servers: Any, given: dict[str, Any]) -> None:
    x = given.get("x")
    if _is_dataset_fn(x):
        if given.get("steps_per_epoch") is None:
            raise ValueError(
                "fit(dataset_fn) needs steps_per_epoch: every worker reads its own dataset, so that the end of an epoch is "
                "not known otherwise."
            )
        _refuse_beside(given, "a dataset function", "let the elements of its datasets be")
        model._symbolic_build(data_batch=next(iter(_dataset_of(x))))
        on_servers.read_on_workers(x)
        given["x"] = _worker_batches_class()()
    elif (shared := _as_shared(x)) is not None:
        _refuse_beside(given, "a shared dataset", "let the elements of the dataset be")
        model._symbolic_build(data_batch=shared.example())
        given["x"] = shared
    else:
        given["x"] = as_input(x)
    given["validation_data"] = _here(given.get("validation_data"))


def _refuse_beside(given: dict[str, Any], what: str, remedy: str) -> None:
    for name in ("y", "sample_weight", "class_weight", "validation_split"):
        if given.get(name) is not None and not (name == "validation_split" and not given[name]):
            raise ValueError(f"fit() got {what} and {name}: {remedy} (x, y, sample_weight).")


def _here(x: Any) -> Any:
    """Return data of an evaluation: of a dataset function, its dataset for one worker, which the coordinator reads."""
    if (shared := _as_shared(x)) is not None:
        return shared
    return as_input(_dataset_of(x) if _is_dataset_fn(x) else x)


def _as_shared(x: Any) -> Any:
    """Return the batches of a shared dataset, None for other data."""
    from stratagem._cluster.coordinator.shared_dataset import SharedDataset
    from stratagem._keras.shared_batches import shared_batches

    return shared_batches(x) if isinstance(x, SharedDataset) else None


def _dataset_of(dataset_fn: Any) -> Any:
    from stratagem._cluster.coordinator.remote_values import build_dataset
    from stratagem._data.dataset import as_dataset

    return as_dataset(build_dataset(dataset_fn, index=0, workers=1))


@functools.cache
def _worker_batches_class() -> Any:
    from stratagem._keras.fit_on_servers import NEXT_OF_WORKER

    class WorkerBatches(names().DataAdapter):  # type: ignore[misc]  # Keras has no types
        """Batches that workers read from their own datasets: the coordinator only counts them."""

        def get_torch_dataloader(self) -> Iterator[str]:
            return itertools.repeat(NEXT_OF_WORKER)

        def get_numpy_iterator(self) -> Any:
            raise NotImplementedError("Stratagem trains Keras models on the torch backend only.")

        get_tf_dataset = get_jax_iterator = get_numpy_iterator

        @property
        def num_batches(self) -> None:
            return None

        batch_size = has_partial_batch = partial_batch_size = num_batches

    return WorkerBatches


def _build(model: Any, x: Any) -> None:
    from stratagem._keras.split_calls import build_for

    build_for(model, x)


def _predict(
    model: Any,
    on_servers: Any,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    from stratagem._keras import fit_on_servers

    names_ = names()
    batches = names_.EpochIterator(
        x=x, batch_size=batch_size, steps_per_epoch=steps, shuffle=False, steps_per_execution=1
    )
    if not isinstance(callbacks, names_.keras.callbacks.CallbackList):
        callbacks = names_.keras.callbacks.CallbackList(
            callbacks,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=1,
            steps=batches.num_batches,
            model=model,
        )
    for _, _, data in batches:
        _build(model, data[0][0] if isinstance(data[0], tuple | list) else data[0])
        break
    batches.reset()
    return fit_on_servers.predict(model, on_servers, batches, callbacks)
