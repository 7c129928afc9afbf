"""In-memory chains by index arithmetic give what the one-by-one cursors give."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem._data.iteration import DatasetIterator, EpochCounter, EpochReader
from stratagem._data.node import replaced, walk
from stratagem._data.row_numbers import IndexedSource, RowsCursor
from stratagem._data.sources import IterableNode
from stratagem.data import Dataset
from tests.data.pipelines_strategy import pipelines


def run(node, *, passes=2):
    counter = EpochCounter(base_seed=11)
    found = []
    for _ in range(passes):
        iterator = DatasetIterator(EpochReader(counter, node))
        found.append([tuple(leaf.tolist() for leaf in element) for element in iterator])
    return found


def streamed(node):
    """The same pipeline over lists of the rows, which have no row numbers."""
    for source in [each for each in walk(node) if isinstance(each, IndexedSource)]:
        rows = [source.at(i) for i in range(source.size)]
        node = replaced(node, source, IterableNode(rows))
    return node


@settings(max_examples=300, deadline=None)
@given(pipeline=pipelines(rows_only=True), size=st.integers(1, 5))
def test_fused_and_streamed_elements_are_identical(pipeline, size):
    """Every chain of row-choosing steps, two epochs."""
    name, build = pipeline
    dataset = build()
    if "batch" not in name:
        dataset = dataset.batch(size)
    assert run(dataset.node) == run(streamed(dataset.node)), name


def test_the_chain_is_really_fused():
    """Otherwise the comparison above compares nothing."""
    dataset = (
        Dataset.from_tensor_slices(torch.arange(9)).shard(2, 0).shuffle().repeat(2).skip(1).take(5)
    )
    assert isinstance(EpochReader(EpochCounter(), dataset.node).cursor, RowsCursor)
    assert not isinstance(EpochReader(EpochCounter(), streamed(dataset.node)).cursor, RowsCursor)


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
