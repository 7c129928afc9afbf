"""Memory of a parameter server's variables: shared segments, and the server's memory budget."""

from __future__ import annotations

import os
from bisect import insort
from pathlib import Path
from typing import Final, final

from typing_extensions import override

from stratagem._owner import Owner
from stratagem._wire.connecting import descriptor_limit
from stratagem._wire.frames import padded
from stratagem._wire.shm import ENTRY_BYTES, HEADER_BYTES, Segment

SMALLEST_SEGMENT_BYTES: Final = 1 << 20
LARGEST_SHARED_BYTES: Final = 1 << 26
"""Variables from this size on have a segment of their own: their memory is freed with them."""

_ENTRIES: Final = 8
"""How many entries of the first one's size a segment has space for; more only where they are small."""


def memory_limit(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may use: of the machine, or less by its cgroups (v1 and v2)."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            folder, name = mounted, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = mounted / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A container may see the host's path but have its own group mounted at the top.
        group = folder / path.lstrip("/")
        for one in (group, *group.parents):
            try:
                limits.append(int((one / name).read_text(encoding="ascii")))
            except (OSError, ValueError):  # not mounted, or "max"
                pass
            if one == folder:
                break
    return min(limits)


def default_budget() -> int:
    """Return nine tenths of the memory that this process may use and does not use yet."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return max(0, memory_limit() - pages * os.sysconf("SC_PAGE_SIZE")) * 9 // 10


@final
class Budget:
    """Limit of the bytes that a server's variables and optimizers hold together.

    Example:
        >>> budget = Budget(100)
        >>> budget.take(60)
        >>> budget.used_bytes
        60
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def check(self, size: int) -> None:
        """Raise MemoryError if `size` more bytes would exceed the limit."""
        if self.used_bytes + size > self.limit_bytes:
            raise MemoryError(
                f"{size} bytes do not fit: {self.used_bytes} of {self.limit_bytes} bytes are in "
                f"use on this server. Use more servers or machines with more memory, or raise "
                f"STRATAGEM_SERVER_MEMORY_BYTES"
            )

    def take(self, size: int) -> None:
        """Count bytes in; MemoryError if they would exceed the limit."""
        self.check(size)
        self.used_bytes += size

    def change(self, size: int) -> None:
        """Count bytes that are held already, or (negative) no more."""
        self.used_bytes += size


class _Pool:
    """One segment and its free space."""

    def __init__(self, segment: Segment, size_class: int, *, reserved: bool = False) -> None:
        self.segment = segment
        self.size_class = size_class
        self.reserved = reserved  # its owner counts the memory that it uses
        self.entries = 0
        self.end = HEADER_BYTES  # of the space that was ever used: the kernel keeps its pages
        self.holes: list[
            tuple[int, int]
        ] = []  # (start, end) below `end`, sorted, apart from each other

    def find(self, size: int) -> tuple[int, int] | None:
        """Return start of free space for an entry, and how many more bytes of the segment it uses."""
        for start, end in self.holes:
            if end - start >= size:
                return start, 0
        return (self.end, size) if self.end + size <= self.segment.size else None

    def take(self, start: int, size: int) -> None:
        self.entries += 1
        if start == self.end:
            self.end += size
            return
        index = next(n for n, hole in enumerate(self.holes) if hole[0] == start)
        _, end = self.holes.pop(index)
        if start + size < end:
            insort(self.holes, (start + size, end))

    def free(self, start: int, size: int) -> None:
        self.entries -= 1
        end = start + size
        for hole in [one for one in self.holes if one[1] == start or one[0] == end]:
            self.holes.remove(hole)
            start, end = min(start, hole[0]), max(end, hole[1])
        insort(self.holes, (start, end))


@final
class Arena(Owner):
    """Segments in which a server places variables.

    Variables of similar size share a segment, and freed space is used again. So a variable that stays keeps no more
    than a few times its own size, and a segment is closed with its last variable. Pages of freed space in an open
    segment cannot be returned to the kernel (segments are sealed): they count as used.

    Example:
        >>> import torch
        >>> with Arena(Budget(1 << 20)) as arena:
        ...     segment, offset = arena.place(40)
        ...     segment.tensor(offset, (10,), torch.float32).zero_().sum()
        tensor(0.)
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._next_number = 1
        self._pools: dict[Segment, _Pool] = {}
        self.used_bytes = 0

    def place(
        self, size: int, *, reserve: bool = False, on_disk: bool = False
    ) -> tuple[Segment, int]:
        """Return a segment with space for an entry of `size` bytes, and the offset of its data.

        `reserve`: only addresses; the caller counts memory in the budget when it is used. `on_disk`: in a file, which
        counts nowhere.

        Raises:
            MemoryError: the limit would be exceeded.
            OSError: the disk has no space.
        """
        needed = ENTRY_BYTES + padded(size)
        size_class = max(needed, SMALLEST_SEGMENT_BYTES // _ENTRIES).bit_length() // 2
        if reserve or on_disk:
            least = 0 if on_disk else LARGEST_SHARED_BYTES
            own = self._add_pool(size_class, max(needed, least), reserved=True, on_disk=on_disk)
            own.take(HEADER_BYTES, needed)
            own.segment.publish(HEADER_BYTES + ENTRY_BYTES, 0)
            return own.segment, HEADER_BYTES + ENTRY_BYTES
        pool, (start, growth) = self._find(size_class, needed)
        self._budget.take(growth)
        self.used_bytes += growth
        if pool is None:
            try:
                pool = self._add_pool(size_class, needed)
            except BaseException:
                self._release(growth)
                raise
        pool.take(start, needed)
        pool.segment.publish(start + ENTRY_BYTES, 0)
        return pool.segment, start + ENTRY_BYTES

    def free(self, segment: Segment, offset: int, size: int) -> None:
        """Free the entry of `size` bytes whose data is at `offset`."""
        pool = self._pools[segment]
        pool.free(offset - ENTRY_BYTES, ENTRY_BYTES + padded(size))
        if not pool.entries:
            if not pool.reserved:
                self._release(pool.end - HEADER_BYTES)
            del self._pools[segment]
            segment.close()

    @override
    def close(self) -> None:
        """Release all memory; tensors over it stay valid. May be called again."""
        for segment in self._pools:
            segment.close()
        self._pools.clear()
        self._release(self.used_bytes)

    @override
    def __repr__(self) -> str:
        return f"<Arena {self.used_bytes} bytes in {len(self._pools)} segments>"

    def _find(self, size_class: int, needed: int) -> tuple[_Pool | None, tuple[int, int]]:
        if needed < LARGEST_SHARED_BYTES:
            for pool in reversed(self._pools.values()):
                is_open = pool.size_class == size_class and not pool.reserved
                found = pool.find(needed) if is_open else None
                if found is not None:
                    return pool, found
        return None, (HEADER_BYTES, needed)

    def _release(self, size: int) -> None:
        self.used_bytes -= size
        self._budget.change(-size)

    def _add_pool(
        self, size_class: int, needed: int, *, reserved: bool = False, on_disk: bool = False
    ) -> _Pool:
        size = needed
        if needed < LARGEST_SHARED_BYTES and not reserved:
            others = [
                one.segment.size for one in self._pools.values() if one.size_class == size_class
            ]
            # Larger ones where there are many, so that there are at most about a hundred of a class.
            grown = min(sum(others) // 4, max(LARGEST_SHARED_BYTES, sum(others) // 64))
            least = min(_ENTRIES * needed, LARGEST_SHARED_BYTES)
            size = max(SMALLEST_SEGMENT_BYTES, needed, least, grown)
        try:
            segment = Segment(self._next_number, size, writable_by_peers=False, on_disk=on_disk)
        except OSError as error:
            if on_disk:
                raise
            raise MemoryError(
                f"cannot make a shared-memory segment of {size} bytes beside {len(self._pools)} "
                f"others: {error} (this process may open {descriptor_limit()} files; raise `ulimit -n` "
                f"if that is the reason)"
            ) from error
        self._next_number += 1
        pool = self._pools[segment] = _Pool(segment, size_class, reserved=reserved)
        return pool
