"""The snippets of page 003 that need a cluster, in PyTorch translation.

The program itself ("Example code for coordinator") is `examples/parameter_server.py`, the branching
script `examples/tf_config_cluster.py`; both are run by `tests/examples/test_examples_cluster.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import stratagem as sg


@pytest.fixture(scope="module")
def three_ps() -> Iterator[sg.LocalCluster]:
    """In-process: what is tested is where things are."""
    with sg.LocalCluster(workers=1, ps=3, in_process=True) as cluster:
        yield cluster


def test_cluster_setup_snippet(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF_CONFIG of the second parameter server, word for word."""
    monkeypatch.setenv(
        "TF_CONFIG",
        """
        {
          "cluster": {
            "chief": ["chief.example.com:2222"],
            "ps": ["ps0.example.com:2222", "ps1.example.com:2222"],
            "worker": ["worker0.example.com:2222", "worker1.example.com:2222",
                       "worker2.example.com:2222"]
          },
          "task": {
            "type": "ps",
            "index": 1
          }
        }
        """,
    )
    resolver = sg.cluster_resolver.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    assert resolver.cluster_spec().num_tasks("worker") == 3
    assert resolver.master() == "ps1.example.com:2222"


def test_server_snippet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server made from the resolver, protocol named as on the page."""
    setting = {"cluster": {"ps": ["localhost:0"]}, "task": {"type": "ps", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(setting))
    cluster_resolver = sg.cluster_resolver.TFConfigClusterResolver()
    with sg.Server(
        cluster_resolver.cluster_spec(),
        job_name=cluster_resolver.task_type,
        task_index=cluster_resolver.task_id,
        protocol="grpc",
    ) as server:
        assert server.target.startswith("grpc://")


def test_variable_creation_snippet(three_ps: sg.LocalCluster) -> None:
    """Round-robin placement in scope; outside it a variable stays here."""
    strategy = sg.ParameterServerStrategy(cluster_resolver=three_ps.resolver)
    with sg.ClusterCoordinator(strategy=strategy):
        v1 = sg.Variable(initial_value=0.0)
        with strategy.scope():
            v2 = sg.Variable(initial_value=1.0)
            v3 = sg.Variable(initial_value=2.0)
            v4 = sg.Variable(initial_value=3.0)
            v5 = sg.Variable(initial_value=4.0)
        assert "ps" not in str(v1.device)
        assert v2.device == "/job:ps/replica:0/task:0/device:CPU:0"
        assert v3.device == "/job:ps/replica:0/task:1/device:CPU:0"
        assert v4.device == "/job:ps/replica:0/task:2/device:CPU:0"
        assert v5.device == "/job:ps/replica:0/task:0/device:CPU:0"


def test_variable_partitioning_snippet(three_ps: sg.LocalCluster) -> None:
    """Two shards, named as on the page; `x * w` converts."""
    strategy = sg.ParameterServerStrategy(
        cluster_resolver=three_ps.resolver,
        variable_partitioner=sg.partitioners.FixedShardsPartitioner(num_shards=2),
    )
    with sg.ClusterCoordinator(strategy):
        with strategy.scope():
            w = sg.Variable(torch.randn(100, 10), name="w")
        assert isinstance(w, sg.ShardedVariable)
        assert len(w.variables) == 2
        assert [shard.name for shard in w.variables] == ["w/part_0", "w/part_1"]
        assert (torch.ones(100, 10) * w).shape == (100, 10)
        assert sg.convert_to_tensor(w).shape == (100, 10)


def test_dataset_preparation_snippet(three_ps: sg.LocalCluster) -> None:
    """dataset_fn runs on the workers: shuffled, repeated, batched."""
    strategy = sg.ParameterServerStrategy(three_ps.resolver)
    with sg.ClusterCoordinator(strategy=strategy) as coordinator:

        def dataset_fn() -> sg.data.Dataset:
            dataset = sg.data.Dataset.from_tensor_slices(torch.arange(10))
            return dataset.shuffle(buffer_size=10).repeat().batch(batch_size=4)

        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        batches = [coordinator.schedule(lambda it: next(it), args=(iterator,)) for _ in range(5)]
        rows = torch.cat([batch.get(timeout_s=120) for batch in batches])
        assert sorted(rows[:10].tolist()) == list(range(10))
        assert sorted(rows[10:].tolist()) == list(range(10))


def test_run_inside_a_scheduled_function(three_ps: sg.LocalCluster) -> None:
    """worker_fn calls strategy.run, as in the page's loop; reduce works there, too."""
    strategy = sg.ParameterServerStrategy(three_ps.resolver)
    with sg.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            model = nn.Linear(2, 1, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            nn.init.zeros_(model.weight)

        def worker_fn(x: torch.Tensor) -> float:
            def replica_fn(x: torch.Tensor) -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(x) - 1).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            return float(strategy.reduce("mean", strategy.run(replica_fn, args=(x,)), axis=None))

        first = coordinator.schedule(worker_fn, args=(torch.tensor([[1.0, 0.0]]),)).fetch(60)
        coordinator.join()
        assert first == 1.0
        assert model.weight.detach().tolist() == [[1.0, 0.0]]
