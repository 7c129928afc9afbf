"""Clusters with gaps in their numbering: tasks keep the numbers they were given (CLS-1, CLS-2)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

import stratagem as sg
from stratagem._strategies.parameter_server_arguments import check_cluster
from stratagem.cluster_resolver import SimpleClusterResolver

WORKERS = (1, 4)
SERVERS = (0, 3)
PS = "/job:ps/replica:0/task:{}/device:CPU:0"


class Tasks:
    """Tasks started by hand, with gaps between their numbers."""

    def __init__(self, stack: ExitStack) -> None:
        self.workers = {
            index: stack.enter_context(sg.Server({"worker": {index: "127.0.0.1:0"}}))
            for index in WORKERS
        }
        self.servers = {
            index: stack.enter_context(sg.Server({"ps": {index: "127.0.0.1:0"}}))
            for index in SERVERS
        }
        spec = {
            "worker": {index: server.address for index, server in self.workers.items()},
            "ps": {index: server.address for index, server in self.servers.items()},
        }
        self.resolver = SimpleClusterResolver(sg.ClusterSpec(spec))


@pytest.fixture
def tasks() -> Iterator[Tasks]:
    with ExitStack() as stack:
        yield Tasks(stack)


@pytest.fixture
def strategy(tasks: Tasks) -> Iterator[sg.ParameterServerStrategy]:
    with sg.ParameterServerStrategy(tasks.resolver) as made:
        yield made


def on_both(coordinator: sg.ClusterCoordinator) -> set[int]:
    """Runs until both workers have answered; the numbers they have."""
    seen: set[int] = set()
    deadline = time.monotonic() + 120.0
    while len(seen) < len(WORKERS):
        assert time.monotonic() < deadline, seen
        values = [coordinator.schedule(sg.get_current_worker_index) for _ in range(8)]
        seen.update(coordinator.fetch(values))
    return seen


def test_workers_keep_their_numbers(strategy: sg.ParameterServerStrategy) -> None:
    """CCO-40 with gaps: functions, per-worker values and datasets go by the numbers given."""
    with strategy.scope():
        mine = sg.Variable(0, per_worker_variable=True)
        total = sg.Variable(0.0)
    with sg.ClusterCoordinator(strategy) as coordinator:
        assert [status.index for status in coordinator.workers] == list(WORKERS)
        assert [status.task for status in coordinator.workers] == [
            f"/job:worker/task:{index}" for index in WORKERS
        ]
        assert on_both(coordinator) == set(WORKERS)

        def note() -> None:
            mine.assign(sg.get_current_worker_index())
            total.assign_add(1.0)

        deadline = time.monotonic() + 120.0
        while {int(value) for value in mine.read_all()} != set(WORKERS):
            assert time.monotonic() < deadline, mine.read_all()
            for _ in range(8):
                coordinator.schedule(note)
            coordinator.join(timeout_s=120)
        assert [int(value) for value in mine.read_all()] == list(WORKERS)  # in worker order

        def dataset(worker: sg.InputContext) -> list[tuple[int, int, int]]:
            place = (worker.input_pipeline_id, worker.num_input_pipelines)
            return [(sg.get_current_worker_index(), *place)] * 10_000

        iterators = iter(coordinator.create_per_worker_dataset(dataset))
        found: set[tuple[int, int, int]] = set()
        while len(found) < len(WORKERS):
            assert time.monotonic() < deadline, found
            values = [coordinator.schedule(next, args=(iterators,)) for _ in range(8)]
            found.update(coordinator.fetch(values))
        assert found == {(1, 0, 2), (4, 1, 2)}  # shares are counted without gaps


def test_variables_name_the_servers_that_are_there(strategy: sg.ParameterServerStrategy) -> None:
    """PSS-10 with gaps, on the coordinator and on a worker."""
    with strategy.scope():
        made = [sg.Variable(float(n)) for n in range(3)]
    assert [v.device for v in made] == [PS.format(n) for n in (0, 3, 0)]
    assert strategy.extended.parameter_devices == tuple(PS.format(n) for n in SERVERS)
    with sg.ClusterCoordinator(strategy) as coordinator:
        devices = coordinator.schedule(lambda: [v.device for v in made]).fetch(timeout_s=120)
        assert devices == [v.device for v in made]


def test_a_lost_worker_is_fenced_and_returns_by_its_number(
    tasks: Tasks, strategy: sg.ParameterServerStrategy
) -> None:
    """FLT-1 with gaps: the right life is refused at the servers, the right worker comes back."""
    with strategy.scope():
        total = sg.Variable(torch.zeros(()))
    with sg.ClusterCoordinator(strategy) as coordinator:
        on_both(coordinator)
        gone = tasks.workers[4]
        gone.close()
        for _ in range(20):
            coordinator.schedule(lambda: total.assign_add(1.0))
        coordinator.join(timeout_s=120)
        assert float(total) == 20.0
        with sg.Server({"worker": {4: gone.address}}):
            deadline = time.monotonic() + 120.0
            while [status.incarnation for status in coordinator.workers][1] < 2 or not all(
                status.connected for status in coordinator.workers
            ):
                assert time.monotonic() < deadline, coordinator.workers
                coordinator.schedule(lambda: None).get(timeout_s=120)
            assert on_both(coordinator) == set(WORKERS)


def test_own_number_beyond_the_count_is_fine() -> None:
    """PSS-1: a task's number need not be below the count of tasks."""
    spec = sg.ClusterSpec({"worker": {1: "w:1", 4: "w:2"}, "ps": ["p:1"]})
    with pytest.raises(ValueError, match=r"task_id=2 .* has the tasks 1, 4 of it"):
        sg.ParameterServerStrategy(SimpleClusterResolver(spec, task_type="worker", task_id=2))
    resolver = SimpleClusterResolver(spec, task_type="worker", task_id=4)
    assert check_cluster(resolver) == spec
