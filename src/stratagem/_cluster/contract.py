"""What the coordinator and a worker ask of the strategy, as two interfaces.

Contract 7 (docs/design/0002): the strategy's side is written in `_strategies` and `_ps`, which
import nothing from here; the interfaces are structural. `PlainViews` is the smallest
implementation: nothing is special, everything travels by value.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from stratagem._wire.handshake import ClusterKey
from stratagem.config import ClusterOptions

Applied: TypeAlias = tuple[Mapping[Hashable, Exception], Sequence[Hashable]]
"""What went wrong with updates, by the token of the object concerned; and tokens nobody names any more."""


class StrategyOnWorker(Protocol):
    """A worker's view of the strategy and everything that belongs to it."""

    def define(self, token: Hashable, definition: object, *, last: bool) -> None:
        """Remembers what is needed to rebuild `token`; `last`: no more of it comes."""

    def rebuild(self, token: Hashable) -> object:
        """The worker's view of `token`: the same object at every call."""

    def apply(self, updates: Sequence[object]) -> Applied:
        """Takes over what moved on the coordinator since the last closure."""

    def closure(
        self, number: int, *, exactly_once: bool, quick: bool
    ) -> AbstractContextManager[object]:
        """Surrounds one closure. Its writes may still be on their way when it is left.

        `quick`: the function is usually over in no time, so that its writes may wait for company.
        """

    def written(self) -> int:
        """How many writes have been made so far."""

    def acknowledged(self, *, wait: bool) -> int:
        """How many of them, counted from the first, are done with; all of them after `wait`."""

    def late_failure(self, number: int) -> Exception | None:
        """What went wrong with a closure's writes after it was left; taken out."""

    def close(self) -> None:
        """Lets go of the servers."""


class WorkerSetup(Protocol):
    """Travels to a worker once per life."""

    def connect(
        self, *, worker_index: int, incarnation: int, key: ClusterKey | None
    ) -> StrategyOnWorker:
        """Builds the views on the worker."""


class StrategyOnCoordinator(Protocol):
    """The coordinator's side of the strategy."""

    def describe(self, obj: object) -> Hashable | None:
        """A token if `obj` belongs to the strategy, else None."""

    def definitions(self, token: Hashable) -> Sequence[object]:
        """What a worker needs to rebuild `token`, in order.

        What the first names must not name `token` in turn; what the others name may.
        """

    def snapshot(self) -> int:
        """A number that moves whenever later closures must see something new."""

    def updates(self, after: int, upto: int) -> Sequence[object]:
        """What moved between two snapshots."""

    def explain(self, update: object) -> str:
        """What an update is about, in words: for the error if it cannot be sent."""

    def outdated(self) -> Sequence[Hashable]:
        """Tokens that workers coming from now on need a new definition of; each is named once."""

    def worker_setup(self) -> WorkerSetup:
        """What a worker needs to build its views."""

    def fence(self, worker_index: int, incarnation: int) -> None:
        """Makes every server refuse writes of this incarnation and older ones."""

    def check_servers(self, options: ClusterOptions) -> None:
        """One look at every server, to be repeated; raises ParameterServerLost if one counts as lost."""

    def finish_closures(self, closures: Sequence[int]) -> None:
        """Let servers refuse late writes of these closures, which are finished. Never waits."""

    def close(self, options: ClusterOptions | None = None) -> None:
        """Ends the session on the servers."""


@runtime_checkable
class ClusterStrategy(Protocol):
    """A strategy that has a cluster."""

    _cluster_coordinator: Any
    """Its coordinator, once there is one."""

    @property
    def cluster_resolver(self) -> Any:
        """Where the cluster's tasks are."""

    def _cluster_views(self) -> StrategyOnCoordinator:
        """The strategy's side of contract 7."""


@dataclass(frozen=True)
class PlainSetup:
    """Setup of a worker for which nothing is special."""

    def connect(
        self, *, worker_index: int, incarnation: int, key: ClusterKey | None
    ) -> StrategyOnWorker:
        """Builds the views of a worker without a strategy."""
        return PlainOnWorker()


class PlainOnWorker:
    """Views of a worker for which nothing is special."""

    def define(self, token: Hashable, definition: object, *, last: bool) -> None:
        """Never called: no object has a token."""
        raise LookupError(f"{token!r} was defined for a worker that has no strategy.")

    def rebuild(self, token: Hashable) -> object:
        """Never called: no object has a token."""
        raise LookupError(f"{token!r} is unknown: this worker has no strategy.")

    def apply(self, updates: Sequence[object]) -> Applied:
        """Nothing can have moved."""
        return {}, ()

    def closure(
        self, number: int, *, exactly_once: bool, quick: bool
    ) -> AbstractContextManager[object]:
        """Nothing to enter."""
        return nullcontext()

    def written(self) -> int:
        """There is nothing to write to."""
        return 0

    def acknowledged(self, *, wait: bool) -> int:
        """Nothing to wait for."""
        return 0

    def late_failure(self, number: int) -> Exception | None:
        """Nothing can have failed."""
        return None

    def close(self) -> None:
        """Nothing to let go of."""


class PlainOnCoordinator:
    """Coordinator's views of a strategy that ships nothing but functions."""

    def describe(self, obj: object) -> Hashable | None:
        """Nothing is special."""
        return None

    def definitions(self, token: Hashable) -> Sequence[object]:
        """Never called: no object has a token."""
        raise LookupError(f"{token!r} has no definition: nothing is special here.")

    def snapshot(self) -> int:
        """Nothing moves."""
        return 0

    def updates(self, after: int, upto: int) -> Sequence[object]:
        """Nothing moves."""
        return ()

    def explain(self, update: object) -> str:
        """Nothing moves, so there is nothing to say about it."""
        return repr(update)

    def outdated(self) -> Sequence[Hashable]:
        """Nothing moves."""
        return ()

    def worker_setup(self) -> WorkerSetup:
        """A setup without servers."""
        return PlainSetup()

    def fence(self, worker_index: int, incarnation: int) -> None:
        """There are no servers to tell."""

    def check_servers(self, options: ClusterOptions) -> None:
        """There are no servers to ask."""

    def finish_closures(self, closures: Sequence[int]) -> None:
        """There are no servers to tell."""

    def close(self, options: ClusterOptions | None = None) -> None:
        """There is no session to end."""
