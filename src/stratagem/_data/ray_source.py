"""Ray Data as a source: `ray.data.Dataset` and `ray.data.DataIterator`.

A program that iterates such a dataset reads it directly. The workers of a cluster share it: an actor
(`ray_share_server.py`) gives every batch to one of them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np
from typing_extensions import override

from stratagem._data.cursor import Cursor, CursorContext
from stratagem._data.node import Node, replaced, walk
from stratagem._data.ray_share_server import BATCH_ROWS, RayShareServer, read_batches
from stratagem._data.sources import Closable, IteratorCursor
from stratagem._data.transforms import RepeatNode
from stratagem.errors import DataError

AHEAD: Final = 2
"""Batches that a worker has asked for: a call of the actor takes a millisecond, and reading longer."""


def is_ray_data(source: object) -> bool:
    """Return whether an object is a dataset or an iterator of Ray Data. Does not import Ray."""
    ray_data = sys.modules.get("ray.data")
    return ray_data is not None and isinstance(source, ray_data.Dataset | ray_data.DataIterator)


@dataclass(frozen=True, eq=False)
class _RayNode(Node):
    """Source of batches of columns."""

    replayable = False  # Ray yields the rows in any order, unless its options say otherwise

    @property
    @override
    def rows_per_batch(self) -> int | None:
        return BATCH_ROWS

    @property
    @override
    def rows_vary(self) -> bool:
        return True


@final
@dataclass(frozen=True, eq=False)
class RayDataNode(_RayNode):
    """Batches of a Ray dataset, read by this process."""

    source: Any

    def open(self, context: CursorContext) -> Cursor:
        return IteratorCursor(lambda: _elements(read_batches(self.source)), "the Ray dataset")

    def __reduce__(self) -> Any:
        # The state is unpickled after the call of `_connected`: it needs the connection to Ray.
        return _connected, (RayDataNode, _address()), self.__dict__


@final
@dataclass(frozen=True, eq=False)
class SharedRayNode(_RayNode):
    """A worker's share of a Ray dataset: the batches that the actor gives to this worker."""

    server: Any
    repeats: bool  # without end; then an epoch without a batch for this worker is passed over
    _readers: list[_ShareReader] = field(default_factory=list)  # one, which all epochs use

    def open(self, context: CursorContext) -> Cursor:
        if not self._readers:
            self._readers.append(_ShareReader(self.server, self.repeats))
        reader = self._readers[0]
        return IteratorCursor(lambda: _elements(reader.epoch()), "the Ray dataset")

    def __reduce__(self) -> Any:
        state = {"server": self.server, "repeats": self.repeats, "_readers": []}
        return _connected, (SharedRayNode, _address()), state


@final
class _ShareReader:
    """Asks the actor for batches, a few ahead."""

    def __init__(self, server: Any, repeats: bool) -> None:
        self._server = server
        self._repeats = repeats
        self._finished = -1
        self._asked: deque[Any] = deque()

    def epoch(self) -> Iterator[Any]:
        """Yield the batches of one epoch that this worker gets."""
        import ray

        present: int | None = None
        while True:
            while len(self._asked) < AHEAD:
                self._asked.append(self._server.next.remote(self._finished))
            epoch, batch, any_batch = ray.get(self._asked[0])
            if present is not None and epoch > present:
                # Another worker has finished the epoch and begun the next one, from which this batch is.
                self._finished = present
                return
            self._asked.popleft()
            if batch is not None:
                present = epoch
                yield batch
            elif epoch > self._finished:
                self._finished = epoch
                if present is not None or not self._repeats or not any_batch:
                    return


def share_node(node: Node) -> tuple[Node, Callable[[], None] | None]:
    """Return a pipeline whose Ray datasets are shared by all workers, and a function that ends the sharing.

    The pipeline itself and None if it reads no Ray dataset.
    """
    found = [each for each in walk(node) if isinstance(each, RayDataNode)]
    if not found:
        return node, None
    import ray

    actor = ray.remote(num_cpus=0)(RayShareServer)
    servers = []
    for each in found:
        servers.append(actor.remote(each.source))
        node = replaced(node, each, SharedRayNode(servers[-1], _repeats(node, each)))

    def end() -> None:
        if ray.is_initialized():
            for server in servers:
                ray.kill(server)

    return node, end


def _repeats(node: Node, source: Node) -> bool:
    """Return whether a source of a pipeline is repeated without end."""
    above = [each for each in walk(node) if isinstance(each, RepeatNode) and each.count is None]
    return any(source in walk(each) for each in above)


def _elements(batches: Iterator[Any]) -> Iterator[Any]:
    try:
        for batch in batches:
            yield _columns(batch)
    finally:  # Ray's threads end with its iterator, which the traceback of an error would keep
        if isinstance(batches, Closable):
            batches.close()
        del batches


def _columns(batch: dict[str, Any]) -> dict[str, Any]:
    """Copy a batch out of Ray's memory, which is read-only and freed with the batch.

    Raises:
        DataError: a column of lists, or another type that is no array.
    """
    for name, column in batch.items():
        if column.dtype == object and any(
            isinstance(item, np.ndarray | list) for item in column[:1]
        ):
            raise DataError(
                f"column {name!r} of the Ray dataset has lists of different lengths, which are no tensor. "
                "Convert the column with Ray's map_batches, or leave it out with select_columns."
            )
    return {name: np.array(column) for name, column in batch.items()}


def _address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _connected(kind: type[_RayNode], address: str) -> _RayNode:
    """Connect this process to Ray if it is not, and return an empty node, whose state pickle then fills in."""
    import ray

    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    return kind.__new__(kind)
