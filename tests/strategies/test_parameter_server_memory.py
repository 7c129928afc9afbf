"""How much memory servers and workers take for parameters, measured on real processes.

Issue 4, section 5: a server's memory <= 1.1 x (parameters + optimizer state); a worker holds no copy of
dense parameters on the servers' host, and none of a sharded table anywhere.
"""

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from waiting import wait_until

import stratagem as sg

pytestmark = pytest.mark.soak

MB = 1 << 20


def memory(pid, *kinds):
    """Bytes of a process, by the kernel's own account (``Rss``, ``Private_Dirty`` …)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return sum(sizes[kind] for kind in kinds)


def own_memory(pid, clients):
    """Bytes of a server's view without its clients' gradient slots, which are their memory.

    A client maps its slots shared, and the servers' variables privately.
    """
    slots = set()
    for client in clients:
        for line in Path(f"/proc/{client}/maps").read_text().splitlines():
            _, rights, _, _, inode, *name = line.split()
            if rights == "rw-s" and name and name[0].startswith("/memfd:stratagem"):
                slots.add(inode)
    total, counts = 0, True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if words[0] == "Rss:":
            total += int(words[1]) * 1024 if counts else 0
        elif not words[0].endswith(":"):  # address, rights, offset, device, inode, name
            counts = words[4] not in slots or "/memfd:stratagem" not in line
    return total


@pytest.fixture(scope="module")
def cluster():
    with sg.LocalCluster(workers=2, ps=1) as made:
        yield made


class Dense(nn.Module):
    """Parameters of 4 MB each, or of so many numbers."""

    def __init__(self, count, numbers=MB):
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(numbers)) for _ in range(count)])

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


class Table(nn.Module):
    """One table of 64 MB, of which a step uses few rows; Adam moves all of them nevertheless."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(MB, 16)

    def forward(self):
        return self.table(torch.arange(0, MB, 1000)).square().sum()


class One(nn.Module):
    """One parameter of 96 MB."""

    def __init__(self):
        super().__init__()
        self.part = nn.Parameter(torch.ones(24, MB))

    def forward(self):
        return self.part.square().mean()


@pytest.mark.filterwarnings("ignore:Adam changes every row")  # that is what is measured
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: Dense(24, MB), {}),
        (lambda: Dense(96, MB // 4), {}),
        (lambda: Dense(96, MB // 4), {"foreach": True}),
        (One, {"foreach": True}),
        (Table, {}),
    ],
    ids=["many", "small", "small-foreach", "one-foreach", "table"],
)
def test_steps_need_no_large_temporary_memory(make, options):
    """No temporaries as large as parameters: the server's own memory stays within 1.1 x all the time.

    What its view shows beyond that are its clients' gradient slots.
    """
    with sg.LocalCluster(workers=2, ps=1) as cluster:
        pid, workers = cluster.pid("ps", 0), [cluster.pid("worker", index) for index in range(2)]
        partitioner = sg.partitioners.FixedShardsPartitioner(1)
        with (
            sg.ParameterServerStrategy(cluster.resolver, partitioner) as strategy,
            sg.ClusterCoordinator(strategy) as coordinator,
        ):

            def train(model, steps):
                optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **options)

                def step():
                    optimizer.zero_grad()
                    model().backward()
                    optimizer.step()

                for _ in range(steps):
                    coordinator.schedule(step)

            with strategy.scope():
                train(Dense(1, 1), 2)  # torch loads some of its code at the first step
                coordinator.join(timeout_s=60)
                before = own_memory(pid, [os.getpid(), *workers])
                model = make()
                needed = 3 * sum(parameter.nbytes for parameter in model.parameters())
                train(model, 8)
            seen = []
            while not coordinator.done():
                seen.append(own_memory(pid, [os.getpid(), *workers]) - before)
            coordinator.join(timeout_s=60)
            seen.append(own_memory(pid, [os.getpid(), *workers]) - before)
            assert len(seen) > 5
            assert max(seen) > 0.95 * needed  # all of it was there
            assert max(seen) <= 1.1 * needed, f"{max(seen) / needed:.2f} x parameters and state"


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
