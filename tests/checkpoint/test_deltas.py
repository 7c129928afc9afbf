"""Saves that hold only the rows changed since the last one (recovery.md section 2, Incremental)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import stratagem as sg
from stratagem._checkpoint.directory import CheckpointDirectory
from stratagem._ps.server import checkpoint_parts
from stratagem._ps.server.changed_rows import ChangedRows
from stratagem._ps.server.cut import Cut
from stratagem.cli import main
from stratagem.errors import CheckpointError

ROWS = 2000


class Run:
    """A table on two servers that is trained by rows."""

    def __init__(self, strategy: Any, coordinator: Any, name: str = "Adagrad") -> None:
        self.coordinator = coordinator
        with strategy.scope():
            self.table = nn.EmbeddingBag(ROWS, 4, mode="sum")
            self.dense = nn.Linear(4, 1)
            parameters = [*self.table.parameters(), *self.dense.parameters()]
            self.optimizer = getattr(torch.optim, name)(parameters, lr=0.1)
            self.total = sg.Variable(torch.zeros(ROWS, dtype=torch.float64), name="total")
        self.checkpoint = sg.Checkpoint(
            table=self.table, dense=self.dense, optimizer=self.optimizer, total=self.total
        )

    def step(self, *ids: int) -> None:
        table, dense, optimizer, total = self.table, self.dense, self.optimizer, self.total

        def run(rows: Tensor) -> None:
            optimizer.zero_grad()
            dense(table(rows[None])).pow(2).sum().backward()
            optimizer.step()
            ones = torch.ones(len(rows), dtype=torch.float64)
            total.scatter_add(torch.sparse_coo_tensor(rows[None], ones, (ROWS,)))

        self.coordinator.schedule(run, args=(torch.tensor(ids),))
        self.coordinator.join(timeout_s=60)

    def state(self) -> list[Tensor]:
        state = self.optimizer.state_dict()["state"]
        return [
            *(one.clone() for one in self.table.state_dict().values()),
            *(one.clone() for one in self.dense.state_dict().values()),
            *(torch.as_tensor(one).clone() for key in sorted(state) for one in state[key].values()),
            torch.as_tensor(self.total.numpy()),
        ]


@contextmanager
def run(servers: int = 2, name: str = "Adagrad", *, processes: bool = False) -> Iterator[Any]:
    with sg.LocalCluster(workers=1, ps=servers, in_process=not processes) as cluster:
        partitioner = sg.partitioners.FixedShardsPartitioner(servers)
        strategy = sg.ParameterServerStrategy(cluster.resolver, partitioner)
        with strategy, sg.ClusterCoordinator(strategy) as coordinator:
            yield Run(strategy, coordinator, name), cluster


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_deltas_hold_the_changed_rows_and_restore_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every save restores exactly, on any number of servers, by the command and by plain PyTorch."""
    states: dict[int, list[Tensor]] = {}
    with (
        run() as (mine, _),
        sg.CheckpointManager(mine.checkpoint, tmp_path, max_to_keep=None, full_every=4) as manager,
    ):
        for number in range(1, 7):
            mine.step(number, 1000 + number, ROWS - number, 7)
            states[number] = mine.state()
            manager.save(number, wait=True, final=number == 6)
        saved = {one.step: one for one in manager.all()}
    kinds = [saved[number].manifest.is_delta for number in range(1, 7)]
    assert kinds == [False, True, True, True, False, False]  # the last one is final
    sizes = [saved[number].bytes for number in range(1, 5)]
    assert max(sizes[1:]) < sizes[0] / 2
    for number, one in saved.items():
        one.verify()
        for servers in (1, 3) if number in (3, 6) else (2,):
            with run(servers) as (other, _):
                assert other.checkpoint.restore(one.path).step == number
                assert equal(other.state(), states[number])
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert "delta of step_00000003" in capsys.readouterr().out
    single = tmp_path / "model.pt"
    assert main(["checkpoint", "to-torch", str(saved[4].path), str(single)]) == 0
    loaded = torch.load(single, weights_only=True)
    assert torch.equal(loaded["table"]["weight"], states[4][0])
    assert torch.equal(loaded["total"], states[4][-1])


def test_optimizers_that_move_whole_shards_get_full_saves(tmp_path: Path) -> None:
    with (
        run(name="Adam") as (mine, _),
        sg.CheckpointManager(mine.checkpoint, tmp_path, full_every=10) as manager,
    ):
        for number in range(3):
            mine.step(number)
            manager.save(number, wait=True)
        assert [one.manifest.is_delta for one in manager.all()] == [False, False, False]


def test_a_server_without_space_says_where_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with run() as (mine, _), sg.CheckpointManager(mine.checkpoint, tmp_path) as manager:
        mine.step(1)
        manager.save(1, wait=True)
        mine.step(2)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_parts, "write_file", full_disk)
            expected = (
                r"/job:ps/task:. failed: its rows could not be written to .*No space.*Free disk"
            )
            with pytest.raises(CheckpointError, match=expected):
                manager.save(2, wait=True)
        mine.step(3)
        assert [one.step for one in manager.all()] == [1]
        manager.save(3, wait=True)


def test_a_failed_save_loses_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next delta holds the rows of both."""
    with (
        run() as (mine, _),
        sg.CheckpointManager(mine.checkpoint, tmp_path, full_every=10) as manager,
    ):
        mine.step(1)
        manager.save(1, wait=True)
        mine.step(2)

        def full_disk(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(CheckpointDirectory, "commit", full_disk)
            with pytest.raises(CheckpointError, match="No space"):
                manager.save(2, wait=True)
        mine.step(3)
        manager.save(3, wait=True)
        assert manager.latest is not None
        assert manager.latest.manifest.is_delta
        expected = mine.state()
    with run() as (other, _):
        other.checkpoint.restore(tmp_path)
        assert equal(other.state(), expected)


def test_parents_of_kept_deltas_are_kept(tmp_path: Path) -> None:
    with (
        run() as (mine, _),
        sg.CheckpointManager(mine.checkpoint, tmp_path, max_to_keep=1, full_every=3) as manager,
    ):
        kept = []
        for number in range(1, 6):
            mine.step(number)
            manager.save(number, wait=True)
            kept.append([one.step for one in manager.all()])
        assert kept == [[1], [1, 2], [1, 2, 3], [4], [4, 5]]


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_lost_server_is_restored_from_a_delta(tmp_path: Path) -> None:
    """A delta after the recovery is full: the new process does not know which rows changed."""
    with (
        run(processes=True) as (mine, cluster),
        sg.CheckpointManager(mine.checkpoint, tmp_path, full_every=10) as manager,
    ):
        mine.step(1, 1999)
        manager.save(1, wait=True)
        mine.step(2, 1998)
        manager.save(2, wait=True)
        expected = mine.state()
        cluster.kill_ps(1)
        mine.coordinator.schedule(lambda: None)
        total, one = mine.total, torch.zeros(ROWS, dtype=torch.float64)
        mine.coordinator.schedule(lambda: total.assign_add(one) and None)
        mine.coordinator.join(timeout_s=120)
        assert [each.step for each in mine.coordinator.recoveries] == [2]
        assert equal(mine.state(), expected)
        mine.step(3, 1997)
        manager.save(3, wait=True)
        expected = mine.state()
    with run(1) as (other, _):
        other.checkpoint.restore(tmp_path)
        assert equal(other.state(), expected)


@given(st.integers(0, 1 << 30))
def test_changed_rows_are_read_as_they_were_at_the_cut(seed: int) -> None:
    """Writes between the cut and the reading do not show, in any order."""
    draw = random.Random(seed)
    rows = draw.randint(1, 300)

    def some() -> Tensor:
        return torch.tensor(sorted(draw.sample(range(rows), draw.randint(0, min(40, rows)))))

    value = torch.arange(rows * 2, dtype=torch.float32).reshape(rows, 2)
    before = value.clone()
    ids = some().long()
    cut = Cut({(1, 0, ""): value})
    cut.begin_reading()
    read = []
    step = draw.randint(1, 50)
    for low in range(0, max(1, len(ids)), step):
        for _ in range(draw.randint(0, 2)):
            written = None if draw.random() < 0.3 else some().long()
            cut.before_write(1, written)
            value[slice(None) if written is None else written] += 1000.0
        part = ids[low : low + step]
        read.append(cut.tensors[1, 0, ""].read_ids(part, is_last=low + step >= len(ids)).clone())
    assert torch.equal(torch.cat(read), before[ids])
    cut.close()


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6), st.data())
def test_changes_since_any_cut(periods: list[list[int]], data: st.DataObject) -> None:
    changed, tensor = ChangedRows(), torch.zeros(10, 2)
    for number, rows in enumerate(periods, 1):
        changed.begin(number, [1])
        for row in rows:
            changed.mark(1, torch.tensor([row]), tensor)
    base = data.draw(st.integers(1, len(periods)))
    expected = sorted({row for rows in periods[base - 1 :] for row in rows})
    found = changed.since(base, 1)
    assert found is not None
    assert found.tolist() == expected
    changed.forget_before(base)
    again = changed.since(base, 1)
    assert again is not None
    assert again.tolist() == expected
    assert changed.since(base, 2) is None
    changed.mark_all([1])
    assert changed.since(base, 1) is None
