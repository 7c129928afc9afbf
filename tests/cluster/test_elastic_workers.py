"""Workers join and leave a running coordinator: through LocalCluster, a file, and Kubernetes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from waiting import Gate, pass_gate, wait_until

import stratagem as sg
from stratagem._cluster.coordinator.startup import membership_change
from stratagem.cluster_resolver import FileResolver, KubernetesClusterResolver
from stratagem.config import ClusterOptions
from stratagem.errors import MisuseError

QUICK = ClusterOptions(
    heartbeat_s=0.2, heartbeat_limit_s=60.0, restart_pause_s=0.05, membership_s=0.05
)


def indices(coordinator: sg.ClusterCoordinator) -> list[int]:
    return [worker.index for worker in coordinator.workers]


def connected(coordinator: sg.ClusterCoordinator) -> list[int]:
    return [worker.index for worker in coordinator.workers if worker.connected]


# ------------------------------------------------------------------ the decision


def test_the_workers_follow_the_resolver() -> None:
    assert membership_change([0, 1], {5: 0, 6: 1}, []) == ([], [])
    assert membership_change([1, 3, 2], {5: 0, 6: 1}, []) == ([2, 3], [5])


def test_a_resolver_without_workers_changes_nothing() -> None:
    """The whole cluster does not disappear between two polls; the resolver is at fault."""
    assert membership_change([], {5: 0}, []) == ([], [])


def test_a_task_that_returns_while_it_is_drained_joins_later() -> None:
    assert membership_change([0, 1], {5: 0, 6: 1}, [6]) == ([], [])
    assert membership_change([0], {5: 0, 6: 1}, [6]) == ([], [])
    assert membership_change([0, 1], {5: 0}, []) == ([1], [])


# ------------------------------------------------------------------ resolvers


def test_a_file_resolver_reads_the_file_again(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"worker": ["a:1"], "ps": ["c:1"]}))
    resolver = FileResolver(path)
    assert resolver.cluster_spec() == {"worker": ["a:1"], "ps": ["c:1"]}
    assert resolver.task_type is None
    path.write_text(
        json.dumps(
            {
                "cluster": {"worker": {"0": "a:1", "4": "b:1"}},
                "task": {"type": "worker", "index": 4},
            }
        )
    )
    assert resolver.cluster_spec().task_indices("worker") == [0, 4]
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 4, "b:1")
    path.write_text('{"worker": ["a')
    with pytest.raises(ValueError, match="not valid JSON"):
        resolver.cluster_spec()
    path.write_text("[1]")
    with pytest.raises(ValueError, match="expected an object"):
        resolver.cluster_spec()


def test_pods_of_an_elastic_cluster_keep_their_index() -> None:
    def pod(name: str, address: str, phase: str = "Running", deleted: Any = None) -> Any:
        return SimpleNamespace(
            metadata=SimpleNamespace(name=name, deletion_timestamp=deleted),
            status=SimpleNamespace(phase=phase, host_ip=address),
        )

    pods = [
        pod("w-10", "a"),
        pod("w-0", "b"),
        pod("w-1", "c", "Pending"),
        pod("w-2", "d", deleted="now"),
    ]
    client = SimpleNamespace(
        list_pod_for_all_namespaces=lambda label_selector: SimpleNamespace(items=pods)
    )
    resolver = KubernetesClusterResolver(
        {"worker": ["w"]}, tf_server_port=9, override_client=client, elastic=True
    )
    assert resolver.cluster_spec() == {"worker": {0: "b:9", 10: "a:9"}}
    pods.append(pod("x-10", "e"))
    with pytest.raises(RuntimeError, match="different numbers"):
        resolver.cluster_spec()


# ------------------------------------------------------------------ clusters


def test_threads_join_and_leave() -> None:
    """The same in one process; a drained worker finishes the closure that it runs."""
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy, sg.ClusterCoordinator(strategy, options=QUICK) as coordinator:
            assert strategy.cluster_resolver.cluster_spec().num_tasks("worker") == 1
            view = coordinator.workers
            assert (len(view), view[0].index, view[:1][0].index) == (1, 0, 0)
            assert [cluster.add_worker(), cluster.add_worker()] == [1, 2]
            wait_until(lambda: connected(coordinator) == [0, 1, 2])
            assert len(view) == 3, "a view that was kept does not show workers that joined"
            with pytest.raises(MisuseError, match="drain=True"):
                cluster.remove_worker(1, drain=False)
            assert cluster.remove_worker(1) == 1
            wait_until(lambda: indices(coordinator) == [0, 2])
            wait_until(lambda: "worker:1" not in repr(cluster))
            assert cluster.add_worker() == 1, "a free index is used again"
            wait_until(lambda: sorted(connected(coordinator)) == [0, 1, 2])
            assert cluster.remove_worker() == 2
            assert cluster.remove_worker() == 1
            with pytest.raises(ValueError, match="the last one"):
                cluster.remove_worker()
            with pytest.raises(ValueError, match=r"expected one of \[0\]"):
                cluster.remove_worker(7)
            wait_until(lambda: indices(coordinator) == [0])
            assert coordinator.schedule(lambda: 3).fetch(timeout_s=60) == 3


def test_a_worker_that_joins_has_no_part_of_a_per_worker_variable() -> None:
    """It is an error of the closure that uses the variable, with a remedy; nothing else is affected."""
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy, sg.ClusterCoordinator(strategy, options=QUICK) as coordinator:
            with strategy.scope():
                mine = sg.Variable(torch.zeros(()), per_worker_variable=True)
            assert coordinator.schedule(lambda: float(mine)).fetch(timeout_s=60) == 0.0
            cluster.add_worker()
            cluster.remove_worker(0)
            wait_until(lambda: connected(coordinator) == [1])
            assert coordinator.schedule(lambda: 1).fetch(timeout_s=60) == 1
            with pytest.raises(ValueError, match="joined after the strategy was made"):
                coordinator.schedule(lambda: float(mine)).fetch(timeout_s=60)


@pytest.mark.process
def test_processes_are_drained_and_end(tmp_path: Path) -> None:
    """A drained worker finishes its closure, its process ends, and no closure runs twice."""
    gate, began = tmp_path / "gate", tmp_path / "began"

    def slow() -> int:
        began.touch()
        wait_until(gate.exists)
        return os.getpid()

    with sg.LocalCluster(workers=1, ps=1) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy, sg.ClusterCoordinator(strategy, options=QUICK) as coordinator:
            value = coordinator.schedule(slow)
            wait_until(began.exists)
            leaving = cluster.pid("worker", 0)
            cluster.add_worker()
            cluster.remove_worker(0)
            wait_until(lambda: [w.draining for w in coordinator.workers] == [True, False])
            wait_until(lambda: connected(coordinator) == [0, 1])
            others = coordinator.fetch([coordinator.schedule(os.getpid) for _ in range(20)])
            assert set(others) == {cluster.pid("worker", 1)}, "the draining worker got a closure"
            gate.touch()
            assert value.fetch(timeout_s=60) == leaving
            wait_until(lambda: indices(coordinator) == [1])
            wait_until(lambda: "worker:0" not in repr(cluster))
            assert not Path(f"/proc/{leaving}").exists()
            assert [w.incarnation for w in coordinator.workers] == [1]


STEPS = 400


def train(
    strategy: sg.ParameterServerStrategy,
    coordinator: sg.ClusterCoordinator,
    at: dict[int, Callable[[], object]],
) -> tuple[float, float]:
    """Train a linear model; call `at[n]` before step n. Return count of steps and loss."""
    torch.manual_seed(0)
    true = torch.randn(8, 1)
    with strategy.scope():
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        count = sg.Variable(torch.zeros((), dtype=torch.float64))

    def step(n: int) -> float:
        x = torch.randn(32, 8)
        loss = ((model(x) - x @ true) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count.assign_add(torch.tensor(float(n), dtype=torch.float64))
        return float(loss)

    values = []
    for n in range(STEPS):
        if n in at:
            at[n]()
        values.append(coordinator.schedule(step, args=(n,)))
        if n >= 16:
            values[n - 16].get(timeout_s=120)  # so that the changes come while steps run
    coordinator.join(timeout_s=240)
    results = coordinator.fetch(values)
    return float(count), sum(results[-20:]) / 20


@pytest.mark.slow
def test_a_cluster_that_grows_and_shrinks_trains_to_the_same_loss(gate: Gate) -> None:
    """Issue 14, point 1: one worker, then four, one is killed, then two. No step is lost or repeated."""
    with sg.LocalCluster(workers=1, ps=2) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy, sg.ClusterCoordinator(strategy, options=QUICK) as coordinator:
            sizes: list[list[int]] = []

            def grow() -> None:
                assert [cluster.add_worker() for _ in range(3)] == [1, 2, 3]
                wait_until(lambda: len(connected(coordinator)) == 4)
                sizes.append(indices(coordinator))
                for _ in range(4):
                    coordinator.schedule(pass_gate, args=(gate.path,))
                gate.wait_for_arrival(4)  # each worker runs one
                gate.open()

            def shrink() -> None:
                assert cluster.remove_worker() == 3
                assert cluster.remove_worker(1) == 1
                wait_until(lambda: len(indices(coordinator)) == 2)
                sizes.append(indices(coordinator))

            changes = {100: grow, 200: lambda: cluster.kill_worker(2), 260: shrink}
            count, loss = train(strategy, coordinator, changes)
            assert count == STEPS * (STEPS - 1) / 2, "a step was lost or repeated"
            assert sizes == [[0, 1, 2, 3], [0, 2]]
            assert loss < 1e-3
            descriptions = strategy.cluster_resolver.cluster_spec()
            assert descriptions.task_indices("worker") == [0, 2]
        fixed = sg.ParameterServerStrategy(cluster.resolver)
        with fixed, sg.ClusterCoordinator(fixed, options=QUICK) as coordinator:
            count, same = train(fixed, coordinator, {})
            assert count == STEPS * (STEPS - 1) / 2
            assert same < 1e-3


@pytest.mark.process
def test_the_coordinator_follows_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resolver that fails or lists no worker changes nothing; workers join and leave by the file."""
    path = tmp_path / "cluster.json"

    def write(text: str) -> None:
        new = tmp_path / "new"
        new.write_text(text)
        new.replace(path)

    with sg.LocalCluster(workers=2, ps=1) as cluster:
        jobs: dict[str, Any] = cluster.cluster_spec.as_dict()
        first, second = jobs["worker"]
        servers = jobs["ps"]
        write(json.dumps({"worker": [first], "ps": servers}))
        key = cluster.resolver.cluster_key_text()
        assert key is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("STRATAGEM_CLUSTER_KEY", key)
            strategy = sg.ParameterServerStrategy(FileResolver(path))
            with strategy, sg.ClusterCoordinator(strategy, options=QUICK) as coordinator:
                assert connected(coordinator) == [0]
                with caplog.at_level(logging.WARNING, "stratagem.coordinator"):
                    write("{")
                    wait_until(lambda: "the workers stay as they are" in caplog.text)
                assert connected(coordinator) == [0]
                write(json.dumps({"worker": [first, second], "ps": servers}))
                wait_until(lambda: connected(coordinator) == [0, 1])
                write(json.dumps({"worker": {"1": second}, "ps": servers}))
                wait_until(lambda: indices(coordinator) == [1])
                assert coordinator.schedule(os.getpid).fetch(timeout_s=60) == cluster.pid(
                    "worker", 1
                )
