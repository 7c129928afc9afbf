"""Row arithmetic against a model: an array to which every block is applied by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem._ps.blocks.block_plan import (
    cut_rows,
    intersect,
    plan_number,
    plan_reads,
    subtract,
)
from stratagem._ps.blocks.manifest import Manifest, StoredBlock, StoredTensor
from stratagem.errors import CheckpointCorrupt

ROWS = 12

ranges = st.lists(st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)), max_size=4).map(
    lambda found: [(min(pair), max(pair)) for pair in found]
)


def rows_of(found: list[tuple[int, int]]) -> set[int]:
    return {row for first, last in found for row in range(first, last)}


@settings(deadline=None)
@given(ranges, st.integers(0, ROWS), st.integers(0, ROWS))
def test_intersect_and_subtract_are_those_of_sets(
    found: list[tuple[int, int]], a: int, b: int
) -> None:
    low, high = min(a, b), max(a, b)
    inside = set(range(low, high))
    assert rows_of(intersect(found, low, high)) == rows_of(found) & inside
    assert rows_of(subtract(found, low, high)) == rows_of(found) - inside


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(0, 300), st.integers(0, 40), st.integers(1, 100))
def test_cuts_cover_all_rows_once_and_stay_within_the_limit(
    start: int, rows: int, row_bytes: int, limit: int
) -> None:
    found = cut_rows(start, rows, row_bytes, limit)
    assert [row for low, high in found for row in range(low, high)] == list(
        range(start, start + rows)
    )
    for low, high in found:
        assert high - low <= 1 or (high - low) * row_bytes <= limit


def manifest_of(blocks: list[StoredBlock]) -> Manifest:
    tensors = {
        "t": StoredTensor("float32", (ROWS, 2)),
        "u": StoredTensor("float32", (ROWS, 2), "t"),
    }
    return Manifest(1, 1, "x", 0.0, tensors, tuple(blocks), {})


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[Manifest], list[dict[int, list[int]]], list[int]]:
    """A full checkpoint cut at random, deltas upon it, and which save holds each row."""
    cuts = sorted(draw(st.sets(st.integers(1, ROWS - 1), max_size=4)))
    edges = [0, *cuts, ROWS]
    saves = [[StoredBlock("t", "f", 0, a, b - a, 0) for a, b in itertools.pairwise(edges)]]
    ids_of: list[dict[int, list[int]]] = [{}]
    owner = [0] * ROWS
    for number in range(1, draw(st.integers(1, 4))):
        touched = sorted(draw(st.sets(st.integers(0, ROWS - 1))))
        blocks, ids = [], {}
        if draw(st.booleans()):
            blocks = [StoredBlock("t", "f", 0, row, 1, 0) for row in touched]
        elif touched:
            blocks = [StoredBlock("t", "f", number, 0, len(touched), 0, 0, 0)]
            ids = {0: touched}
        for row in touched:
            owner[row] = number
        saves.append(blocks)
        ids_of.append(ids)
    return [manifest_of(blocks) for blocks in reversed(saves)], ids_of[::-1], owner


@settings(deadline=None)
@given(chains(), st.integers(0, ROWS), st.integers(0, ROWS), st.sampled_from(["t", "u"]))
def test_each_row_comes_from_the_newest_save_that_has_it(
    made: tuple[list[Manifest], list[dict[int, list[int]]], list[int]], a: int, b: int, name: str
) -> None:
    """Carried out in order, the reads leave in every row the newest save's contents."""
    chain, ids_of, owner = made
    low, high = min(a, b), max(a, b)
    found: dict[int, int] = {}
    for read in plan_reads(chain, name, low, high - low):
        save = len(chain) - 1 - read.depth
        if not read.block.is_scattered:
            has = set(range(read.block.start, read.block.start + read.block.rows))
        else:
            has = set(ids_of[read.depth][0])
        for row in rows_of(list(read.wanted)) & has:
            found[row] = save
    assert found == {row: owner[row] for row in range(low, high)}


def test_rows_in_no_block_are_named() -> None:
    chain = [manifest_of([StoredBlock("t", "f", 0, 0, 4, 0), StoredBlock("t", "f", 0, 6, 6, 0)])]
    with pytest.raises(CheckpointCorrupt, match="rows 4…5 of tensor 't'"):
        plan_reads(chain, "t", 0, ROWS)
    assert len(plan_reads(chain, "t", 6, 6)) == 1


def test_a_number_per_shard_is_found_by_its_rows_or_among_all() -> None:
    shards = [StoredBlock("t", "f", 0, 0, 5, 0), StoredBlock("t", "f", 9, 5, 7, 0)]
    chain = [manifest_of([]), manifest_of(shards)]
    assert plan_number(chain, "t", 5, 7) == [(1, shards[1])]
    assert plan_number(chain, "t", 0, 12) == [(1, shards[0]), (1, shards[1])]
    with pytest.raises(CheckpointCorrupt, match="'missing' is in no block"):
        plan_number(chain, "missing", 0, 1)
