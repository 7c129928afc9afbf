"""A cluster on a real Ray trains, survives the loss of a node, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conserved import ConservedRun
from ray_nodes import RayNodes, ray_nodes
from waiting import Gate, pass_gate, wait_until

import stratagem as sg
from stratagem.errors import StartupError

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A head with 4 CPUs, to which this process is connected."""
    with ray_nodes() as made:
        yield made


def free_cpus() -> float:
    import ray

    return float(ray.available_resources().get("CPU", 0.0))


def test_missing_resources_are_named(nodes: RayNodes) -> None:
    """The error says what was asked and what there is; nothing stays reserved."""
    import ray

    with pytest.raises(StartupError) as caught:
        sg.RayCluster(workers=3, ps=1, resources_per_worker={"CPU": 2}, start_timeout_s=1.0)
    text = str(caught.value)
    assert "within 1 s" in text
    assert "1 × ps {'CPU': 1.0}, 3 × worker {'CPU': 2}" in text
    assert "available {'CPU': 4.0" in text
    with pytest.raises(StartupError, match=r"each on a node of its own \(STRICT_SPREAD\)"):
        sg.RayCluster(workers=1, ps=1, placement_strategy="STRICT_SPREAD", start_timeout_s=1.0)
    states = {one["state"] for one in ray.util.placement_group_table().values()}
    assert states == {"REMOVED"}
    assert free_cpus() == 4.0


def test_tasks_of_a_lost_node_return_on_another_node(nodes: RayNodes, gate: Gate) -> None:
    """FLT-1: every step counts once, although a node is killed while its workers run closures.

    The workers return on another node, at other addresses.
    """
    node = nodes.add()
    with sg.RayCluster(
        workers=2,
        ps=1,
        resources_per_worker={"CPU": 1, "late": 1},
        resources_per_ps={"CPU": 1, "head": 1},
    ) as cluster:
        assert set(cluster.nodes()) == {"worker:0", "worker:1", "ps:0"}
        assert cluster.nodes()["worker:0"] == cluster.nodes()["worker:1"] == node.node_id
        old = cluster.cluster_spec.as_dict()
        pids = [cluster.pid("worker", 0), cluster.pid("worker", 1), cluster.pid("ps", 0)]
        with (
            sg.ParameterServerStrategy(cluster.resolver) as strategy,
            sg.ClusterCoordinator(strategy) as coordinator,
        ):
            run = ConservedRun(strategy, "Adam")
            for _ in range(20):
                run.schedule(coordinator)
            coordinator.join(timeout_s=120)
            for _ in range(2):  # keeps both workers busy until the node is gone
                coordinator.schedule(pass_gate, args=(gate.path,))
            for _ in range(30):
                run.schedule(coordinator)
            nodes.remove(node)
            wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids[:2]))
            replacement = nodes.add()
            gate.open()
            coordinator.join(timeout_s=200)
            run.check(50)
            assert cluster.nodes()["worker:0"] == replacement.node_id
            new = cluster.cluster_spec.as_dict()
            assert new["ps"] == old["ps"]
            assert not set(new["worker"]) & set(old["worker"])
        pids = [cluster.pid("worker", 0), cluster.pid("worker", 1), cluster.pid("ps", 0)]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    wait_until(lambda: free_cpus() == 8.0)
    nodes.remove(replacement)
