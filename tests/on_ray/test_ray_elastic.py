"""Clusters on a real Ray that grow and shrink, and lose nodes with parameter servers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conserved import ConservedRun
from ray_nodes import RayNodes, ray_nodes
from waiting import wait_until

import stratagem as sg
from stratagem.errors import StartupError

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A head with 3 CPUs."""
    with ray_nodes(cpus=3) as made:
        yield made


def free_cpus() -> float:
    import ray

    return float(ray.available_resources().get("CPU", 0.0))


def connected(coordinator: sg.ClusterCoordinator) -> list[int]:
    return [worker.index for worker in coordinator.workers if worker.connected]


def test_a_cluster_grows_when_nodes_come_and_shrinks_by_hand(nodes: RayNodes) -> None:
    """It starts with the smallest number, takes the room there is, and gives back what is removed."""
    with (
        sg.RayCluster(workers=(1, 4), ps=1) as cluster,
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
        sg.ClusterCoordinator(strategy) as coordinator,
    ):
        run = ConservedRun(strategy, "Adam")
        wait_until(lambda: connected(coordinator) == [0, 1])  # 3 CPUs
        for _ in range(20):
            run.schedule(coordinator)
        node = nodes.add(cpus=3)
        wait_until(lambda: connected(coordinator) == [0, 1, 2, 3])
        assert set(cluster.nodes().values()) >= {node.node_id}
        for _ in range(40):
            run.schedule(coordinator)
        assert cluster.remove_worker(2) == 2
        assert cluster.remove_worker(drain=False) == 3
        wait_until(lambda: free_cpus() == 3.0)  # it does not grow again
        assert [worker.index for worker in coordinator.workers] == [0, 1]
        assert cluster.add_worker() == 4
        wait_until(lambda: connected(coordinator) == [0, 1, 4])
        for _ in range(20):
            run.schedule(coordinator)
        coordinator.join(timeout_s=120)
        run.check(80)
        assert cluster.remove_worker(0) == 0  # of the first placement group: its bundle is kept
        wait_until(lambda: "worker:0" not in cluster.nodes())
        assert cluster.add_worker() == 5
        assert free_cpus() == 2.0
    wait_until(lambda: free_cpus() == 6.0)
    nodes.remove(node)
    wait_until(lambda: free_cpus() == 3.0)


def test_a_worker_without_resources_raises(nodes: RayNodes) -> None:
    with sg.RayCluster(workers=2, ps=1, start_timeout_s=60.0) as cluster:
        cluster._start_timeout_s = 1.0
        with pytest.raises(StartupError, match=r"asked for 1 × worker .*; available"):
            cluster.add_worker()
        assert cluster.cluster_spec.task_indices("worker") == [0, 1]
    wait_until(lambda: free_cpus() == 3.0)


def test_a_killed_agent_is_replaced_with_its_tasks(nodes: RayNodes) -> None:
    """The node stays; the agent's process is killed, and its tasks end with it."""
    with sg.RayCluster(workers=1, ps=1) as cluster:
        old = cluster.pid("worker", 0)
        server = Path(f"/proc/{old}/stat").read_text().rpartition(")")[2].split()[1]
        agent = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1]
        assert Path(f"/proc/{agent}/comm").read_text().startswith("ray::NodeAgent")

        os.kill(int(agent), signal.SIGKILL)
        assert cluster.wait_restarted(0, old, timeout_s=120) != old
        wait_until(lambda: not Path(f"/proc/{old}").exists())
    wait_until(lambda: free_cpus() == 3.0)


def test_a_server_that_is_lost_with_its_node_is_restored(nodes: RayNodes, tmp_path: Path) -> None:
    """From the newest checkpoint, on another node; the script goes on."""
    node = nodes.add(cpus=1)
    with (
        sg.RayCluster(
            workers=1,
            ps=1,
            resources_per_worker={"CPU": 1, "head": 1},
            resources_per_ps={"CPU": 1, "late": 1},
            checkpoint_directories=[str(tmp_path)],
        ) as cluster,
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
        sg.ClusterCoordinator(strategy) as coordinator,
    ):
        old = cluster.cluster_spec.task_address("ps", 0)
        with strategy.scope():
            total = sg.Variable(torch.zeros((), dtype=torch.float64))

        def step() -> None:
            total.assign_add(torch.ones((), dtype=torch.float64))

        with sg.CheckpointManager(sg.Checkpoint(total=total), tmp_path / "run") as manager:
            for _ in range(10):
                coordinator.schedule(step)
            manager.save(10, quiet=True).wait(timeout_s=60)
            nodes.remove(node)
            replacement = nodes.add(cpus=1)
            for _ in range(10):
                coordinator.schedule(step)
            coordinator.join(timeout_s=200)
            assert float(total.read_value()) == 20.0
        assert len(coordinator.recoveries) == 1
        assert cluster.cluster_spec.task_address("ps", 0) != old
        assert cluster.nodes()["ps:0"] == replacement.node_id
    nodes.remove(replacement)
