"""Positions and shares of columnar datasets: exact wherever reading stops and whoever reads."""

from __future__ import annotations

import io
import itertools
import pickle
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem._data import autoshard
from stratagem._data.distribute import distribute_dataset
from stratagem.data import AutoShardPolicy, Dataset, DistributeOptions
from tests.data.columnar_files import (
    FORMATS,
    make_files,
    over,
    plain,
    ranges_of,
    rows_of,
    table_of,
    write_parquet,
)
from tests.data.resuming import resumed_rest


def _noise(batch, rng):
    return {"n": batch["n"], "noise": batch["n"] + torch.randint(0, 9, (), generator=rng.torch)}


STEPS = {
    "batch(3)": lambda d: d.batch(3),
    "batch(7)": lambda d: d.map(lambda b: b).batch(7),
    "batch(4,drop)": lambda d: d.map(lambda b: b).batch(4, drop_remainder=True),
    "shuffle": lambda d: d.shuffle(seed=1),
    "shuffle(1)": lambda d: d.shuffle(1),
    "shuffle(9)": lambda d: d.shuffle(9, seed=2),
    "filter": lambda d: d.filter(lambda b: b["n"] % 3 > 0),
    "map": lambda d: d.map(_noise, seed=3),
    "map_parallel": lambda d: d.map(_noise, 2),
    "take(3)": lambda d: d.take(3),
    "skip(2)": lambda d: d.skip(2),
    "shard": lambda d: d.shard(2, 1),
    "repeat(2)": lambda d: d.repeat(2),
    "cache": lambda d: d.cache(),
    "prefetch": lambda d: d.prefetch(2),
    "concatenate": lambda d: d.concatenate(d),
}


def check_resuming(build, stop):
    rest, resumed = resumed_rest(build, stop, plain)
    assert resumed == rest


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_every_format_resumes_after_every_batch(tmp_path, kind):
    paths, rows = make_files(tmp_path, kind, [7, 0, 9])
    build = lambda: FORMATS[kind][1](paths, batch_size=3)
    for stop in range(len(rows) // 3 + 2):
        check_resuming(build, stop)


@pytest.mark.parametrize("step", sorted(STEPS))
def test_every_step_resumes_after_every_batch(tmp_path, step):
    paths, _ = make_files(tmp_path, "parquet", [11, 8])

    def build():
        return STEPS[step](Dataset.from_parquet(paths, ["n"], 4))

    for stop in range(len(list(build())) + 1):
        check_resuming(build, stop)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=3),
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    batch=st.integers(1, 6),
    threads=st.sampled_from([0, 2]),
    stop=st.integers(0, 12),
)
def test_random_pipelines_resume(tmp_path_factory, steps, sizes, batch, threads, stop):
    paths, _ = make_files(tmp_path_factory.mktemp("files"), "parquet", sizes)

    def build():
        dataset = Dataset.from_parquet(paths, ["n"], batch, num_parallel_reads=threads)
        for step in steps:
            dataset = STEPS[step](dataset)
        return dataset

    check_resuming(build, stop)


def test_a_position_is_small_whatever_the_buffer(tmp_path):
    """A window is read again, not saved: 4 MB of rows are held here."""
    path = write_parquet(tmp_path / "a.parquet", table_of(100_000), group=10_000)
    with iter(Dataset.from_parquet(path, ["n", "x"], 1000).shuffle(50_000)) as iterator:
        for _ in range(60):
            next(iterator)
        buffer = io.BytesIO()
        torch.save(iterator.state_dict(), buffer)
        assert len(buffer.getvalue()) < 20_000


def test_rows_read_ahead_are_saved_without_their_chunk(tmp_path):
    """A batch is a view of a chunk of rows; the position must not hold the whole chunk."""
    path = write_parquet(tmp_path / "a.parquet", table_of(60_000), group=60_000)
    with iter(Dataset.from_parquet(path, ["n"], 10).prefetch(2)) as iterator:
        next(iterator)
        buffer = io.BytesIO()
        torch.save(iterator.state_dict(), buffer)
    assert len(buffer.getvalue()) < 20_000


def test_the_number_of_threads_may_change_between_saving_and_resuming(tmp_path):
    paths, _ = make_files(tmp_path, "parquet", [20, 20])
    with iter(Dataset.from_parquet(paths, ["n"], 3, num_parallel_reads=3)) as iterator:
        for _ in range(5):
            next(iterator)
        state = iterator.state_dict()
        rest = [plain(x) for x in iterator]
    with iter(Dataset.from_parquet(paths, ["n"], 3, num_parallel_reads=0)) as resumed:
        resumed.load_state_dict(state)
        assert [plain(x) for x in resumed] == rest


def reader_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("stratagem-read")]


def test_reader_threads_end_with_the_iterator(tmp_path):
    paths, _ = make_files(tmp_path, "parquet", [20, 20])
    iterator = iter(Dataset.from_parquet(paths, ["n"], 3, num_parallel_reads=2))
    next(iterator)
    assert reader_threads()
    iterator.close()
    assert not reader_threads()
    iterator = iter(Dataset.from_parquet(paths, ["n"], 3, num_parallel_reads=2))
    list(iterator)
    assert not reader_threads()
    iterator = iter(Dataset.from_parquet(paths, ["n"], 3, num_parallel_reads=2))
    next(iterator)
    del iterator
    assert not reader_threads()


def test_ranges_are_read_at_the_same_time(tmp_path, monkeypatch):
    """Two ranges meet at a barrier: impossible one after the other."""
    from stratagem._data.column_formats import ParquetColumns

    barrier = threading.Barrier(2, timeout=50)
    tables = ParquetColumns.tables

    def meet(self, rows):
        barrier.wait()
        yield from tables(self, rows)

    monkeypatch.setattr(ParquetColumns, "tables", meet)
    path = write_parquet(tmp_path / "a.parquet", table_of(12), group=3)
    assert len(rows_of(Dataset.from_parquet(path, ["n"], 5, num_parallel_reads=2))) == 12


# --- ranges and shares ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_ranges_are_row_groups_and_can_be_read_anywhere(tmp_path, kind):
    paths, rows = make_files(tmp_path, kind, [7, 0, 5])
    dataset = FORMATS[kind][1](paths, batch_size=2)
    ranges = ranges_of(dataset)
    assert [(r.path, r.index, r.start, r.stop) for r in ranges] == [
        (paths[0], 0, 0, 3),
        (paths[0], 1, 3, 6),
        (paths[0], 2, 6, 7),
        (paths[2], 0, 0, 3),
        (paths[2], 1, 3, 5),
    ]
    assert sum(r.rows for r in ranges) == len(rows)
    # As a ledger would lease them: in any order, one by one, in another process.
    leased = [pickle.loads(pickle.dumps(r)) for r in reversed(ranges)]
    found = [row for r in leased for row in rows_of(over(dataset, [r]))]
    assert sorted(row["n"] for row in found) == [row["n"] for row in rows]
    assert rows_of(over(dataset, ranges[1:4])) == rows[3:10]
    mapped = dataset.map(lambda b: {"n": b["n"] + 1}).filter(lambda b: b["n"] > 0).shuffle(4)
    part = [row["n"] - 1 for row in rows_of(over(mapped, ranges[1:4]))]
    assert sorted(part) == list(range(3, 10))
    assert list(over(dataset, [])) == []


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_ranges_of_every_format_cover_all_rows_once(tmp_path, kind):
    paths, rows = make_files(tmp_path, kind, [7, 5])
    dataset = FORMATS[kind][1](paths, batch_size=2)
    found = [row for r in ranges_of(dataset) for row in rows_of(over(dataset, [r]))]
    assert found == rows


def test_positions_among_chosen_ranges(tmp_path):
    paths, _ = make_files(tmp_path, "parquet", [7, 5])
    dataset = Dataset.from_parquet(paths, ["n"], 2)
    chosen = [ranges_of(dataset)[i] for i in (3, 0, 2)]
    build = lambda: over(dataset, chosen)
    assert [row["n"] for row in rows_of(build())] == [7, 8, 9, 0, 1, 2, 6]
    for stop in range(5):
        check_resuming(build, stop)


def worker(dataset, workers, index):
    cpu = [torch.device("cpu")]
    return distribute_dataset(dataset, cpu, num_input_pipelines=workers, input_pipeline_id=index)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 14), min_size=1, max_size=5),
    workers=st.integers(1, 4),
    policy=st.sampled_from([AutoShardPolicy.AUTO, AutoShardPolicy.DATA]),
    steps=st.lists(st.sampled_from(["shuffle", "shuffle(9)", "filter", "batch(3)"]), max_size=2),
)
def test_together_the_workers_see_every_row_once(tmp_path_factory, sizes, workers, policy, steps):
    """By file, by ranges where files are too few, or by batches; without a warning."""
    paths, _ = make_files(tmp_path_factory.mktemp("files"), "parquet", sizes)
    dataset = Dataset.from_parquet(paths, ["n"], 4)
    for step in steps:
        dataset = STEPS[step](dataset)
    dataset = dataset.with_options(DistributeOptions(auto_shard_policy=policy))
    shares = []
    for index in range(workers):
        torch.manual_seed(index)
        shares.append([row["n"] for row in rows_of(worker(dataset, workers, index))])
    expected = [n for n in range(sum(sizes)) if "filter" not in steps or n % 3]
    assert sorted(itertools.chain(*shares)) == expected


def test_auto_shares_by_file_then_by_range(tmp_path):
    paths, _ = make_files(tmp_path, "parquet", [6, 6, 6])
    dataset = Dataset.from_parquet(paths, ["n"], 3)
    by_file = [[row["n"] for row in rows_of(worker(dataset, 3, i))] for i in range(3)]
    assert by_file == [list(range(6)), list(range(6, 12)), list(range(12, 18))]
    by_range = [[row["n"] for row in rows_of(worker(dataset, 4, i))] for i in range(4)]
    assert by_range == [[0, 1, 2, 12, 13, 14], [3, 4, 5, 15, 16, 17], [6, 7, 8], [9, 10, 11]]
    listed = over(dataset, ranges_of(dataset)[:3])
    assert [[row["n"] for row in rows_of(worker(listed, 2, i))] for i in range(2)] == [
        [0, 1, 2, 6, 7, 8],
        [3, 4, 5],
    ]
    share = autoshard.share(dataset.take(2).node, AutoShardPolicy.AUTO, num_workers=2, index=0)
    assert share.policy is AutoShardPolicy.DATA
    file_policy = dataset.with_options(DistributeOptions(auto_shard_policy=AutoShardPolicy.FILE))
    with pytest.raises(sg.errors.ShardingError, match=r"3 file\(s\) cannot be shared by 4 workers"):
        worker(file_policy, 4, 0)


def test_csv_types_agree_between_workers(tmp_path):
    """The first of all files decides, not the first file of a worker's share."""
    (tmp_path / "0.csv").write_text("x\n0.5\n")
    (tmp_path / "1.csv").write_text("x\n1\n")
    dataset = Dataset.from_csv(str(tmp_path / "*.csv"))
    types = [next(iter(worker(dataset, 2, index)))["x"].dtype for index in range(2)]
    assert types == [torch.float32, torch.float32]
