"""The engine executes what the queue decides: real queue and sender, fake links, no threads."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from fake_links import FakeCluster, FakeLink, failed, finished
from plain_strategy import PlainOnCoordinator

import stratagem as sg
from stratagem._cluster.coordinator.remote_values import RemoteValueStatus
from stratagem._wire import messages
from stratagem.errors import (
    ClosureAborted,
    ClosureCancelled,
    ClosureLostTooOften,
    ParameterServerLost,
    UnavailableError,
    WorkerLost,
)


def step(number: int = 0) -> int:
    return number


def test_results_reach_their_values_and_the_next_closures_are_sent() -> None:
    cluster = FakeCluster(1).come_up()
    (link,) = cluster.links
    values = [cluster.schedule(step, number) for number in range(4)]
    first, second = link.running()
    assert len(link.take(messages.Define)) == 1, "a function is sent once"
    link.report(finished(second, 20), finished(first, {"x": torch.arange(600)}))
    assert values[1].get(timeout_s=0) == 20
    assert torch.equal(values[0].get(timeout_s=0)["x"], torch.arange(600))
    assert len(link.running()) == 4
    assert values[3].status is RemoteValueStatus.NOT_READY
    assert cluster.engine.closures.finished == 2


def test_closures_wait_for_a_worker() -> None:
    cluster = FakeCluster(2)
    value = cluster.schedule(step)
    assert cluster.links[1].messages == []
    cluster.links[1].come_up()
    (closure,) = cluster.links[1].running()
    cluster.links[1].report(finished(closure, 7))
    assert value.get(timeout_s=0) == 7


def test_an_error_is_kept_for_the_next_call_and_the_rest_is_cancelled() -> None:
    """CCO-20, CCO-22."""
    cluster = FakeCluster(1).come_up()
    (link,) = cluster.links
    values = [cluster.schedule(step) for _ in range(4)]
    first, second = link.running()
    link.report(failed(first, ValueError("mine")))
    with pytest.raises(ClosureCancelled):
        values[3].get(timeout_s=0)
    assert cluster.engine.queue.stopped
    assert not cluster.engine.queue.quiet, "the second may be running"
    link.report(messages.Returned(closures=(second,)))
    with pytest.raises(ClosureCancelled):
        values[1].get(timeout_s=0)
    error = cluster.take_error()
    assert isinstance(error, ValueError)
    assert cluster.take_error() is None
    with pytest.raises(ValueError, match="mine"):
        values[0].get(timeout_s=0)
    (record,) = cluster.engine.closures.errors
    assert (record.closure, record.worker, record.error) == (first, link.task, error)
    value = cluster.schedule(step)
    link.report(finished(link.running()[-1], 1))
    assert value.get(timeout_s=0) == 1


def test_closures_that_have_not_started_are_recalled() -> None:
    """After an error, and when another worker has nothing to do."""
    cluster = FakeCluster(1).come_up()
    (link,) = cluster.links
    for _ in range(3):
        cluster.schedule(step)
    first, second = link.running()
    link.report(failed(first, ValueError()))
    assert link.take(messages.Recall) == [messages.Recall(closures=(second,))]
    link.report(messages.Returned(closures=(second,)))
    cluster.take_error()
    for _ in range(2):
        cluster.schedule(step)
    cluster.engine.tick()
    assert link.take(messages.Recall) == []
    cluster.engine.add_worker(1)
    cluster.links[1].come_up()
    cluster.engine.tick()
    (recall,) = link.take(messages.Recall)
    link.report(messages.Returned(closures=recall.closures[1:]))
    assert cluster.links[1].running() == list(recall.closures[1:])


def test_a_lost_worker_is_fenced_once_and_its_closures_run_elsewhere() -> None:
    """FLT-1: the fence stands before the closure is sent to another worker."""
    sent_before_fence: list[Any] = []

    class Fencing(PlainOnCoordinator):
        def fence(self, worker_index: int, incarnation: int) -> None:
            super().fence(worker_index, incarnation)
            sent_before_fence.extend(cluster.links[1].running())

    cluster = FakeCluster(2, Fencing()).come_up()
    value = cluster.schedule(step)
    lost, other = cluster.links
    (closure,) = lost.running()
    lost.get_lost()
    assert cluster.views.fences == [(0, 1)]
    assert sent_before_fence == []
    assert other.running() == [closure]
    other.report(finished(closure, 3))
    lost.report(finished(closure, 4))
    assert value.get(timeout_s=0) == 3, "a late report does not count"
    lost.come_up()
    assert lost.incarnation == 2


def test_a_fence_that_fails_is_raised_and_nothing_is_repeated() -> None:
    class Broken(PlainOnCoordinator):
        def fence(self, worker_index: int, incarnation: int) -> None:
            raise KeyError("surprise")

    cluster = FakeCluster(2, Broken()).come_up()
    value = cluster.schedule(step)
    cluster.links[0].get_lost()
    assert cluster.links[1].running() == []
    with pytest.raises(ClosureCancelled):
        value.get(timeout_s=0)
    assert isinstance(cluster.take_error(), KeyError)
    assert cluster.engine.queue.idle


def test_a_server_lost_while_fencing_stops_all_closures() -> None:
    lost = ParameterServerLost("it is gone", task="/job:ps/task:0")

    class Broken(PlainOnCoordinator):
        def fence(self, worker_index: int, incarnation: int) -> None:
            raise lost

    cluster = FakeCluster(2, Broken()).come_up()
    values = [cluster.schedule(step) for _ in range(6)]
    cluster.links[0].get_lost()
    for value, error in zip(
        values, [ParameterServerLost] * 4 + [ClosureCancelled] * 2, strict=True
    ):
        with pytest.raises(error):
            value.get(timeout_s=0)
    assert cluster.take_error() is lost
    (record,) = cluster.engine.closures.errors
    assert record.worker == "/job:ps/task:0"
    assert cluster.engine.queue.idle


def test_a_poisonous_closure_is_named_with_its_workers() -> None:
    cluster = FakeCluster(2, poison_limit=2).come_up()
    value = cluster.schedule(step)
    for link in cluster.links:
        link.get_lost()
    with pytest.raises(ClosureLostTooOften, match=r"step .* was lost with 2 workers") as caught:
        value.get(timeout_s=0)
    assert caught.value.workers == ("/job:worker/task:0", "/job:worker/task:1")
    assert cluster.take_error() is None, "get() has raised it"
    (record,) = cluster.engine.closures.errors
    assert record.worker == "/job:worker/task:1"


def test_the_first_reports_about_a_server_are_retried_and_counted() -> None:
    """FLT-10."""
    cluster = FakeCluster(1, transient_ps_failures=2).come_up()
    (link,) = cluster.links
    before = sg.metrics.snapshot().counters["coordinator.retried"]
    value = cluster.schedule(step)
    (closure,) = link.running()
    lost = ParameterServerLost("slow", task="/job:ps/task:1")
    link.report(failed(closure, lost, blame="server"))
    assert link.running() == [closure, closure]
    assert sg.metrics.snapshot().counters["coordinator.retried"] == before + 1
    link.report(failed(closure, lost, blame="server"))
    assert isinstance(cluster.take_error(), ParameterServerLost)
    with pytest.raises(ParameterServerLost):
        value.get(timeout_s=0)


def test_no_worker_for_too_long_is_an_error_that_names_them() -> None:
    cluster = FakeCluster(1)
    value = cluster.schedule(step)
    cluster.links[0].last_error = ConnectionError("refused")
    cluster.engine.no_workers(5.0)
    with pytest.raises(ClosureCancelled):
        value.get(timeout_s=0)
    error = cluster.take_error()
    assert isinstance(error, UnavailableError)
    assert "/job:worker/task:0 at 'fake:0': refused" in str(error)


def test_per_worker_values_are_built_aborted_and_built_again() -> None:
    """CCO-33, FLT-2, FLT-3."""
    cluster = FakeCluster(2)
    first, second = cluster.links
    first.come_up()
    values = cluster.engine.add_resource(cluster.engine.sender.pack(step, (), None))
    (build,) = first.take(messages.Run)
    assert build.resource == values._resource
    first.report(finished(build.closure))
    states = [value.status for value in values.values]
    assert states == [RemoteValueStatus.READY, RemoteValueStatus.ABORTED]
    with pytest.raises(ClosureAborted) as caught:
        values.values[1].get()
    assert isinstance(caught.value.original_exception, WorkerLost)
    second.come_up()
    (build,) = second.take(messages.Run)
    second.report(finished(build.closure))
    assert values.values[1].status is RemoteValueStatus.READY
    second.get_lost()
    assert values.values[1].status is RemoteValueStatus.ABORTED
    number = values._resource
    del values
    gc.collect()
    cluster.engine.tick()
    assert first.take(messages.Forget) == [messages.Forget(resources=(number,))]
    second.come_up()
    assert second.take(messages.Run) == [], "what was released is not built again"


def test_servers_learn_which_closures_have_ended() -> None:
    """However they ended: late writes of any of them are refused."""
    cluster = FakeCluster(1, poison_limit=1).come_up()
    (link,) = cluster.links
    for _ in range(4):
        cluster.schedule(step)
    first, second = link.running()
    link.report(finished(first))
    cluster.engine.tick()
    assert cluster.views.finished == [first]
    link.report(failed(second, ValueError()))
    link.get_lost()
    cluster.engine.tick()
    assert sorted(cluster.views.finished) == [first, second, second + 1, second + 2]


def test_closing_cancels_everything_and_releases_the_workers() -> None:
    cluster = FakeCluster(2).come_up()
    values = [cluster.schedule(step) for _ in range(6)]
    closure = cluster.links[0].running()[0]
    cluster.engine.close()
    for value in values:
        with pytest.raises(ClosureCancelled, match="closed"):
            value.get(timeout_s=0)
    assert all(link.left for link in cluster.links)
    cluster.links[0].report(finished(closure, 1))
    cluster.links[0].get_lost()
    assert cluster.views.fences == []
    cluster.engine.close()


# Membership.


def test_a_worker_that_joins_gets_values_and_closures() -> None:
    cluster = FakeCluster(1).come_up()
    cluster.engine._started = True
    values = cluster.engine.add_resource(cluster.engine.sender.pack(step, (), None))
    for _ in range(4):
        cluster.schedule(step)
    assert len(cluster.links[0].running()) == 3
    cluster.engine.add_worker(5)
    joined = cluster.links[1]
    assert joined.started
    assert joined.task == "/job:worker/task:5"
    assert values.values[1].status is RemoteValueStatus.ABORTED
    joined.come_up()
    build, *closures = joined.take(messages.Run)
    assert build.resource == values._resource
    assert len(closures) == 2
    joined.report(finished(build.closure))
    assert values.values[1].status is RemoteValueStatus.READY


def test_a_drained_worker_finishes_what_it_runs_and_is_released() -> None:
    cluster = FakeCluster(2).come_up()
    leaving, staying = cluster.links
    resource = cluster.engine.add_resource(cluster.engine.sender.pack(step, (), None))
    for link in cluster.links:
        link.report(finished(link.take(messages.Run)[0].closure))
    values = [cluster.schedule(step, number) for number in range(4)]
    runs, waits = leaving.running()
    cluster.engine.drain_worker(leaving.number)
    assert not leaving.left
    leaving.report(messages.Returned(closures=(waits,)))
    later = cluster.schedule(step)
    assert leaving.running() == [runs, waits], "it got something new"
    leaving.report(finished(runs, 0))
    assert leaving.left
    assert [link.task_index for link in cluster.engine.links.values()] == [1]
    assert len(resource.values) == 1
    for _ in range(5):
        for closure in staying.running():
            staying.report(finished(closure, closure))
    assert all(value.status is RemoteValueStatus.READY for value in [*values, later])
    assert cluster.views.fences == [], "nothing was lost"


def test_a_draining_worker_that_dies_is_fenced_and_its_closures_run_elsewhere() -> None:
    cluster = FakeCluster(2).come_up()
    leaving, staying = cluster.links
    value = cluster.schedule(step)
    (closure,) = leaving.running()
    cluster.engine.drain_worker(leaving.number)
    leaving.get_lost()
    assert cluster.views.fences == [(0, 1)]
    assert leaving.left
    staying.report(finished(closure, 9))
    assert value.get(timeout_s=0) == 9


def test_a_task_that_left_and_joins_again_has_a_new_incarnation() -> None:
    """Fences are by task and incarnation: the number must not start again."""
    cluster = FakeCluster(2).come_up()
    cluster.engine.drain_worker(cluster.links[0].number)
    assert cluster.links[0].left
    cluster.engine.add_worker(0)
    again: FakeLink = cluster.links[2]
    again.come_up()
    assert again.incarnation == 2
    assert again.number == 2
    cluster.links[0].come_up()  # the old link was about to report: nothing happens
    assert cluster.links[0].take(messages.Run) == []
