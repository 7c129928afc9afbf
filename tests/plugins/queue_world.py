"""A closure queue and the cluster around it, modelled plainly: random events, and checks after each."""

from __future__ import annotations

from orders import Events

from stratagem._cluster.coordinator.closure_actions import (
    Action,
    DeliverResults,
    FenceWorker,
    RaiseError,
    RecallClosures,
    ReleaseWorker,
    RequeueClosure,
    ResolveClosure,
)
from stratagem._cluster.coordinator.closure_queue import ClosureQueue
from stratagem._cluster.coordinator.start_rules import StartRule

QUICK_S = 0.001
LONG_S = 1.0


class World:
    """A queue, and what happens around it, modelled plainly. Which events happen how often: below."""

    def __init__(self, rule: StartRule | None = None) -> None:
        self.queue = ClosureQueue(poison_limit=3, rule=rule)
        self.next_closure = 0
        self.next_worker = 0
        self.open: set[int] = set()  # shared closures that are not resolved
        self.open_resources: set[int] = set()
        self.resources: set[int] = set()
        self.cancelled: set[int] = set()
        self.resolved: set[int] = set()
        self.incarnations: dict[int, int] = {}
        self.alive: set[int] = set()
        self.draining: set[int] = set()
        self.fencing: set[int] = set()
        self.held: dict[int, list[int]] = {}
        self.recalled: set[int] = set()
        self.must_send: set[int] = set()
        for _ in range(3):
            self.join_one()

    @property
    def workers(self) -> list[int]:
        return sorted(self.held)

    def one(self, events: Events) -> int:
        """Some worker, or one that has never been there."""
        return events.of(self.workers) if self.workers else -1

    def execute(self, actions: list[Action]) -> None:
        """Execute every action, as the engine does."""
        for action in actions:
            if isinstance(action, DeliverResults):
                for closure in action.closures:
                    self.resolve(closure)
            elif isinstance(action, ResolveClosure):
                self.resolve(action.closure)
                if action.fate == "poisoned":
                    assert len(action.workers) == 3
                if action.fate == "given up":
                    for held in self.held.values():
                        if action.closure in held:
                            held.remove(action.closure)
            elif isinstance(action, RequeueClosure):
                assert action.closure in self.open
            elif isinstance(action, RaiseError):
                assert self.queue.stopped
            elif isinstance(action, RecallClosures):
                assert action.worker in self.alive
                self.recalled.add(action.worker)
            elif isinstance(action, FenceWorker):
                assert action.incarnation == self.incarnations[action.worker]
                self.fencing.add(action.worker)
            elif isinstance(action, ReleaseWorker):
                assert action.worker in self.draining
                assert not self.held.pop(action.worker), "released with closures"
                self.alive.discard(action.worker)
                self.recalled.discard(action.worker)
            else:
                self.must_send.add(action.worker)

    def resolve(self, closure: int) -> None:
        assert closure not in self.resolved, "completed or resolved twice"
        self.resolved.add(closure)
        self.open.discard(closure)
        self.open_resources.discard(closure)

    def check(self) -> None:
        assert self.queue.idle == (not self.open)
        assert set(self.queue.workers) == set(self.held)

    # What happens; each reads from the events what it needs to know.

    def nothing(self, events: Events) -> None:
        self.execute(self.queue.tick())

    def schedule(self, events: Events) -> None:
        for _ in range(1 + events.below(4)):
            if not self.queue.stopped:
                self.open.add(self.next_closure)
                self.execute(self.queue.add(self.next_closure))
                self.next_closure += 1

    def create_resource(self, events: Events) -> None:
        worker = self.one(events)
        if worker in self.held:
            closure, self.next_closure = self.next_closure, self.next_closure + 1
            self.open_resources.add(closure)
            self.resources.add(closure)
            self.execute(self.queue.add_resource(closure, worker))

    def join(self, events: Events) -> None:
        if len(self.held) < 5:
            self.join_one()

    def join_one(self) -> None:
        worker, self.next_worker = self.next_worker, self.next_worker + 1
        self.queue.add_worker(worker)
        self.held[worker] = []
        self.incarnations[worker] = 0

    def drain(self, events: Events) -> None:
        worker = self.one(events)
        if worker in self.held:
            self.draining.add(worker)
            self.execute(self.queue.drain_worker(worker))

    def come_up(self, events: Events) -> None:
        self.bring_up(self.one(events))

    def bring_up(self, worker: int) -> None:
        if worker in self.held and worker not in self.alive | self.fencing:
            self.incarnations[worker] += 1
            self.alive.add(worker)
            up = self.queue.worker_up(worker, incarnation=self.incarnations[worker])
            self.execute(up)

    def take(self, events: Events) -> None:
        self.take_for(self.one(events))

    def take_for(self, worker: int) -> None:
        self.must_send.discard(worker)
        taken = self.queue.take(worker)
        if not taken:
            return
        assert worker in self.alive
        if worker in self.draining:
            assert set(taken) <= self.resources, "a draining worker got something new"
        assert len(set(taken)) == len(taken)
        for held in self.held.values():
            assert not any(closure in held for closure in taken), "a closure at two workers"
        self.held[worker] += taken

    def send(self, events: Events) -> None:
        """Do what the queue has asked for."""
        for worker in sorted(self.must_send):
            self.take_for(worker)

    def finish_one(self, events: Events) -> None:
        run_s = events.of([LONG_S, QUICK_S, QUICK_S])
        self.finish(self.one(events), events.of(["done"] * 7 + ["retry"]), run_s)

    def fail_one(self, events: Events) -> None:
        self.finish(self.one(events), "error", QUICK_S)

    def finish(self, worker: int, how: str, run_s: float) -> None:
        if worker not in self.alive or not self.held[worker]:
            return
        closure = self.held[worker].pop(0)
        if how == "retry":
            # Another server each time: its first failure is always ignored.
            server = f"ps{self.next_closure}-{closure}-{len(self.resolved)}"
            actions = self.queue.failed(worker, closure, blame="server", task=server)
            expected = closure not in self.resources | self.cancelled
            if expected and not self.queue.stopped:
                assert RequeueClosure(closure, lost=False) in actions
        elif how == "error":
            actions = self.queue.failed(worker, closure)
            assert actions[0] == ResolveClosure(closure, "failed")
        else:
            actions = self.queue.finished(worker, [closure], run_s)
            assert actions[0] == DeliverResults((closure,))
        self.execute(actions)

    def die_at_work(self, events: Events) -> None:
        worker = self.one(events)
        self.bring_up(worker)
        self.take_for(worker)
        self.lose_one(worker)
        self.fence_off(worker)

    def lose(self, events: Events) -> None:
        self.lose_one(self.one(events))

    def lose_one(self, worker: int) -> None:
        actions = self.queue.worker_lost(worker)
        if worker not in self.alive:
            assert actions == []
            return
        assert actions[0] == FenceWorker(worker, self.incarnations[worker])
        self.alive.discard(worker)
        self.recalled.discard(worker)
        late, self.held[worker] = self.held[worker], []
        self.execute(actions)
        assert self.queue.finished(worker, late, QUICK_S) == [], "a late report counted"

    def fence(self, events: Events) -> None:
        self.fence_off(self.one(events))

    def fence_off(self, worker: int) -> None:
        if worker in self.fencing:
            self.fencing.discard(worker)
            self.execute(self.queue.worker_fenced(worker))

    def answer_recall(self, events: Events) -> None:
        self.give_back(self.one(events), events.below(3))

    def give_back(self, worker: int, keep: int) -> None:
        if worker in self.recalled:
            self.recalled.discard(worker)
            back = [c for c in self.held[worker][keep:] if c not in self.resources]
            self.held[worker] = [c for c in self.held[worker] if c not in back]
            self.execute(self.queue.returned(worker, back))

    def cancel(self, events: Events) -> None:
        self.execute(self.queue.cancel())
        self.cancelled |= self.open
        assert all(self.queue.take(worker) == [] for worker in self.idle()), "a cancelled closure"

    def idle(self) -> list[int]:
        """Workers without a closure and without a resource to build."""
        return [] if self.open_resources else [w for w, held in self.held.items() if not held]

    def lose_a_server(self, events: Events) -> None:
        self.execute(self.queue.server_lost())
        assert self.queue.quiet

    def raise_error(self, events: Events) -> None:
        self.resume()

    def resume(self) -> None:
        if self.queue.stopped and self.queue.quiet:
            self.queue.resume()

    def end_well(self) -> None:
        """From any state: bring every worker up, answer everything, and no closure is stuck."""
        if not set(self.held) - self.draining:
            self.join_one()
        for _ in range(40):
            for worker in self.workers:
                self.fence_off(worker)
                self.bring_up(worker)
                self.give_back(worker, 0)
                if worker in self.held:
                    self.take_for(worker)
                while self.held.get(worker):
                    self.finish(worker, "done", QUICK_S)
            self.resume()
            if not self.open and not self.open_resources:
                break
        assert self.open == self.open_resources == set(), "stuck closures"
        assert self.resolved == set(range(self.next_closure)), "lost closures"
        assert self.queue.idle
        assert not set(self.held) & self.draining, "a drained worker was not released"

    def end_by_sends_alone(self) -> None:
        """From any quiet state: whoever executes only the actions gets everything done."""
        if not set(self.held) - self.draining:
            self.join_one()
        for worker in self.workers:
            self.fence_off(worker)
            self.bring_up(worker)
            self.give_back(worker, 0)
        self.resume()
        while self.open and not self.queue.stopped:
            if not self.must_send:
                self.execute(self.queue.tick())
            busy = [worker for worker in self.workers if self.held[worker]]
            assert self.must_send or busy, "the queue asks for nothing, though closures wait"
            for worker in sorted(self.must_send):
                self.take_for(worker)
            for worker in busy:
                self.finish(worker, "done", QUICK_S)


CALM = [
    World.nothing,
    *[World.schedule, World.take, World.send] * 3,
    *[World.finish_one, World.come_up] * 5,
    *[World.lose, World.fence, World.answer_recall, World.raise_error] * 2,
    World.create_resource,
]
# Workers die under what they have just been given, again and again.
DEADLY = [
    World.nothing,
    *[World.come_up, World.take, World.lose, World.fence] * 2,
    *[World.die_at_work] * 6,
    *[World.schedule, World.finish_one, World.answer_recall, World.raise_error] * 2,
]
# Errors of users and of servers come between.
ANGRY = [*CALM, World.lose_a_server, World.fail_one, World.fail_one]
# Workers join and leave, some of them by dying.
ELASTIC = [*CALM, *[World.join, World.drain] * 3, World.die_at_work]
# The user stops early.
IMPATIENT = [*CALM, World.cancel, World.die_at_work]
ALL = [CALM, DEADLY, ANGRY, ELASTIC, IMPATIENT, [*ELASTIC, *ANGRY, World.cancel]]
