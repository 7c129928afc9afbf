"""Statements of the specification about placing, sharing and keeping variables on parameter servers."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg

P = sg.partitioners
PS = "/job:ps/replica:0/task:{}/device:CPU:0"


@pytest.fixture(scope="module")
def cluster() -> Iterator[sg.LocalCluster]:
    with sg.LocalCluster(workers=2, ps=2, in_process=True) as made:
        yield made


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_the_strategy_places_variables_not_a_device_scope(
    cluster: sg.LocalCluster, order: str
) -> None:
    """PSS-11: device scopes around the strategy's scope, or within it, change nothing."""
    with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(2)) as strategy:
        if order == "inside":
            with strategy.scope(), torch.device("meta"):
                made: Any = [sg.Variable([1.0, 2.0]), sg.Variable(3.0)]
        else:
            with torch.device("meta"), strategy.scope():
                made = [sg.Variable([1.0, 2.0]), sg.Variable(3.0)]
        assert [part.device for part in made[0].variables] == [PS.format(0), PS.format(1)]
        assert made[0].numpy().tolist() == [1.0, 2.0]
        assert made[1].device == PS.format(0)
        assert float(made[1]) == 3.0


def test_a_static_table_is_each_workers_own(cluster: sg.LocalCluster) -> None:
    """PSS-15: a lookup table made in scope is replicated; lookups ask nobody, ours is kept apart."""
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            vocabulary = {"red": 0, "green": 1}
            weights = sg.Variable([10.0, 20.0])
        coordinator = sg.ClusterCoordinator(strategy)

        def look_up(word: str) -> float:
            vocabulary["seen here"] = 1  # a worker's own copy: nobody else sees this
            return float(weights.read_value()[vocabulary[word]])

        values = [coordinator.schedule(look_up, args=(word,)) for word in ["red", "green"] * 10]
        assert coordinator.fetch(values) == [10.0, 20.0] * 10
        assert vocabulary == {"red": 0, "green": 1}


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.out = nn.Linear(3, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids))  # type: ignore[no-any-return]


LAYOUTS: list[Any] = [None, P.FixedShardsPartitioner(2), P.FixedShardsPartitioner(5)]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    optimizer.zero_grad()
    model(ids).square().sum().backward()
    optimizer.step()


def fresh(generator: int) -> tuple[Ranker, torch.optim.Optimizer]:
    torch.manual_seed(generator)
    model = Ranker()
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


@pytest.mark.parametrize("after", LAYOUTS, ids=["whole", "two", "five"])
@pytest.mark.parametrize("before", LAYOUTS, ids=["whole", "two", "five"])
def test_a_checkpoint_knows_no_shards(cluster: sg.LocalCluster, before: Any, after: Any) -> None:
    """SHV-10, LIM-5: one logical tensor each; restored into any number of shards, or none."""
    ids = torch.tensor([[0, 6, 3], [6, 2, 1]])
    file = io.BytesIO()
    with sg.ParameterServerStrategy(cluster.resolver, before) as strategy:
        with strategy.scope():
            model, optimizer = fresh(1)
            free = sg.Variable(torch.arange(12.0).reshape(6, 2))
        coordinator = sg.ClusterCoordinator(strategy)
        for _ in range(2):
            coordinator.schedule(step, args=(model, optimizer, ids))
            coordinator.join(timeout_s=60)  # one after the other, as in plain PyTorch
        saved = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "free": sg.convert_to_tensor(free),
        }
        assert saved["model"]["table.weight"].shape == (7, 3)
        torch.save(saved, file)

    plain, plain_optimizer = fresh(1)
    for _ in range(2):
        step(plain, plain_optimizer, ids)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    torch.testing.assert_close(loaded["model"], dict(plain.state_dict()))

    with sg.ParameterServerStrategy(cluster.resolver, after) as strategy:
        with strategy.scope():
            model, optimizer = fresh(2)
            free = sg.Variable(torch.zeros(6, 2))
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        free.assign(loaded["free"])
        coordinator = sg.ClusterCoordinator(strategy)
        coordinator.schedule(step, args=(model, optimizer, ids))
        coordinator.join(timeout_s=60)
        step(plain, plain_optimizer, ids)  # the same run, without a stop
        trained = {key: value.clone() for key, value in model.state_dict().items()}
        torch.testing.assert_close(trained, dict(plain.state_dict()))
        assert torch.equal(sg.convert_to_tensor(free), torch.arange(12.0).reshape(6, 2))


def test_a_saved_model_is_a_plain_one(cluster: sg.LocalCluster) -> None:
    """SHV-11: saved as one variable of full shape, loaded without any cluster."""
    file = io.BytesIO()
    ids = torch.tensor([[0, 6, 3], [6, 2, 1]])
    with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(3)) as strategy:
        with strategy.scope():
            model, optimizer = fresh(1)
        coordinator = sg.ClusterCoordinator(strategy)
        coordinator.schedule(step, args=(model, optimizer, ids))
        coordinator.join(timeout_s=60)
        torch.save(model, file)  # before anything else has looked at the values
        expected = model(ids).detach()
        coordinator.schedule(step, args=(model, optimizer, ids))
        coordinator.join(timeout_s=60)
        twin = copy.deepcopy(model)  # the same for a copy
        assert not torch.equal(model(ids).detach(), expected)
        torch.testing.assert_close(twin(ids).detach(), model(ids).detach())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is Ranker
    assert type(loaded.table.weight) is nn.Parameter
    assert loaded.table.weight.shape == (7, 3)
    torch.testing.assert_close(loaded(ids).detach(), expected)
    torch.optim.Adagrad(loaded.parameters()).step()


def test_a_model_lists_each_variable_once_and_a_container_lists_its_shards(
    cluster: sg.LocalCluster,
) -> None:
    """SHV-12: on the coordinator and in a function, captured or passed, also inside a structure."""
    with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(2)) as strategy:
        with strategy.scope():
            model = Ranker()
            table: Any = sg.Variable(torch.arange(10.0).reshape(5, 2), name="table")
        assert [name for name, _ in model.named_parameters()] == [
            "table.weight",
            "out.weight",
            "out.bias",
        ]
        assert [part.name for part in table] == ["table/part_0", "table/part_1"]
        coordinator = sg.ClusterCoordinator(strategy)

        def look(nest: dict[str, list[Any]], seen: nn.Module) -> tuple[Any, ...]:
            (given,) = nest["tables"]
            names = [part.name for part in given.variables]
            places = [part.device for part in given.variables]
            shapes = [tuple(parameter.shape) for parameter in seen.parameters()]
            return names, places, shapes, given.sparse_read([4, 0]), len(table.variables)

        value = coordinator.schedule(look, args=({"tables": [table]}, model))
        names, places, shapes, rows, count = value.get(timeout_s=60)
        assert names == [part.name for part in table.variables]
        assert places == [part.device for part in table.variables]
        assert shapes == [(7, 3), (1, 3), (1,)]
        assert rows.tolist() == [[8.0, 9.0], [0.0, 1.0]]
        assert count == 2
