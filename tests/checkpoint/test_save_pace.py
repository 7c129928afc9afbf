"""A server rests while it writes a checkpoint and is trained; the checkpoint is complete, and nobody waits for the rests."""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from waiting import wait_until

import stratagem as sg
from stratagem._ps.server import cut as cuts
from stratagem._ps.server import save_pace
from stratagem._ps.server.checkpoint_parts import CheckpointAccess, SessionCheckpoints
from stratagem._ps.server.cut import Cut
from stratagem._ps.server.save_pace import SavePace
from stratagem._ps.server.store import VariableStore
from stratagem._ps.types import Gradient, GroupSpec
from stratagem._wire import messages

LIMIT_S = 120.0
ROWS, COLUMNS = 100_000, 16  # seven pieces of a megabyte, and as many of Adagrad's sums


class Clock(SimpleNamespace):
    """Stands for the module `time`: it counts rests."""

    def __init__(self) -> None:
        self.now, self.used, self.rests = 0.0, 0.0, list[float]()
        super().__init__(
            monotonic=lambda: self.now, thread_time=lambda: self.used, sleep=self.rests.append
        )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(save_pace, "time", made)
    monkeypatch.setattr(cuts, "time", made)
    return made


def rests(clock: Clock, pace: SavePace, moved: int) -> list[float]:
    """Return the rests after a piece that took a millisecond."""
    clock.rests.clear()
    clock.used += 0.001
    pace.rest(moved)
    return list(clock.rests)


def test_rests_come_while_writes_come(clock: Clock) -> None:
    cut = Cut({(1, 0, ""): torch.zeros(1000, 4)})
    pace = SavePace(cut, 1000)
    assert not rests(clock, pace, 500)  # nobody has written since the cut
    cut.before_write(1, torch.tensor([3]))
    assert rests(clock, pace, 500) == [pytest.approx(0.001 * save_pace.REST)]
    clock.now += cuts.IDLE_S
    assert not rests(clock, pace, 500)
    cut.before_write(2, None)  # another variable
    assert rests(clock, pace, 500)
    pace.hurries = True
    assert not rests(clock, pace, 500)


def test_a_paced_save_has_an_upper_limit(clock: Clock) -> None:
    """The thread rests as long as it is ahead of a save that takes `PACED_S`."""
    cut = Cut({(1, 0, ""): torch.zeros(1000, 4)})
    pace = SavePace(cut, 1000)
    clock.now = save_pace.PACED_S / 2
    cut.before_write(1, torch.tensor([3]))
    assert not rests(clock, pace, 499)
    assert rests(clock, pace, 501)
    clock.now = save_pace.PACED_S + 0.5
    assert not rests(clock, pace, 1000)


def test_copied_rows_hurry_the_thread(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "LEAST_ASIDE_BYTES", 0)
    value = torch.zeros(1000, 16)
    cut = Cut({(1, 0, ""): value})
    cut.begin_reading()
    pace = SavePace(cut, value.nbytes)
    cut.before_write(1, torch.arange(10))
    assert rests(clock, pace, value.nbytes)
    cut.before_write(1, torch.arange(10, 60))  # with the numbers of places 9 %; 10 % is the limit
    assert not rests(clock, pace, value.nbytes)
    cut.tensors[1, 0, ""].read(0, 100)
    assert rests(clock, pace, value.nbytes)


def test_a_write_that_waits_hurries_the_thread(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "LEAST_ASIDE_BYTES", 0)
    cut = Cut({(1, 0, ""): torch.zeros(1000, 16)})
    cut.begin_reading()
    pace = SavePace(cut, 1000)
    writer = threading.Thread(target=cut.before_write, args=(1, None))
    writer.start()
    wait_until(lambda: cut.is_crowded)
    assert not rests(clock, pace, 1000)
    cut.tensors[1, 0, ""].read(0, 1000)
    writer.join(LIMIT_S)
    assert not writer.is_alive()
    assert rests(clock, pace, 1000)


class Server:
    """One shard with Adagrad's sums, and a save whose rests are taken from a queue."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuts, "IDLE_S", float("inf"))  # writes come often
        self.rests: queue.Queue[threading.Event] = queue.Queue()
        monkeypatch.setattr(save_pace, "PACED_S", float("inf"))
        rest, used = self._rest, time.thread_time
        clock = SimpleNamespace(monotonic=time.monotonic, thread_time=used, sleep=rest)
        monkeypatch.setattr(save_pace, "time", clock)
        self.path = directory / "__0_0.distcp"
        (directory / "probe").touch()
        self.store = VariableStore()
        self.store.create(1, "table", (ROWS, COLUMNS), torch.float32).normal_()
        groups = [GroupSpec(variables=(1,), settings={"lr": 0.1})]
        self.store.create_optimizer(1, "torch.optim.Adagrad", groups)
        self.push()
        access = CheckpointAccess((str(directory),))
        self.checkpoints = SessionCheckpoints(self.store, access)
        self.cut = self.checkpoints.make_cut(
            messages.MakeCut(variables=(1,), directory=str(directory), probe="probe")
        )
        [entry] = (one for one in self.store.optimizer_state(1) if one.key == "sum")
        assert isinstance(entry.value, torch.Tensor)
        self.expected = [self.store.read(1).clone(), entry.value.clone()]

    def _rest(self, _: float) -> None:
        over = threading.Event()
        self.rests.put(over)
        assert over.wait(LIMIT_S)

    def push(self) -> None:
        ids = torch.randperm(ROWS)[:500].sort().values
        self.store.push(1, [Gradient(variable=1, values=torch.randn(500, COLUMNS), ids=ids)])

    def begin(self) -> None:
        shape = ROWS, COLUMNS
        value = messages.PartRef("table", shape, 0, ROWS, 1)
        sums = messages.PartRef("sum", shape, 0, ROWS, 1, optimizer=1, key="sum")
        order = messages.WriteCut(cut=self.cut.cut, path=str(self.path), parts=(value, sums))
        self.checkpoints.write_cut(order)

    def train_in_rest(self) -> None:
        """Make a step during a rest of the writing thread, which then goes on."""
        over = self.rests.get(timeout=LIMIT_S)
        self.push()
        over.set()

    def finish(self) -> messages.Transfer:
        """Wait for the file, in which no more rests may come, and compare it."""
        found: list[messages.Transfer] = []

        def is_done() -> bool:
            assert self.rests.empty(), "the thread rested"
            found[:] = [self.checkpoints.progress()[0]]
            return found[0].done

        wait_until(is_done)
        [result] = found
        assert not result.failure
        contents = self.path.read_bytes()
        assert len(contents) == result.size
        for name, expected in zip(("table", "sum"), self.expected, strict=True):
            blocks = sorted((one.start, one) for one in result.blocks if one.tensor == name)
            assert sum(one.rows for _, one in blocks) == ROWS
            for start, one in blocks:
                rows = contents[one.offset : one.offset + one.rows * 4 * COLUMNS]
                assert zlib.crc32(rows) == one.crc32
                assert np.array_equal(
                    np.frombuffer(rows, np.float32).reshape(-1, COLUMNS),
                    expected[start : start + one.rows].numpy(),
                )
        return result


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    torch.manual_seed(0)
    made = Server(tmp_path, monkeypatch)
    try:
        yield made
    finally:
        monkeypatch.undo()
        while not made.rests.empty():
            made.rests.get().set()
        made.checkpoints.close()


def test_a_paced_save_is_the_cut_and_ends_at_full_speed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps change rows of all pieces in every rest; when they stop, so do the rests."""
    server.push()
    server.begin()
    for _ in range(6):
        server.train_in_rest()
    last = server.rests.get(timeout=LIMIT_S)
    monkeypatch.setattr(cuts, "IDLE_S", -1.0)  # no write has come for longer
    last.set()
    server.finish()


def test_a_save_that_is_waited_for_rests_no_more(server: Server) -> None:
    server.push()
    server.begin()
    server.train_in_rest()
    last = server.rests.get(timeout=LIMIT_S)
    assert not server.checkpoints.progress(hurry=True)[0].done
    last.set()
    server.finish()


def test_rows_of_a_variable_and_its_state_are_written_in_turns(server: Server) -> None:
    """A step changes both. Once they have been read, it copies neither."""
    server.push()
    server.begin()
    for _ in range(7):  # half of the pieces
        server.train_in_rest()
    last = server.rests.get(timeout=LIMIT_S)
    assert server.checkpoints._cut is not None
    read = [one._read for one in server.checkpoints._cut.tensors.values() if one.shape]
    assert len(read) == 2
    assert min(read) > ROWS // 3
    server.checkpoints.progress(hurry=True)
    last.set()
    server.finish()


@pytest.mark.parametrize("how", ["wait", "step", "save", "close"])
def test_whoever_waits_for_a_save_ends_its_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A rest lasts here until the coordinator says that somebody waits."""
    resting = threading.Event()

    def rest(pace: SavePace, _: int) -> None:
        resting.set()
        wait_until(lambda: pace.hurries)

    monkeypatch.setattr(SavePace, "rest", rest)
    with (
        sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster,
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
    ):
        with strategy.scope():
            table = nn.Embedding(8, 2)
        checkpoint = sg.Checkpoint(table=table)
        with sg.CheckpointManager(checkpoint, tmp_path, every_steps=2) as manager:
            handle = manager.step(2)
            assert handle is not None
            assert resting.wait(LIMIT_S)
            assert manager.step(3) is None
            assert not handle.done
            if how == "wait":
                handle.wait(LIMIT_S)
            elif how == "step":
                assert manager.step(4) is None  # due, and not possible yet
                wait_until(lambda: handle.done)
            elif how == "save":
                manager.save(5, wait=True)
        assert handle.done
        assert manager.latest is not None
