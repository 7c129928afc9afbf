"""Bad files and wrong options: errors name the file and the column."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest
import torch

import stratagem as sg
from stratagem.data import Dataset, Feature, write_tfrecords
from stratagem.errors import ColumnError, CorruptRecord, MissingFile
from tests.data.columnar_files import (
    example,
    make_files,
    rows_of,
    table_of,
    write_ipc,
    write_parquet,
)


def write(path, columns):
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("threads", [0, 2])
def test_missing_columns(tmp_path, threads):
    path = write(tmp_path / "a.parquet", {"a": [1], "b": [2]})
    with pytest.raises(
        ColumnError, match=r"column 'c' does not exist in file .*a.parquet.* 'a', 'b'"
    ) as caught:
        list(Dataset.from_parquet(path, ["a", "c"], num_parallel_reads=threads))
    assert (caught.value.path, caught.value.column) == (str(path), "c")
    other = write(tmp_path / "b.parquet", {"a": [1]})
    dataset = Dataset.from_parquet([path, other], num_parallel_reads=threads, batch_size=1)
    iterator = iter(dataset)
    with pytest.raises(ColumnError, match=r"column 'b' does not exist in file .*b.parquet"):
        list(iterator)


def test_files_of_different_types(tmp_path):
    files = [write(tmp_path / "a.parquet", {"a": [1]}), write(tmp_path / "b.parquet", {"a": [1.5]})]
    with pytest.raises(
        ColumnError,
        match=r"column 'a' of file .*b.parquet.* has type double, but int64 in the first",
    ):
        list(Dataset.from_parquet(files))
    assert rows_of(Dataset.from_parquet(files, dtypes={"a": torch.float64})) == [
        {"a": 1.0},
        {"a": 1.5},
    ]
    ipc = [
        write_ipc(tmp_path / "a.arrow", pa.table({"a": [1]})),
        write_ipc(tmp_path / "b.arrow", pa.table({"a": ["x"]})),
    ]
    with pytest.raises(ColumnError, match=r"b.arrow.* has type string, but int64"):
        list(Dataset.from_arrow(ipc))
    np.savez(tmp_path / "a.npz", x=np.ones((2, 3)))
    np.savez(tmp_path / "b.npz", x=np.ones((2, 4)))
    with pytest.raises(
        ColumnError, match=r"column 'x' of file .*b.npz' has type .*\[4\], but .*\[3\]"
    ):
        list(Dataset.from_numpy([tmp_path / "a.npz", tmp_path / "b.npz"]))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Dataset.from_parquet, "a.parquet"),
        (Dataset.from_arrow, "a.arrow"),
        (Dataset.from_numpy, "a.npy"),
        (Dataset.from_numpy, "a.npz"),
        (lambda path: Dataset.from_tfrecord(path, {"n": torch.int64}), "a.tfrecord"),
        (Dataset.from_csv, "a.csv.gz"),
    ],
)
def test_corrupt_and_missing_files(tmp_path, make, name):
    path = tmp_path / name
    with pytest.raises(MissingFile, match=name):
        list(make(path))
    path.write_bytes(b"garbage" * 10)
    with pytest.raises(CorruptRecord, match=name) as caught:
        list(make(path))
    assert caught.value.path == str(path)
    if name != "a.tfrecord":
        path.write_bytes(b"")
        with pytest.raises(CorruptRecord, match=name):
            list(make(path))


def test_a_truncated_parquet_file_and_a_broken_row_group(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", table_of(5000), group=1000)
    whole = path.read_bytes()
    path.write_bytes(whole[:-50])
    with pytest.raises(CorruptRecord, match=r"a.parquet"):
        list(Dataset.from_parquet(path))
    broken = bytearray(whole)
    broken[2000:4000] = bytes(2000)
    path.write_bytes(broken)
    with pytest.raises(sg.errors.DataError, match=r"a.parquet"):
        list(Dataset.from_parquet(path))


def test_empty_files(tmp_path):
    """Zero rows are no error; a file without even a header is one."""
    assert (
        list(Dataset.from_parquet(write(tmp_path / "a.parquet", {"a": pa.array([], pa.int64())})))
        == []
    )
    schema = pa.schema([("a", pa.int64())])
    with pq.ParquetWriter(tmp_path / "b.parquet", schema):
        pass  # zero row groups
    assert pq.ParquetFile(tmp_path / "b.parquet").num_row_groups == 0
    assert list(Dataset.from_parquet(tmp_path / "b.parquet")) == []
    assert len(Dataset.from_parquet(tmp_path / "b.parquet")) == 0
    (tmp_path / "a.csv").write_text("x,y\n")
    assert list(Dataset.from_csv(tmp_path / "a.csv")) == []
    (tmp_path / "b.csv").write_text("")
    with pytest.raises(CorruptRecord, match=r"b.csv.* is empty; expected a header line"):
        list(Dataset.from_csv(tmp_path / "b.csv"))
    write_tfrecords(tmp_path / "a.tfrecord", [])
    assert list(Dataset.from_tfrecord(tmp_path / "a.tfrecord", {"n": torch.int64})) == []
    with pytest.raises(MissingFile, match="no file matches"):
        Dataset.from_parquet(str(tmp_path / "*.none"))


def test_types_that_cannot_become_tensors(tmp_path):
    columns = {
        "when": pa.array([0], pa.timestamp("us")),
        "price": pa.array([None], pa.decimal128(5, 2)),
        "pair": pa.array([{"a": 1}]),
        "words": pa.array([["a"]], pa.list_(pa.string())),
        "deep": pa.array([[[1]]]),
    }
    path = write(tmp_path / "a.parquet", columns)
    for name, kind, advice in (
        ("when", r"timestamp\[us\]", "dtypes="),
        ("price", "decimal128", "dtypes="),
        ("pair", "struct", "Leave it out"),
        ("words", "list<", "hash_buckets="),
        ("deep", "list<", "Leave it out"),
    ):
        with pytest.raises(
            ColumnError, match=rf"column '{name}' of file .*a.parquet' has type {kind}.*{advice}"
        ):
            list(Dataset.from_parquet(path, [name]))
    (batch,) = Dataset.from_parquet(path, ["words"], hash_buckets={"words": 10})
    assert batch["words"].tolist() == [[int(sg.data.hash_bucket(["a"], 10))]]


def test_wrong_filters(tmp_path):
    path = write(tmp_path / "a.parquet", {"a": [1], "t": ["x"]})
    with pytest.raises(
        ColumnError, match=r"the filter's column 'z' does not exist in file .*a.parquet"
    ):
        list(Dataset.from_parquet(path, filters=[("z", "=", 1)]))
    with pytest.raises(ValueError, match=r"filter on column 'a': '~' is not an operator"):
        Dataset.from_parquet(path, filters=[("a", "~", 1)])
    with pytest.raises(TypeError, match=r"expected tuples \(column, operator, value\)"):
        Dataset.from_parquet(path, filters=["a > 1"])
    with pytest.raises(TypeError, match=r"expected tuples .* use .filter\(function\)"):
        Dataset.from_parquet(path, filters=pa.compute.field("a") == 1)
    with pytest.raises(ColumnError, match=r"filters=.* do not fit file .*a.parquet"):
        list(Dataset.from_parquet(path, filters=[("t", ">", 3)]))


def test_wrong_options(tmp_path):
    path = write(tmp_path / "a.parquet", {"a": [1], "x": [1.5], "t": ["x"]})
    for option in ("fill", "dtypes", "hash_buckets"):
        value = {"fill": 0, "dtypes": torch.int64, "hash_buckets": 5}[option]
        with pytest.raises(ColumnError, match=rf"{option} names column 'z', which is not read"):
            list(Dataset.from_parquet(path, **{option: {"z": value}}))
    with pytest.raises(TypeError, match=r"unknown option 'filter'; expected columns"):
        Dataset.from_parquet(path, filter=[])
    with pytest.raises(TypeError, match=r"dtypes\['a'\]='int' is not supported"):
        Dataset.from_parquet(path, dtypes={"a": "int"})
    with pytest.raises(ValueError, match=r"hash_buckets\['a'\]=0"):
        Dataset.from_parquet(path, hash_buckets={"a": 0})
    with pytest.raises(
        ColumnError, match=r"column 'x' of file .* has type double, which cannot be hashed"
    ):
        list(Dataset.from_parquet(path, hash_buckets={"x": 5}))
    with pytest.raises(ValueError, match=r"batch_size=0 is out of range"):
        Dataset.from_parquet(path, batch_size=0)
    with pytest.raises(TypeError, match=r"columns='a' must be a list of names"):
        Dataset.from_parquet(path, "a")
    with pytest.raises(
        ColumnError, match=r"cannot be stacked into 'g': 'x' is torch.float64 in file"
    ):
        list(Dataset.from_parquet(path, {"g": ["a", "x"]}))
    with pytest.raises(
        ColumnError, match=r"cannot be stacked into 'g': 't' is not a column of single numbers"
    ):
        list(Dataset.from_parquet(path, {"g": ["a", "t"]}))
    with pytest.raises(ValueError, match="not available for NumPy files"):
        Dataset.from_numpy("a.npz", fill={"x": 1})


def test_broken_csv(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "1,2\n" * 5 + "3\n")
    with pytest.raises(CorruptRecord, match=r"a.csv.* cannot be read: .*Expected 2 columns, got 1"):
        list(Dataset.from_csv(path))
    path.write_text("a,b\n1,2\n3,4\n")
    other = tmp_path / "b.csv"
    other.write_text("a,b\n5,6\n7,oops\n")
    with pytest.raises(
        ColumnError, match=r"column 'b' of file .*b.csv' has a value that is not int64: .*'oops'"
    ) as caught:
        list(Dataset.from_csv([path, other]))
    assert (caught.value.path, caught.value.column) == (str(other), "b")
    gap = tmp_path / "c.csv"
    gap.write_text("a\n1\nNA\n")
    with pytest.raises(ColumnError, match=r"column 'a' of file .*c.csv' has 1 missing value"):
        list(Dataset.from_csv(gap))


def test_broken_examples(tmp_path):
    path = tmp_path / "a.tfrecord"
    good = example({"n": [1]})
    write_tfrecords(path, [good, b"\x0a\x05hello", good])
    with pytest.raises(
        CorruptRecord, match=r"record 1 of file .*a.tfrecord.*not an Example"
    ) as caught:
        list(Dataset.from_tfrecord(path, {"n": torch.int64}))
    assert caught.value.record == 1
    write_tfrecords(path, [good, example({"n": [1.5]})])
    with pytest.raises(
        CorruptRecord, match=r"record 1 .*feature 'n' is a list of float, not of int64"
    ):
        list(Dataset.from_tfrecord(path, {"n": torch.int64}))
    write_tfrecords(path, [good, example({"n": [1, 2]})])
    with pytest.raises(
        CorruptRecord, match=r"record 1 .*feature 'n' has 2 values, not 1.*size=None"
    ):
        list(Dataset.from_tfrecord(path, {"n": torch.int64}))
    write_tfrecords(path, [good, example({"m": [1]})])
    with pytest.raises(ColumnError, match=r"column 'n' .*has 1 missing value"):
        list(Dataset.from_tfrecord(path, {"n": torch.int64}))
    write_tfrecords(path, [b"text"])
    with pytest.raises(CorruptRecord, match=r"record 0"):
        list(Dataset.from_tfrecord(path, {"n": torch.int64}))
    raw = bytearray()
    write_tfrecords(path, [good] * 3)
    raw += path.read_bytes()
    raw[len(raw) // 3 + 14] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptRecord, match=r"record 1 .*checksum of its bytes"):
        list(Dataset.from_tfrecord(path, {"n": torch.int64}))
    with pytest.raises(TypeError, match="a feature of type"):
        Feature("int")


def test_after_an_error_everything_is_released(tmp_path):
    import threading

    paths, _ = make_files(tmp_path, "parquet", [5, 5])
    (tmp_path / "1.parquet").write_bytes(b"no")
    iterator = iter(Dataset.from_parquet(paths, batch_size=2, num_parallel_reads=2))
    with pytest.raises(CorruptRecord):
        list(iterator)
    assert not [t for t in threading.enumerate() if t.name.startswith("stratagem-")]
    with pytest.raises(sg.errors.DataError, match="ended with an error"):
        next(iterator)
