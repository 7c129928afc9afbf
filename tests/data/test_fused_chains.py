"""In-memory chains by index arithmetic give what the one-by-one cursors give."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem._data.iteration import DatasetIterator, EpochCounter, EpochReader
from stratagem.data import Dataset
from tests.data.pipelines_strategy import pipelines


def run(dataset, *, fuse, passes=2):
    counter = EpochCounter(base_seed=11)
    found = []
    for _ in range(passes):
        iterator = DatasetIterator(EpochReader(counter, dataset.node, fuse=fuse))
        found.append([tuple(leaf.tolist() for leaf in element) for element in iterator])
    return found


@settings(max_examples=300, deadline=None)
@given(pipeline=pipelines(rows_only=True), size=st.integers(1, 5))
def test_fused_and_streamed_elements_are_identical(pipeline, size):
    """Every chain of row-choosing steps, two epochs."""
    name, build = pipeline
    dataset = build()
    if "batch" not in name:
        dataset = dataset.batch(size)
    assert run(dataset, fuse=True) == run(dataset, fuse=False), name


def test_the_chain_is_really_fused():
    """Otherwise the comparison above compares nothing."""
    dataset = (
        Dataset.from_tensor_slices(torch.arange(9))
        .shard(2, 0)
        .shuffle()
        .repeat(2)
        .skip(1)
        .take(5)
        .batch(2)
    )
    for fuse in (True, False):
        assert EpochReader(EpochCounter(), dataset.node, fuse=fuse).cursor.gathers is fuse
    mapped = Dataset.range(4).map(lambda x: x).batch(2)
    assert not EpochReader(EpochCounter(), mapped.node).cursor.gathers


def test_sharding_batches_skips_without_gathering():
    """A worker that keeps every W-th batch does not make the others'."""
    counted = []

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            counted.append(index)
            return index

    from stratagem.data import as_dataset

    share = as_dataset(Rows()).batch(2).shard(3, 1)
    assert [b.tolist() for b in share] == [[2, 3], [8, 9]]
    assert counted == [2, 3, 8, 9]
