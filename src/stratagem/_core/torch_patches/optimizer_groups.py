"""Parameter groups of an optimizer in a replica: the replica's leaves and settings."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from typing_extensions import override

from stratagem._core.context import Replica, current_replica
from stratagem._core.managed import ManagedParameter, find_managed
from stratagem._core.replicated_parameters import ReplicatedParameter, resolve_all
from stratagem._core.strategy_hooks import StrategyHooks
from stratagem._core.torch_patches.module_members import ByContext
from stratagem.errors import ReplicaError


class _Setting:
    """A number of a parameter group that replicas set in a run.

    Attributes:
        run: stands for the run.
        before: the number from before.
        written: the numbers that each replica has set, in order.
    """

    __slots__ = ("before", "run", "written")

    def __init__(self, run: object, before: Any) -> None:
        self.run, self.before = run, before
        self.written: dict[int, list[float]] = {}


class GroupByReplica(ByContext):
    """A parameter group whose ``"params"`` are the replica's leaves in a replica.

    Attributes:
        managed: one entry per parameter, in order; None for a parameter that no strategy manages.
        replicated: the entries that have a leaf per replica.
    """

    __slots__ = ("_own", "_strategy", "managed", "replicated")

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        given = plain["params"]
        self._own: dict[str, _Setting] = {}
        self._find_managed(given)
        # An optimizer made in a replica is given leaves: keep their central parameters.
        central = [
            each if managed is None else managed.central
            for each, managed in zip(given, self.managed, strict=True)
        ]
        dict.__setitem__(self, "params", central)

    def _find_managed(self, parameters: Iterable[Tensor]) -> None:
        self.managed: list[ManagedParameter | None] = [find_managed(each) for each in parameters]
        self.replicated = [each for each in self.managed if isinstance(each, ReplicatedParameter)]
        strategies = {id(each.strategy): each.strategy for each in self.replicated}
        alike = len(strategies) == 1 and len(self.replicated) == len(self.managed)
        strategy = strategies.popitem()[1] if alike else None
        self._strategy = None if strategy is None else weakref.ref(strategy)

    def belongs_to(self, strategy: StrategyHooks) -> bool:
        """Return whether all parameters have leaves in the replicas of this strategy."""
        return self._strategy is not None and self._strategy() is strategy

    @property
    def central(self) -> list[Tensor]:
        """The central parameters, in any context."""
        return dict.__getitem__(self, "params")

    @override
    def __getitem__(self, key: str) -> Any:
        value = dict.__getitem__(self, key)
        if key != "params":
            return value if not self._own else self._own_value(key, value)
        if (replica := current_replica()) is None:
            return value
        if self.belongs_to(replica.strategy):
            return resolve_all(self.replicated, replica)
        pairs = zip(value, self.managed, strict=True)
        return [each if managed is None else managed.resolve() for each, managed in pairs]

    @override
    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            value = list(value)
            self._find_managed(value)
        elif (replica := current_replica()) is None or not isinstance(value, int | float):
            self._own.pop(key, None)
        else:
            self._write_own(replica, key, value)
        dict.__setitem__(self, key, value)

    def _own_value(self, key: str, value: Any) -> Any:
        """Return the number that this replica has set in this run; the one from before if only others have set it."""
        replica, own = current_replica(), self._own.get(key)
        if replica is None or own is None or own.run is not _run_of(replica):
            return value
        written = own.written.get(replica.id)
        return written[-1] if written else own.before

    def _write_own(self, replica: Replica, key: str, value: float) -> None:
        """Note a number that a replica has set; refuse one that differs from another replica's."""
        own, run = self._own.get(key), _run_of(replica)
        if own is None or own.run is not run:
            own = self._own[key] = _Setting(run, dict.get(self, key))
        mine = own.written.setdefault(replica.id, [])
        mine.append(value)
        for other, theirs in own.written.items():
            if len(theirs) >= len(mine) and theirs[len(mine) - 1] != value:
                raise ReplicaError(
                    f"replica {replica.id} set the optimizer's {key!r} to {value!r}, replica {other} to "
                    f"{theirs[len(mine) - 1]!r}. The optimizer steps once for all replicas, so it needs one number. Compute "
                    "it outside the function given to run(), or in a function given to "
                    "sg.get_replica_context().merge_call(...), which runs once for all replicas."
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(dict.items(self)), memo)


def _run_of(replica: Replica) -> object:
    return replica.group.shared.setdefault("run of settings", object())
