"""Iterators of a dataset: epochs, positions, and the release of resources."""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
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
        resume: position where the next epoch begins, if not at its first element.
        newest: reader of the epoch begun last.
    """

    number: int = 0
    base_seed: int | None = None
    caches: dict[int, list[Any]] = field(default_factory=dict)
    resume: dict[str, Any] | None = None
    newest: weakref.ref[EpochReader] | None = None

    def state(self, node: Node) -> dict[str, Any]:
        """Return the number of epochs begun, and the position in the newest one if it is open."""
        position = self.resume
        newest = None if self.newest is None else self.newest()
        if position is None and newest is not None and newest.is_open:
            position = newest.state()
        return {
            "version": _VERSION,
            "pipeline": outline(node),
            "seed": self.base_seed,
            "epochs": self.number,
            "position": position,
        }

    def load(self, state: dict[str, Any], node: Node) -> None:
        """Make the next epoch the one that would have come next when `state` was saved."""
        _check_pipeline(state, node)
        if "epochs" not in state:
            raise ValueError(
                "this is the position of an iterator. Load it into one: "
                "iter(dataset).load_state_dict(position)."
            )
        self.number, self.base_seed, self.caches = state["epochs"], state["seed"], {}
        self.resume = state["position"]


def outline(node: Node) -> str:
    """Return the shape of a pipeline as text, such as ``Batch(Shuffle(Slices))``."""
    name = type(node).__name__.removesuffix("Node")
    inside = ", ".join(outline(each) for each in node.inputs)
    return f"{name}({inside})" if inside else name


def _check_pipeline(state: dict[str, Any], node: Node) -> None:
    """Raise if a position is one of another pipeline."""
    version, there, here = state.get("version"), state.get("pipeline"), outline(node)
    if version != _VERSION or there != here:
        raise ValueError(
            f"this position was saved by {there!r} (format {version!r}), but the dataset here is "
            f"{here!r} (format {_VERSION}). Build the same pipeline, with the same version of "
            "Stratagem, to resume."
        )


@final
class _ClosedCursor(Cursor):
    """Takes the place of a cursor that was closed."""

    def next(self) -> Any:
        return END


@final
class EpochReader:
    """Reads one epoch of a pipeline; is open, has ended, has failed or was closed.

    It refers to no public iterator, so that the finalizer of a dropped iterator can close it.

    Args:
        counter: epochs of the dataset; this is the next one.
        node: the pipeline.
        wrap: returns the cursor to read, given the pipeline's cursor and a seed of the epoch.
    """

    def __init__(
        self,
        counter: EpochCounter,
        node: Node,
        wrap: Callable[[Cursor, int], Cursor] | None = None,
    ) -> None:
        if counter.base_seed is None:
            # A pipeline without randomness does not touch torch's generator.
            counter.base_seed = fresh_seed() if node.wants_seed else 0
        self._counter = counter
        self._node = node
        self._wrap = wrap or (lambda cursor, seed: cursor)
        self._ended = False
        self._closed = False
        # Text only: the error's traceback refers to the user's iterator, which could then never be
        # collected.
        self._failure: str | None = None
        self._open(counter.number)
        position, counter.resume = counter.resume, None
        if position is not None:
            self.load(position)
        counter.newest = weakref.ref(self)

    @property
    def is_open(self) -> bool:
        """True if there may be more elements."""
        return not (self._ended or self._closed)

    def _open(self, epoch: int) -> None:
        counter = self._counter
        assert counter.base_seed is not None
        counter.number = epoch + 1  # the next iter() is the epoch after this one
        self._epoch = epoch
        self.run = PipelineRun(counter.base_seed, counter.caches)
        cursor = self._node.open(CursorContext(self.run).in_epoch(epoch))
        self.cursor = self._wrap(cursor, mix(counter.base_seed, epoch))

    def next(self) -> Any:
        """Return the next element, or `END`; raise `DataError` after an error or `close()`."""
        if self._ended:
            return END
        self._refuse_closed()
        try:
            element = self.cursor.next()
        except BaseException as error:  # Ctrl-C too: threads and files are open
            self._failure = f"{type(error).__name__}: {error}"
            self.close()
            raise
        if element is END:
            self._ended = True
            self._release()
            self._report_skipped()
        return element

    def _release(self) -> None:
        """Close the cursor and drop it, with the elements and errors it holds."""
        cursor, self.cursor = self.cursor, _ClosedCursor()
        cursor.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            state = f"ended with an error ({self._failure})" if self._failure else "was closed"
            raise DataError(f"this iterator {state}. Call iter(dataset) for a new one.")

    def _report_skipped(self) -> None:
        """Warn once about skipped records."""
        skipped = self.run.skipped
        if skipped:
            first = skipped[0]
            warnings.warn(
                f"{len(skipped)} unreadable record(s) or file(s) were skipped; the first: record "
                f"{first.record} of {first.path!r}: {first.reason}. The iterator's .skipped lists all.",
                stacklevel=4,
            )

    def state(self) -> dict[str, Any]:
        """Return the position after the last delivered element."""
        self._refuse_closed()
        return {
            "version": _VERSION,
            "pipeline": outline(self._node),
            "seed": self.run.base_seed,
            "epoch": self._epoch,
            "cursor": None if self._ended else nests.to_plain(self.cursor.state()),
            "ended": self._ended,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        self._refuse_closed()
        _check_pipeline(state, self._node)
        self._release()
        if state["seed"] != self._counter.base_seed:
            self._counter.base_seed, self._counter.caches = state["seed"], {}
        self._open(state["epoch"])
        self._ended = state["ended"]
        if not self._ended:
            self.cursor.restore(nests.from_plain(state["cursor"]))

    def close(self) -> None:
        """End threads and close files; idempotent."""
        self._closed = True
        self._release()

    def __repr__(self) -> str:
        state = "failed" if self._failure else "closed" if self._closed else "open"
        state = "ended" if self._ended else state
        return f"{state}, epoch {self._epoch} of {outline(self._node)}"


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
        return tuple(self._reader.run.skipped)

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

    def __next__(self) -> Any:
        element = self._reader.next()
        if element is END:
            raise StopIteration
        return element


class EpochSource(ABC):
    """Base of the public datasets: every `iter()` begins a new epoch of a pipeline, from a position if one was loaded.

    Attributes:
        node: the pipeline.
    """

    def __init__(self, node: Node, base_seed: int | None = None) -> None:
        self.node = node
        self._epochs = EpochCounter(base_seed=base_seed)

    @abstractmethod
    def __iter__(self) -> ElementIterator:
        """Begin an epoch."""

    def __bool__(self) -> bool:
        return True  # also without elements, as len() may be unknown

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Fold the elements: ``state = reduce_func(state, element)``.

        Example:
            >>> import stratagem as sg
            >>> int(sg.data.Dataset.range(4).reduce(0, lambda total, x: total + x))
            6
        """
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the newest iterator and the number of epochs, as plain values.

        Example:
            >>> import stratagem as sg
            >>> dataset = sg.data.Dataset.range(5)
            >>> iterator = iter(dataset)
            >>> _ = next(iterator)
            >>> resumed = sg.data.Dataset.range(5)
            >>> resumed.load_state_dict(dataset.state_dict())
            >>> [int(x) for x in resumed]
            [1, 2, 3, 4]
        """
        return self._epochs.state(self.node)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved position: the next ``iter()`` begins there.

        Raises:
            ValueError: the position belongs to another pipeline.
        """
        self._epochs.load(state, self.node)
