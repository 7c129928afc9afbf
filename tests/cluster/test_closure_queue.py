"""The queue's decisions, by example and by thousands of random orders of events."""

from __future__ import annotations

import pytest
from orders import Events, orders
from queue_world import ALL, LONG_S, QUICK_S, World

from stratagem._cluster.coordinator.closure_actions import (
    Action,
    DeliverResults,
    FenceWorker,
    RaiseError,
    RecallClosures,
    ReleaseWorker,
    RequeueClosure,
    ResolveClosure,
    SendClosures,
    SetAsideWorker,
)
from stratagem._cluster.coordinator.closure_queue import ClosureQueue
from stratagem._cluster.coordinator.queue_state import ClosureChoice


def queue_of(workers: int, **options: int) -> ClosureQueue:
    """A queue with that many workers, all up."""
    queue = ClosureQueue(**options)
    for worker in range(workers):
        queue.add_worker(worker)
        queue.worker_up(worker, incarnation=1)
    return queue


def done(queue: ClosureQueue, worker: int, *closures: int, run_s: float = LONG_S) -> bool:
    """Report closures as done; return whether that counted."""
    actions = queue.finished(worker, closures, run_s)
    return bool(actions) and actions[0] == DeliverResults(closures)


def resolved(actions: list[Action]) -> list[Action]:
    """Leave out what is only sent."""
    return [action for action in actions if not isinstance(action, SendClosures)]


def test_closures_are_taken_in_order_and_only_as_many_as_the_window() -> None:
    """CCO-12: first in, first out; a worker holds no more than its window."""
    queue = queue_of(2)
    assert queue.add(0) == [SendClosures(0)]
    for closure in range(1, 5):
        queue.add(closure)
    assert queue.take(0) == [0, 1]
    assert queue.take(0) == []
    assert queue.take(1) == [2, 3]
    assert queue.finished(0, [0], LONG_S) == [DeliverResults((0,)), SendClosures(0)]
    assert queue.take(0) == [4]
    assert not queue.idle


def test_a_new_closure_goes_to_the_worker_with_the_fewest() -> None:
    """CCO-12: any idle worker takes the next; a full one is not sent to."""
    queue = queue_of(3)
    queue.add(0)
    queue.take(1)
    assert queue.add(1) == [SendClosures(0)]
    queue.take(0)
    assert queue.add(2) == [SendClosures(2)]
    queue.take(2)
    for closure in range(3, 6):
        (send,) = queue.add(closure)
        assert isinstance(send, SendClosures)
        queue.take(send.worker)
    assert queue.add(6) == [], "every window is full"


def test_the_window_follows_the_time_closures_take() -> None:
    """40 ms of work are sent ahead, between 2 and 64 closures."""
    queue = queue_of(1)
    for closure in range(200):
        queue.add(closure)
    (first, second) = queue.take(0)
    assert done(queue, 0, first, second, run_s=QUICK_S)
    taken = queue.take(0)
    assert len(taken) == 40
    assert done(queue, 0, *taken, run_s=1e-9)
    for _ in range(20):
        assert done(queue, 0, *queue.take(0), run_s=1e-9) or queue.idle
    assert queue.idle
    for closure in range(200, 300):
        queue.add(closure)
    assert len(queue.take(0)) == 64


def test_a_worker_without_a_path_to_a_server_is_set_aside() -> None:
    """Its closures run elsewhere, uncounted, and it gets none until it is back."""
    queue = queue_of(3, poison_limit=1, server_failures=1)
    for closure in range(3):
        queue.add(closure)
    assert queue.take(0) == [0, 1]
    actions = queue.failed(0, 0, blame="path", task="ps", others_reach=True)
    assert actions[:2] == [RequeueClosure(0, lost=False), SetAsideWorker(0, "it does not reach ps")]
    assert queue.take(0) == []
    assert queue.failed(0, 1, blame="path", task="ps", others_reach=True)[:1] == [
        RequeueClosure(1, lost=False)
    ], "it is set aside once"
    queue.add(3)
    assert SendClosures(0) not in queue.tick()
    assert queue.worker_lost(0) == [FenceWorker(0, 1)]
    queue.worker_fenced(0)
    assert not queue.stopped
    queue.worker_up(0, incarnation=2)
    assert queue.take(0)


def test_a_worker_that_lacks_an_object_gets_a_new_session() -> None:
    """Its closure has failed; a resource that cannot be built would end every session."""
    queue = queue_of(1, poison_limit=1)
    queue.add_resource(10, 0)
    queue.add(0)
    assert queue.take(0) == [10, 0]
    assert queue.failed(0, 10, lacks=True)[0] == ResolveClosure(10, "failed")
    actions = queue.failed(0, 0, lacks=True)
    assert actions[:2] == [
        ResolveClosure(0, "failed"),
        SetAsideWorker(0, "it could not unpack an object"),
    ]
    assert queue.stopped
    queue.resume()
    assert queue.add(1) == [], "it gets nothing until it is back"


def test_closures_of_a_worker_that_is_set_aside_did_not_cause_its_loss() -> None:
    """They are not suspected, however often it happens."""
    queue = queue_of(1, poison_limit=1)
    queue.add(0)
    queue.add(1)
    queue.take(0)
    queue.failed(0, 0, blame="path", task="ps", others_reach=True)
    queue.worker_lost(0)
    assert queue.worker_fenced(0) == [RequeueClosure(1, lost=True)]


def test_a_server_that_a_majority_does_not_reach_is_out_of_reach() -> None:
    """A worker that is up again reaches every server."""
    queue = queue_of(3)
    queue.worker_without_path(0, "ps")
    assert queue.servers_out_of_reach() == []
    queue.add(0)
    queue.take(1)
    queue.failed(1, 0, blame="path", task="ps", others_reach=False)
    assert queue.servers_out_of_reach() == ["ps"]
    queue.worker_lost(1)
    queue.worker_fenced(1)
    queue.worker_up(1, incarnation=2)
    assert queue.servers_out_of_reach() == []


def test_full_queue_says_so_and_zero_means_no_limit() -> None:
    """CCO-12: back-pressure at the limit."""
    queue = ClosureQueue(limit=2)
    queue.add(0)
    assert not queue.full
    queue.add(1)
    assert queue.full
    endless = ClosureQueue(limit=0)
    endless.add(0)
    assert not endless.full


def test_lost_worker_s_closures_wait_for_the_fence_then_go_to_the_end() -> None:
    """CCO-13, FLT-1: nothing runs elsewhere before the fence stands."""
    queue = queue_of(2)
    for closure in range(5):
        queue.add(closure)
    queue.take(0)
    assert queue.worker_lost(0) == [FenceWorker(0, 1)]
    assert queue.take(1) == [2, 3]
    assert not queue.quiet
    assert queue.worker_fenced(0) == [RequeueClosure(0, lost=True), RequeueClosure(1, lost=True)]
    assert done(queue, 1, 2, 3)
    assert queue.take(1) == [4], "the queue's own order first, lost ones at the end"
    assert done(queue, 1, 4)
    assert queue.take(1) == [0], "a closure lost before runs alone"
    assert queue.take(1) == []
    assert done(queue, 1, 0)
    assert queue.take(1) == [1]
    assert done(queue, 1, 1)
    assert queue.idle


def test_a_report_of_a_lost_worker_does_not_count() -> None:
    """A result that arrives after the loss was decided is not counted twice."""
    queue = queue_of(2)
    queue.add(7)
    queue.take(0)
    queue.worker_lost(0)
    assert queue.finished(0, [7], LONG_S) == []
    assert queue.failed(0, 7) == []
    assert queue.failed(0, 7, blame="server", task="ps") == []


def test_closure_lost_with_three_workers_is_poisonous_and_its_neighbours_are_not() -> None:
    """The closure that kills is found; one that was merely beside it is run to its end."""
    queue = queue_of(2)
    queue.add(1)
    queue.add(2)
    assert queue.take(0) == [1, 2]
    ended: list[Action] = []
    finished = []
    for incarnation in range(2, 12):
        queue.worker_lost(0)
        ended += [one for one in queue.worker_fenced(0) if isinstance(one, ResolveClosure)]
        queue.worker_up(0, incarnation=incarnation)
        while taken := queue.take(0):
            if taken == [2]:
                break  # closure 2 kills the worker it runs on
            assert taken == [1]
            assert done(queue, 0, 1)
            finished.append(1)
    assert ended == [ResolveClosure(2, "poisoned", (0, 0, 0))]
    assert finished == [1]
    assert queue.stopped


def test_first_error_stops_the_queue_at_once_and_cancels_what_waits() -> None:
    """13.8, CCO-22: nothing more is served; what has not started comes back cancelled."""
    queue = queue_of(2)
    for closure in range(6):
        queue.add(closure)
    assert queue.take(0) == [0, 1]
    assert queue.take(1) == [2, 3]
    assert queue.failed(0, 0) == [
        ResolveClosure(0, "failed"),
        RaiseError(0),
        ResolveClosure(4, "cancelled"),
        ResolveClosure(5, "cancelled"),
        RecallClosures(0, (1,)),
        RecallClosures(1, (2, 3)),
    ]
    assert queue.take(0) == queue.take(1) == []
    assert queue.returned(0, [1]) == [ResolveClosure(1, "cancelled")]
    assert queue.returned(1, [3]) == [ResolveClosure(3, "cancelled")]
    assert not queue.quiet, "closure 2 is running and is waited for"
    assert queue.failed(1, 2) == [ResolveClosure(2, "failed")], "only the first is raised"
    assert queue.quiet
    assert queue.stopped
    queue.resume()
    queue.add(6)
    assert queue.take(1) == [6], "after the error was raised work goes on"


def test_put_back_after_an_error_is_cancelled_instead() -> None:
    """FLT-7: a closure lost while an error waits to be raised is not run again."""
    queue = queue_of(2)
    queue.add(0)
    queue.take(0)
    queue.worker_lost(0)
    assert queue.stop() == [RaiseError(None)]
    assert queue.worker_fenced(0) == [ResolveClosure(0, "cancelled", (0,))]
    queue.resume()
    queue.add(1)
    queue.take(1)
    queue.stop()
    retried = queue.failed(1, 1, blame="server", task="ps")
    assert retried == [ResolveClosure(1, "cancelled")]


def test_the_first_failures_of_a_server_are_retried() -> None:
    """FLT-10: two reports about each server are ignored, the third is raised."""
    queue = queue_of(1)
    for task in ("ps0", "ps1"):
        for _ in range(2):
            queue.add(1)
            queue.take(0)
            again = queue.failed(0, 1, blame="server", task=task)
            assert again == [RequeueClosure(1, lost=False), SendClosures(0)]
            assert done(queue, 0, *queue.take(0))
    queue.add(2)
    queue.take(0)
    assert resolved(queue.failed(0, 2, blame="server", task="ps0")) == [
        ResolveClosure(2, "failed"),
        RaiseError(2),
    ]


@pytest.mark.parametrize(("workers", "limit", "ignored"), [(20, -1, 1), (1, -1, 0), (1, 3, 2)])
def test_missed_deadlines_are_retried(workers: int, limit: int, ignored: int) -> None:
    """FLT-11: all but the last of N are ignored, by default N is a tenth of the workers."""
    queue = queue_of(workers, deadlines=limit)
    queue.add(1)
    queue.take(0)
    for _ in range(ignored):
        assert RequeueClosure(1, lost=False) in queue.failed(0, 1, blame="deadline")
        assert queue.take(0) == [1]
    assert RaiseError(1) in queue.failed(0, 1, blame="deadline")


def test_a_lost_server_stops_everything_and_nothing_is_waited_for() -> None:
    """What runs waits for that server, or is about to."""
    queue = queue_of(2)
    for closure in range(5):
        queue.add(closure)
    queue.take(0)
    queue.take(1)
    queue.worker_lost(1)
    assert resolved(queue.server_lost()) == [
        RaiseError(None),
        ResolveClosure(4, "cancelled"),
        RecallClosures(0, (0, 1)),
        ResolveClosure(0, "given up"),
        ResolveClosure(1, "given up"),
        ResolveClosure(2, "given up"),
        ResolveClosure(3, "given up"),
    ]
    assert queue.quiet
    assert queue.worker_fenced(1) == []
    assert queue.finished(0, [0], LONG_S) == [], "a late report does not count"


def test_resources_come_first_are_not_counted_and_are_aborted_with_their_worker() -> None:
    """CCO-15, CCO-33, FLT-2."""
    queue = queue_of(2)
    queue.add(1)
    assert queue.add_resource(10, 0) == [SendClosures(0)]
    assert queue.take(0) == [10, 1]
    assert done(queue, 0, 1)
    assert queue.idle
    queue.add_resource(11, 0)
    assert queue.worker_lost(0) == [
        FenceWorker(0, 1),
        ResolveClosure(10, "aborted"),
        ResolveClosure(11, "aborted"),
    ]
    assert queue.add_resource(12, 0) == [ResolveClosure(12, "aborted")]
    queue.worker_fenced(0)
    assert queue.idle


def test_a_failed_resource_stops_nothing() -> None:
    """CCO-25: it concerns only those who use it."""
    queue = queue_of(2)
    queue.add_resource(10, 0)
    queue.take(0)
    assert queue.failed(0, 10) == [ResolveClosure(10, "failed")]
    assert not queue.stopped


def test_idle_worker_gets_what_waits_behind_a_long_closure() -> None:
    """CCO-12, any idle worker takes the next: also what another had been sent ahead."""
    queue = queue_of(2)
    for closure in range(3):
        queue.add(closure)
    assert queue.take(0) == [0, 1]
    assert queue.take(1) == [2]
    assert queue.tick() == []
    assert done(queue, 1, 2)
    assert queue.tick() == [RecallClosures(0, (0, 1))]
    assert queue.tick() == [], "asked once"
    assert queue.returned(0, [1]) == [SendClosures(1)]
    assert queue.take(1) == [1]


def test_a_worker_that_joins_is_sent_closures() -> None:
    """Membership grows: the newcomer is down until it answers, then takes what waits."""
    queue = queue_of(1)
    for closure in range(4):
        queue.add(closure)
    queue.take(0)
    queue.add_worker(7)
    assert queue.add_resource(10, 7) == [ResolveClosure(10, "aborted")]
    assert queue.take(7) == []
    assert queue.worker_up(7, incarnation=1) == [SendClosures(7)]
    assert queue.take(7) == [2, 3]
    assert queue.workers == (0, 7)


def test_a_drained_worker_finishes_what_it_runs_and_gives_back_the_rest() -> None:
    """Membership shrinks without a loss: nothing runs twice, nothing is forgotten."""
    queue = queue_of(2)
    for closure in range(4):
        queue.add(closure)
    assert queue.take(0) == [0, 1]
    queue.take(1)
    assert queue.drain_worker(0) == [RecallClosures(0, (0, 1))]
    assert queue.returned(0, [1]) == []
    assert queue.take(0) == []
    assert queue.add_resource(10, 0) == [ResolveClosure(10, "aborted")]
    assert queue.finished(0, [0], LONG_S) == [DeliverResults((0,)), ReleaseWorker(0)]
    assert queue.workers == (1,)
    assert done(queue, 1, 2, 3)
    assert queue.take(1) == [1]


def test_an_idle_or_absent_worker_leaves_at_once_and_a_lost_one_after_its_fence() -> None:
    queue = queue_of(2)
    queue.add_worker(2)
    assert queue.drain_worker(2) == [ReleaseWorker(2)]
    assert queue.drain_worker(1) == [ReleaseWorker(1)]
    queue.add(0)
    queue.take(0)
    queue.drain_worker(0)
    assert queue.worker_lost(0) == [FenceWorker(0, 1)]
    assert queue.worker_fenced(0) == [RequeueClosure(0, lost=True), ReleaseWorker(0)]
    assert queue.workers == ()
    assert not queue.idle, "the closure waits for a worker"
    queue.add_worker(3)
    queue.worker_up(3, incarnation=1)
    assert queue.take(3) == [0]


def test_late_reports_of_a_released_worker_are_ignored() -> None:
    queue = queue_of(1)
    queue.drain_worker(0)
    assert queue.take(0) == []
    for late in (
        queue.finished(0, [1], LONG_S),
        queue.failed(0, 1),
        queue.returned(0, [1]),
        queue.worker_lost(0),
        queue.worker_fenced(0),
    ):
        assert late == []


def test_misuse_is_refused() -> None:
    """The engine's own mistakes do not pass silently."""
    queue = queue_of(2)
    with pytest.raises(RuntimeError, match="worker 0 came up"):
        queue.worker_up(0, incarnation=2)
    with pytest.raises(RuntimeError, match="added twice"):
        queue.add_worker(1)
    queue.stop()
    with pytest.raises(RuntimeError, match="resume"):
        queue.add(1)


@pytest.mark.timeout(600)  # a machine with too much to do needs minutes
@orders(3000, events=60)
def test_in_any_order_no_closure_is_lost_or_completed_twice_and_none_is_stuck(
    events: Events,
) -> None:
    """CCO-12, CCO-13, FLT-1, FLT-7 in orders nobody would think of, with workers that come and go."""
    world = World()
    mood = events.of(ALL)
    while events.more:
        events.of(mood)(world, events)
        world.check()
    world.end_well()


@pytest.mark.timeout(600)
@orders(1000, events=60)
def test_the_actions_alone_get_everything_done(events: Events) -> None:
    """The engine needs no decision of its own: it sends to a worker only when the queue says so."""
    world = World()
    mood = events.of(ALL)
    while events.more:
        events.of([one for one in mood if one is not World.take])(world, events)
    world.end_by_sends_alone()


def test_a_cancelled_closure_is_resolved_when_its_worker_returns_or_is_lost() -> None:
    queue = queue_of(2)
    for closure in range(4):
        queue.add(closure)
        queue.take(closure % 2)
    queue.add(9)
    assert queue.cancel() == [
        ResolveClosure(9, "withdrawn"),
        RecallClosures(0, (0, 2)),
        RecallClosures(1, (1, 3)),
    ]
    assert queue.returned(0, (2,)) == [ResolveClosure(2, "withdrawn")]
    queue.worker_lost(1)
    assert queue.worker_fenced(1) == [
        ResolveClosure(1, "withdrawn", (1,)),
        ResolveClosure(3, "withdrawn", (1,)),
    ]
    queue.add(10)
    queue.finished(0, (0,), 0.1)
    assert queue.take(0) == [10], "later closures are not cancelled"


# ------------------------------------------------------------------ datasets that are used up


def reading_queue(workers: int) -> ClosureQueue:
    """A queue whose closures all read per-worker dataset 7, but those from 100 on."""
    queue = ClosureQueue(choice=ClosureChoice(inputs_of=lambda n: [7] if n < 100 else []))
    for worker in range(workers):
        queue.add_worker(worker)
        queue.worker_up(worker, incarnation=1)
    return queue


def end(queue: ClosureQueue, worker: int, closure: int) -> list[Action]:
    return queue.failed(worker, closure, ended=7)


def test_a_closure_without_elements_runs_on_another_worker_until_all_have_ended() -> None:
    queue = reading_queue(2)
    queue.add(0)
    assert queue.take(0) == [0]
    assert RequeueClosure(0, lost=False) in end(queue, 0, 0)
    assert queue.take(0) == [], "the worker whose data has ended got it again"
    queue.add(100)
    assert queue.take(0) == [100], "closures that read something else still run there"
    assert queue.take(1) == [0]
    actions = end(queue, 1, 0)
    assert ResolveClosure(0, "failed") in actions
    assert RaiseError(0) in actions
    assert queue.stopped


def test_new_closures_go_to_the_workers_that_have_elements() -> None:
    queue = reading_queue(3)
    queue.add(0)
    queue.take(0)
    assert SendClosures(1) in end(queue, 0, 0)
    assert queue.take(1) == [0]
    assert queue.add(1) == [SendClosures(2)]


def test_a_lost_worker_may_return_with_elements() -> None:
    """Closures wait for it, with a limit; a worker that was never there does not count."""
    queue = reading_queue(2)
    queue.add_worker(2)
    queue.worker_lost(1)
    queue.worker_fenced(1)
    queue.add(0)
    queue.take(0)
    assert not queue.waits_for_workers
    assert RequeueClosure(0, lost=False) in end(queue, 0, 0)
    assert queue.waits_for_workers
    queue.worker_up(1, incarnation=2)
    assert not queue.waits_for_workers
    assert queue.take(1) == [0]


def test_the_others_are_asked_again_when_a_worker_leaves() -> None:
    """It was the only one that had elements, so the end is found again."""
    queue = reading_queue(2)
    queue.worker_lost(1)
    queue.worker_fenced(1)
    queue.add(0)
    queue.take(0)
    end(queue, 0, 0)
    assert queue.drain_worker(1) == [ReleaseWorker(1)]
    queue.tick()
    assert queue.take(0) == [0]
    assert ResolveClosure(0, "failed") in end(queue, 0, 0)
