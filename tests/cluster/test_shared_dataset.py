"""`create_shared_dataset`: all workers read one dataset together, and every row is accounted for."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_training import (
    LIMIT_S,
    counting_step,
    dataset_of,
    train_epoch,
    write_files,
)
from waiting import Gate, pass_gate, wait_until
from warm_start import run_program

import stratagem as sg
from stratagem.config import ClusterOptions
from stratagem.data import Dataset
from stratagem.errors import ClosureCancelled, DataError, EndOfData, MisuseError

QUICK = ClusterOptions(
    heartbeat_s=0.2, heartbeat_limit_s=60.0, restart_pause_s=0.05, membership_s=0.05
)
SCRIPT = Path(__file__).parents[1] / "plugins" / "shared_training.py"


@pytest.fixture
def threads() -> Iterator[tuple[Any, sg.ClusterCoordinator]]:
    """A strategy and its coordinator, on two workers in this process."""
    with sg.LocalCluster(workers=2, ps=1, in_process=True) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy, sg.ClusterCoordinator(strategy) as coordinator:
            yield strategy, coordinator


def take(batches: Any) -> Any:
    return next(batches)


def rows_of(values: list[sg.RemoteValue]) -> list[int]:
    return [x for value in values for x in value.get(timeout_s=LIMIT_S).tolist()]


def schedule_epoch(coordinator: sg.ClusterCoordinator, data: Any) -> list[sg.RemoteValue]:
    """Schedule a function for each element, up to the end of the epoch."""
    values = []
    with pytest.raises(EndOfData, match="has ended"):
        while True:
            values.append(coordinator.schedule(take, args=(data,)))
    return values


# ------------------------------------------------------------------ in one process


def test_one_call_trains_one_epoch(threads: Any) -> None:
    """`run_steps` over a shared dataset: one result per batch, in order; each call is an epoch."""
    strategy, coordinator = threads
    data = coordinator.create_shared_dataset(Dataset.range(30).batch(4))
    for epoch in range(2):
        results = list(strategy.run_steps(lambda batch: batch.tolist(), data))
        assert [x for batch in results for x in batch] == list(range(30))
        assert data.ledger.epoch == epoch
        assert data.ledger.rows_trained == 30 * (epoch + 1)
    assert [len(batch) for batch in results] == [4] * 7 + [2]
    assert not data.ledger.lost
    assert len(list(strategy.run_steps(lambda batch: None, data, steps=3))) == 3


class Squares(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A map-style dataset."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index * index


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (Dataset.range(10).map(lambda x: x * x).batch(3), [n * n for n in range(10)]),
        (lambda: sg.data.as_dataset(Squares()).batch(4), [n * n for n in range(10)]),
        (torch.arange(5).split(2), [0, 1, 2, 3, 4]),
        (lambda context: [torch.tensor([7]), torch.tensor([8])], [7, 8]),
    ],
)
def test_sources(threads: Any, source: Any, expected: list[int]) -> None:
    """Pipelines, map-style datasets, lists of batches; functions that make them, with a context or none."""
    _, coordinator = threads
    data = coordinator.create_shared_dataset(list(source) if isinstance(source, tuple) else source)
    for _ in range(2):
        assert rows_of(schedule_epoch(coordinator, data)) == expected
    assert data.ledger.rows_trained == 2 * len(expected)


def test_elements_of_a_map_style_dataset_and_of_a_list_of_files(threads: Any) -> None:
    _, coordinator = threads
    rows = coordinator.create_shared_dataset(Squares())
    files = coordinator.create_shared_dataset(["a.npy", "b.npy"])
    values = [coordinator.schedule(take, args=(rows,)) for _ in range(len(rows))]
    assert [int(value.get()) for value in values] == [n * n for n in range(10)]
    values = [coordinator.schedule(take, args=(files,)) for _ in range(len(files))]
    assert [value.get() for value in values] == ["a.npy", "b.npy"]


def test_several_elements_per_function_and_captured_datasets(threads: Any) -> None:
    _, coordinator = threads
    data = coordinator.create_shared_dataset(Dataset.range(7), per_closure=3)
    assert len(data) == 3
    values = [
        coordinator.schedule(lambda: [int(x) for x in data])  # type: ignore[attr-defined]
        for _ in range(3)
    ]
    assert [value.get() for value in values] == [[0, 1, 2], [3, 4, 5], [6]]


def test_two_datasets_end_with_the_shorter_one(threads: Any) -> None:
    """The function that finds one of them at its end is not scheduled, and gets no element of the other."""
    _, coordinator = threads
    long = coordinator.create_shared_dataset(Dataset.range(5))
    short = coordinator.create_shared_dataset(Dataset.range(10, 12))
    values = []
    with pytest.raises(EndOfData):
        while True:
            values.append(
                coordinator.schedule(lambda a, b: (int(next(a)), int(next(b))), args=(long, short))
            )
    assert [value.get() for value in values] == [(0, 10), (1, 11)]
    assert int(coordinator.schedule(take, args=(long,)).get()) == 2


def test_a_function_that_reads_too_much_or_too_little(threads: Any) -> None:
    """Too much: StopIteration, as at the end of any iterator. Too little: the ledger says which."""
    _, coordinator = threads
    data = coordinator.create_shared_dataset(Dataset.range(4))
    coordinator.schedule(lambda it: None, args=(data,)).get()
    assert [(lost.first, lost.stop) for lost in data.ledger.lost] == [(0, 1)]
    value = coordinator.schedule(lambda it: [next(it), next(it)], args=(data,))
    with pytest.raises(Exception, match="per_closure"):
        value.get(timeout_s=LIMIT_S)
    assert [(lost.first, lost.stop) for lost in data.ledger.lost] == [(0, 2)]


@pytest.mark.parametrize("again", [False, True])
def test_a_failed_function_loses_its_elements_or_repeats_them(
    threads: Any, gate: Gate, tmp_path: Path, again: bool
) -> None:
    """Functions that were cancelled before they ran give their elements back in both cases."""
    _, coordinator = threads

    def fail_at_first(path: str, also: str, batches: Any) -> int:
        got = int(next(batches))
        pass_gate(path if got == 0 else also)
        if got == 0:
            raise ValueError("bad row")
        return got

    data = coordinator.create_shared_dataset(Dataset.range(40), at_least_once=again)
    with Gate(tmp_path / "others") as others:
        args = (gate.path, others.path, data)
        values = [coordinator.schedule(fail_at_first, args=args) for _ in range(40)]
        gate.wait_for_arrival()
        others.wait_for_arrival()
        gate.open()
        wait_until(lambda: coordinator.errors)
        others.open()
        with pytest.raises(ValueError, match="bad row"):
            coordinator.join(timeout_s=LIMIT_S)
    found = []
    for value in values:
        try:
            found.append(value.get())
        except (ClosureCancelled, ValueError):
            pass
    assert 0 < len(found) < 39
    found += [int(value.get(timeout_s=LIMIT_S)) for value in schedule_epoch(coordinator, data)]
    ledger = data.ledger
    assert sorted(found) == list(range(0 if again else 1, 40))
    told, other = (ledger.repeated, ledger.lost) if again else (ledger.lost, ledger.repeated)
    assert [(one.epoch, one.first, one.stop) for one in told] == [(0, 0, 1)]
    assert not other
    assert ledger.rows_trained == len(found)


def test_cancelled_functions_give_their_elements_back(threads: Any, gate: Gate) -> None:
    _, coordinator = threads

    def wait_first(path: str, batches: Any) -> int:
        pass_gate(path)
        return int(next(batches))

    data = coordinator.create_shared_dataset(Dataset.range(100))
    values = [coordinator.schedule(wait_first, args=(gate.path, data)) for _ in range(50)]
    gate.wait_for_arrival()
    coordinator.cancel()
    gate.open()
    coordinator.join(timeout_s=LIMIT_S)
    found = []
    for value in values:
        try:
            found.append(value.get())
        except ClosureCancelled:
            pass
    assert 0 < len(found) < 50
    found += [int(value.get()) for value in schedule_epoch(coordinator, data)]
    assert sorted(found) == list(range(100))


def test_a_position_of_another_dataset_or_a_busy_one_is_refused(threads: Any, gate: Gate) -> None:
    _, coordinator = threads
    data = coordinator.create_shared_dataset(Dataset.range(4))
    other = coordinator.create_shared_dataset(Dataset.range(4).batch(2))
    with pytest.raises(ValueError, match="same dataset"):
        data.load_state_dict(other.state_dict())
    value = coordinator.schedule(lambda path, it: pass_gate(path), args=(gate.path, data))
    with pytest.raises(MisuseError, match="join"):
        data.load_state_dict(data.state_dict())
    gate.open()
    value.get(timeout_s=LIMIT_S)


def test_wrong_arguments(threads: Any) -> None:
    _, coordinator = threads
    loader = torch.utils.data.DataLoader(Squares(), 2)
    with pytest.raises(DataError, match="its own order"):
        coordinator.create_shared_dataset(loader)
    with pytest.raises(ValueError, match="per_closure=0"):
        coordinator.create_shared_dataset(Dataset.range(3), per_closure=0)
    with pytest.raises(TypeError, match="is not a dataset"):
        coordinator.create_shared_dataset(3)
    with pytest.raises(NotImplementedError, match="scheduled function"):
        next(coordinator.create_shared_dataset(Dataset.range(3)))


@pytest.mark.parametrize("quiet", [True, False])
def test_a_checkpoint_continues_with_another_number_of_workers(tmp_path: Path, quiet: bool) -> None:
    """Issue 14, point 2. Exactly once after a quiet save; otherwise rows of running steps may be lost, by name."""
    rows = 600
    write_files(tmp_path / "data", rows=rows, files=3, group=40)

    def run(workers: int, steps: int | None) -> tuple[torch.Tensor, Any]:
        with sg.LocalCluster(workers=workers, ps=2, in_process=True) as cluster:
            strategy = sg.ParameterServerStrategy(cluster.resolver)
            with strategy, sg.ClusterCoordinator(strategy) as coordinator:
                counts, step = counting_step(strategy, rows)
                data = coordinator.create_shared_dataset(dataset_of(tmp_path / "data"))
                checkpoint = sg.Checkpoint(counts=counts, data=data)
                with sg.CheckpointManager(checkpoint, tmp_path / "saved") as manager:
                    manager.restore_or_initialize()
                    if steps is None:
                        list(strategy.run_steps(step, data))
                    else:
                        for _ in range(steps):
                            coordinator.schedule(lambda it: step(next(it)), args=(data,))
                        manager.save(steps, quiet=quiet, wait=True)
                        coordinator.cancel()
                    coordinator.join(timeout_s=LIMIT_S)
                    return counts.read_value().clone(), data.ledger

    run(3, 40)
    counts, ledger = run(1, None)
    if quiet:
        assert counts.tolist() == [1.0] * rows
        assert not ledger.lost
        assert ledger.rows_trained == rows
    else:
        lost = sum(one.stop - one.first for one in ledger.lost)
        assert counts.max() == 1.0, "a row was trained twice"
        assert int((counts == 0).sum()) <= 8 * lost
        assert lost <= 3 * 64, "steps that no worker had received are lost"
    assert not ledger.repeated


# ------------------------------------------------------------------ processes


@pytest.mark.process
def test_one_epoch_over_files_with_a_slow_worker_and_a_killed_one(
    tmp_path: Path, gate: Gate
) -> None:
    """Issue 17, point 2: every row once, although one worker hangs behind and one is killed while it trains."""
    rows = 2000
    write_files(tmp_path / "data", rows=rows, files=4, group=100)
    with sg.LocalCluster(workers=3, ps=2) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy, sg.ClusterCoordinator(strategy, options=QUICK) as coordinator:
            counts, count = counting_step(strategy, rows)
            slow = gate.path

            def step(batch: Any) -> int:
                if sg.get_current_worker_index() == 0:
                    pass_gate(slow)
                return count(batch)

            data = coordinator.create_shared_dataset(
                lambda: dataset_of(tmp_path / "data", batch_size=20)
            )
            wait_until(lambda: len([w for w in coordinator.workers if w.connected]) == 3)

            def disturb() -> None:
                wait_until(lambda: data.ledger.rows_trained >= 200)
                cluster.kill_worker(1)
                wait_until(lambda: data.ledger.rows_trained >= 400)
                gate.open()

            thread = threading.Thread(target=disturb)
            thread.start()
            sizes = list(strategy.run_steps(step, data))
            thread.join()
            assert sum(sizes) == rows
            assert counts.read_value().tolist() == [1.0] * rows
            ledger = data.ledger
            assert (ledger.rows_trained, ledger.lost, ledger.repeated) == (rows, (), ())
            assert sum(one.stop - one.first for one in ledger.trained) == len(data)
            wait_until(lambda: coordinator.workers[1].incarnation == 2)  # it was killed


@pytest.mark.process
@pytest.mark.parametrize("kill", ["step:40", pytest.param("unnoted:5", marks=pytest.mark.slow)])
def test_a_killed_coordinator_continues_the_epoch(tmp_path: Path, kill: str) -> None:
    """Issue 14, point 2, with ``job=``: each row counts once, wherever the coordinator was killed."""
    rows = 640
    write_files(tmp_path / "data", rows=rows, files=4, group=50)
    with sg.LocalCluster(workers=2, ps=2) as cluster:
        spec = json.dumps(cluster.cluster_spec.as_dict())
        arguments = [spec, cluster._key, str(tmp_path / "data"), str(rows), kill]
        ended = run_program(
            [sys.executable, str(SCRIPT), *arguments],
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        result = train_epoch(cluster.resolver, tmp_path / "data", rows)
    assert result.counts.tolist() == [1.0] * rows
    assert not result.ledger.lost
    assert not result.ledger.repeated


def random_kills(tmp_path: Path, seed: int, kills: int) -> None:
    """Train one epoch while workers are killed, join and leave at random; count every row."""
    chance = random.Random(seed)
    rows = 3000
    write_files(tmp_path / "data", rows=rows, files=3, group=chance.choice([40, 120, 700]))
    with sg.LocalCluster(workers=2, ps=2) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        options = ClusterOptions(**{**vars(QUICK), "poison_limit": 1000})
        with strategy, sg.ClusterCoordinator(strategy, options=options) as coordinator:
            counts, step = counting_step(strategy, rows)
            data = coordinator.create_shared_dataset(
                dataset_of(tmp_path / "data", batch_size=chance.choice([3, 8])),
                interleave=chance.choice([1, 3, 8]),
            )
            at = sorted(chance.randrange(rows // 2) for _ in range(kills))
            results = strategy.run_steps(step, data)
            trained = done = 0
            for size in results:
                trained += size
                while done < len(at) and trained >= at[done]:
                    done += 1
                    disturb(cluster, chance)
            assert done == kills
            assert trained == rows
            assert counts.read_value().tolist() == [1.0] * rows, f"seed {seed}"
            ledger = data.ledger
            assert (ledger.rows_trained, ledger.lost, ledger.repeated) == (rows, (), ())


def disturb(cluster: sg.LocalCluster, chance: random.Random) -> None:
    """Kill, add or drain a worker."""
    spec = cluster.resolver.cluster_spec()
    workers = spec.task_indices("worker")
    what = chance.choice(["kill", "kill", "add", "drain"])
    if what == "add" and len(workers) < 4:
        cluster.add_worker()
    elif what == "drain" and len(workers) > 1:
        cluster.remove_worker(chance.choice(workers))
    else:
        cluster.kill_worker(chance.choice(workers))


@pytest.mark.slow
def test_every_row_counts_once_with_random_kills(tmp_path: Path) -> None:
    """Issue 14, point 2: property-tested; many seeds in the soak test below."""
    random_kills(tmp_path, seed=1, kills=4)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_every_row_counts_once_with_many_random_kills(tmp_path: Path, seed: int) -> None:
    random_kills(tmp_path, seed, kills=12)
