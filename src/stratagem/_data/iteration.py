"""Iteration of a dataset: epochs, positions, and the release of everything that was opened."""

from __future__ import annotations

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, final

from typing_extensions import override

from stratagem._data import nests
from stratagem._data.cursor import END, Cursor, CursorContext, PipelineRun, Skipped
from stratagem._data.node import Node
from stratagem._data.seeds import fresh_seed, mix
from stratagem._owner import Owner
from stratagem.errors import DataError

_VERSION = 2  # of the format of positions


@dataclass
class EpochCounter:
    """Number of times a dataset was iterated; every epoch has orders of its own.

    Attributes:
        number: epochs begun.
        base_seed: seed of every step without a seed of its own, drawn when first needed.
        caches: elements kept by `cache()` for later epochs.
    """

    number: int = 0
    base_seed: int | None = None
    caches: dict[int, list[Any]] = field(default_factory=dict)

    def begin(self, node: Node, *, fuse: bool = True) -> Epoch:
        """Begin the next epoch of a pipeline."""
        if self.base_seed is None:
            # A pipeline without randomness does not touch torch's generator.
            self.base_seed = fresh_seed() if node.wants_seed else 0
        self.number += 1
        return Epoch(self, node, self.number - 1, fuse=fuse)


@final
class Epoch:
    """One pass over a pipeline.

    The epoch opens its `cursor`. `state` and `reopen` add the values that belong to the whole pipeline to
    the cursor's position: shape, seed and epoch number.
    """

    def __init__(self, counter: EpochCounter, node: Node, number: int, *, fuse: bool) -> None:
        self._counter = counter
        self._node = node
        self._number = number
        self._fuse = fuse
        self._open()

    def _open(self) -> None:
        assert self._counter.base_seed is not None
        self.run = PipelineRun(self._counter.base_seed, self._counter.caches, fuse=self._fuse)
        self.cursor = self._node.open(CursorContext(self.run).in_epoch(self._number))

    def state(self, cursor_state: Any) -> dict[str, Any]:
        """Return the whole position, given the position of the cursor."""
        return {
            "version": _VERSION,
            "pipeline": outline(self._node),
            "seed": self.run.base_seed,
            "epoch": self._number,
            "cursor": cursor_state,
        }

    def check(self, state: dict[str, Any]) -> None:
        """Refuse the position of another pipeline."""
        version, there, here = state.get("version"), state.get("pipeline"), outline(self._node)
        if version != _VERSION or there != here:
            raise ValueError(
                f"this position was saved by {there!r} (format {version!r}), but the dataset here is "
                f"{here!r} (format {_VERSION}). Build the same pipeline, with the same version of "
                "Stratagem, to resume."
            )

    def reopen(self, state: dict[str, Any]) -> Any:
        """Open a new cursor in the epoch of `state` and return the cursor's part of `state`.

        The cursor before must have been closed.
        """
        counter = self._counter
        if state["seed"] != counter.base_seed:
            counter.base_seed, counter.caches = state["seed"], {}
        self._number = state["epoch"]
        # The next iter() is the epoch after the resumed one.
        counter.number = self._number + 1
        self._open()
        return state["cursor"]

    @override
    def __repr__(self) -> str:
        return f"epoch {self._number} of {outline(self._node)}"

    @property
    def seed(self) -> int:
        """Seed of this epoch, for random numbers outside the pipeline's nodes."""
        return mix(self.run.base_seed, self._number)

    def report_skipped(self) -> None:
        """Warn once about skipped records."""
        skipped = self.run.skipped
        if skipped:
            first = skipped[0]
            warnings.warn(
                f"{len(skipped)} unreadable record(s) or file(s) were skipped; the first: record "
                f"{first.record} of {first.path!r}: {first.reason}. The iterator's .skipped lists all.",
                stacklevel=3,
            )


def outline(node: Node) -> str:
    """Return the shape of a pipeline as text, such as ``Batch(Shuffle(Slices))``."""
    name = type(node).__name__.removesuffix("Node")
    inside = ", ".join(outline(each) for each in node.inputs)
    return f"{name}({inside})" if inside else name


@final
class _ClosedCursor(Cursor):
    """Takes the place of a cursor that was closed."""

    @override
    def next(self) -> Any:
        return END


@final
class EpochReader:
    """Reads an epoch and knows whether it is open, has ended, has failed or was closed.

    It refers to no public iterator, so that the finalizer of a dropped iterator can close it.

    Args:
        epoch: the epoch to read.
        wrap: returns the cursor to read, such as one that reads the epoch's cursor ahead.
    """

    def __init__(self, epoch: Epoch, wrap: Callable[[Epoch], Cursor] | None = None) -> None:
        self.epoch = epoch
        self._wrap = wrap or (lambda epoch: epoch.cursor)
        self._cursor = self._wrap(epoch)
        self._ended = False
        self._closed = False
        # Text only: the error's traceback refers to the user's iterator, which could then never be
        # collected.
        self._failure: str | None = None

    def next(self) -> Any:
        """Return the next element, or `END`; raise `DataError` after an error or `close()`."""
        if self._ended:
            return END
        if self._closed:
            raise self._closed_error()
        try:
            element = self._cursor.next()
        except BaseException as error:  # Ctrl-C too: threads and files are open
            self._failure = f"{type(error).__name__}: {error}"
            self.close()
            raise
        if element is END:
            self._ended = True
            self._release()
            self.epoch.report_skipped()
        return element

    def _release(self) -> None:
        """Close the cursors and drop them, with the elements and errors they hold."""
        cursor, self._cursor = self._cursor, _ClosedCursor()
        cursor.close()
        self.epoch.cursor = self._cursor

    def _closed_error(self) -> DataError:
        if self._failure is None:
            return DataError("this iterator was closed. Call iter(dataset) for a new one.")
        return DataError(
            f"this iterator ended with an error ({self._failure}). Call iter(dataset) for a new one."
        )

    def state(self) -> dict[str, Any]:
        """Return the position after the last delivered element."""
        if self._closed:
            raise self._closed_error()
        own = None if self._ended else nests.to_plain(self._cursor.state())
        return {**self.epoch.state(own), "ended": self._ended}

    def load(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        if self._closed:
            raise self._closed_error()
        self.epoch.check(state)
        self._release()
        own = self.epoch.reopen(state)
        self._cursor = self._wrap(self.epoch)
        self._ended = state["ended"]
        if not self._ended:
            self._cursor.restore(nests.from_plain(own))

    def close(self) -> None:
        """End threads and close files; idempotent."""
        self._closed = True
        self._release()

    @override
    def __repr__(self) -> str:
        state = "failed" if self._failure else "closed" if self._closed else "open"
        return f"{'ended' if self._ended else state}, {self.epoch!r}"


class ElementIterator(Owner):
    """Base of the public iterators over elements."""

    def __init__(self, reader: EpochReader) -> None:
        self._reader = reader
        self._finalizer = weakref.finalize(self, reader.close)

    @final
    def __iter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> Any:
        """Return the next element."""

    @property
    @final
    def skipped(self) -> tuple[Skipped, ...]:
        """Records that ``on_error="skip"`` has skipped so far."""
        return tuple(self._reader.epoch.run.skipped)

    @final
    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered element: plain values and tensors only."""
        return self._reader.state()

    @final
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position saved from an iterator of the same pipeline.

        Raises:
            ValueError: the position belongs to another pipeline.
        """
        self._reader.load(state)

    @final
    @override
    def close(self) -> None:
        """End threads and close files; idempotent."""
        self._finalizer()

    @override
    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._reader!r}>"


@final
class DatasetIterator(ElementIterator):
    """Iterator over the elements of a dataset, with a position.

    The iterator ends its threads and closes its files after the last element, after an error, on
    `close()`, at the end of a ``with`` block, and when it is dropped.

    Example:
        >>> import stratagem as sg
        >>> dataset = sg.data.Dataset.range(10).shuffle(seed=1).batch(4)
        >>> iterator = iter(dataset)
        >>> _ = next(iterator)
        >>> position = iterator.state_dict()
        >>> rest = [batch.tolist() for batch in iterator]
        >>> resumed = iter(dataset)
        >>> resumed.load_state_dict(position)
        >>> [batch.tolist() for batch in resumed] == rest
        True
    """

    @override
    def __next__(self) -> Any:
        element = self._reader.next()
        if element is END:
            raise StopIteration
        return element
