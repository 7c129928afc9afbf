"""Workers share a dataset: together they see every row exactly once."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem._data import autoshard
from stratagem._data.distribute import distribute_dataset, distribute_datasets_from_function
from stratagem._data.iteration import DatasetIterator, EpochCounter, EpochReader
from stratagem._data.seeds import fresh_seed
from stratagem._data.transforms import ShardNode
from stratagem.data import SHARD_HINT, AutoShardPolicy, Dataset, DistributeOptions, Options
from tests.data.pipelines_strategy import pipelines

CPU = [torch.device("cpu")]


def worker(dataset, workers, index):
    return distribute_dataset(dataset, CPU, num_input_pipelines=workers, input_pipeline_id=index)


def rows(dataset, workers):
    """Rows each worker sees in one pass."""
    return [
        [value for batch in worker(dataset, workers, i) for value in batch.reshape(-1).tolist()]
        for i in range(workers)
    ]


def seen(dataset, workers):
    """All rows all workers see, sorted."""
    return sorted(itertools.chain(*rows(dataset, workers)))


def with_policy(dataset, policy):
    return dataset.with_options(DistributeOptions(auto_shard_policy=policy))


@pytest.fixture
def files(tmp_path):
    for number in range(5):
        lines = "".join(f"{number * 10 + i}\n" for i in range(3))
        (tmp_path / f"{number}.txt").write_text(lines)
    return str(tmp_path / "*.txt")


def lines(files):
    return Dataset.from_files(files).map(lambda text: int(text))


def test_inp_30_values():
    assert [int(p) for p in AutoShardPolicy] == [-1, 0, 1, 2, 3]


def test_inp_30_data_deals_batches(files):
    dataset = with_policy(Dataset.range(10).batch(2), AutoShardPolicy.DATA)
    assert rows(dataset, 2) == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]


def test_inp_30_file_deals_files(files):
    dataset = with_policy(lines(files).batch(2), AutoShardPolicy.FILE)
    assert rows(dataset, 2) == [[0, 1, 2, 20, 21, 22, 40, 41, 42], [10, 11, 12, 30, 31, 32]]
    listed = Dataset.list_files(files).interleave(Dataset.from_files).map(lambda t: int(t)).batch(2)
    assert seen(with_policy(listed, AutoShardPolicy.FILE), 2) == sorted(
        n * 10 + i for n in range(5) for i in range(3)
    )


def test_inp_30_auto_chooses(files):
    assert (
        autoshard.share(lines(files).node, AutoShardPolicy.AUTO, num_workers=2, index=0).policy
        is AutoShardPolicy.FILE
    )
    for dataset in (
        Dataset.range(4),
        lines(files).take(5),
        lines(files).batch(2, drop_remainder=True),
        Dataset.zip(lines(files), lines(files)),
        lines(files).concatenate(Dataset.range(3)),
    ):
        share = autoshard.share(dataset.node, AutoShardPolicy.AUTO, num_workers=2, index=0)
        assert share.policy is AutoShardPolicy.DATA, dataset


def test_inp_30_off_and_hint(files):
    off = with_policy(Dataset.range(4).batch(2), AutoShardPolicy.OFF)
    assert rows(off, 2) == [[0, 1, 2, 3]] * 2
    hinted = Dataset.range(6).shard(SHARD_HINT, SHARD_HINT).batch(2)
    assert rows(with_policy(hinted, AutoShardPolicy.HINT), 2) == [[0, 2, 4], [1, 3, 5]]
    without = with_policy(Dataset.range(4).batch(2), AutoShardPolicy.HINT)
    assert rows(without, 2) == [[0, 1, 2, 3]] * 2
    assert rows(with_policy(hinted, AutoShardPolicy.HINT), 1) == [[0, 1, 2, 3, 4, 5]]


def test_inp_31_file_without_files():
    dataset = with_policy(Dataset.range(4).batch(2), AutoShardPolicy.FILE)
    with pytest.raises(sg.errors.NotFoundError, match="reads no files"):
        worker(dataset, 2, 0)
    assert rows(dataset, 1) == [[0, 1, 2, 3]]


def test_inp_31_fewer_files_than_workers(files):
    dataset = with_policy(lines(files).batch(2), AutoShardPolicy.FILE)
    with pytest.raises(ValueError, match=r"5 file\(s\) cannot be shared by 6 workers"):
        worker(dataset, 6, 0)
    with pytest.warns(UserWarning, match=r"reads 5 file\(s\), fewer than its 6 workers.*by data"):
        share = worker(lines(files).batch(1), 6, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert seen(lines(files).batch(1), 6) == sorted(
            n * 10 + i for n in range(5) for i in range(3)
        )
    share = iter(share)
    share.close()


def test_files_side_by_side_cannot_be_shared_by_file(files):
    dataset = with_policy(Dataset.zip(lines(files), lines(files)), AutoShardPolicy.FILE)
    with pytest.raises(sg.errors.ShardingError, match="pair wrong rows"):
        worker(dataset, 2, 0)


@settings(max_examples=60, deadline=None)
@given(
    pipeline=pipelines(),
    workers=st.integers(1, 4),
    policy=st.sampled_from([AutoShardPolicy.AUTO, AutoShardPolicy.DATA]),
)
def test_together_the_workers_see_every_row_exactly_once(pipeline, workers, policy):
    """Unseeded shuffles included: each worker draws its own torch seed, yet all agree on the order.

    INP-32 as 13.10 amends it: whole batches are dealt, so no sizes rotate between workers.
    """
    name, build = pipeline
    found = []
    for index in range(workers):
        torch.manual_seed(index)  # workers are different processes
        found.append([x.tolist() for x in worker(with_policy(build(), policy), workers, index)])
    # Elements dealt in turn: reading the shares in turn gives the whole, in order.
    merged = [
        e for row in itertools.zip_longest(*found, fillvalue=None) for e in row if e is not None
    ]
    torch.manual_seed(0)
    seed = fresh_seed() if workers == 1 and build().node.wants_seed else autoshard.SHARED_SEED
    node = with_policy(build(), policy).node
    whole = node if workers == 1 else ShardNode(node, 1, 0)
    reference = DatasetIterator(EpochReader(EpochCounter(base_seed=seed), whole))
    assert merged == [x.tolist() for x in reference], name


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 60),
    batch=st.integers(1, 7),
    workers=st.integers(1, 5),
    epochs=st.integers(1, 3),
)
def test_unseeded_shuffles_shared_by_data_lose_nothing(n, batch, workers, epochs):
    """Every epoch is a partition of the rows, and the epochs' orders differ."""
    dataset = Dataset.range(n).shuffle().batch(batch)
    orders = []
    distributed = []
    for index in range(workers):
        torch.manual_seed(index)
        distributed.append(worker(dataset, workers, index))
    for _ in range(epochs):
        seen = [v for d in distributed for b in d for v in b.tolist()]
        assert sorted(seen) == list(range(n))
        orders.append(seen)
    if n >= 20 and workers > 1:
        assert len({tuple(o) for o in orders}) == epochs


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6), workers=st.integers(1, 4))
def test_files_of_any_size_are_shared_without_loss(tmp_path_factory, sizes, workers):
    folder = tmp_path_factory.mktemp("files")
    expected = []
    for number, size in enumerate(sizes):
        values = [number * 100 + i for i in range(size)]
        (folder / f"{number}.txt").write_text("".join(f"{v}\n" for v in values))
        expected += values
    dataset = lines([folder / f"{i}.txt" for i in range(len(sizes))]).shuffle(3).batch(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # fewer files than workers
        assert seen(dataset, workers) == sorted(expected)


def test_worker_numbers_are_checked():
    with pytest.raises(ValueError, match=r"index=2 of num_workers=2"):
        worker(Dataset.range(3), 2, 2)


def test_options_travel_through_the_pipeline():
    dataset = with_policy(Dataset.range(4), AutoShardPolicy.OFF).batch(2).prefetch(1)
    assert dataset.options.distribute.auto_shard_policy is AutoShardPolicy.OFF
    later = dataset.with_options(Options(distribute=DistributeOptions(auto_shard_policy=2)))
    assert later.options.distribute.auto_shard_policy is AutoShardPolicy.DATA
    with pytest.raises(ValueError, match="auto_shard_policy=9"):
        DistributeOptions(auto_shard_policy=9)
    with pytest.raises(TypeError, match="with_options"):
        dataset.with_options({"auto_shard_policy": 1})


def test_functions_receive_the_context_of_their_pipeline():
    seen = []

    def dataset_fn(context):
        seen.append(
            (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync)
        )
        return Dataset.range(2)

    distribute_datasets_from_function(
        dataset_fn, CPU * 2, num_input_pipelines=3, input_pipeline_id=1
    )
    assert seen == [(3, 1, 6)]
