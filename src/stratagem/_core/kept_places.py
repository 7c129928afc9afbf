"""Places in which a program keeps values between its steps, and the replicas' own values there.

A `Place` reads and writes what a program keeps. `WrittenTensor` and `Contents` hold the values of the replicas during a run:
of a tensor that is written in place, and of a place in which other values are put. `kept_values` has the rules.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast, final

import numpy as np
import torch
from torch import Tensor

from stratagem._core.fingerprints import PLAIN
from stratagem._core.managed import find_managed
from stratagem._core.step_code import Kinds
from stratagem._core.torch_patches.private_api import version
from stratagem.errors import ReplicaError

if TYPE_CHECKING:
    from stratagem._core.replicated_parameters import ReplicatedParameter

_log = logging.getLogger("stratagem.core")

NUMBERS: Final = (bool, int, float, np.number, np.bool_)

LARGEST: Final = 256 << 20
"""Size of a tensor of which a copy is kept; writes to larger ones by several replicas are refused."""

SMALL: Final = 4096
"""Size of a tensor of which a copy is always kept, although other code than the replicas' changes it."""

_memory: Callable[[Tensor], Tensor] = cast("Any", Tensor.data).__get__
_set_memory: Callable[[Tensor, Tensor], None] = cast("Any", Tensor.data).__set__

_COMPUTED: Final = frozenset({"moves", "varies"})
_MAY_VARY: Final = (
    "The number in %s is computed from itself and a local variable. All replicas have computed the same number, which was "
    "written once for all of them. If the local variable depends on a replica's rows (a count of rows), compute it from all "
    "rows: sg.get_replica_context().all_reduce('sum', n)."
)
_DIFFERENT: Final = "with different values: they depend on a replica's rows, or not all wrote"

Values = dict[Hashable, Any]
"""Values of one place, by key."""

NUMBER_REMEDY: Final = (
    "Replicas share this number, and every replica runs the same code on its own rows. Compute it from the rows of all "
    "replicas, so that every replica has the same number, which is then written once:\n"
    "    v = sg.get_replica_context().all_gather(v, axis=0)  # one value per row\n"
    "    k = k + 0.001 * v.mean().item()\n"
    "or change it in merge_call or outside run()."
)

REMEDY: Final = (
    "Replicas share this tensor, and every replica runs the same code. Write it once for all replicas:\n"
    "    sg.get_replica_context().merge_call(lambda strategy: average.update())\n"
    "or register it as a buffer of a module created under the scope (register_buffer): every replica then has its "
    "own copy, and the copies are averaged; or return the value from the step and combine it outside run(). If the step "
    "begins with a new value, not with the last step's, set it to None when the step ends."
)


@final
class Place:
    """Place in which a program keeps values: a dict, list, closure cell, or attributes of an object.

    Args:
        holder: the object that holds the values: a dict (also of attributes or globals), list, deque, tuple or cell, or a
            class or an object with slots.
        key: the key of the value in a dict of attributes or globals, or its attribute; None: everything in the holder.
        path: the place in words, for errors.
        name: the variable or attribute by which code refers to it, see `step_code.py`.

    Attributes:
        kinds: how the code that was found changes it; empty: no code that was found does.
        by_memory: whether code may write it through ``.data``, which counts no version.
        is_moved: whether code that names it computes its tensors from their own values.
        is_used: whether code computes something else with its numbers, other than text for a log.
        wanted: of a list or dict with numbers: returns whether code changes the number under a key.
    """

    __slots__ = (
        "_matched", "_size", "by_memory", "holder", "is_moved", "is_used", "key", "kinds", "name", "path", "wanted",
    )  # fmt: skip

    def __init__(self, holder: Any, key: str | None, path: str, name: str) -> None:
        self.holder, self.key, self.path, self.name = holder, key, path, name
        self.kinds: Kinds = frozenset()
        self.by_memory = self.is_moved = False
        self.is_used = True
        self.wanted: Callable[[Hashable], bool] | None = None
        self._size = -1
        self._matched: Sequence[Any] = ()

    def read(self) -> dict[Hashable, Any]:
        """Return what the place holds now, by key."""
        holder, key = self.holder, self.key
        if key is not None:
            held = holder if isinstance(holder, dict) else _Attributes(holder)
            value = held.get(key, self)
            return {} if value is self else {key: value}
        if isinstance(holder, types.CellType):
            try:
                return {"": holder.cell_contents}
            except ValueError:  # the variable has been deleted
                return {}
        if self.wanted is None:
            return dict(holder) if isinstance(holder, dict) else dict(enumerate(holder))
        if len(holder) != self._size:
            self._size = len(holder)
            keys = holder if isinstance(holder, dict) else range(self._size)
            self._matched = [one for one in keys if self.wanted(one)]
        get: Any = holder.get if isinstance(holder, dict) else holder.__getitem__
        return {one: value for one in self._matched if isinstance(value := get(one), NUMBERS)}

    def write(self, values: dict[Hashable, Any]) -> None:
        """Bring back values; remove those that are not among them. Items appended to a list remain."""
        holder = self.holder
        if isinstance(holder, types.CellType):
            for value in values.values():
                holder.cell_contents = value
        elif isinstance(holder, dict):
            for key in self.read().keys() - values.keys():
                del holder[key]
            for key, value in values.items():  # a `collections.Counter` adds in `update`
                holder[key] = value
        elif isinstance(holder, list):
            for number, value in cast("dict[int, Any]", values).items():
                if number < len(holder):
                    holder[number] = value
        else:
            for name, value in values.items():
                setattr(holder, str(name), value)

    def values(self) -> list[Any]:
        """Return what the place holds now."""
        return [*self.read().values()]

    def within(self, value: Any) -> Place:
        """Return the place of a list or dict that this place holds."""
        found = Place(value, None, self.path, self.name)
        found.kinds, found.by_memory = self.kinds, self.by_memory
        return found

    def words(self, key: Hashable) -> str:
        """Return the place of one value in words."""
        is_item = self.key is None and not isinstance(self.holder, types.CellType)
        return f"{self.path}[{key!r}]" if is_item else self.path


class _Attributes:
    """Attributes of a class or of an object with slots, read as a dict."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        self._of = of

    def get(self, name: str, default: Any) -> Any:
        return getattr(self._of, name, default)


@final
class WrittenTensor:
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
            self.refuse(_DIFFERENT)
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


@final
class Contents:
    """What a place holds, which the step replaces: numbers (``self.tau *= 0.99``), tensors, results of a graph.

    Args:
        place: the place.
        named: places that a log message has named.

    Attributes:
        own: what replicas have put there instead.
    """

    __slots__ = ("_before", "_is_shown", "_named", "own", "place")

    def __init__(self, place: Place, named: set[str]) -> None:
        self.place = place
        self.own: dict[int, Values] = {}
        self._named = named
        self._is_shown = False
        self.renew()

    def renew(self) -> None:
        """Start from the present contents."""
        self._before = self.place.read()

    begin = renew

    def resume(self, replica_id: int) -> None:
        """Show a replica its own contents."""
        if replica_id in self.own:
            self.place.write(self.own[replica_id])
            self._is_shown = True

    def pause(self, replica_id: int) -> None:
        """Put aside what a replica has put in place of the contents from before."""
        now, before = self.place.read(), self._before
        if self._is_shown or not _are_same(now, before):
            if isinstance(self.place.holder, list):  # what a replica appends is shared
                now = {key: value for key, value in now.items() if key in before}
            self.own[replica_id] = now
            self.place.write(before)
            self._is_shown = False

    def settle(self, replicas: Sequence[int]) -> None:
        """Keep the contents of the replicas if they are equal."""
        kinds = self.place.kinds
        found = [self.own.get(i, self._before) for i in replicas]
        if all(is_equal(found[0], each) for each in found[1:]):
            varies = "varies" in kinds and self.place.path not in self._named
            if varies and not is_equal(found[0], self._before):
                self._named.add(self.place.path)
                _log.warning(_MAY_VARY, self.place.path)
            self.own = {}
            self.place.write(found[0])
            self.renew()
        elif self.place.is_used and not kinds.isdisjoint(_COMPUTED):
            self._refuse(found, [*replicas])

    def finish(self) -> None:
        """Leave the last replica's contents; of counts, those of all replicas."""
        if self.own:
            result = dict(self.own[max(self.own)])
            for key, value in result.items():
                before = self._before.get(key, 0)
                found = [each.get(key, before) for each in self.own.values()]
                is_count = "moves" in self.place.kinds
                if is_count and all(type(each) is int for each in (before, value, *found)):
                    result[key] = before + sum(each - before for each in found)
            self.place.write(result)
        self.own = {}

    def forget(self) -> None:
        """Leave the contents from before, after a run that failed."""
        self.own = {}

    def refuse_changes(self) -> None:
        """Raise if a number has changed while replicas ran at the same time."""
        is_checked = self.place.is_used and not self.place.kinds.isdisjoint(_COMPUTED)
        now = self.place.read() if is_checked else {}
        for key, value in now.items():
            if isinstance(value, NUMBERS) and not is_equal(value, self._before.get(key)):
                self._refuse_number(
                    key, "was changed while replicas ran at the same time (parallel_replicas=True)"
                )

    def _refuse(self, found: Sequence[Values], replicas: list[int]) -> NoReturn:
        for key in dict.fromkeys(key for each in found for key in each):
            mine = [each.get(key) for each in found]
            if all(isinstance(each, NUMBERS) for each in mine) and not all(
                is_equal(mine[0], each) for each in mine[1:]
            ):
                self._refuse_number(
                    key, f"differs between the replicas: {mine} in replicas {replicas}"
                )
        own, self.own = sorted(self.own), {}
        raise refused(f"what {self.place.path} holds", own, _DIFFERENT)

    def _refuse_number(self, key: Hashable, what: str) -> NoReturn:
        self.own = {}
        raise ReplicaError(
            f"the number in {self.place.words(key)} {what} (it was {self._before.get(key)} before). {NUMBER_REMEDY}"
        )


def _are_same(now: Values, before: Values) -> bool:
    """Return whether a place holds the same objects, or equal numbers."""
    return now.keys() == before.keys() and all(
        value is before[key] or (isinstance(value, NUMBERS) and is_equal(value, before[key]))
        for key, value in now.items()
    )


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two values are the same; numbers that are not a number are."""
    if one is other:
        return True
    if isinstance(one, NUMBERS) and isinstance(other, NUMBERS):
        return bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124
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
