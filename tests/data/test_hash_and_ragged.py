"""`hash_bucket` and `Ragged`."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem._data import nests
from stratagem.data import Dataset, Ragged, hash_bucket

TEXTS = [
    "",
    "a",
    "berlin",
    "exactly8",
    "a text of more than eight bytes",
    "köln",
    "\x00",
    "\x00\x00",
]


@pytest.mark.process
def test_values_are_fixed_for_all_time():
    """Trained embeddings depend on them."""
    assert hash_bucket(TEXTS, 1_000_003).tolist() == KNOWN_TEXTS
    assert hash_bucket(torch.tensor([0, 1, -1, 2**62]), 1_000_003).tolist() == KNOWN_INTEGERS
    assert hash_bucket(TEXTS[:2], 1_000_003, seed=7).tolist() != KNOWN_TEXTS[:2]
    code = f"import stratagem as sg; print(sg.data.hash_bucket({TEXTS!r}, 1_000_003).tolist())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250
    )
    assert done.stdout.strip() == str(KNOWN_TEXTS)


KNOWN_TEXTS = [902558, 873490, 6733, 313397, 118787, 42409, 67639, 914103]
KNOWN_INTEGERS = [902558, 523779, 276927, 781914]


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(max_size=30), max_size=12), buckets=st.integers(1, 2**40))
def test_every_kind_of_input_gives_the_same(texts, buckets):
    expected = (
        torch.cat([hash_bucket([text], buckets) for text in texts])
        if texts
        else torch.empty(0).long()
    )
    assert bool(((expected >= 0) & (expected < buckets)).all())
    if texts:
        assert torch.equal(hash_bucket(texts, buckets), expected)
        assert torch.equal(hash_bucket([text.encode() for text in texts], buckets), expected)
    assert torch.equal(hash_bucket(np.array(texts, dtype=object), buckets), expected)
    array = pa.array(texts, pa.string())
    for column in (
        array,
        array.cast(pa.large_string()),
        array.dictionary_encode(),
        pa.chunked_array([array, array[:0]]),
    ):
        assert torch.equal(hash_bucket(column, buckets), expected)
    assert torch.equal(hash_bucket(array[1:], buckets), expected[1:])


def test_integers_of_every_width_hash_alike():
    values = [0, 5, 100]
    expected = hash_bucket(torch.tensor(values), 1000)
    for dtype in (np.int8, np.uint8, np.int32, np.uint64):
        assert torch.equal(hash_bucket(np.array(values, dtype), 1000), expected)
    assert torch.equal(hash_bucket(pa.array(values, pa.int16()), 1000), expected)
    ragged = hash_bucket(Ragged.from_lists([[0, 5], [], [100]]), 1000)
    assert ragged.tolist() == [expected[:2].tolist(), [], expected[2:].tolist()]
    assert hash_bucket(np.array([["a", "b"], ["c", "d"]]), 9).shape == (2, 2)


def test_buckets_are_evenly_used():
    """50,000 similar names in 100 buckets: no bucket is far from 500."""
    counts = torch.bincount(hash_bucket([f"user_{i}" for i in range(50_000)], 100), minlength=100)
    assert 380 < counts.min() <= counts.max() < 620
    counts = torch.bincount(hash_bucket(torch.arange(50_000), 100), minlength=100)
    assert 380 < counts.min() <= counts.max() < 620


def test_wrong_values_to_hash():
    with pytest.raises(TypeError, match="text, bytes or integers"):
        hash_bucket(torch.ones(2), 5)
    with pytest.raises(TypeError, match="got 3"):
        hash_bucket(np.array(["a", 3], dtype=object), 5)
    with pytest.raises(ValueError, match="are missing"):
        hash_bucket(pa.array(["a", None]), 5)
    with pytest.raises(ValueError, match="num_buckets=0"):
        hash_bucket(["a"], 0)


LISTS = st.lists(st.lists(st.integers(-5, 5), max_size=4), max_size=8)


@settings(max_examples=100, deadline=None)
@given(lists=LISTS, data=st.data())
def test_ragged_behaves_like_a_list_of_lists(lists, data):
    column = Ragged.from_lists(lists)
    assert len(column) == len(lists)
    assert column.tolist() == lists
    values, offsets = column
    assert [values[a:b].tolist() for a, b in itertools.pairwise(offsets)] == lists
    bounds = data.draw(
        st.tuples(*[st.integers(-9, 9) | st.none()] * 2, st.sampled_from([None, 1, 2, -1]))
    )
    if bounds[2] != -1:
        assert column[slice(*bounds)].tolist() == lists[slice(*bounds)]
    if lists:
        picks = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=9))
        assert column.gather(torch.tensor(picks, dtype=torch.int64)).tolist() == [
            lists[i] for i in picks
        ]
        assert column[-1].tolist() == lists[-1]
    assert Ragged.concatenate([column, column[:0], column]).tolist() == lists * 2
    assert nests.from_plain(nests.to_plain({"c": column}))["c"].tolist() == lists


def test_ragged_is_checked():
    with pytest.raises(ValueError, match="offsets of a Ragged must be int64"):
        Ragged(torch.ones(2), torch.tensor([0, 2], dtype=torch.int32))
    with pytest.raises(IndexError, match="row 3 of a Ragged of 1 rows"):
        Ragged.from_lists([[1]])[3]
    assert "1000 rows" in repr(Ragged.from_lists([[1]] * 1000))


def test_ragged_columns_in_row_datasets():
    """A map may make them of anything; later steps keep rows together."""
    table = pa.table({"n": list(range(6))})
    dataset = Dataset.from_arrow(table, batch_size=2).map(
        lambda b: {
            "n": b["n"],
            "upto": Ragged.from_lists([range(int(n)) for n in b["n"]], torch.int64),
        }
    )
    for batch in dataset.shuffle(seed=1).batch(4):
        assert batch["upto"].lengths.tolist() == batch["n"].tolist()
