"""Rooms in shared memory: segments that grow in number, and the budget several of them share.

A parameter server keeps the variables of a session in an `Arena`, a client its gradient slots. What a segment is, and who may
map it, is in `shm.py`.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from typing import Final, final

from typing_extensions import override

from stratagem._owner import Owner
from stratagem._wire.shm import ENTRY_BYTES, Segment

SMALLEST_SEGMENT_BYTES: Final = 1 << 22
LARGEST_SHARED_BYTES: Final = 1 << 26
"""A variable from this size on gets a segment of its own, so that deleting it frees its memory."""


def memory_of_machine() -> int:
    """Bytes of physical memory here."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@final
class Budget:
    """How many bytes several arenas may use together.

    Example:
        >>> from stratagem._wire.arenas import Budget
        >>> budget = Budget(100)
        >>> budget.take(60)
        >>> budget.used_bytes
        60
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, size: int) -> None:
        """Counts bytes in; MemoryError if they would pass the limit."""
        if self.used_bytes + size > self.limit_bytes:
            raise MemoryError(
                f"{size} bytes do not fit: {self.used_bytes} of {self.limit_bytes} bytes are in "
                f"use. Add parameter servers, or make the variable smaller."
            )
        self.used_bytes += size

    def give_back(self, size: int) -> None:
        """Counts bytes out."""
        self.used_bytes -= size


@final
class Arena(Owner):
    """Segments that grow in number: where a server keeps variables, or a worker its gradients.

    Example:
        >>> import torch
        >>> from stratagem._wire.arenas import Arena, Budget
        >>> with Arena(Budget(1 << 20), writable_by_peers=False) as arena:
        ...     segment, offset = arena.place(40)
        ...     segment.tensor(offset, (10,), torch.float32).zero_().sum()
        tensor(0.)
    """

    def __init__(self, budget: Budget, *, writable_by_peers: bool) -> None:
        self._budget = budget
        self._writable_by_peers = writable_by_peers
        self._next_number = 1
        self._segments: dict[int, Segment] = {}
        self._current: Segment | None = None
        self._taken: dict[int, int] = {}  # segment number -> bytes of its entries, heads included
        self.used_bytes = 0

    def place(self, size: int) -> tuple[Segment, int]:
        """Room for an entry: its segment, and the offset of its data.

        Raises:
            MemoryError: the limit would be passed.
        """
        self._budget.take(size)
        try:
            segment, offset = self._find_room(size)
        except BaseException:  # Ctrl-C too: what was not placed must not count
            self._budget.give_back(size)
            raise
        self.used_bytes += size
        taken = self._taken.get(segment.number, 0)
        self._taken[segment.number] = taken + size + ENTRY_BYTES
        return segment, offset

    def _find_room(self, size: int) -> tuple[Segment, int]:
        # Slots are placed anew every step: they reuse the room there is, whatever their size.
        if size >= LARGEST_SHARED_BYTES and not self._writable_by_peers:
            segment = self._add_segment(size + ENTRY_BYTES)
        else:
            segment = self._current or self._add_common(size)
        offset = segment.take(size)
        if offset is None:
            segment = self._add_common(size)
            offset = segment.take(size)
        assert offset is not None
        return segment, offset

    def free(self, segment: Segment, size: int) -> None:
        """An entry of `size` bytes is not used any more; the memory goes with its segment."""
        self._forget_bytes(size)
        self._taken[segment.number] -= size + ENTRY_BYTES
        if not self._taken[segment.number]:
            if segment is self._current:
                self._current = None
            del self._taken[segment.number]
            del self._segments[segment.number]
            segment.close()

    def reset(self) -> None:
        """Forgets all entries but keeps the memory, as one segment large enough for all of it."""
        if len(self._segments) > 1:
            total = sum(segment.size for segment in self._segments.values())
            self.close()
            self._current = self._add_segment(total)
        elif self._current is None:
            self._current = next(iter(self._segments.values()), None)
        for segment in self._segments.values():
            segment.reset()
        self._taken.clear()
        self._forget_bytes(self.used_bytes)

    def position(self) -> dict[int, int]:
        """How far each segment is taken, for `advance`."""
        return {number: segment.position for number, segment in self._segments.items()}

    def advance(self, position: Mapping[int, int]) -> None:
        """Leaves free what was taken at that `position`, whatever has been reset since."""
        for number, end in position.items():
            segment = self._segments[number]
            segment.position = max(segment.position, end)

    def segments(self) -> list[Segment]:
        """All segments there are."""
        return list(self._segments.values())

    @override
    def close(self) -> None:
        """Gives all memory up; tensors over it stay valid. Repeatable."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._taken.clear()
        self._current = None
        self._forget_bytes(self.used_bytes)

    def _forget_bytes(self, size: int) -> None:
        self.used_bytes -= size
        self._budget.give_back(size)

    @override
    def __repr__(self) -> str:
        return f"<Arena {self.used_bytes} bytes in {len(self._segments)} segments>"

    def _add_common(self, size: int) -> Segment:
        """A segment for many entries; each as large as all before it, so that there are few."""
        total = sum(segment.size for segment in self._segments.values())
        room = max(SMALLEST_SEGMENT_BYTES, min(total, 1 << 30), size + ENTRY_BYTES)
        self._current = self._add_segment(room)
        return self._current

    def _add_segment(self, room: int) -> Segment:
        try:
            segment = Segment(self._next_number, room, writable_by_peers=self._writable_by_peers)
        except OSError as error:
            used = len(self._segments)
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise MemoryError(
                f"cannot make a shared-memory segment of {room} bytes beside {used} others: {error} "
                f"(this process may open {limit} files; raise `ulimit -n` if that is the reason)"
            ) from error
        self._next_number += 1
        self._segments[segment.number] = segment
        return segment
