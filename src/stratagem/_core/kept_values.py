"""Tensors that a step keeps between its calls: each replica has its own value during a run.

Replicas share Python objects. A moving average (``shadow.mul_(0.9).add_(p, alpha=0.1)``) would move once per replica.
So when the turn of a replica ends, what it has written is put aside, and the next replica finds the value from before.
When all replicas wait for each other, their values are compared (`settle`): equal ones are written once. If they
differ, `write_kinds` says what the program means: sums add up, values that are overwritten in every step remain the last
replica's, and everything else is an error.

A copy of a tensor is kept as long as the program runs; it is renewed when the tensor has changed. Sums (``total += n``)
and tensors that no code writes have no copy. Every turn reads the version of each tensor.
"""

from __future__ import annotations

import contextlib
import operator
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._core.kept_numbers import KeptNumbers
from stratagem._core.kept_search import Place, Search, holds_tensors, is_kept
from stratagem._core.managed import find_managed
from stratagem._core.rendezvous import OwnValues
from stratagem._core.same_code import PLAIN
from stratagem._core.strategy_hooks import StrategyHooks
from stratagem._core.torch_patches.private_api import version
from stratagem.errors import ReplicaError

if TYPE_CHECKING:
    from stratagem._core.replicated_parameters import ReplicatedParameter

LARGEST: Final = 256 << 20
"""Size of a tensor of which a copy is kept; writes to larger ones by several replicas are refused."""

MOST_FUNCTIONS: Final = 8
"""Functions of a strategy whose kept values are remembered."""

SMALL: Final = 4096
"""Size of a tensor of which a copy is always kept, although other code than the replicas' changes it."""

_memory: Callable[[Tensor], Tensor] = cast("Any", Tensor.data).__get__
_set_memory: Callable[[Tensor, Tensor], None] = cast("Any", Tensor.data).__set__

REMEDY: Final = (
    "Replicas share this tensor, and every replica runs the same code. Write it once for all replicas:\n"
    "    sg.get_replica_context().merge_call(lambda strategy: average.update())\n"
    "or register it as a buffer of a module created under the scope (register_buffer): every replica then has its "
    "own copy, and the copies are averaged; or return the value from the step and combine it outside run()."
)


class _Kept:
    """One tensor, and a copy of it from before the replicas wrote.

    Attributes:
        own: values of the replicas that have written it since.
    """

    __slots__ = ("_before", "_first", "_is_shown", "_version", "_written", "own", "place", "tensor")

    def __init__(self, tensor: Tensor, place: Place) -> None:
        self.tensor, self.place = tensor, place
        self.own: dict[int, Tensor] = {}
        self._before: Tensor | None = None
        self._version = -1
        self._first = True
        self._written = tensor.nbytes <= SMALL  # or the replicas have written it before
        self._is_shown = False  # whether the tensor has a replica's own value now

    def renew(self) -> None:
        """Start from the tensor's present value."""
        if not self.is_written():
            return
        now = version(self.tensor)
        self._version = now
        keeps = bool(self.place.kinds) and self.tensor.nbytes <= LARGEST
        if not keeps or not (self._first or self._written):
            self._before = None
        elif self._before is None or self._before.shape != self.tensor.shape:
            self._before = _memory(self.tensor).clone()
        else:
            self._before.copy_(_memory(self.tensor))

    def begin(self) -> None:
        """Prepare for a run."""
        self.renew()
        self._first = False

    def _show(self, value: Tensor) -> None:
        """Make this the tensor's value, without another version: no code of the user has written."""
        memory = _memory(self.tensor)
        if memory.shape != value.shape:
            _set_memory(self.tensor, value.clone())
        else:
            memory.copy_(value)
        managed = find_managed(self.tensor)
        if managed is not None:
            cast("ReplicatedParameter", managed).stepped()

    def resume(self, replica_id: int) -> None:
        """Show a replica its own value."""
        if replica_id in self.own and self._before is not None:
            self._show(self.own[replica_id])
            self._is_shown = True

    def pause(self, replica_id: int) -> None:
        """Put aside what a replica has written; show the value from before."""
        if self.is_written(replica_id):
            self._version, self._written = version(self.tensor), True
            self.own[replica_id] = (
                self.tensor if self._before is None else _memory(self.tensor).clone()
            )
            self._is_shown = True
        if self._is_shown and self._before is not None:
            self._show(self._before)
        self._is_shown = False

    def settle(self, replicas: Sequence[int]) -> None:
        """Write the common value of the replicas once."""
        own, before, kinds = self.own, self._before, self.place.kinds
        if before is None:
            if len(own) > 1:
                self.refuse(
                    "and no copy from before could be kept: it is large, changes outside the step or is written by "
                    "code that was not found"
                )
            self.own = {}
            return
        values = [own.get(i, before) for i in replicas]
        if all(is_equal(values[0], value) for value in values[1:]):
            result = values[0]
        elif "moves" in kinds or not kinds:
            self.refuse("with different values: they depend on a replica's rows, or not all wrote")
        elif "grows" in kinds:
            result = before + sum(value - before for value in own.values())
        else:
            return  # each replica keeps its own value until the run ends
        self.own = {}
        self._show(result)
        before.copy_(result)

    def finish(self) -> None:
        """Leave the last replica's value in a tensor that every step overwrites."""
        if self.own and self._before is not None:
            self._show(self.own[max(self.own)])
            self._version = -1
        self.own = {}

    def forget(self) -> None:
        """Leave the value from before, after a run that failed."""
        self.own = {}

    def is_written(self, replica_id: int = -1) -> bool:
        """Return whether the tensor was written since it was last looked at, or since a replica's turn began."""
        if version(self.tensor) != self._version:
            return True
        shown = self.own.get(replica_id, self._before)
        return (
            self.place.by_memory and shown is not None and not is_equal(_memory(self.tensor), shown)
        )

    def refuse(self, why: str) -> NoReturn:
        """Raise: replicas have written the tensor."""
        own, self.own = sorted(self.own), {}
        shape = tuple(self.tensor.shape)
        raise refused(f"the tensor of shape {shape} in {self.place.path}", own, why)


class _Bound:
    """A place in which the step replaces tensors (``self.average[name] = 0.9 * self.average[name] + …``)."""

    __slots__ = ("_before", "_is_shown", "_values", "own", "place")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.own: dict[int, Any] = {}
        self._is_shown = False
        self.renew()

    def renew(self) -> None:
        """Start from the present contents."""
        self._before, self._values = self.place.contents(), self.place.values()

    begin = renew

    def _is_changed(self) -> bool:
        now = self.place.values()
        return len(now) != len(self._values) or not all(map(operator.is_, now, self._values))

    def resume(self, replica_id: int) -> None:
        """Show a replica its own contents."""
        if replica_id in self.own:
            self.place.put(self.own[replica_id])
            self._is_shown = True

    def pause(self, replica_id: int) -> None:
        """Put aside what a replica has put in place of the contents from before."""
        if self._is_shown or self._is_changed():
            self.own[replica_id] = self.place.contents()
            self.place.put(self._before)
            self._is_shown = False

    def settle(self, replicas: Sequence[int]) -> None:
        """Keep the contents of the replicas if they are equal."""
        own = self.own
        contents = [own.get(i, self._before) for i in replicas]
        if all(is_equal(contents[0], each) for each in contents[1:]):
            self.own = {}
            self.place.put(contents[0])
            self.renew()
        elif "moves" in self.place.kinds:
            self.own = {}
            why = "with different values: they depend on a replica's rows, or not all wrote"
            raise refused(f"what {self.place.path} holds", sorted(own), why)

    def finish(self) -> None:
        """Leave the last replica's contents."""
        if self.own:
            self.place.put(self.own[max(self.own)])
        self.own = {}

    def forget(self) -> None:
        """Leave the contents from before, after a run that failed."""
        self.own = {}


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two values are the same; numbers that are not a number are."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        one, other = one.detach(), other.detach().to(one.device)
        return torch.equal(one, other) or torch.allclose(
            one, other, rtol=0.0, atol=0.0, equal_nan=True
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return type(one) in PLAIN and bool(one == other)


def refused(what: str, replicas: Sequence[int], why: str) -> ReplicaError:
    """Return the error about a kept value that replicas have written."""
    who = f"replicas {[*replicas]}" if replicas else "a replica"
    return ReplicaError(f"{what} was written by {who}, {why}. {REMEDY}")


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
        self._kept: dict[int, _Kept] = {}
        self._bound: list[_Bound | KeptNumbers] = []
        self._numbers: list[KeptNumbers] = []
        self._carried: list[_Bound] = []
        self._all: Sequence[_Kept | _Bound | KeptNumbers] = ()
        self._tensors: list[Tensor] = []
        self._versions = 0
        self._by_memory = False
        self._pending: list[_Kept | _Bound | KeptNumbers] = []
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
            self._numbers = found.numbers
            self._carried = [_Bound(each) for each in found.carried]
            self._places = []
        if not (self._found or self._numbers or self._carried):
            return False
        if not self._places or any(
            _differ(place.values(), values) for place, values in self._places
        ):
            self._collect()
        self._pending = []
        if self._may_be_written():
            with _plain_mode():
                for kept in self._kept.values():
                    kept.begin()
            self._versions = self._sum()
        for bound in self._bound:
            bound.begin()
        return True

    def _collect(self) -> None:
        """Find the tensors that the places hold now."""
        before, self._kept, self._places = self._kept, {}, []
        self._bound = [*self._numbers, *self._carried]
        todo = deque(self._found)
        holders = set()
        while todo:
            place = todo.popleft()
            if place.keys is None:
                if id(place.holder) in holders:
                    continue
                holders.add(id(place.holder))
            values = place.values()
            self._places.append((place, values))
            todo.extend(place.within(value) for value in values if holds_tensors(value))
            if "binds" in place.kinds and not isinstance(place.holder, (tuple, deque)):
                self._bound.append(_Bound(place))
            for value in values:
                if is_kept(value) and id(value) not in self._kept:
                    known = before.get(id(value))
                    same = known is not None and known.tensor is value
                    self._kept[id(value)] = known if same else _Kept(value, place)  # type: ignore[assignment]
        self._tensors = [kept.tensor for kept in self._kept.values()]
        self._all = [*self._bound, *self._kept.values()]
        self._by_memory = any(kept.place.by_memory for kept in self._kept.values())
        self._versions = -1

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
            self._pending = [each for each in self._pending if each.own]

    def refuse_writes(self) -> None:
        """Raise if replicas that run at the same time have written a tensor or number, other than by adding to it."""
        for kept in self._kept.values() if self._may_be_written() else ():
            if kept.is_written() and kept.place.kinds & {"moves", "grows"}:
                kept.refuse("and replicas run at the same time (parallel_replicas=True)")
        for number in self._numbers:
            number.refuse_changes()

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
    single = place.keys is not None or isinstance(place.holder, types.CellType)
    return "grows" in kinds and any(
        value.is_floating_point() and (not single or value.numel() > 1) for value in tensors
    )
