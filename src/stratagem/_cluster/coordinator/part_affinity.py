"""Prefer to send a closure to the worker that already reads the same part of a shared dataset.

Opening a file or decoding a row group costs more than reading on. Pure; `ClosureQueue` asks it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Final, final

from typing_extensions import override


@final
class EndedInputs:
    """Per-worker datasets that are used up, by worker.

    Args:
        inputs_of: returns the numbers of the per-worker values that a closure uses.

    Example:
        >>> ended = EndedInputs({1: [7], 2: []}.get)
        >>> ended.note(0, 7)
        >>> ended.can_run(0, 1), ended.can_run(0, 2), ended.can_run(5, 1)
        (False, True, True)
    """

    def __init__(self, inputs_of: Callable[[int], Collection[int]]) -> None:
        self._inputs_of = inputs_of
        self._by_worker: dict[int, set[int]] = {}

    def note(self, worker: int, resource: int) -> None:
        """Note that the worker has no more elements of a dataset."""
        self._by_worker.setdefault(worker, set()).add(resource)

    def can_run(self, worker: int, closure: int) -> bool:
        """Return whether the worker may have elements for the closure."""
        ended = self._by_worker.get(worker)
        return not ended or ended.isdisjoint(self._inputs_of(closure))

    def forget_worker(self, worker: int) -> None:
        """Handle a worker that is gone: if it returns, its datasets are built again."""
        self._by_worker.pop(worker, None)

    def forget_all(self) -> None:
        """Ask all workers again: one that had elements left the cluster."""
        self._by_worker.clear()

    @override
    def __repr__(self) -> str:
        return f"<EndedInputs {self._by_worker}>"


LOOK: Final = 32
"""Closures from which one is chosen: some rounds over the parts that are read in turn. The first closure waits for no
more than this many others."""

PARTS: Final = 8
"""Parts of a worker that are remembered: as many as a worker keeps open."""


@final
class PartAffinity:
    """The parts that each worker reads.

    Args:
        part_of: returns the part that a closure reads; None if it reads none.
        ended: per-worker datasets that are used up.

    Example:
        >>> affinity = PartAffinity({1: "a", 2: "b", 3: "a", 4: "b"}.get)
        >>> affinity.choose(0, [1, 2, 3, 4]), affinity.choose(0, [2, 3, 4])
        (0, 1)
        >>> affinity.choose(1, [2, 4]), affinity.choose(0, [4])
        (0, 0)
    """

    def __init__(
        self, part_of: Callable[[int], Hashable | None], ended: EndedInputs | None = None
    ) -> None:
        self._part_of = part_of
        self.ended = ended or EndedInputs(lambda _: ())
        self._parts: dict[int, OrderedDict[Hashable, None]] = {}  # by worker, the latest last
        self._readers: dict[Hashable, OrderedDict[int, None]] = {}  # by part, the latest last
        self._overtaken = 0  # how often the first closure was passed over

    def choose(self, worker: int, queued: Sequence[int]) -> int | None:
        """Return the place of the closure that the worker gets, and note that it reads that closure's part.

        It is the first closure that reads no part, or one that the worker reads; else the first one whose part
        no worker reads; else the first one. None if the worker has no elements for any of them.
        """
        if not self.ended.can_run(worker, queued[0]):
            first = range(1, min(len(queued), LOOK))
            return next((n for n in first if self.ended.can_run(worker, queued[n])), None)
        if self._part_of(queued[0]) is None:
            return 0
        own = self._parts.setdefault(worker, OrderedDict())
        chosen = self._choose(worker, own, queued) if self._overtaken < LOOK else 0
        self._overtaken = self._overtaken + 1 if chosen else 0
        self._note(worker, own, self._part_of(queued[chosen]))
        return chosen

    def reader(self, closure: int) -> int | None:
        """Return the worker that reads the closure's part; None if there is none."""
        readers = self._readers.get(self._part_of(closure))
        return None if readers is None else next(reversed(readers))

    def _choose(self, worker: int, own: OrderedDict[Hashable, None], queued: Sequence[int]) -> int:
        unread = None
        for place in range(min(len(queued), LOOK)):
            part = self._part_of(queued[place])
            if (part is None or part in own) and self.ended.can_run(worker, queued[place]):
                return place
            if unread is None and part is not None and part not in self._readers:
                unread = place
        return unread or 0

    def _note(self, worker: int, own: OrderedDict[Hashable, None], part: Hashable | None) -> None:
        if part is None:
            return
        if part not in own:
            self._readers.setdefault(part, OrderedDict())[worker] = None
            own[part] = None
            if len(own) > PARTS:
                self._forget(worker, own.popitem(last=False)[0])
        own.move_to_end(part)

    def forget_worker(self, worker: int) -> None:
        """Handle a worker that is gone: others may read its parts."""
        self.ended.forget_worker(worker)
        for part in self._parts.pop(worker, ()):
            self._forget(worker, part)

    def _forget(self, worker: int, part: Hashable) -> None:
        readers = self._readers[part]
        del readers[worker]
        if not readers:
            del self._readers[part]

    @override
    def __repr__(self) -> str:
        return f"<PartAffinity {len(self._readers)} parts, {len(self._parts)} workers>"
