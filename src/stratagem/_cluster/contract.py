"""Protocols between the cluster and a strategy: the methods that coordinator and workers call.

Contract 7 (docs/design/0002). The strategy's side is in `_strategies` and `_ps`, which import nothing from
here: the interfaces are structural. The named job and the servers of a strategy are those of `_ps`. A *token* names an object of the strategy (a module, parameter, variable,
optimizer, the strategy itself) on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from stratagem._wire.handshake import ClusterKey
from stratagem.config import ClusterOptions

if TYPE_CHECKING:  # workers load this module, too
    from stratagem._ps.coordinator.named_job import NamedJob
    from stratagem._ps.coordinator.server_control import ServerControl

Applied: TypeAlias = tuple[Mapping[Hashable, Exception], Sequence[Hashable]]
"""Errors of updates, by the token of the object concerned; and tokens that no longer exist."""


class StrategyOnCoordinator(Protocol):
    """The strategy as the coordinator uses it."""

    @property
    def job(self) -> NamedJob | None:
        """The named job of the strategy, or None."""

    @property
    def servers(self) -> ServerControl:
        """The strategy's servers."""

    @property
    def staleness(self) -> int | None:
        """Number of updates of others that a closure may miss; None: any number."""

    def describe(self, obj: object) -> Hashable | None:
        """Return the token of an object of the strategy, None for any other object."""

    def definitions(self, token: Hashable) -> Sequence[object]:
        """Return what a worker needs to rebuild the object of a token, in order.

        The first definition must not refer to `token`, directly or through others. Later ones may.
        """

    def check_definition(self, token: Hashable, named: Collection[Hashable]) -> None:
        """Raise if a definition that names these objects lacks some that it should name."""

    def changes(self) -> tuple[Sequence[object], Sequence[Hashable]]:
        """Return updates that functions scheduled from now on must see, and tokens to define again.

        Workers get the updates; workers that connect later get the new definitions. The same updates are
        returned again until `accept` is called.
        """

    def accept(self) -> None:
        """Take what `changes` returned as sent."""

    def current(self) -> Sequence[object]:
        """Return the updates that bring every definition up to date, for a worker that connects now."""

    def explain(self, update: object) -> str:
        """Return a phrase about an update, for the error if it cannot be sent."""

    def worker_setup(self) -> WorkerSetup:
        """Return the object that connects a worker to the strategy."""

    def counted(self, function: Callable[..., Any], owners: Sequence[Any]) -> Callable[..., Any]:
        """Return a function with counters (`_core/counters.py`) as it is sent to workers."""

    def advance(self, worker: int, incarnation: int, report: int, advances: Sequence[Any]) -> None:
        """Make what a closure did to schedulers, gradient scalers and settings on the coordinator's objects.

        Called once for each closure; without `advances` if the closure does not count. Never waits.
        """

    def snapshot(self, worker: int, incarnation: int, known: Collection[Any]) -> object | None:
        """Return an update about such objects that the worker must get before its next closure, if any."""

    def apply_round(self, closures: Sequence[int]) -> None:
        """Let every server make the steps that it holds of these closures, as one."""

    def close(self, options: ClusterOptions | None = None) -> None:
        """End the session on the servers."""


class WorkerSetup(Protocol):
    """Object that the coordinator sends to every new incarnation of a worker."""

    def connect(
        self, *, worker_index: int, incarnation: int, key: ClusterKey | None
    ) -> StrategyOnWorker:
        """Connect the worker to the strategy's servers."""


class StrategyOnWorker(Protocol):
    """The strategy as a worker uses it."""

    def define(self, token: Hashable, definition: object, *, last: bool) -> None:
        """Store one definition of a token; with `last` the object is complete."""

    def rebuild(self, token: Hashable) -> object:
        """Return the worker's object for a token: the same object at every call."""

    def apply(self, updates: Sequence[object]) -> Applied:
        """Apply changes of the coordinator's objects."""

    def closure(
        self, number: int, *, exactly_once: bool, quick: bool, arrived: float
    ) -> AbstractContextManager[object]:
        """Return the context of one closure. Its writes may be unacknowledged when it is left.

        `quick`: the function usually takes less than a millisecond, so its writes may be batched. `arrived`: when the
        closure arrived at the worker (`time.perf_counter`); it sees every write that had finished by then.
        """

    def advances(self) -> tuple[int, Sequence[object]] | None:
        """Return what the closure that ended last did to schedulers, scalers and settings, with a number."""

    def written(self) -> int:
        """Return the number of writes so far."""

    def acknowledged(self, *, wait: bool) -> int:
        """Return how many writes, counted from the first, are acknowledged; wait for all if asked."""

    def reaches(self, task: str) -> bool:
        """Return whether the connection to a server is open, as far as this worker knows."""

    def late_failure(self, number: int) -> Exception | None:
        """Return, once, the error of a closure's writes after its context was left."""

    def abandon(self) -> None:
        """Let requests to servers fail from now on, also those that wait. Any thread may call it."""

    def close(self) -> None:
        """Disconnect from the servers."""


@runtime_checkable
class ClusterStrategy(Protocol):
    """A strategy that has a cluster."""

    _cluster_coordinator: Any
    """The strategy's coordinator, None until there is one."""

    @property
    def cluster_resolver(self) -> Any:
        """The resolver that finds the cluster's tasks."""

    def _cluster_views(self) -> StrategyOnCoordinator:
        """Return the strategy's side of the contract."""
