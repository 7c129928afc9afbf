"""Python numbers that a step changes in every call: each replica has its own value during a run.

Examples are a counter of steps (``self.steps += 1``), a temperature (``self.tau *= 0.99``), a flag (``turn = not turn``) and
BEGAN's balance ``k = min(max(k + 0.001 * d.item(), 0), 1)``. Replicas share them, so each would move once per replica. As
for tensors (`kept_values`), a replica finds the value from before the run, and equal values are written once. If the
values differ, the step computes with a number that depends on a replica's rows: an error. A number that the step only
writes to a log is no error: integers add up over the replicas, of others the last replica's remains.

Sums (``total += loss.item()``) are left alone: they add up over the replicas. `number_writes` tells them from the others.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn, cast, final

import numpy as np

from stratagem.errors import ReplicaError

_NUMBERS: Final = (bool, int, float, np.number, np.bool_)

REMEDY: Final = (
    "Replicas share this number, and every replica runs the same code on its own rows. Compute it from the rows of all "
    "replicas, so that every replica has the same number, which is then written once:\n"
    "    v = sg.get_replica_context().all_gather(v, axis=0)  # one value per row\n"
    "    k = k + 0.001 * v.mean().item()\n"
    "or change it in merge_call or outside run()."
)


def is_number(value: object) -> bool:
    """Return whether a value is a Python or NumPy number."""
    return isinstance(value, _NUMBERS)


Values = dict[Hashable, Any]
"""Numbers of one place, by key."""


@final
class KeptNumbers:
    """Numbers that the step moves in one place: a variable, attributes of an object, items of a dict or list.

    Args:
        holder: a dict (also of attributes or globals), a list, a closure cell, or an object or class with attributes.
        moves: returns whether the step moves the number under a key; "varying": an integer there is a sum, left alone.
        path: the place in words, for errors.
        uses: returns whether the step computes something else with the number under a key.
        keys: the only keys to look at; None: all.

    Attributes:
        own: values of the replicas that have changed some since.
    """

    __slots__ = (
        "_before", "_has_sums", "_is_shown", "_keys", "_matched", "_moves", "_path", "_size", "_sums", "_uses", "holder",
        "own",
    )  # fmt: skip

    def __init__(
        self,
        holder: Any,
        moves: Callable[[Hashable], bool | str],
        path: str,
        uses: Callable[[Hashable], bool],
        keys: Sequence[Hashable] | None = None,
    ) -> None:
        self.holder, self._moves, self._path, self._uses = holder, moves, path, uses
        self._keys = keys
        self.own: dict[int, Values] = {}
        self._is_shown = False
        self._before: Values = {}
        self._sums: Values = {}
        self._size = -1
        self._matched: Sequence[Any] = ()
        self._has_sums = False
        self._match()
        self.renew()

    def places(self) -> dict[Hashable, str]:
        """Return the keys of the numbers, with each place in words."""
        return {key: self._path + self._item(key) for key in self._before}

    def _item(self, key: Hashable) -> str:
        return f"[{key!r}]" if self._keys is None else ""

    def _read(self) -> Values:
        """Return the numbers that the step moves; integers that are sums are only noted."""
        found = self._all()
        if not self._has_sums:
            return found
        sums = {k: v for k, v in found.items() if type(v) is int and self._moves(k) == "varying"}
        self._sums.update(sums)
        return {key: value for key, value in found.items() if key not in sums}

    def _all(self) -> Values:
        holder = self.holder
        if isinstance(holder, (dict, list)):
            if self._keys is None and len(holder) != self._size:
                self._match()
            if isinstance(holder, dict):
                get = holder.get
                return {k: v for k in self._matched if isinstance(v := get(k), _NUMBERS)}
            return {k: v for k in self._matched if isinstance(v := holder[k], _NUMBERS)}
        if isinstance(holder, types.CellType):
            try:
                value = holder.cell_contents
            except ValueError:  # the variable has been deleted
                return {}
            return {"": value} if isinstance(value, _NUMBERS) else {}
        return {k: v for k in self._matched if isinstance(v := getattr(holder, k, None), _NUMBERS)}

    def _match(self) -> None:
        """Find the keys that the step moves; again if the number of items has changed."""
        keys: Iterable[Hashable] = self._keys or ()
        if self._keys is None:
            self._size = len(self.holder)
            keys = self.holder if isinstance(self.holder, dict) else range(self._size)
        kinds = {key: self._moves(key) for key in keys}
        self._matched = [key for key, kind in kinds.items() if kind]
        self._has_sums = "varying" in kinds.values() or self._moves("") == "varying"

    def _write(self, values: Values) -> None:
        """Bring back numbers; remove those that are not among them."""
        holder = self.holder
        gone = self._read().keys() - values.keys()
        # An integer that is a sum, and has become another number, becomes the integer again.
        values = {**values, **{key: self._sums[key] for key in gone if key in self._sums}}
        for key in gone - values.keys() if isinstance(holder, dict) else ():
            del holder[key]
        for key, value in values.items():
            if isinstance(holder, types.CellType):
                holder.cell_contents = value
            elif isinstance(holder, dict):
                holder[key] = value
            elif not isinstance(holder, list):
                setattr(holder, cast("str", key), value)
            elif (number := cast("int", key)) < len(holder):
                holder[number] = value

    def renew(self) -> None:
        """Start from the present numbers."""
        self._sums = {}
        self._before = self._read()

    begin = renew

    def resume(self, replica_id: int) -> None:
        """Show a replica its own numbers."""
        if replica_id in self.own:
            self._write(self.own[replica_id])
            self._is_shown = True

    def pause(self, replica_id: int) -> None:
        """Put aside the numbers of a replica; show those from before."""
        now = self._read()
        if self._is_shown or not _are_same(now, self._before):
            if isinstance(self.holder, list):  # what a replica appends is shared
                now = {key: value for key, value in now.items() if key in self._before}
            self.own[replica_id] = now
            self._write(self._before)
            self._is_shown = False

    def settle(self, replicas: Sequence[int]) -> None:
        """Write the common numbers of the replicas once."""
        values = [self.own.get(i, self._before) for i in replicas]
        if all(_are_same(values[0], each) for each in values[1:]):
            self.own = {}
            self._write(values[0])
            self.renew()
            return
        for key in dict.fromkeys(key for each in values for key in each):
            mine = [each.get(key, self._sums.get(key)) for each in values]
            if self._uses(key) and not all(_is_same(mine[0], each) for each in mine):
                self._refuse(key, f"differs between the replicas: {mine} in replicas {[*replicas]}")

    def finish(self) -> None:
        """Leave the numbers of a run that succeeded: integers of all replicas, of others the last replica's."""
        if self.own:
            result = dict(self.own[max(self.own)])
            for key, value in result.items():
                before = self._before.get(key, 0)
                values = [each.get(key, before) for each in self.own.values()]
                if all(type(each) is int for each in (before, value, *values)):
                    result[key] = _counted(before, cast("list[int]", values))
            self._write(result)
        self.own = {}

    def forget(self) -> None:
        """Leave the numbers from before, after a run that failed."""
        self.own = {}

    def refuse_changes(self) -> None:
        """Raise if a number has changed while replicas ran at the same time."""
        now = self._read()
        for key in now:
            if self._uses(key) and not _is_same(now[key], self._before.get(key)):
                self._refuse(
                    key, "was changed while replicas ran at the same time (parallel_replicas=True)"
                )

    def _refuse(self, key: Hashable, what: str) -> NoReturn:
        self.own = {}
        raise ReplicaError(
            f"the number in {self._path}{self._item(key)} {what} (it was {self._before.get(key, self._sums.get(key))} before). {REMEDY}"
        )


def _counted(before: int, values: Sequence[int]) -> int:
    """Return a count after a run: by one run if the replicas agree, else by all that they counted."""
    same = len(set(values)) == 1
    return values[0] if same else before + sum(value - before for value in values)


def _are_same(some: Mapping[Hashable, Any], others: Mapping[Hashable, Any]) -> bool:
    return some == others or (
        some.keys() == others.keys()
        and all(_is_same(value, others[key]) for key, value in some.items())
    )


def _is_same(one: Any, other: Any) -> bool:
    return one is other or bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124
