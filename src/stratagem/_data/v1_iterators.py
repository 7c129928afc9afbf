"""Iterators of tf.distribute's first version: `make_dataset_iterator`, `make_input_fn_iterator`.

Called by the compatibility names; the same steps as the iterators of today, with `initialize()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, final

import torch
from typing_extensions import override

from stratagem._core.context import InputContext
from stratagem._data.dataset import Dataset
from stratagem._data.distribute import (
    DistributedDataset,
    DistributedIterator,
    OptionalElement,
    distribute_dataset,
    distribute_datasets_from_function,
)
from stratagem.config import InputReplicationMode


@final
class InputIterator:
    """An iterator that can go back to the start; usable at once, `initialize()` restarts it.

    Example:
        >>> import torch, stratagem as sg
        >>> from stratagem._data.v1_iterators import make_dataset_iterator
        >>> iterator = make_dataset_iterator(
        ...     sg.data.Dataset.range(2).batch(1), [torch.device("cpu")]
        ... )
        >>> iterator.get_next(), iterator.get_next()
        (tensor([0]), tensor([1]))
        >>> _ = iterator.initialize()
        >>> iterator.get_next()
        tensor([0])
        >>> iterator.close()
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._iterator: DistributedIterator | None = None

    def initialize(self) -> Self:
        """Start over."""
        self.close()
        return self

    @property
    def initializer(self) -> Any:
        """`initialize()`, for code that runs the property's value."""
        return self.initialize()

    def _current(self) -> DistributedIterator:
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        return self._iterator

    def get_next(self) -> Any:
        """The next step; `EndOfData` (a StopIteration) after the last (INP-40)."""
        return self._current().get_next()

    def get_next_as_optional(self) -> OptionalElement:
        """The next step in an optional."""
        return self._current().get_next_as_optional()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._current())

    def close(self) -> None:
        """End background threads; idempotent."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator.close()

    @override
    def __repr__(self) -> str:
        return f"<InputIterator over {self._dataset!r}>"


def make_dataset_iterator(dataset: Any, devices: Sequence[torch.device]) -> InputIterator:
    """An iterator over a dataset of global batches."""
    return InputIterator(distribute_dataset(dataset, devices))


def make_input_fn_iterator(
    input_fn: Callable[[InputContext], Any],
    devices: Sequence[torch.device],
    replication_mode: Any = InputReplicationMode.PER_WORKER,
) -> InputIterator:
    """An iterator over what `input_fn` returns: a dataset, or a function called for each element.

    Raises:
        ValueError: another replication mode, or a result that is neither (INP-41).
    """
    if replication_mode is not InputReplicationMode.PER_WORKER:
        raise ValueError(
            f"replication_mode={replication_mode!r} is not supported: expected "
            "InputReplicationMode.PER_WORKER"
        )

    def dataset_fn(context: InputContext) -> Any:
        made = input_fn(context)
        if callable(made) and not isinstance(made, Dataset):
            return Dataset.from_generator(_calls, args=(made,))
        return made

    try:
        return InputIterator(distribute_datasets_from_function(dataset_fn, devices))
    except TypeError as error:
        raise ValueError(
            f"input_fn must return a dataset or a function without arguments: {error}"
        ) from error


def _calls(make: Callable[[], Any]) -> Iterator[Any]:
    """What a function returns, call after call, until it raises StopIteration."""
    while True:
        try:
            element = make()
        except StopIteration:
            return
        yield element
