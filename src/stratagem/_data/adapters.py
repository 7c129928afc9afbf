"""What users already have, as a source: loaders, datasets of other libraries, iterables.

Nothing of these libraries is imported here: an object of a library that is not loaded cannot exist.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import torch
from torch.utils import data as torch_data
from typing_extensions import override

from stratagem._data import nests
from stratagem._data.calling import element_randomness
from stratagem._data.node import END, UNKNOWN, Cursor, CursorContext, Node, State
from stratagem._data.seeds import ElementRng, mix
from stratagem._data.sources import (
    Closable,
    IndexedSource,
    IteratorCursor,
    SlicesNode,
    Stateful,
)
from stratagem.errors import DataError


def node_of(source: Any) -> Node:
    """A node for anything that yields elements; see `docs/input.md` for the table.

    Raises:
        TypeError: it yields nothing.
    """
    if isinstance(source, torch_data.TensorDataset):
        return SlicesNode(tuple(source.tensors))
    if isinstance(source, Stateful) and isinstance(source, Iterable):
        return StatefulNode(source)  # StatefulDataLoader, datasets.IterableDataset, users' own
    if isinstance(source, torch_data.DataLoader):
        return LoaderNode(source)
    hugging_face = sys.modules.get("datasets")
    if hugging_face is not None and isinstance(source, hugging_face.Dataset):
        return HuggingFaceNode(source)
    if isinstance(source, torch_data.Dataset) and not isinstance(source, Iterable):
        return MapStyleNode(source)
    if isinstance(source, torch.Tensor | np.ndarray | tuple | dict):
        return SlicesNode(source)
    if isinstance(source, Iterator):
        return OnceNode(source)
    if isinstance(source, Iterable) and not isinstance(source, str | bytes):
        return IterableNode(source)
    raise TypeError(
        f"{type(source).__name__} {source!r:.60} is not a dataset: expected an sg.data.Dataset, a "
        "DataLoader, arrays or tensors, or an iterable of batches"
    )


@final
class IterableNode(Node):
    """Any object that can be iterated again and again; a position is a count of elements.

    Iterators with `get_state`/`set_state` (grain's) or `state_dict`/`load_state_dict` are asked
    for their position instead.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return _SeekingCursor(self._source)

    @override
    def cardinality(self) -> int:
        return len(self._source) if isinstance(self._source, list) else UNKNOWN


@runtime_checkable
class Seekable(Protocol):
    """An iterator that tells and takes its position, in grain's words."""

    def get_state(self) -> Any:
        """Its position."""

    def set_state(self, state: Any, /) -> None:
        """Go to a position."""


@final
class _SeekingCursor(Cursor):
    """An `IteratorCursor`, unless the iterator is `Seekable`."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self._made: Any = None
        self._plain = IteratorCursor(self._begin, f"{type(source).__name__}")

    def _begin(self) -> Any:
        self._made = iter(self._source)
        return self._made

    @override
    def next(self) -> Any:
        return self._plain.next()

    @override
    def state(self) -> State:
        state = self._plain.state()
        if isinstance(self._made, Seekable) and not state["ended"]:
            state["seek"] = self._made.get_state()
        return state

    @override
    def restore(self, state: State) -> None:
        if "seek" not in state:
            self._plain.restore(state)
            return
        iterator = self._begin()
        iterator.set_state(state["seek"])
        self._plain.resume(iterator, state["position"])

    @override
    def close(self) -> None:
        self._plain.close()
        self._made = None


@final
class OnceNode(Node):
    """An iterator or generator object: there is only one pass in it."""

    replayable = False

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._used = False

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return IteratorCursor(self._begin, f"{type(self._iterator).__name__} object")

    def _begin(self) -> Iterator[Any]:
        if self._used:
            raise DataError(
                f"this dataset is a {type(self._iterator).__name__} object, which can be iterated "
                "once, and has been. Use sg.data.Dataset.from_generator(function), or a list."
            )
        self._used = True
        return self._iterator

    @override
    def __reduce__(self) -> Any:
        raise TypeError(
            f"a dataset over a {type(self._iterator).__name__} object cannot be sent to another "
            "process. Use sg.data.Dataset.from_generator(function)."
        )


@final
class StatefulNode(Node):
    """A loader that keeps its own position: `state_dict()`, and `load_state_dict()` before `iter`."""

    replayable = False

    def __init__(self, source: Any) -> None:
        self._source = source

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return StatefulCursor(self._source)

    @override
    def cardinality(self) -> int:
        return _loader_length(self._source)


@final
class StatefulCursor(Cursor):
    """Asks the loader for its position after every element, as such loaders expect."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._iterator: Any = None
        self._saved: Any = None
        self._ended = False

    @override
    def next(self) -> Any:
        if self._ended:
            return END
        if self._iterator is None:
            self._iterator = iter(self._source)
        try:
            value = next(self._iterator)
        except StopIteration:
            self._ended = True
            self.close()
            return END
        return nests.to_element(value)

    @override
    def state(self) -> State:
        if self._iterator is not None:
            self._saved = self._source.state_dict()
        return {"own": self._saved, "ended": self._ended}

    @override
    def restore(self, state: State) -> None:
        self._ended, self._saved = state["ended"], state["own"]
        if not self._ended and self._saved is not None:
            shared = torch.default_generator.get_state()
            try:
                self._source.load_state_dict(self._saved)
                self._iterator = iter(self._source)
            finally:
                torch.default_generator.set_state(shared)

    @override
    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        if isinstance(self._source, torch_data.DataLoader):
            _end_workers(self._source, iterator)
        elif isinstance(iterator, Closable):
            iterator.close()


@runtime_checkable
class _WithWorkers(Protocol):
    """A DataLoader's iterator that has worker processes."""

    def _shutdown_workers(self) -> None: ...


def _end_workers(loader: torch_data.DataLoader[Any], iterator: Any) -> None:
    """End worker processes now; persistent ones belong to the loader.

    Torch ends them when the iterator is collected, but after an error its traceback keeps the
    iterator for as long as somebody looks at the error.
    """
    if isinstance(iterator, _WithWorkers) and not loader.persistent_workers:
        iterator._shutdown_workers()


def _loader_length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:  # over an iterable dataset
        return UNKNOWN


@final
class LoaderNode(Node):
    """A `torch.utils.data.DataLoader`, with its workers, sampler and collation."""

    replayable = False

    def __init__(self, loader: torch_data.DataLoader[Any]) -> None:
        self._loader = loader

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return LoaderCursor(self._loader)

    @override
    def cardinality(self) -> int:
        # A DataLoader's length over an IterableDataset is the dataset's own guess: not ours to trust.
        if isinstance(self._loader.dataset, torch_data.IterableDataset):
            return UNKNOWN
        return _loader_length(self._loader)


@final
class LoaderCursor(Cursor):
    """Batches of a DataLoader.

    Its position is the state its random generators had when the epoch began, and a count: on
    resuming the epoch is begun again from that state and the batches before are passed over.

    Without worker processes the dataset's own randomness would draw from torch's global generator,
    from a thread, while the training step draws from it too. So every batch but the first (in which
    samplers draw the order, which stays what it is without us) has a random stream of its own.
    """

    def __init__(self, loader: torch_data.DataLoader[Any]) -> None:
        self._loader = loader
        self._iterator: Any = None
        self._began: list[torch.Tensor] | None = None
        self._stream = 0  # seed of the batches' random streams
        self._position = 0
        self._ended = False

    def _generators(self) -> list[torch.Generator]:
        """The generators an epoch's order comes from; torch's global one where none was given."""
        found = [self._loader.generator or torch.default_generator]
        sampler = self._loader.sampler
        if isinstance(
            sampler,
            torch_data.RandomSampler
            | torch_data.SubsetRandomSampler
            | torch_data.WeightedRandomSampler,
        ):
            own = sampler.generator
            found.append(own if isinstance(own, torch.Generator) else torch.default_generator)
        return found

    def _begin(self) -> Iterator[Any]:
        self._began = [generator.get_state() for generator in self._generators()]
        self._stream = zlib.crc32(self._began[0].numpy().tobytes())
        return iter(self._loader)

    @override
    def next(self) -> Any:
        if self._ended:
            return END
        if self._iterator is None:
            self._iterator = self._begin()
        try:
            with self._randomness():
                value = next(self._iterator)
        except StopIteration:
            self._ended = True
            self.close()
            return END
        self._position += 1
        return nests.to_element(value)

    def _randomness(self) -> AbstractContextManager[object]:
        if self._position == 0 or self._loader.num_workers > 0:
            return nullcontext()
        return element_randomness(ElementRng(mix(self._stream, self._position)))

    @override
    def state(self) -> State:
        return {"position": self._position, "ended": self._ended, "began": self._began}

    @override
    def restore(self, state: State) -> None:
        self._ended = state["ended"]
        if self._ended or state["began"] is None:
            return
        shared = torch.default_generator.get_state()
        for generator, began in zip(self._generators(), state["began"], strict=True):
            generator.set_state(began)
        try:
            self._iterator = self._begin()
            found = self.skip(state["position"])
        finally:
            torch.default_generator.set_state(shared)
        if found < state["position"]:
            raise DataError(
                f"the DataLoader has only {found} batches, but the saved position is after "
                f"{state['position']}: it is not the loader the position was taken from."
            )

    @override
    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        _end_workers(self._loader, iterator)


class _Indexed(IndexedSource):
    """Somebody's object with a length, whose rows are had by number."""

    def __init__(self, source: Any) -> None:
        self._source = source

    @property
    @override
    def size(self) -> int:
        return len(self._source)


@final
class MapStyleNode(_Indexed):
    """A map-style `torch.utils.data.Dataset`: rows by number."""

    @override
    def at(self, index: int) -> Any:
        return nests.to_element(self._source[index])

    @override
    def gather(self, indices: torch.Tensor) -> Any:
        return nests.stack([self.at(index) for index in indices.tolist()])


@final
class HuggingFaceNode(_Indexed):
    """A `datasets.Dataset`: rows by number, batches by one call. Its format decides the types."""

    @override
    def at(self, index: int) -> Any:
        return nests.to_element(dict(self._source[index]))

    @override
    def gather(self, indices: torch.Tensor) -> Any:
        return nests.to_columns(dict(self._source[indices.tolist()]))
