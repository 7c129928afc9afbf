"""Files: formats, positions, damage."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import stratagem as sg
from stratagem.data import (
    Bad,
    CsvReader,
    Dataset,
    LineReader,
    Reader,
    TFRecordReader,
    write_tfrecords,
)


def test_lines(tmp_path):
    (tmp_path / "b.txt").write_text("three\r\nfour")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert list(Dataset.from_files(str(tmp_path / "*.txt"))) == ["one", "two", "three", "four"]
    with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
        file.write("packed\n")
    assert list(Dataset.from_files(tmp_path / "c.txt.gz")) == ["packed"]
    skipped = Dataset.from_files(tmp_path / "a.txt", LineReader(skip_lines=1))
    assert list(skipped) == ["two"]


def test_list_files_is_sorted_and_interleaves(tmp_path):
    for name in "cab":
        (tmp_path / f"{name}.txt").write_text(f"{name}1\n{name}2\n")
    files = Dataset.list_files(str(tmp_path / "*.txt"))
    assert [path[-5] for path in files] == ["a", "b", "c"]
    rows = files.interleave(Dataset.from_files, cycle_length=3)
    assert list(rows) == ["a1", "b1", "c1", "a2", "b2", "c2"]


def test_csv_types_come_from_the_first_row_or_from_the_user(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('id,score,name\n1,0.5,"x, y"\n2,2,z\n')
    first, second = Dataset.from_files(path)
    assert first["id"].dtype is torch.int64
    assert first["score"].dtype is torch.float32
    assert first["name"] == "x, y"
    assert second["score"].item() == 2.0
    chosen = Dataset.from_files(
        path, CsvReader(dtypes={"id": torch.float64, "name": "str"}, select=["id"])
    )
    assert [dict(r) for r in chosen] == [{"id": torch.tensor(1.0)}, {"id": torch.tensor(2.0)}]
    bare = tmp_path / "bare.csv"
    bare.write_text("1;true\n2;false\n")
    reader = CsvReader(header=False, columns=["n", "b"], delimiter=";", dtypes={"b": torch.bool})
    assert [bool(r["b"]) for r in Dataset.from_files(bare, reader)] == [True, False]


def test_numpy_files(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(6).reshape(3, 2))
    assert [x.tolist() for x in Dataset.from_files(tmp_path / "a.npy")] == [[0, 1], [2, 3], [4, 5]]
    np.savez(tmp_path / "b.npz", x=np.arange(2), y=np.ones((2, 3), dtype=np.float32))
    rows = list(Dataset.from_files(tmp_path / "b.npz"))
    assert [int(r["x"]) for r in rows] == [0, 1]
    assert rows[0]["y"].shape == (3,)


def test_parquet_files_by_row_group(tmp_path):
    table = pa.table(
        {"u": list(range(10)), "t": [f"n{i}" for i in range(10)], "v": [[i, i] for i in range(10)]}
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    dataset = Dataset.from_files(tmp_path / "a.parquet")
    rows = list(dataset)
    assert [int(r["u"]) for r in rows] == list(range(10))
    assert rows[4]["t"] == "n4"
    assert rows[4]["v"].tolist() == [4, 4]
    only = Dataset.from_files(tmp_path / "a.parquet", sg.data.ParquetReader(columns=["u"]))
    assert list(next(iter(only))) == ["u"]
    iterator = iter(dataset)
    for _ in range(7):
        next(iterator)
    resumed = iter(Dataset.from_files(tmp_path / "a.parquet"))
    resumed.load_state_dict(iterator.state_dict())
    assert [int(r["u"]) for r in resumed] == [7, 8, 9]


def test_tfrecords_written_by_the_definition_are_read(tmp_path):
    """Bytes laid out by hand, as TensorFlow writes them: length 3, b'abc'."""
    path = tmp_path / "a.tfrecord"
    write_tfrecords(path, [b"abc", b"", b"x" * 5000])
    raw = path.read_bytes()
    assert struct.unpack("<Q", raw[:8]) == (3,)
    assert raw[12:15] == b"abc"
    # Masked CRC-32C of the length 3, computed bit by bit from the definition.
    register = 0xFFFFFFFF
    for byte in raw[:8]:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    crc = register ^ 0xFFFFFFFF
    rotated = ((crc >> 15) | (crc << 17)) & 0xFFFFFFFF
    assert struct.unpack("<I", raw[8:12]) == ((rotated + 0xA282EAD8) & 0xFFFFFFFF,)
    assert list(Dataset.from_files(path)) == [b"abc", b"", b"x" * 5000]


def damaged_record(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_tfrecords(path, [b"first", b"second", b"third"])
    raw = bytearray(path.read_bytes())
    raw[21 + 12] ^= 1  # first byte of the second record
    path.write_bytes(raw)
    return path


def test_a_corrupt_record_names_file_and_record(tmp_path):
    path = damaged_record(tmp_path)
    iterator = iter(Dataset.from_files(path))
    assert next(iterator) == b"first"
    with pytest.raises(
        sg.errors.CorruptRecord, match=r"record 1 of file .*a.tfrecord.*checksum"
    ) as caught:
        next(iterator)
    assert (caught.value.path, caught.value.record) == (str(path), 1)
    with pytest.raises(sg.errors.DataError, match="ended with an error"):
        next(iterator)
    unchecked = Dataset.from_files(path, TFRecordReader(verify=False))
    assert len(list(unchecked)) == 3


def test_skipping_counts_and_reports(tmp_path):
    path = damaged_record(tmp_path)
    dataset = Dataset.from_files([path, tmp_path / "missing.tfrecord"], on_error="skip")
    iterator = iter(dataset)
    with pytest.warns(UserWarning, match=r"2 unreadable record\(s\) or file\(s\) were skipped"):
        assert list(iterator) == [b"first", b"third"]
    assert [(s.record, s.path[-10:]) for s in iterator.skipped] == [
        (1, "a.tfrecord"),
        (-1, "g.tfrecord"),
    ]


@pytest.mark.parametrize("cut", [5, 14, 30])
def test_a_file_that_ends_too_early(tmp_path, cut):
    path = tmp_path / "a.tfrecord"
    write_tfrecords(path, [b"first", b"second"])
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(sg.errors.CorruptRecord, match="the file ends within"):
        list(Dataset.from_files(path))


def test_a_broken_length_ends_the_file(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_tfrecords(path, [b"first", b"second"])
    raw = bytearray(path.read_bytes())
    raw[0] = 200
    path.write_bytes(raw)
    with pytest.raises(sg.errors.CorruptRecord, match="rest is unreadable"):
        list(Dataset.from_files(path))


def test_missing_files(tmp_path):
    with pytest.raises(sg.errors.MissingFile, match="does not exist") as caught:
        list(Dataset.from_files(tmp_path / "none.txt"))
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(sg.errors.MissingFile, match="no file matches"):
        Dataset.from_files(str(tmp_path / "*.txt"))
    with pytest.raises(sg.errors.CorruptRecord, match="cannot be opened"):
        list(Dataset.from_files(tmp_path, "lines"))
    with pytest.raises(ValueError, match="names no file"):
        Dataset.from_files([])


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.csv", b"x,y\n1,2\n3\n5,6\n", "1 fields instead of 2"),
        ("a.csv", b"x,y\n1,2\n3,oops\n5,6\n", "column 'y': 'oops' is not"),
        ("a.csv", b"x,y\na,2\n\xff,3\nb,6\n", "column 'x'"),
        ("a.txt", b"ok\n\xff\xfe\nok\n", "not utf-8"),
    ],
)
def test_damaged_text_is_skipped_by_record(tmp_path, name, content, reason):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(sg.errors.CorruptRecord, match=reason) as caught:
        list(Dataset.from_files(path))
    assert caught.value.record == 1
    iterator = iter(Dataset.from_files(path, on_error="skip"))
    with pytest.warns(UserWarning, match="1 unreadable"):
        assert len(list(iterator)) == 2


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.parquet", "a.csv.gz", "a.txt.gz"])
def test_garbage_instead_of_a_file(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"garbage" * 10)
    with pytest.raises(sg.errors.CorruptRecord, match=name):
        list(Dataset.from_files(path))


def test_positions_in_files_with_skips(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x\n1\nbad\n3\n4\nbad\n6\n")
    build = lambda: Dataset.from_files([path, path], on_error="skip").map(lambda r: r["x"])
    iterator = iter(build())
    first = [int(next(iterator)) for _ in range(3)]
    resumed = iter(build())
    resumed.load_state_dict(iterator.state_dict())
    with pytest.warns(UserWarning, match="skipped"):
        rest = [int(x) for x in resumed]
    assert first + rest == [1, 3, 4, 6, 1, 3, 4, 6]


def test_files_without_a_reader_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"'.bin' have no default reader; give reader= one of"):
        Dataset.from_files(tmp_path / "a.bin")
    with pytest.raises(ValueError, match=r"reader='tsv' is not a reader; expected a Reader"):
        Dataset.from_files(tmp_path / "a.bin", "tsv")


def test_own_readers(tmp_path):
    class Words(Reader):
        def records(self, path, start):
            with open(path) as file:
                for word in file.read().split()[start:]:
                    yield Bad("rude") if word == "damn" else word

    path = tmp_path / "words"
    path.write_text("a b damn c")
    with pytest.raises(sg.errors.CorruptRecord, match=r"record 2 .*rude"):
        list(Dataset.from_files(path, Words()))
    with pytest.raises(ValueError, match="have no default reader"):
        Dataset.from_files(path)
    with pytest.raises(ValueError, match="is not a reader"):
        Dataset.from_files(path, "words")
    with pytest.raises(ValueError, match="on_error"):
        Dataset.from_files(path, Words(), on_error="ignore")


def test_files_are_closed_when_iteration_stops_half_way(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    import os

    def held():
        return [
            f
            for f in os.listdir("/proc/self/fd")
            if os.path.realpath(f"/proc/self/fd/{f}") == str(path)
        ]

    iterator = iter(Dataset.from_files(path))
    next(iterator)
    assert held()
    iterator.close()
    assert not held()
