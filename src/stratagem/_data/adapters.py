"""Adapters for sources of other libraries: loaders, datasets, iterables.

This module imports none of these libraries: an object of a library that is not loaded cannot exist.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import torch
from torch.utils import data as torch_data
from typing_extensions import override

from stratagem._data.calling import element_randomness
from stratagem._data.cursor import Cursor, CursorContext, State
from stratagem._data.node import UNKNOWN, Node
from stratagem._data.ray_source import RayDataNode, is_ray_data
from stratagem._data.seeds import ElementRng, mix
from stratagem._data.sources import (
    IterableCursor,
    IterableNode,
    IteratorCursor,
    SizedNode,
    SlicesNode,
    Stateful,
)
from stratagem.errors import DataError


def node_of(source: Any) -> Node:
    """Return a node for any object that yields elements; `docs/input.md` has the table.

    Raises:
        TypeError: `source` yields no elements.
    """
    if is_ray_data(source):
        return RayDataNode(source)
    if isinstance(source, torch_data.TensorDataset):
        return SlicesNode.of(tuple(source.tensors))
    # Stateful are StatefulDataLoader, datasets.IterableDataset and users' own.
    if isinstance(source, Iterable) and isinstance(source, Stateful | torch_data.DataLoader):
        return LoaderNode(source)
    # Programs often have a module of their own that is called `datasets`.
    hugging_face = sys.modules.get("datasets.arrow_dataset")
    if hugging_face is not None and isinstance(source, hugging_face.Dataset):
        return SizedNode(source, reads_many=True)
    if isinstance(source, torch_data.Dataset) and not isinstance(source, Iterable):
        return SizedNode(source)
    if isinstance(source, torch.Tensor | np.ndarray | tuple | dict):
        return SlicesNode.of(source)
    if isinstance(source, Iterator):
        return OnceNode(source)
    if isinstance(source, Iterable) and not isinstance(source, str | bytes):
        return IterableNode(source)
    raise TypeError(
        f"{type(source).__name__} {source!r:.60} is not a dataset: expected an sg.data.Dataset, a "
        "DataLoader, arrays or tensors, or an iterable of batches"
    )


@final
@dataclass(frozen=True, eq=False)
class OnceNode(Node):
    """Elements of an iterator or generator object, which can be read only once."""

    replayable = False
    iterator: Iterator[Any]
    _begun: list[bool] = field(default_factory=list)

    def open(self, context: CursorContext) -> Cursor:
        return IterableCursor(self._begin, f"{type(self.iterator).__name__} object")

    def _begin(self) -> Iterator[Any]:
        if self._begun:
            raise DataError(
                f"this dataset is a {type(self.iterator).__name__} object, which can be iterated "
                "once, and has been. Use sg.data.Dataset.from_generator(function), or a list."
            )
        self._begun.append(True)
        return self.iterator

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a dataset over a {type(self.iterator).__name__} object cannot be sent to another "
            "process. Use sg.data.Dataset.from_generator(function)."
        )


@final
@dataclass(frozen=True, eq=False)
class LoaderNode(Node):
    """A `torch.utils.data.DataLoader`, or another iterable with positions of its own."""

    replayable = False
    loader: Any

    def open(self, context: CursorContext) -> Cursor:
        kind = StatefulCursor if isinstance(self.loader, Stateful) else TorchLoaderCursor
        return kind(self.loader)

    @override
    def cardinality(self) -> int:
        # Over an IterableDataset the length of a DataLoader is a guess of that dataset, or an error.
        is_loader = isinstance(self.loader, torch_data.DataLoader)
        if is_loader and isinstance(self.loader.dataset, torch_data.IterableDataset):
            return UNKNOWN
        try:
            return len(self.loader)
        except TypeError:
            return UNKNOWN


class LoaderCursor(IteratorCursor):
    """Elements of a loader whose worker processes end with the cursor."""

    def __init__(self, source: Any) -> None:
        super().__init__(lambda: iter(source), "the DataLoader")
        self._source = source

    @override
    def close(self) -> None:
        # Torch ends worker processes when the iterator is collected. After an error the traceback keeps
        # the iterator alive. Persistent workers belong to the loader.
        if isinstance(self._source, torch_data.DataLoader):
            iterator, self._iterator = self._iterator, None
            if isinstance(iterator, _WithWorkers) and not self._source.persistent_workers:
                iterator._shutdown_workers()
        super().close()


@runtime_checkable
class _WithWorkers(Protocol):
    """Iterator of a DataLoader that has worker processes."""

    def _shutdown_workers(self) -> None: ...


@final
class StatefulCursor(LoaderCursor):
    """Elements of a loader that has positions of its own."""

    _saved: Any = None

    @override
    def _own_position(self) -> Any:
        if self._iterator is not None:
            self._saved = self._source.state_dict()
        return self._saved

    @override
    def restore(self, state: State) -> None:
        self._position, self._ended, self._saved = state["position"], state["ended"], state["own"]
        if not self._ended and self._saved is not None:
            shared = torch.default_generator.get_state()
            try:
                self._source.load_state_dict(self._saved)
                self._iterator = self._begin()
            finally:
                torch.default_generator.set_state(shared)


@final
class TorchLoaderCursor(LoaderCursor):
    """Batches of a DataLoader.

    The position is the state that the loader's random generators had when the epoch began, and a count.
    Resuming begins the epoch again from that state and skips the batches before the position.

    Without worker processes the dataset would draw random numbers from torch's global generator in the
    pipeline's thread, while the training step draws from it too. So every batch except the first has a
    random stream of its own. In the first batch samplers draw the order, which stays the loader's own.
    """

    _began: list[torch.Tensor] | None = None
    _stream = 0  # seed of the batches' random streams

    def _generators(self) -> list[torch.Generator]:
        """Return the generators of an epoch's order; torch's global one if none was given."""
        found = [self._source.generator or torch.default_generator]
        sampler = self._source.sampler
        if isinstance(
            sampler,
            torch_data.RandomSampler
            | torch_data.SubsetRandomSampler
            | torch_data.WeightedRandomSampler,
        ):
            own = sampler.generator
            found.append(own if isinstance(own, torch.Generator) else torch.default_generator)
        return found

    @override
    def _begin(self) -> Iterator[Any]:
        self._began = [generator.get_state() for generator in self._generators()]
        self._stream = zlib.crc32(self._began[0].numpy().tobytes())
        return super()._begin()

    @override
    def _randomness(self) -> AbstractContextManager[object]:
        if self._position == 0 or self._source.num_workers > 0:
            return super()._randomness()
        return element_randomness(ElementRng(mix(self._stream, self._position)))

    @override
    def _own_position(self) -> Any:
        return self._began

    @override
    def _go_to(self, own: Any) -> bool:
        return False  # read again from the beginning of the epoch

    @override
    def restore(self, state: State) -> None:
        shared = torch.default_generator.get_state()
        for generator, began in zip(self._generators(), state["own"] or (), strict=False):
            generator.set_state(began)
        try:
            super().restore(state)
        finally:
            torch.default_generator.set_state(shared)
