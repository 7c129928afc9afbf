"""Examples in TFRecord files, decoded without TensorFlow, against an encoder written from the format's definition."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem.data import Dataset, Feature, Ragged, write_tfrecords
from tests.data.columnar_files import example, plain


def test_three_kinds_and_three_sizes(tmp_path):
    path = tmp_path / "a.tfrecord"
    records = [
        example({"n": [1], "pair": [0.5, 1.5], "tags": [b"a", b""], "city": [b"lima"]}),
        example({"n": [-(2**63)], "pair": [2.5, -3.5], "tags": [], "city": ["köln".encode()]}),
        example({"n": [2**63 - 1], "pair": [0.0, 1e30], "tags": [b"xyz"], "city": [b"x" * 300]}),
    ]
    write_tfrecords(path, records)
    features = {
        "n": torch.int64,
        "pair": Feature(torch.float32, 2),
        "city": str,
        "tags": Feature(bytes, None),
    }
    (batch,) = Dataset.from_tfrecord(path, features, hash_buckets={"tags": 50})
    assert batch["n"].tolist() == [1, -(2**63), 2**63 - 1]
    assert batch["pair"].shape == (3, 2)
    assert batch["pair"][2, 1].item() == struct.unpack("<f", struct.pack("<f", 1e30))[0]
    assert batch["city"].tolist() == ["lima", "köln", "x" * 300]
    assert isinstance(batch["tags"], Ragged)
    assert batch["tags"].lengths.tolist() == [2, 0, 1]
    (raw,) = Dataset.from_tfrecord(path, {"city": bytes})
    assert raw["city"].tolist()[0] == b"lima"


def test_some_features_are_read(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_tfrecords(path, [example({"a": [1], "b": [1.5, 2.5], "c": [b"t"]})] * 3)
    features = {"a": torch.int64, "b": Feature(torch.float32, None), "c": bytes}
    (batch,) = Dataset.from_tfrecord(path, features)
    assert plain(batch) == {"a": [1] * 3, "b": [[1.5, 2.5]] * 3, "c": [b"t"] * 3}
    (chosen,) = Dataset.from_tfrecord(path, features, columns=["a"])
    assert list(chosen) == ["a"]


def test_missing_features_are_filled(tmp_path):
    path = tmp_path / "a.tfrecord"
    records = [
        example({"a": [1], "t": [b"x"]}),
        example({"a": []}),
        example({}),
        example({"a": None, "t": [b"y"]}),
        b"",
    ]
    write_tfrecords(path, records)
    (batch,) = Dataset.from_tfrecord(path, {"a": torch.int64, "t": str}, fill={"a": -7, "t": "?"})
    assert plain(batch) == {"a": [1, -7, -7, -7, -7], "t": ["x", "?", "?", "y", "?"]}
    (lists,) = Dataset.from_tfrecord(path, {"a": Feature(torch.int64, None)})
    assert plain(lists) == {"a": [[1], [], [], [], []]}


INTEGERS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3)
FLOATS = st.lists(st.floats(width=32, allow_nan=False), max_size=3)
STRINGS = st.lists(st.binary(max_size=9), max_size=3)
LONG_NAME = "a name that is longer than eight bytes"


@st.composite
def records(draw):
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        features = {
            "i": draw(INTEGERS),
            "f": draw(FLOATS),
            LONG_NAME: draw(STRINGS),
            "other": draw(INTEGERS),
        }
        names = draw(st.permutations(sorted(features)))  # a map has no order
        rows.append({name: features[name] for name in names})
    return rows


@settings(max_examples=150, deadline=None)
@given(records=records())
def test_random_examples(tmp_path_factory, records):
    """Any order of names, any number of values."""
    path = tmp_path_factory.mktemp("records") / "a.tfrecord"
    write_tfrecords(path, [example(features) for features in records])
    kinds = {"i": torch.int64, "f": torch.float32, LONG_NAME: bytes}
    features = {name: Feature(kind, None) for name, kind in kinds.items()}
    numbers = {name: features[name] for name in ("i", "f")}
    (batch,) = Dataset.from_tfrecord(path, numbers)
    assert plain(batch) == {name: [row[name] for row in records] for name in numbers}
    (hashed,) = Dataset.from_tfrecord(
        path, features, columns=[LONG_NAME], hash_buckets={LONG_NAME: 1 << 40}
    )
    from stratagem.data import hash_bucket

    expected = [[int(hash_bucket([text], 1 << 40)) for text in row[LONG_NAME]] for row in records]
    assert plain(hashed) == {LONG_NAME: expected}


def test_many_records_over_several_blocks(tmp_path, monkeypatch):
    from stratagem._data import tfrecord_format

    monkeypatch.setattr(tfrecord_format, "_BLOCK_BYTES", 500)
    path = tmp_path / "a.tfrecord"
    values = [i * i * 977 for i in range(300)]
    write_tfrecords(path, [example({"n": [v], "pad": [b"x" * (v % 700)]}) for v in values])
    batches = list(Dataset.from_tfrecord(path, {"n": torch.int64}, 64))
    assert [v for batch in batches for v in batch["n"].tolist()] == values


@pytest.mark.parametrize("cut", range(1, 40))
def test_no_damage_is_read_as_data(tmp_path, cut):
    """Records cut short or changed raise; they never give wrong values or hang."""
    whole = example({"name": [b"abc", b"d"], "n": [1, 300], "x": [0.5, 2.5]})
    path = tmp_path / "a.tfrecord"
    good = {
        "n": Feature(torch.int64, None),
        "x": Feature(torch.float32, None),
        "name": Feature(bytes, None),
    }
    write_tfrecords(path, [whole, whole[:-cut]])
    with pytest.raises(sg.errors.DataError):
        list(Dataset.from_tfrecord(path, good, hash_buckets={"name": 9}))
    changed = bytearray(whole)
    changed[cut % len(whole)] ^= 0x55
    write_tfrecords(path, [whole, bytes(changed)])
    try:
        list(Dataset.from_tfrecord(path, good, hash_buckets={"name": 9}))
    except sg.errors.DataError:
        pass  # most bytes matter for the structure; others are values


@pytest.mark.parametrize("values", [[1, 300], [0.5, 2.5]])
def test_numbers_that_are_not_packed_are_refused(tmp_path, values):
    """No known program writes such Examples."""
    path = tmp_path / "a.tfrecord"
    write_tfrecords(path, [example({"n": values}), example({"n": values}, packed=False)])
    dtype = torch.int64 if values[0] == 1 else torch.float32
    with pytest.raises(sg.errors.CorruptRecord, match=r"record 1 .*'n' is broken, or not packed"):
        list(Dataset.from_tfrecord(path, {"n": Feature(dtype, None)}))
