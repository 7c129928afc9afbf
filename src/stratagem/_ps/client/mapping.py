"""Locations of variables on servers, and the servers' memory mapped into this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._ps import types
from stratagem._wire import codec, messages, shm


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """A variable (or shard) on a server."""

    server: int
    variable: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return shm.bytes_for(self.shape, self.dtype)

    def pieces(self) -> list[tuple[int, int]]:
        """Return (start, count) of the rows of each piece that is transferred; (0, -1) for all at once.

        Example:
            >>> import torch
            >>> from stratagem._ps.client.mapping import ShardLocation
            >>> ShardLocation(0, 1, (8,), torch.float32).pieces()
            [(0, -1)]
            >>> len(ShardLocation(0, 1, (1 << 20, 64), torch.float32).pieces())
            4
        """
        if self.nbytes <= types.TRANSFER_BYTES or not self.shape:
            return [(0, -1)]
        return types.row_pieces(self.shape[0], self.nbytes)


@final
class MappedVariable:
    """A variable in a server's shared memory, as this process sees it.

    `tensor` changes when the server writes. Writing to it changes this process's page only, and hides later writes
    of the server to that page until `refresh`.
    """

    __slots__ = ("_changes", "_counter", "_memory", "_offset", "_pages", "segment", "tensor")

    def __init__(
        self, segment: shm.MappedSegment, offset: int, tensor: Tensor, pages: shm.OwnPages
    ) -> None:
        self.segment = segment
        self._pages = pages
        self._offset = offset
        self._counter = shm.counter_index(offset)
        self._changes = tensor._version
        self._memory: memoryview | None = None
        self.tensor = tensor

    @property
    def memory(self) -> memoryview:
        """The bytes of the tensor."""
        if self._memory is None:
            self._memory = codec.bytes_of(self.tensor)
        return self._memory

    @property
    def version(self) -> int:
        """Number of writes to the variable; a memory read, no request."""
        return self.segment.counters[self._counter] >> 1

    def copy(self) -> tuple[Tensor, int] | None:
        """Return a copy that no write interrupted, and its version; None if writes came too often."""
        version = self.version
        copy = self.segment.read_whole(self.tensor, self._offset)
        return (copy, version) if copy is not None and self.version == version else None

    def is_overwritten(self) -> bool:
        """Return whether this process wrote to the middle of the tensor, counted by torch or not."""
        return self._pages.has(self.tensor.data_ptr() + self.tensor.nbytes // 2)

    def may_be_overwritten(self) -> bool:
        """Return whether this process may have written to a page of the tensor."""
        return self._pages.has(self.tensor.data_ptr(), self.tensor.nbytes, unknown=True)

    def undo_writes(self) -> None:
        """Call `refresh` if torch counted a write of this process to the tensor or a view of it."""
        if self.tensor._version != self._changes:
            self._changes = self.tensor._version
            self.refresh()

    def refresh(self) -> None:
        """Drop what this process wrote to the tensor, so that it shows the server's value again."""
        self.segment.refresh(self._offset, self.tensor.nbytes)


@final
class Mappings:
    """The mapped variables and segments of one client."""

    def __init__(self) -> None:
        self._segments: dict[tuple[int, int], shm.MappedSegment] = {}
        self._variables: dict[tuple[int, int], MappedVariable] = {}
        self._pages = shm.OwnPages()

    def get(self, place: ShardLocation) -> MappedVariable | None:
        return self._variables.get((place.server, place.variable))

    def add(self, server: int, places: Sequence[ShardLocation], located: messages.Located) -> bool:
        """Map what a server located; return False if its memory cannot be mapped here."""
        if len(located.places) != len(places):
            return False  # it does not share its memory
        for ref in located.segments:
            if (server, ref.number) not in self._segments:
                segment = shm.open_segment(ref, shared=False)
                if segment is None:
                    return False
                self._segments[server, ref.number] = segment
        for place, where in zip(places, located.places, strict=True):
            segment = self._segments[server, where.segment]
            with torch.inference_mode(False):  # a function may look rows up in that mode first
                tensor = segment.tensor(where.offset, where.shape, codec.dtype_from(where.dtype))
            mapped = MappedVariable(segment, where.offset, tensor, self._pages)
            self._variables[server, place.variable] = mapped
        return True

    def forget(self, place: ShardLocation) -> None:
        """Forget a deleted variable; its memory is unmapped when no tensor uses it any more."""
        gone = self._variables.pop((place.server, place.variable), None)
        if gone is not None and not any(
            one.segment is gone.segment for one in self._variables.values()
        ):
            # Not closed: a tensor may still be over it. Python unmaps it after the last one.
            self._segments.pop((place.server, gone.segment.number), None)

    def versions_on(self, server: int) -> dict[int, int]:
        """Return the versions of the variables of a server that are mapped."""
        known = list(self._variables.items())  # a copy: another thread may map something
        return {variable: one.version for (where, variable), one in known if where == server}

    def forget_server(self, server: int) -> None:
        """The server was replaced: its memory is unmapped when nothing here uses it any more."""
        for known in (self._variables, self._segments):
            for key in list(known):  # a copy: another thread may map something
                if key[0] == server:
                    known.pop(key, None)

    def close(self) -> None:
        """Unmap everything that no tensor uses. May be called again."""
        self._variables.clear()
        self._pages.close()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    @override
    def __repr__(self) -> str:
        return f"<Mappings {len(self._variables)} variables in {len(self._segments)} segments>"
