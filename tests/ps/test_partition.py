"""Partitioners and the arithmetic of shards: PRT-1, PRT-2, PRT-6 … PRT-9."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from orders import tries

import stratagem as sg
from stratagem._ps.partition import Partitioner, ShardLayout, number_of_shards, shard_sizes

F32 = torch.float32
P = sg.partitioners


@pytest.mark.parametrize(
    ("rows", "shards", "sizes"), [(13, 5, [3, 3, 3, 2, 2]), (10, 4, [3, 3, 2, 2]), (4, 4, [1] * 4)]
)
def test_div_rule_gives_first_shards_the_extra_rows(rows, shards, sizes):
    """PRT-2."""
    assert shard_sizes(rows, shards) == sizes


@tries(2000)
@given(st.integers(1, 10_000), st.integers(1, 50))
def test_shards_cover_all_rows_once_and_differ_by_at_most_one(rows, shards):
    """PRT-2 for any numbers."""
    sizes = shard_sizes(rows, shards)
    assert sum(sizes) == rows
    assert len(sizes) == shards
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@tries(2000)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.data())
def test_every_row_is_found_in_its_shard(sizes, data):
    """`cut_sorted` agrees with walking over the shards."""
    layout = ShardLayout(sizes)
    owners = [(shard, local) for shard, size in enumerate(sizes) for local in range(size)]
    ids = sorted(data.draw(st.lists(st.integers(0, layout.rows - 1), max_size=30)))
    pieces = layout.cut_sorted(torch.tensor(ids, dtype=torch.int64))
    for shard, (begin, end) in enumerate(pieces):
        for row in ids[begin:end]:
            assert owners[row] == (shard, row - layout.offsets[shard])
    assert pieces[0][0] == 0
    assert pieces[-1][1] == len(ids)


def test_row_out_of_range_is_named():
    """An id that is no row raises ValueError with the id and the range."""
    layout = ShardLayout(shard_sizes(8, 3))
    layout.check(torch.tensor([], dtype=torch.int64), "w")
    with pytest.raises(ValueError, match=r"row id 8 .*0 <= id < 8"):
        layout.check(torch.tensor([1, 8]), "w")
    with pytest.raises(ValueError, match="row id -1"):
        layout.check(torch.tensor([1, -1]), "w")


def test_fixed_shards_are_never_more_than_rows_and_are_not_checked():
    """PRT-6."""
    assert P.FixedShardsPartitioner(4)(shape=(10, 3), dtype=F32) == [4, 1]
    assert P.FixedShardsPartitioner(4)(shape=(3,), dtype=F32) == [3]
    assert P.FixedShardsPartitioner(0)(shape=(3,), dtype=F32) == [0]
    assert P.FixedShardsPartitioner(-1)(shape=(3,), dtype=F32) == [-1]
    with pytest.raises(IndexError):
        P.FixedShardsPartitioner(2)(shape=(), dtype=F32)


def test_min_size_partitioner_keeps_its_promise():
    """PRT-7: at least the minimum in every shard (TensorFlow's ceil breaks it; 13.1)."""
    assert P.MinSizePartitioner(256 << 10, 100)(shape=(1024, 1024), dtype=F32) == [16, 1]
    assert P.MinSizePartitioner(10, 100)(shape=(6, 1), dtype=F32) == [2, 1]
    assert P.MinSizePartitioner()(shape=(1 << 20, 8), dtype=F32) == [1, 1]
    assert P.MinSizePartitioner(16, 10, bytes_per_string=16)(shape=(6,), dtype=str) == [6]
    assert P.MinSizePartitioner(1, 10)(shape=(6, 0), dtype=F32) == [1, 1]
    for bad in [{"min_shard_bytes": 0}, {"max_shards": 0}, {"bytes_per_string": 0}]:
        with pytest.raises(ValueError, match="at least 1"):
            P.MinSizePartitioner(**bad)


@tries(2000)
@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 5000), st.integers(1, 40))
def test_no_shard_is_smaller_than_the_minimum(rows, columns, minimum, most):
    """PRT-7 for any numbers: only an unsharded variable may be smaller."""
    (shards, _) = P.MinSizePartitioner(minimum, most)(shape=(rows, columns), dtype=F32)
    assert 1 <= shards <= most
    if shards > 1:
        assert min(shard_sizes(rows, shards)) * columns * 4 >= minimum


@pytest.mark.parametrize(
    ("shape", "size", "most", "shards"),
    [
        ((6, 1), 4, None, 6),
        ((6, 1), 4, 2, 2),
        ((6, 1), 9, None, 3),
        ((6, 1), 1024, None, 1),
        ((7, 1), 12, None, 3),
        ((6, 1), 4, 0, 6),
        ((6, 8), 1, None, 6),
    ],
)
def test_max_size_partitioner(shape, size, most, shards):
    """PRT-8."""
    assert P.MaxSizePartitioner(size, most)(shape=shape, dtype=F32) == [shards, 1]


def test_max_size_partitioner_refuses_bad_numbers():
    """PRT-8."""
    for bad in [(0,), (1, -1), (1, None, 0)]:
        with pytest.raises(ValueError, match="at least"):
            P.MaxSizePartitioner(*bad)
    with pytest.raises(ValueError, match="not fully defined"):
        P.MaxSizePartitioner(4)(shape=(None, 2), dtype=F32)


def test_partitioner_base_is_abstract():
    """PRT-9."""
    with pytest.raises(NotImplementedError, match="__call__"):
        Partitioner()(shape=(2,), dtype=F32)


class Says(Partitioner):
    """Answers what it was told."""

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, shape, dtype, axis=0):
        return self.answer


@pytest.mark.parametrize("answer", [None, [], [0, 1], [-1, 1], [2, 2], [1, 3]])
def test_answers_that_are_no_partition_of_the_first_axis_are_refused(answer):
    """PRT-1."""
    with pytest.raises(ValueError, match="only the first axis"):
        number_of_shards(Says(answer), (4, 4), F32)


def test_shards_are_at_most_the_rows_and_scalars_are_never_cut():
    """PRT-1, PRT-2: min(first entry, dim0); rank 0 and no partitioner mean one."""
    assert number_of_shards(Says([9, 1]), (4, 4), F32) == 4
    assert number_of_shards(Says([1, 1]), (4, 4), F32) == 1
    assert number_of_shards(Says([9]), (), F32) == 1
    assert number_of_shards(None, (4,), F32) == 1
    with pytest.raises(ValueError, match="first number is at least 1"):
        number_of_shards(P.FixedShardsPartitioner(3), (0, 2), F32)
