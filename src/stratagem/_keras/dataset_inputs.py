"""Datasets of ours, and functions that return datasets, as input of ``fit``, ``evaluate`` and ``predict`` (KER-21, KER-22)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from stratagem._data.dataset import Dataset, as_dataset
from stratagem._data.node import INFINITE
from stratagem._keras.keras_names import names

STEPS = {"fit": "steps_per_epoch", "evaluate": "steps", "predict": "steps"}
"""The argument of each method that says how many batches to read."""


def convert_inputs(method: str, given: dict[str, Any]) -> None:
    """Replace datasets of ours, and dataset functions, in the arguments of a method by a form that Keras reads.

    Raises:
        ValueError: an argument beside the dataset would be ignored, or nothing says where an endless dataset stops.
    """
    if method not in STEPS:
        return
    x = given.get("x")
    if isinstance(x, Dataset) or is_dataset_fn(x):
        dataset = dataset_of(x)
        refuse_beside(method, given, ("y", "sample_weight"), "a dataset")
        if (class_weight := given.get("class_weight")) is not None:
            dataset = dataset.map(functools.partial(_weigh, class_weight))
        given["x"] = _finite(dataset, method, STEPS[method], given)
    validation = given.get("validation_data")
    if isinstance(validation, Dataset) or is_dataset_fn(validation):
        given["validation_data"] = _finite(dataset_of(validation), "fit", "validation_steps", given)


def is_dataset_fn(x: Any) -> bool:
    """Return whether an input is a function that returns a dataset."""
    return inspect.isroutine(x) or isinstance(x, functools.partial)


def dataset_of(x: Any) -> Dataset:
    """Return the dataset; of a function, the one that it returns for a single reader."""
    if isinstance(x, Dataset):
        return x
    from stratagem._cluster.coordinator.remote_values import build_dataset  # loads the cluster

    return as_dataset(build_dataset(x, index=0, workers=1))


def refuse_beside(
    method: str, given: dict[str, Any], arguments: tuple[str, ...], what: str
) -> None:
    """Raise if an argument was given that the elements of a dataset must contain."""
    for name in arguments:
        value = given.get(name)
        if value is not None and not (name == "validation_split" and not value):
            raise ValueError(
                f"{method}() got {what} and {name}: let the elements of the dataset be (x, y, sample_weight)."
            )


def _weigh(class_weight: dict[int, float], *element: Any) -> Any:
    """Return an element of (x, y) with the weights of its classes."""
    if len(element) != 2:
        raise ValueError(
            f"class_weight needs elements (x, y), but the dataset has elements of {len(element)} parts. Omit class_weight, and "
            "let the elements be (x, y, sample_weight)."
        )
    return (*element, names().class_weight_to_sample_weights(element[1], class_weight))


def _finite(dataset: Dataset, method: str, argument: str, given: dict[str, Any]) -> Any:
    if dataset.cardinality() == INFINITE and given.get(argument) is None:
        raise ValueError(
            f"{method}() got a dataset without end, and no {argument}: it would never stop. Give {argument}=…, or omit "
            "repeat()."
        )
    return data_adapter(lambda: dataset, dataset.cardinality)


def data_adapter(begin: Callable[[], Iterable[Any]], count: Callable[[], int]) -> Any:
    """Return a Keras data adapter.

    Args:
        begin: returns the batches of one epoch.
        count: returns their number; negative if it is not known.
    """
    return _adapter_class()(begin, count)


@functools.cache
def _adapter_class() -> Any:
    class BatchAdapter(names().DataAdapter):  # type: ignore[misc]  # Keras has no types
        """Batches of any source, as input of ``fit``, ``evaluate`` and ``predict``."""

        def __init__(self, begin: Callable[[], Iterable[Any]], count: Callable[[], int]) -> None:
            self._begin, self._count = begin, count

        def get_torch_dataloader(self) -> Iterable[Any]:
            return self._begin()

        def get_numpy_iterator(self) -> Any:
            raise NotImplementedError("Stratagem trains Keras models on the torch backend only.")

        get_tf_dataset = get_jax_iterator = get_numpy_iterator

        @property
        def num_batches(self) -> int | None:
            count = self._count()
            return count if count >= 0 else None

        @property
        def batch_size(self) -> None:
            return None

        has_partial_batch = partial_batch_size = batch_size

    return BatchAdapter
