"""Datasets of Ray Data as input, in one process and shared by workers."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import police
import pytest
import torch
from ray_nodes import RayNodes, ray_nodes
from waiting import wait_until

import stratagem as sg
from stratagem._data.ray_share_server import RayShareServer
from stratagem._data.ray_source import RayDataNode
from stratagem.errors import DataError, ShardingError

ROWS = 5000


class FakeDataset:
    """The part of a Ray dataset that is used."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def iter_batches(self, **_: Any) -> list[Any]:
        return self._batches


def test_workers_take_part_in_the_present_epoch_until_they_have_finished_it() -> None:
    """A worker that is late, or new, joins the epoch that runs; the first that has finished begins the next one."""
    server = RayShareServer(FakeDataset([{"number": 0}, {"number": 1}]))
    assert server.next(-1) == (0, {"number": 0}, True)
    assert server.next(-1) == (0, {"number": 1}, True)
    assert server.next(-1) == (0, None, True)  # one worker has seen the end
    assert server.next(-1) == (0, None, True)  # and another one
    assert server.next(0) == (1, {"number": 0}, True)
    assert server.next(-1) == (1, {"number": 1}, True)  # a new worker
    assert server.next(0) == (1, None, True)
    assert RayShareServer(FakeDataset([])).next(-1) == (0, None, False)


def test_lists_of_different_lengths_are_refused() -> None:
    """They are no tensor; the error names the column."""
    lists = np.empty(2, dtype=object)
    lists[:] = [np.zeros(1), np.zeros(2)]
    source = FakeDataset([{"id": np.arange(2), "tags": lists}])
    with pytest.raises(DataError, match="column 'tags' of the Ray dataset has lists"):
        list(sg.data.Dataset(RayDataNode(source)))


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes() as made:
        import ray

        ray.data.DataContext.get_current().enable_progress_bars = False
        yield made


@pytest.fixture(scope="module")
def numbers(nodes: RayNodes) -> Any:
    """A Ray dataset with the column "id"."""
    import ray

    return ray.data.range(ROWS)


@pytest.mark.soak
def test_a_ray_dataset_yields_batches_of_columns(numbers: Any) -> None:
    """Numbers become tensors, texts stay; `batch` cuts other batches; a DataIterator is accepted, too."""

    def add(batch: dict[str, Any]) -> dict[str, Any]:
        texts = np.array([f"row {number}" for number in batch["id"]], dtype=object)
        return {"id": batch["id"], "half": batch["id"] * 0.5, "text": texts}

    source = numbers.map_batches(add)
    batches = list(sg.data.as_dataset(source).batch(600))
    assert [len(batch["id"]) for batch in batches] == [600] * 8 + [200]
    assert batches[0]["half"].dtype == torch.float64
    by_id = {int(i): t for b in batches for i, t in zip(b["id"], b["text"], strict=True)}
    assert by_id == {number: f"row {number}" for number in range(ROWS)}
    again = [int(i) for batch in sg.data.as_dataset(source.iterator()) for i in batch["id"]]
    assert sorted(again) == list(range(ROWS))


@pytest.mark.soak
def test_replicas_get_every_row_once(numbers: Any) -> None:
    """INP-1: `distribute_dataset` takes a Ray dataset itself."""
    with sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        parts = [strategy.local_results(b["id"]) for b in strategy.distribute_dataset(numbers)]
    assert sorted(int(i) for batch in parts for part in batch for i in part) == list(range(ROWS))
    assert all(len(batch) == 3 for batch in parts)


def rows_of(it: Iterator[Any]) -> list[int]:
    """Return the rows of the worker's next batch; none at the end."""
    try:
        return [int(i) for i in next(it)["id"]]
    except StopIteration:
        return []


@pytest.mark.soak
def test_workers_share_a_ray_dataset(numbers: Any) -> None:
    """Every row goes to one worker, also when a worker joins later; the actor ends with the iterators."""

    def servers() -> int:
        """Count the actors that share datasets, by the names that Ray gives its processes."""
        names = [Path(f"/proc/{pid}/comm") for pid in os.listdir("/proc") if pid.isdigit()]
        found = 0
        for name in names:
            with contextlib.suppress(OSError):
                shares = name.read_text().startswith("ray::RayShare")
                found += shares and police._is_ours(int(name.parent.name))
        return found

    with (
        sg.LocalCluster(workers=2, ps=1) as cluster,
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
        sg.ClusterCoordinator(strategy) as coordinator,
    ):

        def read(iterators: Any, rows: int, calls: int = 10) -> list[int]:
            """Read at least so many rows; workers without rows return at once and may take many calls."""
            found: list[int] = []
            while len(found) < rows:
                values = [coordinator.schedule(rows_of, args=(iterators,)) for _ in range(calls)]
                found += [row for rows in coordinator.fetch(values) for row in rows]
            return sorted(found)

        def epoch(source: Any) -> list[int]:
            return read(iter(coordinator.create_per_worker_dataset(source)), ROWS)

        kept = iter(coordinator.create_per_worker_dataset(numbers))
        wait_until(lambda: servers() == 1)
        del kept
        assert epoch(numbers) == list(range(ROWS))
        assert epoch(sg.data.as_dataset(numbers).batch(100)) == list(range(ROWS))
        assert epoch(strategy.distribute_dataset(numbers)) == list(range(ROWS))
        endless = sg.data.as_dataset(numbers).repeat().batch(500)
        repeated = read(iter(coordinator.create_per_worker_dataset(endless)), 4 * ROWS)
        counts = torch.bincount(torch.tensor(repeated), minlength=ROWS)
        assert counts.max() - counts.min() <= 3  # each worker has up to 4 batches of 1024 rows
        gc.collect()
        wait_until(lambda: servers() == 0)

        batches = sg.data.as_dataset(numbers).batch(50)
        iterators = iter(coordinator.create_per_worker_dataset(batches))
        first = read(iterators, 200, calls=4)
        cluster.add_worker()
        wait_until(lambda: sum(worker.connected for worker in coordinator.workers) == 3)
        assert sorted(first + read(iterators, ROWS - len(first))) == list(range(ROWS))


@pytest.mark.soak
def test_workers_that_would_each_read_the_dataset_are_refused(numbers: Any) -> None:
    """Its order may differ between two workers, so shares by number would overlap."""
    from stratagem._data.distribute import distribute_dataset

    with pytest.raises(ShardingError, match=r"create_per_worker_dataset\(\)"):
        distribute_dataset(numbers, [torch.device("cpu")], num_input_pipelines=2)
