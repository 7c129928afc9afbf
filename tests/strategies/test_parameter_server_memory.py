"""How much memory servers and workers take for parameters, measured on real processes.

Issue 4, section 5: a server's memory <= 1.1 x (parameters + optimizer state); a worker holds no copy of
dense parameters on the servers' host, and none of a sharded table anywhere.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from waiting import wait_until

import stratagem as sg

MB = 1 << 20


def memory(pid, *kinds):
    """Bytes of a process, by the kernel's own account (``Rss``, ``Private_Dirty`` …)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return sum(sizes[kind] for kind in kinds)


@pytest.fixture(scope="module")
def cluster():
    with sg.LocalCluster(workers=2, ps=1) as made:
        yield made


class Dense(nn.Module):
    """Parameters of 4 MB each."""

    def __init__(self, count):
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(MB)) for _ in range(count)])

    def forward(self):
        return torch.stack([part.square().mean() for part in self.parts]).sum()


def test_a_server_takes_little_more_than_its_parameters_and_their_state(cluster):
    """96 MB of parameters under Adam, two workers: everything in the server's view counts (RSS)."""
    pid = cluster.pid("ps", 0)
    before = memory(pid, "Rss")
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = Dense(24)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        needed = 3 * sum(parameter.nbytes for parameter in model.parameters())

        def step():
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            return sg.get_current_worker_index()

        with sg.ClusterCoordinator(strategy) as coordinator:
            steps = [coordinator.schedule(step) for _ in range(12)]
            coordinator.join(timeout_s=120)
            assert {one.fetch() for one in steps} == {0, 1}  # both have gradients with the server
            assert memory(pid, "Rss") - before >= needed
            wait_until(
                lambda: memory(pid, "Rss") - before <= 1.1 * needed,
                tell=lambda: f"{(memory(pid, 'Rss') - before) / needed:.2f} x parameters and state",
            )
            # What it gave up was its view: the next step is like those before it.
            before_step = model.parts[0].detach().clone()
            coordinator.schedule(step)
            coordinator.join(timeout_s=60)
            assert (model.parts[0] < before_step).all()


def test_a_worker_has_no_copy_of_dense_parameters(cluster):
    """Reading 96 MB of parameters on the servers' host takes no memory of the worker's own."""
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = Dense(24)

        def look():
            with torch.no_grad():
                return float(sum(part.max() for part in model.parts))

        with sg.ClusterCoordinator(strategy) as coordinator:
            # Pages of a segment count as shared while its server has them mapped, which it has as
            # long as the session lives; both workers have let go of the sessions before this one.
            owns = ("Private_Clean", "Private_Dirty")
            before = [memory(cluster.pid("worker", index), *owns) for index in range(2)]
            found = [coordinator.schedule(look) for _ in range(12)]
            coordinator.join(timeout_s=60)
            assert {one.fetch() for one in found} == {24.0}
            after = [memory(cluster.pid("worker", index), *owns) for index in range(2)]
            assert max(b - a for a, b in zip(before, after, strict=True)) < 16 * MB


def test_an_idle_worker_holds_nothing_of_its_last_coordinator(cluster):
    """96 MB of parameters and their gradients are nobody's memory any more once the strategy is closed.

    A view of a session that is over would keep the freed memory of its server in use.
    """
    pids = [cluster.pid("worker", index) for index in range(2)]
    before = [memory(pid, "Rss") for pid in pids]
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = Dense(24)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step():
            optimizer.zero_grad()
            model().backward()
            optimizer.step()

        with sg.ClusterCoordinator(strategy) as coordinator:
            for _ in range(12):
                coordinator.schedule(step)
            coordinator.join(timeout_s=120)
            during = [memory(pid, "Rss") for pid in pids]
    assert max(d - b for b, d in zip(before, during, strict=True)) > 96 * MB
    wait_until(
        lambda: all(memory(p, "Rss") - b < 32 * MB for p, b in zip(pids, before, strict=True)),
        tell=lambda: [(memory(p, "Rss") - b) / MB for p, b in zip(pids, before, strict=True)],
    )


def test_a_worker_has_no_copy_of_a_sharded_table(cluster):
    """Steps on a few rows of a table of 128 MB: not even the view of it covers the table."""
    partitioner = sg.partitioners.FixedShardsPartitioner(2)
    with sg.ParameterServerStrategy(cluster.resolver, partitioner) as strategy:
        with strategy.scope():
            table = nn.Embedding(2 * MB, 16)
            optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)

        def step(ids):
            optimizer.zero_grad()
            F.embedding(ids, table.weight).square().sum().backward()
            optimizer.step()

        with sg.ClusterCoordinator(strategy) as coordinator:
            before = [memory(cluster.pid("worker", index), "Rss") for index in range(2)]
            for _ in range(12):
                coordinator.schedule(step, args=(torch.arange(100) * 7,))
            coordinator.join(timeout_s=60)
            after = [memory(cluster.pid("worker", index), "Rss") for index in range(2)]
            assert max(b - a for a, b in zip(before, after, strict=True)) < 32 * MB
