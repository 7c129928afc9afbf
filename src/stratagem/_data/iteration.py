"""Iterating a dataset: passes, positions, and the end of everything that was opened."""

from __future__ import annotations

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, final

from typing_extensions import override

from stratagem._data import nests
from stratagem._data.node import END, Cursor, CursorContext, Node, PipelineRun, Skipped
from stratagem._data.seeds import fresh_seed, mix
from stratagem._owner import Owner
from stratagem.errors import DataError

_VERSION = 1


@dataclass
class Passes:
    """How often a dataset was iterated: each pass is an epoch with orders of its own.

    Attributes:
        number: passes begun.
        base_seed: seed of everything unseeded, drawn when first needed.
        caches: what `cache()` kept, for later passes.
    """

    number: int = 0
    base_seed: int | None = None
    caches: dict[int, list[Any]] = field(default_factory=dict)

    def begin(self, node: Node, *, fuse: bool = True) -> Pass:
        """The next pass over a pipeline."""
        if self.base_seed is None:
            # A pipeline without randomness leaves torch's generator alone.
            self.base_seed = fresh_seed() if node.wants_seed else 0
        self.number += 1
        return Pass(self, node, self.number - 1, fuse=fuse)


@final
class Pass:
    """One pass over a pipeline, without the user's iterator around it.

    Its `cursor` is opened and closed here; `state` and `restore` add to the cursor's position what
    belongs to the whole pipeline: its shape, seed and epoch.
    """

    def __init__(self, passes: Passes, node: Node, epoch: int, *, fuse: bool) -> None:
        assert passes.base_seed is not None
        self._passes = passes
        self._node = node
        self._epoch = epoch
        self._fuse = fuse
        self.run = PipelineRun(passes.base_seed, caches=passes.caches, fuse=fuse)
        self.cursor: Cursor = self._open()

    def _open(self) -> Cursor:
        return self._node.open(CursorContext(self.run).in_epoch(self._epoch))

    def state(self, cursor_state: Any) -> dict[str, Any]:
        """The whole position, around that of the cursor (or of what reads it ahead)."""
        return {
            "version": _VERSION,
            "pipeline": outline(self._node),
            "seed": self.run.base_seed,
            "epoch": self._epoch,
            "cursor": cursor_state,
        }

    def check(self, state: dict[str, Any]) -> None:
        """Refuse a position of another pipeline."""
        here = outline(self._node)
        if state.get("version") != _VERSION or state.get("pipeline") != here:
            raise ValueError(
                f"this position was saved by {state.get('pipeline')!r} (version "
                f"{state.get('version')!r}), but the dataset here is {here!r} (version {_VERSION}). "
                "Build the same pipeline to resume."
            )

    def reopen(self, state: dict[str, Any]) -> Any:
        """Open a fresh cursor in the epoch of `state`; returns the cursor's part of it.

        The cursor before must have been closed.
        """
        if state["seed"] != self._passes.base_seed:
            self._passes.caches = {}
            self._passes.base_seed = state["seed"]
        self._epoch = state["epoch"]
        # The next iter() is the epoch after the one resumed, as it would have been.
        self._passes.number = self._epoch + 1
        self.run = PipelineRun(state["seed"], caches=self._passes.caches, fuse=self._fuse)
        self.cursor = self._open()
        return state["cursor"]

    @override
    def __repr__(self) -> str:
        return f"epoch {self._epoch} of {outline(self._node)}"

    @property
    def seed(self) -> int:
        """A seed of this pass, for randomness outside the pipeline's nodes."""
        return mix(self.run.base_seed, self._epoch)

    def report_skipped(self) -> None:
        """Warn, once, about records that were passed over."""
        skipped = self.run.skipped
        if skipped:
            first = skipped[0]
            warnings.warn(
                f"{len(skipped)} unreadable record(s) or file(s) were skipped; the first: record "
                f"{first.record} of {first.path!r}: {first.reason}. The iterator's .skipped lists all.",
                stacklevel=3,
            )


def outline(node: Node) -> str:
    """The shape of a pipeline as text, such as ``Batch(Shuffle(Slices))``."""
    name = type(node).__name__.removesuffix("Node")
    inside = ", ".join(outline(each) for each in node.inputs)
    return f"{name}({inside})" if inside else name


class Source(Protocol):
    """What a `Playback` plays: a cursor, or what reads one ahead."""

    def next(self) -> Any:
        """The next element, or `END`."""

    def state(self) -> Any:
        """The position."""

    def restore(self, state: Any) -> None:
        """Take over a position, fresh."""

    def close(self) -> None:
        """Release everything."""


@final
class _Nothing(Cursor):
    """Stands where a cursor was."""

    @override
    def next(self) -> Any:
        return END


@final
class Playback:
    """A pass being played: knows whether it is open, has ended, failed or was closed.

    It refers to no public iterator, so that an iterator nobody holds any more can close it.
    """

    def __init__(self, one_pass: Pass, wrap: Callable[[Pass], Source] | None = None) -> None:
        self.one_pass = one_pass
        self._wrap = wrap
        self._source: Source = self._wrapped()
        self._ended = False
        self._closed = False
        # Text only: the error's traceback holds the user's iterator, which could then never be
        # collected while this object waits to be closed for it.
        self._failure: str | None = None

    def _wrapped(self) -> Source:
        return self.one_pass.cursor if self._wrap is None else self._wrap(self.one_pass)

    def next(self) -> Any:
        """The next element, or `END`; after an error or `close()` a `DataError`."""
        if self._ended:
            return END
        if self._closed:
            raise self._closed_error()
        try:
            element = self._source.next()
        except BaseException as error:  # Ctrl-C too: threads and files are open
            self._failure = f"{type(error).__name__}: {error}"
            self.close()
            raise
        if element is END:
            self._ended = True
            self._release()
            self.one_pass.report_skipped()
        return element

    def _release(self) -> None:
        """Close what is open and let go of it, elements held and errors kept included."""
        source, self._source = self._source, _Nothing()
        source.close()
        self.one_pass.cursor = _Nothing()

    def _closed_error(self) -> DataError:
        if self._failure is None:
            return DataError("this iterator was closed. Call iter(dataset) for a new one.")
        return DataError(
            f"this iterator ended with an error ({self._failure}). Call iter(dataset) for a new one."
        )

    def state(self) -> dict[str, Any]:
        """The position after the last element delivered."""
        if self._closed:
            raise self._closed_error()
        own = None if self._ended else nests.to_plain(self._source.state())
        return {**self.one_pass.state(own), "ended": self._ended}

    def load(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        if self._closed:
            raise self._closed_error()
        self.one_pass.check(state)
        self._release()
        own = self.one_pass.reopen(state)
        self._source = self._wrapped()
        self._ended = state["ended"]
        if not self._ended:
            self._source.restore(nests.from_plain(own))

    def close(self) -> None:
        """End threads, close files; idempotent."""
        self._closed = True
        self._release()

    @override
    def __repr__(self) -> str:
        if self._ended:
            where = "ended"
        elif self._closed:
            where = "closed" if self._failure is None else "failed"
        else:
            where = "open"
        return f"{where}, {self.one_pass!r}"


class ElementIterator(Owner):
    """What every iterator over elements can do; abstract, for `DatasetIterator` and its like."""

    def __init__(self, playback: Playback) -> None:
        self._playback = playback
        self._finalizer = weakref.finalize(self, playback.close)

    @final
    def __iter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> Any:
        """The next element."""

    @property
    @final
    def skipped(self) -> tuple[Skipped, ...]:
        """Records passed over so far by ``on_error="skip"``."""
        return tuple(self._playback.one_pass.run.skipped)

    @final
    def state_dict(self) -> dict[str, Any]:
        """The position after the last element delivered; plain values and tensors only."""
        return self._playback.state()

    @final
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position saved from an iterator of the same pipeline.

        Raises:
            ValueError: the position is one of another pipeline.
        """
        self._playback.load(state)

    @final
    @override
    def close(self) -> None:
        """End threads, close files; idempotent."""
        self._finalizer()

    @override
    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._playback!r}>"


@final
class DatasetIterator(ElementIterator):
    """The elements of a dataset, and the position among them.

    It ends its threads and closes its files after the last element, after an error, on `close()`,
    at the end of a ``with`` block, and when it is dropped.

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
        element = self._playback.next()
        if element is END:
            raise StopIteration
        return element
