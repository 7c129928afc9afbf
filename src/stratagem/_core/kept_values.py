"""Values that a step keeps between its calls: each replica has its own during a run.

Replicas share Python objects. A moving average (``shadow.mul_(0.9).add_(p, alpha=0.1)``) or a counter (``self.steps += 1``)
would move once per replica. So when the turn of a replica ends, what it has changed is put aside, and the next replica finds
the value from before. When all replicas wait for each other, their values are compared (`settle`): equal ones are written
once. If they differ, `step_code` says what the program means: sums add up, values that every step replaces remain the last
replica's, and a value that is computed from the old one is an error, unless it is a number that only a log gets.

Sums (``total += n``) are left alone: they add up over the replicas. A copy of a tensor is kept as long as the program runs;
it is renewed when the tensor has changed. Every turn reads the version of each tensor.
"""

from __future__ import annotations

import contextlib
import operator
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._core.kept_places import Contents, Place, WrittenTensor
from stratagem._core.kept_search import Search, holds_tensors, is_kept
from stratagem._core.rendezvous import OwnValues
from stratagem._core.strategy_hooks import StrategyHooks
from stratagem._core.torch_patches.private_api import version

MOST_FUNCTIONS: Final = 8
"""Functions of a strategy whose kept values are remembered."""


@final
class WatchedValues(OwnValues):
    """Kept tensors of a function whose replicas run at the same time, so that writes have no known replica."""

    def __init__(self, kept: KeptValues) -> None:
        self._kept = kept

    @override
    def settle(self, replicas: Sequence[int]) -> None:
        """Raise if a tensor was written that only one replica may write."""
        self._kept.refuse_writes()

    @override
    def share(self, replica_id: int) -> None:
        """Accept what code has written that ran once for all replicas."""
        self._kept.share(replica_id)


@contextlib.contextmanager
def _plain_mode() -> Iterator[None]:
    """Make ordinary tensors, whatever mode the step has left on."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@final
class KeptValues(OwnValues):
    """Kept tensors of one function; reused in every run of the function.

    Attributes:
        writes: whether code of the step writes anything in place.
    """

    def __init__(self) -> None:
        self.writes = False
        self._found: list[Place] = []
        self._places: list[tuple[Place, list[Any]]] = []  # and what they held last
        self._kept: dict[int, WrittenTensor] = {}
        self._bound: list[Contents] = []
        self._changing: list[Contents] = []
        self._all: Sequence[WrittenTensor | Contents] = ()
        self._tensors: list[Tensor] = []
        self._named: set[str] = set()
        self._versions = 0
        self._by_memory = False
        self._pending: list[WrittenTensor | Contents] = []
        self._runs = 0

    @property
    def is_first_run(self) -> bool:
        """True in the first run of the function."""
        return self._runs == 1

    def begin(self, function: Callable[..., Any]) -> bool:
        """Prepare for a run of a function; return whether there is anything to watch.

        In the 1st, 2nd, 4th, 8th, … run the function is searched.
        """
        self._runs += 1
        if self._runs & (self._runs - 1) == 0:
            found = Search(function)
            self.writes = found.writes
            self._found = [place for place in found.places if found.writes and _is_wanted(place)]
            self._changing = [Contents(each, self._named) for each in found.changing]
            self._places = []
        if not (self._found or self._changing):
            return False
        self._pending = []
        self._collect()
        if self._may_be_written():
            with _plain_mode():
                for kept in self._kept.values():
                    kept.begin()
            self._versions = self._sum()
        for bound in self._bound:
            bound.begin()
        return True

    def _collect(self) -> None:
        """Find the tensors that the places hold now, if they are others than before."""
        if self._places and not any(
            _differ(place.values(), values) for place, values in self._places
        ):
            return
        before, self._kept, self._places = self._kept, {}, []
        known = {(id(one.place.holder), one.place.key): one for one in self._bound}
        self._bound = [*self._changing]
        todo = deque(self._found)
        holders = set()
        while todo:
            place = todo.popleft()
            if place.key is None:
                if id(place.holder) in holders:
                    continue
                holders.add(id(place.holder))
            values = place.values()
            self._places.append((place, values))
            todo.extend(place.within(value) for value in values if holds_tensors(value))
            if "binds" in place.kinds and not isinstance(place.holder, (tuple, deque)):
                bound = known.get((id(place.holder), place.key))
                self._bound.append(bound or Contents(place, self._named))
            for value in values:
                if is_kept(value) and id(value) not in self._kept:
                    kept = before.get(id(value))
                    same = kept is not None and kept.tensor is value
                    self._kept[id(value)] = kept if same else WrittenTensor(value, place)  # type: ignore[assignment]
        self._tensors = [kept.tensor for kept in self._kept.values()]
        self._all = [*self._bound, *self._kept.values()]
        self._by_memory = any(kept.place.by_memory for kept in self._kept.values())
        self._versions = -1

    def _follow(self) -> None:
        """Watch the tensors that have taken the place of others, which replicas may write in place from now on."""
        before = self._kept
        self._collect()
        if self._kept is not before:
            for number, kept in self._kept.items():
                if before.get(number) is not kept:
                    kept.begin()

    def _sum(self) -> int:
        return sum(map(version, self._tensors))

    def _may_be_written(self) -> bool:
        return self._by_memory or self._sum() != self._versions

    @override
    def resume(self, replica_id: int) -> None:
        """Show a replica its own values, when its turn begins."""
        if self._pending:
            with _plain_mode():
                for each in self._pending:
                    each.resume(replica_id)

    @override
    def pause(self, replica_id: int) -> None:
        """Put aside what a replica has written, when its turn ends."""
        if self._may_be_written() or self._pending or self._bound:
            with _plain_mode():
                for each in self._all:
                    each.pause(replica_id)
                    if each.own and each not in self._pending:
                        self._pending.append(each)
            self._versions = self._sum()

    @override
    def settle(self, replicas: Sequence[int]) -> None:
        """Write once what all these replicas agree on. All wait for each other."""
        if self._pending:
            with _plain_mode():
                for each in self._pending:
                    each.settle(replicas)
                self._follow()
            self._pending = [each for each in self._pending if each.own]

    def refuse_writes(self) -> None:
        """Raise if replicas that run at the same time have written a tensor or number, other than by adding to it."""
        for kept in self._kept.values() if self._may_be_written() else ():
            if kept.is_written() and kept.place.kinds & {"moves", "grows"}:
                kept.refuse("and replicas run at the same time (parallel_replicas=True)")
        for contents in self._changing:
            contents.refuse_changes()

    @override
    def share(self, replica_id: int) -> None:
        """Let all replicas see what code has written that ran once for them, with the values of this one."""
        if self._may_be_written() or self._pending or self._bound:
            with _plain_mode():
                for each in self._all:
                    if each not in self._pending:
                        each.renew()
                for each in self._pending:
                    each.pause(replica_id)
                self._follow()
            self._versions = self._sum()

    @override
    def finish(self, replicas: Sequence[int], *, succeeded: bool) -> None:
        """End a run."""
        for each in self._pending:
            if succeeded:
                each.finish()
            else:
                each.forget()
        self._pending = []


def kept_by(strategy: StrategyHooks, key: Hashable) -> KeptValues:
    """Return what the function with a `function_key` keeps, found when a strategy ran it before.

    The strategy has it: what a function keeps may refer to the strategy, and both can be freed together.
    """
    known: dict[Hashable, KeptValues] = vars(strategy).setdefault("_kept_values", {})
    found = known.pop(key, None)
    if found is None:
        found = KeptValues()
        if len(known) >= MOST_FUNCTIONS:
            del known[next(iter(known))]  # not used for longest
    known[key] = found
    return found


def _differ(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) != len(before) or not all(map(operator.is_, now, before))


def _is_wanted(place: Place) -> bool:
    """Return whether a place is watched: not if code only adds to it."""
    kinds = place.kinds
    if "moves" in kinds or not kinds & {"adds", "grows"}:
        return True
    tensors = [value for value in place.values() if isinstance(value, Tensor)]
    single = place.key is not None or isinstance(place.holder, types.CellType)
    return "grows" in kinds and any(
        value.is_floating_point() and (not single or value.numel() > 1) for value in tensors
    )
