"""Run synchronous rounds: hold results, let the servers apply the step of a round, start smaller rounds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, final

from stratagem._cluster.coordinator.closure_actions import (
    Action,
    EndRound,
    Fate,
    ResolveClosure,
    Sending,
)
from stratagem._cluster.coordinator.closure_table import Cause
from stratagem._cluster.coordinator.start_rules import SynchronousRounds
from stratagem._wire.messages import Frame
from stratagem.errors import ParameterServerLost

if TYPE_CHECKING:
    from stratagem._cluster.coordinator.engine import Engine
    from stratagem._cluster.coordinator.worker_link import WorkerLink

_log = logging.getLogger("stratagem.coordinator")


class _HeldResult(NamedTuple):
    """The report of a result, and the session that made it."""

    link: WorkerLink
    incarnation: int
    frame: Frame


@final
class RoundDriver:
    """The rounds of one engine (``staleness=0``)."""

    def __init__(self, engine: Engine, rule: SynchronousRounds) -> None:
        self._engine = engine
        self._rule = rule
        self._held: dict[int, _HeldResult] = {}  # by closure
        self._pausing = threading.Lock()

    def locked_hold(
        self, link: WorkerLink, frames: Sequence[Frame], results: Mapping[int, Frame]
    ) -> list[Frame]:
        """Hold the results of the round; return the other frames."""
        for closure, frame in results.items():
            if self._rule.holds(closure):
                self._held[closure] = _HeldResult(link, link.incarnation, frame)
        kept = {id(one.frame) for one in self._held.values()}
        return [frame for frame in frames if id(frame) not in kept]

    def apply(self, action: EndRound) -> None:
        """Let every server make the steps of a round, then deliver its results."""
        engine = self._engine
        try:
            engine.views.apply_round(action.closures)
        except Exception as error:  # noqa: BLE001 - an optimizer may raise anything
            if isinstance(error, ParameterServerLost):
                engine.server_lost(error)
            cause = Cause(error)
            engine.handle(lambda: [*self.locked_give_up("failed"), *engine.queue.stop()], cause)
            return
        with engine.changed:
            if engine.closed:
                return
            found = self._rule.applied()
            held, self._held = self._held, {}
            pending: list[Sending] = []
            for closure in sorted(held):
                one = held[closure]
                pending += engine.locked_advance(one.link, one.incarnation, [one.frame], found)
            frames = {closure: one.frame for closure, one in held.items()}
            pending += engine.locked_execute(found, results=frames)
            pending += engine.locked_execute(engine.queue.tick())
            engine.changed.notify_all()
        engine.execute(pending)

    def locked_give_up(self, fate: Fate) -> list[Action]:
        """End the round; return the actions that resolve its closures."""
        self._held.clear()
        return [ResolveClosure(one, fate) for one in self._rule.give_up()]

    def restart(self) -> None:
        """Run all closures of the round again: a restored server has lost the steps that it held."""

        def event() -> list[Action]:
            again = self._rule.restart() if not self._engine.queue.stopped else []
            for closure in again:
                one = self._held.pop(closure)
                self._engine.locked_advance(one.link, one.incarnation, [one.frame], ())
            return self._engine.queue.run_again(again)

        self._engine.handle(event)

    def check_schedule(self, *, exactly_once: bool) -> None:
        """Raise if a round cannot have the closure; begin a round if the queue is full."""
        if not exactly_once:
            raise ValueError(
                "schedule(exactly_once=False) with staleness=0: servers hold the steps of a round by closure, so "
                "that every closure counts exactly once. Leave exactly_once=True."
            )
        if self._engine.locked_full:
            self.want()

    def want(self, closure: int | None = None) -> None:
        """Begin a round with fewer closures than workers if this closure is queued; by default, if any is."""
        with self._engine.lock:
            wanted = self._engine.closures.last_number if closure is None else closure
            if wanted <= self._rule.wanted:
                return
            self._rule.wanted = wanted
        self._engine.handle(self._engine.queue.tick)

    @contextmanager
    def between(self) -> Iterator[None]:
        """Wait until no round is under way; no round begins inside the context."""
        engine, rule = self._engine, self._rule
        with self._pausing:
            with engine.changed:
                rule.paused = True
                engine.changed.wait_for(lambda: engine.closed or rule.is_between)
            try:
                yield
            finally:
                with engine.lock:
                    rule.paused = False
                engine.handle(engine.queue.tick)
