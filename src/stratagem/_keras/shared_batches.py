"""A shared dataset as input of ``fit`` and ``evaluate``: workers read the batches, the coordinator counts them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

from stratagem._cluster.coordinator.shared_dataset import SharedDataset
from stratagem._data.dataset import Dataset
from stratagem._keras.keras_names import names


def shared_batches(dataset: SharedDataset) -> Any:
    """Return the Keras data adapter of a shared dataset."""
    return _adapter_class()(dataset)


@functools.cache
def _adapter_class() -> Any:
    class SharedBatches(names().DataAdapter):  # type: ignore[misc]  # Keras has no types
        """One entry, the dataset, for each function that an epoch feeds."""

        def __init__(self, dataset: SharedDataset) -> None:
            self.shared = dataset

        def example(self) -> Any:
            """Return one batch, read here."""
            return next(iter(Dataset(self.shared._dataset.node)))

        def get_torch_dataloader(self) -> Iterator[SharedDataset]:
            return itertools.repeat(self.shared, len(self.shared))

        def get_numpy_iterator(self) -> Any:
            raise NotImplementedError("Stratagem trains Keras models on the torch backend only.")

        get_tf_dataset = get_jax_iterator = get_numpy_iterator

        @property
        def num_batches(self) -> int:
            return len(self.shared)

        @property
        def batch_size(self) -> None:
            return None

        has_partial_batch = partial_batch_size = batch_size

    return SharedBatches
