"""Memory of a parameter server's variables: shared segments that grow in number, and their common budget."""

from __future__ import annotations

import os
import resource
from typing import Final, final

from typing_extensions import override

from stratagem._owner import Owner
from stratagem._wire.shm import ENTRY_BYTES, Segment

SMALLEST_SEGMENT_BYTES: Final = 1 << 22
LARGEST_SHARED_BYTES: Final = 1 << 26
"""A variable from this size on gets a segment of its own, so that deleting it frees its memory."""


def memory_of_machine() -> int:
    """Return the bytes of physical memory here."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@final
class Budget:
    """Limit of the bytes that several arenas use together.

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
        """Count bytes in; MemoryError if they would exceed the limit."""
        if self.used_bytes + size > self.limit_bytes:
            raise MemoryError(
                f"{size} bytes do not fit: {self.used_bytes} of {self.limit_bytes} bytes are in "
                f"use. Add parameter servers, or make the variable smaller."
            )
        self.used_bytes += size

    def give_back(self, size: int) -> None:
        """Count bytes out."""
        self.used_bytes -= size


@final
class Arena(Owner):
    """Segments in which a server places variables.

    Example:
        >>> import torch
        >>> from stratagem._wire.arenas import Arena, Budget
        >>> with Arena(Budget(1 << 20)) as arena:
        ...     segment, offset = arena.place(40)
        ...     segment.tensor(offset, (10,), torch.float32).zero_().sum()
        tensor(0.)
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._next_number = 1
        self._entries: dict[
            Segment, int
        ] = {}  # bytes of the entries of each segment, heads included
        self._current: Segment | None = None
        self.used_bytes = 0

    def place(self, size: int) -> tuple[Segment, int]:
        """Return a segment with room for an entry of `size` bytes, and the offset of its data.

        Raises:
            MemoryError: the limit would be exceeded.
        """
        self._budget.take(size)
        try:
            segment, offset = self._find_room(size)
        except BaseException:  # Ctrl-C too: what was not placed must not count
            self._budget.give_back(size)
            raise
        self.used_bytes += size
        self._entries[segment] += size + ENTRY_BYTES
        return segment, offset

    def _find_room(self, size: int) -> tuple[Segment, int]:
        if size >= LARGEST_SHARED_BYTES:
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
        """Free an entry of `size` bytes; the memory goes with the last entry of its segment."""
        self._count_out(size)
        self._entries[segment] -= size + ENTRY_BYTES
        if not self._entries[segment]:
            if segment is self._current:
                self._current = None
            del self._entries[segment]
            segment.close()

    @override
    def close(self) -> None:
        """Release all memory; tensors over it stay valid. May be called again."""
        for segment in self._entries:
            segment.close()
        self._entries.clear()
        self._current = None
        self._count_out(self.used_bytes)

    @override
    def __repr__(self) -> str:
        return f"<Arena {self.used_bytes} bytes in {len(self._entries)} segments>"

    def _count_out(self, size: int) -> None:
        self.used_bytes -= size
        self._budget.give_back(size)

    def _add_common(self, size: int) -> Segment:
        """Add a segment for many entries, as large as all before it, so that there are few."""
        total = sum(segment.size for segment in self._entries)
        room = max(SMALLEST_SEGMENT_BYTES, min(total, 1 << 30), size + ENTRY_BYTES)
        self._current = self._add_segment(room)
        return self._current

    def _add_segment(self, room: int) -> Segment:
        try:
            segment = Segment(self._next_number, room, writable_by_peers=False)
        except OSError as error:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise MemoryError(
                f"cannot make a shared-memory segment of {room} bytes beside {len(self._entries)} "
                f"others: {error} (this process may open {limit} files; raise `ulimit -n` if that is "
                f"the reason)"
            ) from error
        self._next_number += 1
        self._entries[segment] = 0
        return segment
