"""Cluster specifications and resolvers (CLS-1, CLS-2, CDF-1, RES-1 … RES-6)."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

import stratagem as sg
from stratagem._cluster.discovery.platform_resolvers import expand_hostlist, expand_tasks_per_node
from stratagem.cluster_resolver import (
    ExecutableLocation,
    GCEClusterResolver,
    KubernetesClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)

SPEC = {"worker": ["w0:1", "w1:1"], "ps": ["p0:1"]}


def test_spec_takes_lists_dictionaries_and_specs() -> None:
    """CLS-1, CLS-2."""
    spec = sg.ClusterSpec({"worker": ["a", "b"], "ps": {"3": "c"}, "none": {}})
    assert spec.as_dict() == {"worker": ["a", "b"], "ps": {3: "c"}, "none": {}}
    assert spec.jobs == ["worker", "ps", "none"]
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("ps") == [3]
    assert spec.task_address("ps", 3) == "c"
    assert spec.job_tasks("ps") == [None, None, None, "c"]
    assert sg.ClusterSpec(spec) == spec == {"worker": {0: "a", 1: "b"}, "ps": {3: "c"}, "none": {}}
    assert spec != {"worker": ["a"]}
    assert not sg.ClusterSpec({})
    assert repr(spec).index("'none'") < repr(spec).index("'ps'") < repr(spec).index("'worker'")


@pytest.mark.parametrize(
    "bad", [3, ["a"], {"worker": 3}, {"worker": [3]}, {3: ["a"]}, {"worker": {"x": "a"}}]
)
def test_an_invalid_cluster_spec_raises(bad: Any) -> None:
    """CLS-1."""
    with pytest.raises(TypeError):
        sg.ClusterSpec(bad)


def test_unknown_jobs_and_tasks_are_refused() -> None:
    """CLS-2."""
    spec = sg.ClusterSpec({"worker": ["a"], "none": []})
    for call in (spec.num_tasks, spec.task_indices, spec.job_tasks):
        with pytest.raises(ValueError, match="no job 'chief'"):
            call("chief")
    with pytest.raises(ValueError, match="has no task 5"):
        spec.task_address("worker", 5)
    with pytest.raises(ValueError, match="has no tasks"):
        spec.job_tasks("none")


def test_device_filters_are_kept() -> None:
    """CDF-1."""
    filters = sg.compat.ClusterDeviceFilters()
    filters.set_device_filters("worker", 0, ["/job:ps"])
    filters.set_device_filters("worker", 0, ["/job:chief"])
    assert filters.device_filters("worker", 0) == ("/job:chief",)
    with pytest.raises(AssertionError):
        filters.set_device_filters("worker", 0, [3])  # type: ignore[list-item]


def test_simple_resolver() -> None:
    """RES-1."""
    spec = sg.ClusterSpec(SPEC)
    resolver = SimpleClusterResolver(spec, task_type="ps", task_id=0, rpc_layer="grpc")
    assert resolver.cluster_spec() == spec
    assert resolver.master() == ""
    assert resolver.master("worker", 1) == "grpc://w1:1"
    assert SimpleClusterResolver(spec, master="m:1").master() == "m:1"
    assert resolver.num_accelerators() == {}
    assert resolver.environment == ""
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 1, "other"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "other")
    with pytest.raises(TypeError):
        SimpleClusterResolver(SPEC)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        SimpleClusterResolver(spec, master=3)  # type: ignore[arg-type]


def test_tf_config_is_read_at_every_access(monkeypatch: pytest.MonkeyPatch) -> None:
    """RES-2."""
    resolver = TFConfigClusterResolver()
    assert not resolver.cluster_spec()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert resolver.master() == ""
    setting = {"cluster": SPEC, "task": {"type": "worker", "index": "1"}, "rpc_layer": "grpc"}
    monkeypatch.setenv("TF_CONFIG", json.dumps(setting))
    assert resolver.cluster_spec() == SPEC
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master() == "grpc://w1:1"
    assert resolver.master("ps", 0) == "grpc://p0:1"
    with pytest.raises(ValueError, match="has no task"):
        resolver.master("worker", 7)
    over = TFConfigClusterResolver(task_type="ps", task_id="0", rpc_layer="x")
    assert (over.task_type, over.task_id, over.master()) == ("ps", 0, "x://p0:1")
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": SPEC, "session_master": "s:1"}))
    assert resolver.master() == "s:1"
    assert resolver.task_type is None
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["one:1"]}}))
    assert resolver.master() == ""
    for bad in ("", "{", '{"task": {"index": "x"}}'):
        monkeypatch.setenv("TF_CONFIG", bad)
        with pytest.raises(ValueError):
            _ = resolver.task_id
    for bad in ("{", "[1]"):
        monkeypatch.setenv("TF_CONFIG", bad)
        with pytest.raises(ValueError, match=r"TF_CONFIG=.* expected a JSON object"):
            resolver.cluster_spec()


def test_union_of_resolvers() -> None:
    """RES-3."""
    first = SimpleClusterResolver(sg.ClusterSpec({"worker": ["a"]}), task_type="worker", task_id=0)
    second = SimpleClusterResolver(sg.ClusterSpec({"worker": ["b"], "ps": ["c"]}), rpc_layer="r")
    sparse = SimpleClusterResolver(sg.ClusterSpec({"worker": {5: "d"}}))
    assert UnionResolver(first, second).cluster_spec() == {"worker": ["a", "b"], "ps": ["c"]}
    assert UnionResolver(first, sparse).cluster_spec() == {"worker": {0: "a", 5: "d"}}
    with pytest.raises(KeyError):
        UnionResolver(sparse, sparse).cluster_spec()
    union = UnionResolver(first, second, rpc_layer="own", task_id=0)
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 0, "own")
    assert union.master("ps", 0) == "own://c"
    assert UnionResolver(second, task_id=0).task_id == 0, "0 is a task, not nothing"
    for args, options, kind in (
        ((), {}, ValueError),
        ((first,), {"colour": 1}, ValueError),
        ((3,), {}, TypeError),
    ):
        with pytest.raises(kind):
            UnionResolver(*args, **options)  # type: ignore[arg-type]


def slurm(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name in ("PROCID", "STEP_NUM_TASKS", "STEP_NODELIST", "STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_slurm_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """RES-4, issue 4: usable on machines without GPUs."""
    slurm(
        monkeypatch,
        PROCID="3",
        STEP_NUM_TASKS="5",
        STEP_NODELIST="n[1-2]",
        STEP_TASKS_PER_NODE="3,2",
    )
    resolver = SlurmClusterResolver({"worker": 4, "ps": 1}, port_base=100)
    assert resolver.cluster_spec() == {
        "ps": ["n1:100"],
        "worker": ["n1:101", "n1:102", "n2:100", "n2:101"],
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.master() == "grpc://n2:100"
    assert resolver.num_accelerators() == {}
    default = SlurmClusterResolver()
    assert default.cluster_spec().num_tasks("worker") == 5
    with pytest.raises(RuntimeError, match="need 2 tasks, Slurm started 5"):
        SlurmClusterResolver({"worker": 2})


def test_slurm_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """RES-4: each task its share; too many → RuntimeError."""
    slurm(monkeypatch, PROCID="1", STEP_NODELIST="h[9,10]", STEP_TASKS_PER_NODE="2(x2)")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    resolver = SlurmClusterResolver({"worker": 4}, gpus_per_node=4)
    import os

    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert resolver.num_accelerators() == {"GPU": 2}
    # Slurm counts ranks along h9, h10; addresses are dealt out sorted: h10 before h9.
    assert resolver.cluster_spec().task_address("worker", resolver.task_id or 0) == "h9:8889"
    with pytest.raises(RuntimeError, match="need 6 GPUs, a node has 4"):
        SlurmClusterResolver({"worker": 4}, gpus_per_node=4, gpus_per_task=3)


def test_slurm_outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """RES-4."""
    slurm(monkeypatch)
    with pytest.raises(RuntimeError, match="SLURM_PROCID is not set"):
        SlurmClusterResolver()


def test_slurm_grammars() -> None:
    """RES-4: host lists and tasks per node."""
    assert expand_hostlist("n[01-03],m5") == ["n01", "n02", "n03", "m5"]
    assert expand_hostlist("a[1,3-4]b") == ["a1b", "a3b", "a4b"]
    assert expand_tasks_per_node("3(x2),2,1") == [3, 3, 2, 1]
    for bad in ("n[1-", "n[a-b]", "n[3-1]"):
        with pytest.raises(ValueError):
            expand_hostlist(bad)
    for bad in ("x", "3(x", "3(2)"):
        with pytest.raises(ValueError):
            expand_tasks_per_node(bad)


def pod(name: str, ip: str, phase: str = "Running") -> SimpleNamespace:
    return SimpleNamespace(
        metadata=SimpleNamespace(name=name), status=SimpleNamespace(phase=phase, host_ip=ip)
    )


class Pods:
    """A client that knows some pods by their label."""

    def __init__(self, **by_label: list[SimpleNamespace]) -> None:
        self.by_label = by_label

    def list_pod_for_all_namespaces(self, label_selector: str) -> SimpleNamespace:
        return SimpleNamespace(items=self.by_label[label_selector.partition("=")[2]])


def test_kubernetes_pods_in_order_of_their_names() -> None:
    """RES-5."""
    client = Pods(w=[pod("b", "2"), pod("a", "1")], p=[pod("c", "fd00::3")])
    resolver = KubernetesClusterResolver(
        {"worker": ["job=w"], "ps": ["job=p"]}, tf_server_port=9, override_client=client
    )
    assert resolver.cluster_spec() == {"worker": ["1:9", "2:9"], "ps": ["[fd00::3]:9"]}
    assert resolver.master() == ""
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "grpc://2:9"
    waiting = KubernetesClusterResolver(
        {"worker": ["job=w"]}, override_client=Pods(w=[pod("a", "1", "Pending")])
    )
    with pytest.raises(RuntimeError, match="'Pending', not 'Running'"):
        waiting.cluster_spec()
    with pytest.raises(ValueError, match="expected one of"):
        KubernetesClusterResolver(override_client=client, executable_location=1)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match="override_client"):
        KubernetesClusterResolver(executable_location=ExecutableLocation.OFF_CLUSTER)


class Compute:
    """As much of the Compute Engine client as the resolver uses, with two pages of machines."""

    pages = ({"items": [{"instance": "url/m2"}]}, {"items": [{"instance": "url/m1"}]})

    def instanceGroups(self) -> Compute:
        return self

    def instances(self) -> Compute:
        return self

    def listInstances(self, **_: Any) -> Any:
        return SimpleNamespace(page=0, execute=lambda: self.pages[0])

    def listInstances_next(self, request: Any, _: Any) -> Any:
        return SimpleNamespace(page=1, execute=lambda: self.pages[1]) if request.page == 0 else None

    def get(self, *, instance: str, **_: Any) -> Any:
        return SimpleNamespace(execute=lambda: {"networkInterfaces": [{"networkIP": instance}]})


def test_compute_engine_group() -> None:
    """RES-6."""
    resolver = GCEClusterResolver("p", "z", "g", 5, service=Compute())
    assert resolver.cluster_spec() == {"worker": ["m1:5", "m2:5"]}
    resolver.task_id = 1
    assert resolver.master() == "grpc://m2:5"
    with pytest.raises(RuntimeError, match="given to the constructor"):
        resolver.task_type = "ps"
    with pytest.raises(ImportError, match="service"):
        GCEClusterResolver("p", "z", "g", 5)
