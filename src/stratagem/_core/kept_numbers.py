"""Python numbers that a step moves in every call, in replicas: every replica has its own value of them.

Examples are a temperature (``self.tau *= 0.99``), a flag (``turn = not turn``) and BEGAN's balance
``k = min(max(k + 0.001 * d.item(), 0), 1)``. Replicas share them, so each would move once per replica. As for tensors
(`kept_values`), a replica finds the value from before the run, and equal values are written once. If the values
differ, the step computes with a number that depends on a replica's rows: an error. A number that the step only writes to
a log is no error: each replica has its own, and the last one remains.

Sums (``total += loss.item()``) are left alone: they add up over the replicas. `step_counters` has integer counters.
The bytecode is read: no code of the user runs.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np

from stratagem.errors import ReplicaError

if TYPE_CHECKING:
    from stratagem._core.kept_search import Place

_STORES: Final = {
    "STORE_ATTR": ("LOAD_ATTR",),
    "STORE_GLOBAL": ("LOAD_GLOBAL", "LOAD_NAME"),
    "STORE_DEREF": ("LOAD_DEREF",),
}
_NAMED: Final = frozenset(name for names in _STORES.values() for name in names) | {"LOAD_METHOD"}
_CONSTANTS: Final = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})
_ENDS: Final = ("STORE_", "POP_TOP", "POP_JUMP", "RETURN", "YIELD", "DELETE", "JUMP", "RAISE")
_TEXT: Final = ("FORMAT_", "BUILD_STRING")
_LOGS: Final = frozenset(
    {
        "add_scalar", "add_scalars", "critical", "debug", "error", "format", "info", "log", "log_dict", "log_metric",
        "print", "set_description", "set_postfix", "str", "tqdm", "warn", "warning", "write",
    }
)  # fmt: skip
_MAKES_TEXT: Final = frozenset({"format", "str"})
_NUMBERS: Final = (bool, int, float, np.floating, np.bool_)

REMEDY: Final = (
    "Replicas share this number, and every replica runs the same code on its own rows. Compute it from the rows of all "
    "replicas, so that every replica has the same number, which is then written once:\n"
    "    v = sg.get_replica_context().all_gather(v, axis=0)  # one value per row\n"
    "    k = k + 0.001 * v.mean().item()\n"
    "or change it in merge_call or outside run()."
)


class Numbers(NamedTuple):
    """Names in code: those that it computes from their own value, those that it computes with, those that it returns.

    Attributes:
        carried: those that it reads first, and later replaces: the state of a recurrent network.
    """

    moved: frozenset[str]
    used: frozenset[str]
    returned: frozenset[str]
    carried: frozenset[str]


def is_number(value: object) -> bool:
    """Return whether a value is a Python or NumPy number."""
    return isinstance(value, _NUMBERS)


@functools.lru_cache(maxsize=4096)
def numbers_in(code: types.CodeType) -> Numbers:
    """Return the attributes, globals and closure variables that code moves and uses, also in functions defined in it.

    Example:
        >>> def step(self, loss):
        ...     self.mean = 0.9 * self.mean + 0.1 * loss
        ...     self.total += loss
        ...     self.scale *= 2
        ...     print(self.mean)
        ...     return (loss * self.scale).mean()
        >>> moved, used, returned, carried = numbers_in(step.__code__)
        >>> sorted(moved), sorted(used), sorted(returned)
        (['mean', 'scale'], [], ['mean', 'scale'])
    """
    moved: set[str] = set()
    used: set[str] = set()
    returned: set[str] = set()
    read: set[tuple[str, str]] = set()
    replaced: set[tuple[str, str]] = set()
    carried: set[str] = set()
    for statement in _statements(code):
        end = statement[-1]
        loads = [one for one in statement if one.opname in _NAMED]
        own = ""
        if end.opname in _STORES:
            mine = [
                one
                for one in loads
                if one.opname in _STORES[end.opname] and one.argval == end.argval
            ]
            if mine:
                own = str(end.argval)
                if len(mine) > 1 or not _is_sum(statement, mine[0]):
                    moved.add(own)
        if not _is_log(statement):
            kept = returned if end.opname.startswith("RETURN") else used
            kept.update(str(one.argval) for one in loads if one.argval != own)
            read.update((one.opname, str(one.argval)) for one in loads)
        if end.opname in _STORES:
            place = (end.opname, str(end.argval))
            if place not in replaced and any(
                (load, place[1]) in read for load in _STORES[end.opname]
            ):
                carried.add(place[1])
            replaced.add(place)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = numbers_in(constant)
            moved |= inner.moved
            used |= inner.used | inner.returned
            carried |= inner.carried
    return Numbers(*map(frozenset, (moved, used, returned, carried)))


def carried_by(codes: Iterable[types.CodeType]) -> frozenset[str]:
    """Return the names that functions read first, and later replace."""
    return frozenset(
        name for code in codes if _may_be_called(code.co_name) for name in numbers_in(code).carried
    )


def numbers_of(codes: Iterable[types.CodeType]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that functions move, and those that they use, also as results of each other."""
    found = [(code.co_name, numbers_in(code)) for code in codes if _may_be_called(code.co_name)]
    used = {name for _, one in found for name in one.used}
    for _ in range(2):  # a result that goes through two functions
        used.update(name for called, one in found if called in used for name in one.returned)
    return frozenset(name for _, one in found for name in one.moved), frozenset(used)


def _may_be_called(name: str) -> bool:
    """Return whether a step may call a function by name or by calling its object: not ``__eq__`` of a dataclass."""
    return not name.startswith("__") or name == "__call__"


def _statements(code: types.CodeType) -> Iterator[list[dis.Instruction]]:
    """Yield groups of instructions that end where a value is stored, dropped, tested or returned."""
    part: list[dis.Instruction] = []
    for one in dis.get_instructions(code):
        part.append(one)
        if one.opname.startswith(_ENDS):
            yield part
            part = []
    if part:
        yield part


def _is_sum(statement: Sequence[dis.Instruction], load: dis.Instruction) -> bool:
    """Return whether a statement only adds something to a value, other than a constant."""
    rest = statement[statement.index(load) + 1 :]
    height = 1  # of the stack, from the value upwards
    before = load
    for number, one in enumerate(rest):
        if one.opname == "BINARY_OP" and height <= 2:
            after = [each.opname for each in rest[number + 1 : -1] if each.opname != "CACHE"]
            direct = all(
                name in ("LOAD_FAST", "SWAP", "LOAD_DEREF", "LOAD_GLOBAL") for name in after
            )
            adds = one.argrepr in ("+", "+=", "-", "-=")
            return adds and direct and height == 2 and before.opname not in _CONSTANTS
        height += dis.stack_effect(one.opcode, one.arg)
        if height < 1:
            return False
        before = one
    return False


def _is_log(statement: Sequence[dis.Instruction]) -> bool:
    """Return whether a statement makes text, calls something that writes a log, or compares with a first value."""
    end = statement[-1].opname
    names = {str(one.argval) for one in statement if one.opname.startswith("LOAD_")}
    if any(one.opname.startswith(_TEXT) for one in statement):
        return True
    if end.startswith("POP_JUMP"):
        return "NONE" in end or any(
            one.opname == "IS_OP"
            or (one.opname == "COMPARE_OP" and "=" in one.argrepr[:2] and one.argrepr[0] in "=!")
            for one in statement
        )
    if end == "POP_TOP":
        computes = any(one.opname == "BINARY_OP" for one in statement)
        listed = "append" in names and not computes
        return "backward" not in names and (listed or not names.isdisjoint(_LOGS))
    return not names.isdisjoint(_MAKES_TEXT)


@final
class KeptNumber:
    """A place with a number that the step moves.

    Attributes:
        own: values of the replicas that have changed it since.
    """

    __slots__ = ("_before", "_is_shown", "_used", "own", "place")

    def __init__(self, place: Place, *, used: bool) -> None:
        self.place = place
        self.own: dict[int, Any] = {}
        self._used = used
        self._is_shown = False
        self.renew()

    def renew(self) -> None:
        """Start from the present number."""
        self._before = self.place.values()[0]

    begin = renew

    def _is_changed(self) -> bool:
        now, before = self.place.values()[0], self._before
        # Integers are counts, positions and sums: `step_counters`.
        return now is not before and not (type(now) is int and type(before) is int)

    def resume(self, replica_id: int) -> None:
        """Show a replica its own number."""
        if replica_id in self.own:
            self.place.put([self.own[replica_id]])
            self._is_shown = True

    def pause(self, replica_id: int) -> None:
        """Put aside the number of a replica; show the one from before."""
        if self._is_shown or self._is_changed():
            self.own[replica_id] = self.place.values()[0]
            self.place.put([self._before])
            self._is_shown = False

    def settle(self, replicas: Sequence[int]) -> None:
        """Write the common number of the replicas once."""
        own = self.own
        values = [own.get(i, self._before) for i in replicas]
        if all(_is_same(values[0], each) for each in values[1:]):
            self.own = {}
            self.place.put([values[0]])
            self.renew()
        elif self._used:
            self.own = {}
            raise ReplicaError(
                f"the number in {self.place.path} differs between the replicas: {values} in replicas {[*replicas]} "
                f"(it was {self._before} before). {REMEDY}"
            )

    def finish(self) -> None:
        """Leave the last replica's number."""
        if self.own:
            self.place.put([self.own[max(self.own)]])
        self.own = {}

    def forget(self) -> None:
        """Leave the number from before, after a run that failed."""
        self.own = {}

    def refuse_changes(self) -> None:
        """Raise if the number has changed while replicas ran at the same time."""
        if self._used and self._is_changed():
            raise ReplicaError(
                f"the number in {self.place.path} was changed while replicas ran at the same time "
                f"(parallel_replicas=True). {REMEDY}"
            )


def _is_same(one: Any, other: Any) -> bool:
    return one is other or bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124
