"""Files with columns for several tests, and batches as plain values."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch

from stratagem._data.node import replaced, walk
from stratagem.data import Dataset, Ragged, write_tfrecords


def plain(value):
    """A batch as lists."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray | Ragged) else value


def rows_of(batches):
    """Rows of dict batches, in order, as dicts of plain values."""
    found = []
    for batch in batches:
        columns = plain(batch)
        found += [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
    return found


def ranges_of(dataset):
    """The ranges of rows of a dataset's files, in order."""
    return list(_source(dataset).ranges)


def over(dataset, ranges):
    """The same pipeline over some of its ranges, as a worker reads it."""
    source = _source(dataset)
    return Dataset(replaced(dataset.node, source, replace(source, only=tuple(ranges))))


def _source(dataset):
    return next(node for node in walk(dataset.node) if not node.inputs)


def table_of(rows, start=0):
    numbers = list(range(start, start + rows))
    return pa.table(
        {
            "n": pa.array(numbers, pa.int64()),
            "x": pa.array([i / 4 for i in numbers], pa.float32()),
            "flag": pa.array([i % 3 == 0 for i in numbers], pa.bool_()),
            "name": pa.array([f"name {i % 5}" for i in numbers], pa.string()),
            "tags": pa.array([list(range(i % 4)) for i in numbers], pa.list_(pa.int64())),
        }
    )


FLAT = ["n", "x", "flag", "name"]


def write_parquet(path, table, group=3):
    pq.write_table(table, path, row_group_size=group)
    return path


def write_ipc(path, table, group=3):
    with pa.ipc.new_file(path, table.schema) as file:
        for batch in table.to_batches(max_chunksize=group):
            file.write_batch(batch)
    return path


def write_csv(path, table):
    pa.csv.write_csv(table.select(FLAT), path)
    return path


def write_npz(path, table):
    np.savez(path, **{name: table.column(name).to_numpy() for name in ("n", "x", "flag")})
    return path


def varint(value):
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number, payload):
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def encode_list(values, *, packed=True):
    """A Feature of one of the three kinds, by the types of the values."""
    if values and isinstance(values[0], bytes):
        return field(1, b"".join(field(1, value) for value in values))
    if values and isinstance(values[0], float):
        numbers = [struct.pack("<f", value) for value in values]
        return field(
            2, field(1, b"".join(numbers)) if packed else b"".join(b"\x0d" + n for n in numbers)
        )
    numbers = [varint(value) for value in values]
    if not numbers:
        return field(3, b"")
    return field(
        3, field(1, b"".join(numbers)) if packed else b"".join(b"\x08" + n for n in numbers)
    )


def example(features, *, packed=True):
    """A `tf.train.Example`, encoded by the definition of the format."""
    entries = b"".join(
        field(
            1,
            field(1, name.encode())
            + (b"" if values is None else field(2, encode_list(values, packed=packed))),
        )
        for name, values in features.items()
    )
    return field(1, entries)


def write_examples(path, table):
    records = [
        example(
            {
                "n": [row["n"]],
                "x": [float(row["x"])],
                "flag": [int(row["flag"])],
                "name": [row["name"].encode()],
                "tags": row["tags"],
            }
        )
        for row in table.to_pylist()
    ]
    write_tfrecords(path, records)
    return path


FORMATS = {
    "parquet": (write_parquet, Dataset.from_parquet),
    "arrow": (write_ipc, Dataset.from_arrow),
    "csv": (
        write_csv,
        # pyarrow writes 0.0 as 0: the first rows alone would make x an integer.
        lambda files, **options: Dataset.from_csv(files, dtypes={"x": torch.float32}, **options),
    ),
    "numpy": (write_npz, Dataset.from_numpy),
    "tfrecord": (
        write_examples,
        lambda files, **options: Dataset.from_tfrecord(
            files,
            {"n": torch.int64, "x": torch.float32, "name": str},
            **options,
        ),
    ),
}


def columns_of(kind):
    """Columns that the reader of a format gives by default."""
    return {"parquet": [*FLAT, "tags"], "arrow": [*FLAT, "tags"], "csv": FLAT, "numpy": ["n", "x", "flag"],
            "tfrecord": ["n", "x", "name"]}[kind]  # fmt: skip


def make_files(folder, kind, sizes):
    """Files with numbered rows; returns paths and all rows as dicts."""
    write, _ = FORMATS[kind]
    suffix = {"numpy": "npz"}.get(kind, kind)
    paths, rows, start = [], [], 0
    for number, size in enumerate(sizes):
        table = table_of(size, start)
        paths.append(str(write(folder / f"{number}.{suffix}", table)))
        rows += table.select(columns_of(kind)).to_pylist()
        start += size
    return paths, rows
