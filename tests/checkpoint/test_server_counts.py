"""A checkpoint of P servers is restored on Q, for all P and Q and with other partitioners (recovery.md section 6)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import written_checkpoints as written
from torch import nn

import stratagem as sg

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

ROWS, COLUMNS = 101, 4
PARTITIONERS: tuple[Any, ...] = (
    None,
    sg.partitioners.FixedShardsPartitioner(5),
    sg.partitioners.MinSizePartitioner(min_shard_bytes=400, max_shards=4),
    sg.partitioners.MaxSizePartitioner(max_shard_bytes=300),
)


# Names of `Objects.state` → names in the checkpoint, which plain PyTorch uses.
IN_CHECKPOINT = {
    **{f"{part}": f"model.{part}" for part in ("0.weight", "1.weight", "1.bias")},
    **{f"rows.0.{key}": f"rows.state.0.weight.{key}" for key in ("step", "sum")},
    **{
        f"adam.{number}.{key}": f"adam.state.{part}.{key}"
        for number, part in enumerate(("1.weight", "1.bias"))
        for key in ("step", "exp_avg", "exp_avg_sq")
    },
    "total": "total",
}


class Objects:
    """A table, a layer, their optimizers, and a variable; of some values."""

    def __init__(self, scope: Any, seed: int) -> None:
        torch.manual_seed(seed)
        with scope:
            self.model = nn.Sequential(nn.Embedding(ROWS, COLUMNS), nn.Linear(COLUMNS, 7))
            table, layer = self.model
            self.rows = torch.optim.Adagrad(table.parameters(), lr=0.1)
            self.adam = torch.optim.Adam(layer.parameters(), lr=0.1)
            self.total = sg.Variable(torch.randn(10, 3, dtype=torch.float64), name="total")
        self.checkpoint = sg.Checkpoint(
            model=self.model, rows=self.rows, adam=self.adam, total=self.total
        )

    def step(self) -> None:
        for optimizer in (self.rows, self.adam):
            optimizer.zero_grad()
        self.model(torch.arange(0, ROWS, 2)).pow(2).sum().backward()
        for optimizer in (self.rows, self.adam):
            optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        for name, optimizer in (("rows", self.rows), ("adam", self.adam)):
            for index, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    found[f"{name}.{index}.{key}"] = torch.as_tensor(value).clone()
        return found | {"total": torch.as_tensor(self.total.numpy()).clone()}


@contextmanager
def trained(cluster: sg.LocalCluster | None, partitioner: Any, seed: int) -> Iterator[Objects]:
    """Yield objects after two steps, on one device or on the servers of a cluster."""
    if cluster is None:
        with sg.OneDeviceStrategy("cpu:0") as device:
            made = Objects(device.scope(), seed)
            for _ in range(2):
                device.run(made.step)
            yield made
        return
    servers = sg.ParameterServerStrategy(cluster.resolver, variable_partitioner=partitioner)
    with servers, sg.ClusterCoordinator(servers) as coordinator:
        made = Objects(servers.scope(), seed)
        for _ in range(2):
            coordinator.schedule(made.step)
        coordinator.join(timeout_s=100)
        yield made


@contextmanager
def servers(count: int) -> Iterator[sg.LocalCluster | None]:
    if not count:
        yield None
        return
    with sg.LocalCluster(workers=1, ps=count) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "layouts"),
    [
        ((0, 1, 2, 3), 2),
        pytest.param((0, 1, 2, 3, 4, 5), 4, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
def test_every_number_of_servers_to_every_other(
    tmp_path: Path, counts: tuple[int, ...], layouts: int
) -> None:
    """Bit for bit, also as plain PyTorch reads it; each number of servers saves with `layouts` partitioners, and restores with all.

    0 servers is one device without a cluster.
    """
    saved: dict[Path, dict[str, torch.Tensor]] = {}
    choices = itertools.cycle(PARTITIONERS)
    for count in counts:
        writers = []
        with servers(count) as cluster:
            for turn in range(layouts if count else 1):
                with trained(cluster, next(choices), seed=10 * count + turn) as made:
                    path = tmp_path / f"{count}-{turn}"
                    files = made.checkpoint.save(path).manifest.files
                    writers.append(sum(each.endswith(".distcp") for each in files))
                    saved[path] = made.state()
        assert max(writers) == 1 + count  # some partitioner puts rows on every server
    for path, expected in saved.items():
        tensors = {IN_CHECKPOINT[name]: value for name, value in expected.items()}
        assert len(tensors) == len(expected)
        read = written.read_by_torch(path, tensors)
        assert all(written.same_bits(read[name], value) for name, value in tensors.items()), path
    restored = 0
    for count in counts:
        with servers(count) as cluster:
            for partitioner in PARTITIONERS if count else (None,):
                with trained(cluster, partitioner, seed=99) as made:
                    for path, expected in saved.items():
                        made.checkpoint.restore(path)
                        found = made.state()
                        assert found.keys() == expected.keys()
                        for name, value in expected.items():
                            assert written.same_bits(found[name], value), (path, count, name)
                        restored += 1
    assert len(saved) == layouts * (len(counts) - 1) + 1
    assert restored == len(saved) * (1 + (len(counts) - 1) * len(PARTITIONERS))
