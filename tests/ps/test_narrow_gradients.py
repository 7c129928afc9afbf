"""Gradients and rows in bfloat16 on sockets: fewer bytes, the numbers of rounded gradients, off by default."""

import pytest
import torch

import stratagem as sg
from stratagem import config


def build():
    torch.manual_seed(1)
    return torch.nn.ModuleDict(
        {"table": torch.nn.Embedding(50, 4, sparse=True), "head": torch.nn.Linear(4, 3)}
    )


def loss_of(model, ids):
    return model["head"](model["table"](ids)).square().sum()


IDS = torch.tensor([3, 7, 7, 20, 49])


@pytest.mark.parametrize("narrow", ["", "bfloat16"])
@pytest.mark.parametrize("shared", ["0", "1"])
def test_gradients_and_rows_are_rounded_on_sockets_only(monkeypatch, narrow, shared):
    """The servers keep full precision: what travels is rounded once in each direction."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", shared)
    monkeypatch.setenv("STRATAGEM_WIRE_DTYPE", narrow)
    rounds = narrow and shared == "0"

    def through_the_wire(value):
        return value.bfloat16().float() if rounds else value

    plain = build()
    with torch.no_grad():
        full = plain["table"].weight.clone()
        plain["table"].weight.copy_(through_the_wire(full))
    loss_of(plain, IDS).backward()
    expected = {
        "table.weight": full - 0.1 * through_the_wire(plain["table"].weight.grad.to_dense()),
        "head.weight": plain["head"].weight.detach()
        - 0.1 * through_the_wire(plain["head"].weight.grad),
        "head.bias": plain["head"].bias.detach() - 0.1 * through_the_wire(plain["head"].bias.grad),
    }
    partitioner = sg.partitioners.FixedShardsPartitioner(2)
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
        with sg.ParameterServerStrategy(
            cluster.resolver, variable_partitioner=partitioner
        ) as strategy:
            with strategy.scope():
                model = build()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            coordinator = sg.ClusterCoordinator(strategy)

            def step(ids):
                optimizer.zero_grad()
                loss_of(model, ids).backward()
                optimizer.step()

            coordinator.schedule(step, args=(IDS,))
            coordinator.join(timeout_s=60)
            trained = {key: value.clone() for key, value in model.state_dict().items()}
    torch.testing.assert_close(trained, expected, rtol=1e-6, atol=1e-7)


def test_another_type_is_refused(monkeypatch):
    monkeypatch.setenv("STRATAGEM_WIRE_DTYPE", "int8")
    with pytest.raises(ValueError, match=r"STRATAGEM_WIRE_DTYPE='int8' .* expected bfloat16"):
        config.wire_dtype()
