"""Step counters of a function that runs on several replicas: every replica sees its own values.

Replicas share Python objects. A counter of steps (``self.steps += 1``, ``global steps; steps += 1``) would move once
per replica, and a learning rate computed from it would be wrong. So a replica gets its own values of the counters when
its turn begins, and all of them move by one run together. Counters of something else than calls (rows, correct
answers: increased by an expression, or in a loop) are left alone: they add up over the replicas.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, final

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem._core.counters import (
    CounterSlot,
    counted_attributes,
    counted_names,
    is_counter,
)
from stratagem._core.fingerprints import Fingerprint
from stratagem._core.same_code import PLAIN, names_of

MOST_FUNCTIONS: Final = 64
"""Functions whose counters are remembered; a program has a few."""


@final
class StepCounters:
    """The counters of one run, with a value for each replica.

    Args:
        slots: where the program keeps the counters.
        size: number of replicas.
    """

    def __init__(self, slots: Sequence[CounterSlot], size: int) -> None:
        self._slots = slots
        self._start = [slot.get() for slot in slots]
        self._values = [list(self._start) for _ in range(size)]

    def resume(self, replica_id: int) -> None:
        """Give the program the values of a replica, whose turn begins."""
        for slot, value in zip(self._slots, self._values[replica_id], strict=True):
            if value is not None:
                slot.set(value)

    def pause(self, replica_id: int) -> None:
        """Keep the values of a replica, whose turn ends."""
        self._values[replica_id] = [slot.get() for slot in self._slots]

    def share(self, replica_id: int) -> None:
        """Move the counters of all replicas as code did that ran once for them, with the values of this one."""
        for k, slot in enumerate(self._slots):
            before, after = self._values[replica_id][k], slot.get()
            for values in self._values:
                if is_counter(before) and is_counter(after) and is_counter(values[k]):
                    values[k] += after - before
                else:
                    values[k] = after

    def settle(self, replicas: Sequence[int]) -> None:
        """Do nothing: replicas may count differently until the run ends."""

    def finish(self, replicas: Sequence[int], *, succeeded: bool) -> None:
        """Set the counters after the run: by one run if these replicas agree, else by all that they counted."""
        for k, slot in enumerate(self._slots):
            start, values = self._start[k], [self._values[i][k] for i in replicas]
            if not all(map(is_counter, [start, *values])):
                continue  # the value that the program has set last
            moves = [value - start for value in values]
            slot.set(start + (moves[0] if len(set(moves)) == 1 else sum(moves)))


def counters_of(
    function: Callable[..., Any], size: int, key: Hashable = None
) -> StepCounters | None:
    """Return the step counters of a function for a run on several replicas; None if it has none.

    Args:
        function: the function.
        size: number of replicas.
        key: its `function_key`, if the caller knows it.

    Example:
        >>> class Rule:
        ...     steps = 0
        ...
        ...     def rate(self):
        ...         self.steps += 1
        >>> rule = Rule()
        >>> rule.steps = 4
        >>> counters = counters_of(lambda: rule.rate(), 2)
        >>> for replica in (0, 1):
        ...     counters.resume(replica)
        ...     rule.rate()
        ...     counters.pause(replica)
        >>> counters.finish([0, 1], succeeded=True)
        >>> rule.steps
        5
    """
    key = function_key(function) if key is None else key
    known = _known.get(key)
    if known is None:
        if len(_known) >= MOST_FUNCTIONS:
            _known.clear()
        known = _known[key] = _Found()
    slots = known.slots(function)
    return StepCounters(slots, size) if slots else None


@final
class _Found:
    """Counters of one function; searched again in the 2nd, 4th, 8th, ... run, and if an owner is gone."""

    __slots__ = ("_runs", "_slots")

    def __init__(self) -> None:
        self._runs = 0
        self._slots: list[CounterSlot] = []

    def slots(self, function: Callable[..., Any]) -> Sequence[CounterSlot]:
        self._runs += 1
        if self._runs & (self._runs - 1) == 0 or any(slot.is_gone for slot in self._slots):
            found = {CounterSlot.key(*place): place for place in _search(function)}
            self._slots = [CounterSlot(*place) for place in found.values()]
        return self._slots


_known: dict[Hashable, _Found] = {}


def with_objects(call: functools.partial[Any]) -> Callable[..., Any]:
    """Return a function with those of its arguments that may count or keep something: not the batch."""
    given = [one for one in (*call.args, *call.keywords.values()) if _is_object(one)]
    return functools.partial(call.func, *given) if given else call.func


def _is_object(value: object) -> bool:
    return type(value) not in PLAIN and not isinstance(value, _OF_BATCHES)


_OF_BATCHES: Final = (Tensor, list, tuple, dict, np.ndarray)


def function_key(function: Any) -> Hashable:
    """Return the code of a function and the identities of the objects that it refers to or gets."""
    given: list[int] = []
    while isinstance(function, functools.partial):
        given += [_identity(one) for one in function.args]
        function = function.func
    owner = id(getattr(function, "__self__", None))
    inner = getattr(function, "__func__", function)
    if type(inner) is not types.FunctionType:
        return type(function), id(function), *given
    held = inner.__globals__
    found = [*given, owner, *[_identity(held.get(name)) for name in names_of(inner.__code__)]]
    for cell in inner.__closure__ or ():
        try:
            found.append(_identity(cell.cell_contents))
        except ValueError:  # the variable has no value yet
            found.append(0)
    return inner.__code__, *found


def _identity(value: object) -> int:
    """Return the id of an object that may have counters; numbers and tensors are other ones in every step."""
    return 0 if type(value) in PLAIN or isinstance(value, Tensor) else id(value)


def _search(function: Any) -> Iterator[tuple[Any, str]]:
    """Yield owner and name of each counter that counts calls."""
    seen = Fingerprint(function, _token_of, lambda value: (id(value), ()), find_counters=True)
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    own = counted_names(code, varying=True).attributes if code is not None else frozenset()
    for owner, name in seen.counters:
        if isinstance(owner, types.FunctionType):
            varying = counted_names(owner.__code__, varying=True)
            if name not in varying.globals | varying.cells:
                yield owner, name
        else:
            kind: Any = type(owner)
            if name not in own | counted_attributes(kind, varying=True):
                yield owner, name
    roots = (one for one in seen.managed if isinstance(one, nn.Module))
    for module in (one for root in roots for one in root.modules()):
        kind = type(module)
        for name in counted_attributes(kind) - counted_attributes(kind, varying=True):
            if is_counter(vars(module).get(name)):
                yield module, name


def _token_of(value: object) -> Hashable | None:
    """Return a token for objects that are not searched. Optimizers step once for all replicas."""
    return id(value) if isinstance(value, (Tensor, nn.Module, Optimizer)) else None
