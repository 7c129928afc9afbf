"""``fit``, ``evaluate``, ``predict`` and their forms for one batch: they run under the strategy of their model (KER-1)."""

from __future__ import annotations

import functools
from typing import Any

from stratagem._data.dataset import Dataset
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

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with at_work(self, name) as strategy:
            if strategy is None:
                return method(self, *args, **kwargs)
            if is_on_servers(strategy):
                from stratagem._keras import server_steps  # and with it the cluster

                return server_steps.run(self, method, args, kwargs)
            args = tuple(as_input(arg) for arg in args)
            kwargs = {key: as_input(arg) for key, arg in kwargs.items()}
            return method(self, *args, **kwargs)

    return run


def as_input(value: Any) -> Any:
    """Return a dataset of ours in the form that Keras reads; anything else unchanged."""
    return _adapter_class()(value) if isinstance(value, Dataset) else value


@functools.cache
def _adapter_class() -> Any:
    """Return the class of Keras data adapters over our datasets."""

    class DatasetAdapter(names().DataAdapter):  # type: ignore[misc]  # Keras has no types
        """A `stratagem.data.Dataset` of batches, as input of ``fit``, ``evaluate`` and ``predict``."""

        def __init__(self, dataset: Dataset) -> None:
            self._dataset = dataset

        def get_torch_dataloader(self) -> Dataset:
            return self._dataset

        def get_numpy_iterator(self) -> Any:
            raise NotImplementedError("Stratagem trains Keras models on the torch backend only.")

        get_tf_dataset = get_jax_iterator = get_numpy_iterator

        @property
        def num_batches(self) -> int | None:
            count = self._dataset.cardinality()
            return count if count >= 0 else None

        @property
        def batch_size(self) -> None:
            return None

        has_partial_batch = partial_batch_size = batch_size

    return DatasetAdapter
