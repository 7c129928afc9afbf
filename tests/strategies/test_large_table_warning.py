"""An optimizer class that changes all rows of a large table in every step is named, once."""

import torch
from torch import nn

import stratagem as sg
from stratagem._ps.coordinator import server_optimizers


def step_once(strategy, kind, rows):
    with strategy.scope():
        table = nn.Embedding(rows, 4)
        optimizer = kind(table.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        table(torch.tensor([1])).sum().backward()
        optimizer.step()

    with sg.ClusterCoordinator(strategy) as coordinator:
        coordinator.schedule(step)
        coordinator.join(timeout_s=120)


def test_a_class_that_moves_a_large_table_is_named_once(monkeypatch, recwarn):
    monkeypatch.setattr(server_optimizers, "LARGE_TABLE_BYTES", 1 << 10)
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        for kind, rows, warned in [
            (torch.optim.Adam, 8, 0),
            (torch.optim.Adagrad, 1000, 0),
            (sg.optim.LazyAdam, 1000, 0),
            (torch.optim.Adam, 1000, 1),
        ]:
            recwarn.clear()
            with sg.ParameterServerStrategy(cluster.resolver) as strategy:
                step_once(strategy, kind, rows)
            found = [str(one.message) for one in recwarn if "LazyAdam" in str(one.message)]
            assert len(found) == warned
    assert "Adam changes every row of table 'weight' (1000, 4)" in found[0]
    assert "RowWiseAdagrad" in found[0]
