"""Constructors of `Dataset` for data in memory, generators and files."""

from __future__ import annotations

import builtins
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias, TypedDict

import torch
from typing_extensions import Unpack

from stratagem._data import nests
from stratagem._data.arrow_columns import ColumnSelection
from stratagem._data.column_formats import (
    IN_MEMORY,
    IpcColumns,
    NumpyColumns,
    ParquetColumns,
    TableColumns,
)
from stratagem._data.csv_format import CsvColumns, CsvOptions
from stratagem._data.file_source import FilesNode, ListFilesNode, OnError, expand, reader_for
from stratagem._data.node import Node
from stratagem._data.readers import Reader
from stratagem._data.row_ranges import ColumnFile, ColumnFormat, RangeSource
from stratagem._data.sources import GeneratorNode, IterableNode, RangeNode, SlicesNode
from stratagem._data.tfrecord_format import Feature, TFRecordColumns

Columns: TypeAlias = Sequence[str] | Mapping[str, str | Sequence[str]] | None


class ColumnOptions(TypedDict, total=False):
    """Options of all readers of columns.

    Attributes:
        filters: rows to keep: tuples (column, operator, value) that must all hold, such as
            ``[("day", ">=", 3), ("country", "in", ["de", "pe"])]``; or a list of such lists, of which one must hold.
            Parquet skips row groups whose statistics exclude them.
        fill: replacements for missing values, by column. A missing value in a column without one raises an error.
        dtypes: types to convert to, by column.
        hash_buckets: number of hash buckets for each column of categories; see `hash_bucket`.
        drop_remainder: drop a last batch with fewer rows.
        num_parallel_reads: threads that read ranges of rows; 0 reads in the caller's thread. By default one per
            core, at most 4. The order of the rows does not depend on it.

    Example:
        >>> import stratagem as sg
        >>> options: sg.data.ColumnOptions = {"fill": {"age": 0}, "hash_buckets": {"city": 1000}}
    """

    filters: Sequence[Any] | None
    fill: Mapping[str, Any]
    dtypes: Mapping[str, torch.dtype]
    hash_buckets: Mapping[str, int]
    drop_remainder: bool
    num_parallel_reads: int


def range_source(
    files: tuple[str, ...],
    kind: Callable[[str, ColumnSelection], ColumnFile],
    columns: Columns,
    batch_size: int,
    options: ColumnOptions,
    *,
    has_row_counts: bool = True,
) -> RangeSource:
    """Return the source of batches of columns."""
    unknown = set(options) - ColumnOptions.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"unknown option {min(unknown)!r}; expected columns, batch_size, or one of "
            f"{', '.join(ColumnOptions.__annotations__)}"
        )
    threads = options.get("num_parallel_reads", -1)
    for name, value, least in (("batch_size", batch_size, 1), ("num_parallel_reads", threads, -1)):
        if value < least:
            raise ValueError(f"{name}={value!r} is out of range: expected a number >= {least}")
    names = ("filters", "fill", "dtypes", "hash_buckets")
    chosen: dict[str, Any] = {name: options[name] for name in names if name in options}  # type: ignore[literal-required]
    reader = ColumnFormat(kind, ColumnSelection(columns, **chosen), has_row_counts)
    return RangeSource(files, reader, batch_size, options.get("drop_remainder", False), threads)


class DatasetSources(ABC):
    """Constructors of `Dataset`, and the ranges of rows of its files."""

    node: Node

    @abstractmethod
    def __init__(self, node: Node) -> None: ...

    @classmethod
    def range(cls, *args: int) -> Self:
        """Return a dataset of integers, with the arguments of Python's `range`.

        Example:
            >>> import stratagem as sg
            >>> [int(x) for x in sg.data.Dataset.range(1, 6, 2)]
            [1, 3, 5]
        """
        return cls(RangeNode(builtins.range(*map(operator.index, args))))

    @classmethod
    def from_tensors(cls, tensors: Any) -> Self:
        """Return a dataset with one element, a nest of tensors.

        Example:
            >>> import stratagem as sg
            >>> list(sg.data.Dataset.from_tensors([1, 2]))
            [tensor([1, 2])]
        """
        return cls(IterableNode([nests.to_columns(tensors)]))

    @classmethod
    def from_tensor_slices(cls, tensors: Any) -> Self:
        """Return a dataset of the rows of a nest of arrays, tensors or lists; lists are stacked.

        Example:
            >>> import stratagem as sg
            >>> list(sg.data.Dataset.from_tensor_slices({"x": [1, 2], "y": [3, 4]}))
            [{'x': tensor(1), 'y': tensor(3)}, {'x': tensor(2), 'y': tensor(4)}]
        """
        return cls(SlicesNode.of(tensors))

    @classmethod
    def from_generator(cls, generator: Callable[..., Any], args: tuple[Any, ...] = ()) -> Self:
        """Return a dataset of the items of ``generator(*args)``, which every epoch calls again.

        Example:
            >>> import stratagem as sg
            >>> def squares(n):
            ...     yield from (i * i for i in range(n))
            >>> [int(x) for x in sg.data.Dataset.from_generator(squares, args=(4,))]
            [0, 1, 4, 9]
        """
        return cls(GeneratorNode(generator, tuple(args)))

    @classmethod
    def list_files(cls, patterns: Any) -> Self:
        """Return a dataset of paths; the matches of a pattern are sorted.

        Example:
            >>> import stratagem as sg
            >>> list(sg.data.Dataset.list_files(["b.txt", "a.txt"]))
            ['b.txt', 'a.txt']
        """
        return cls(ListFilesNode(expand(patterns)))

    @classmethod
    def from_files(
        cls, patterns: Any, reader: Reader | str | None = None, *, on_error: OnError = "raise"
    ) -> Self:
        r"""Return a dataset of the records of files, in order.

        Args:
            patterns: a path or pattern, or a list of them.
            reader: a `Reader`, or "lines", "csv", "numpy", "parquet" or "tfrecord"; by default the file names
                decide. For large tables use `from_csv`, `from_numpy` or `from_parquet`, which read columns.
            on_error: "raise", or "skip" to skip unreadable records and files. The iterator's ``skipped``
                lists them, and a warning at the end counts them.

        Example:
            >>> import stratagem as sg, pathlib, tempfile
            >>> path = pathlib.Path(tempfile.mkdtemp(), "a.csv")
            >>> _ = path.write_text("x\n1\nbad\n3\n")
            >>> [int(r["x"]) for r in sg.data.Dataset.from_files(path).take(1)]
            [1]
        """
        paths = expand(patterns)
        return cls(FilesNode(paths, reader_for(reader, paths), on_error))

    @classmethod
    def from_parquet(
        cls,
        files: Any,
        columns: Columns = None,
        batch_size: int = 1024,
        **options: Unpack[ColumnOptions],
    ) -> Self:
        """Return a dataset of batches of columns from Parquet files.

        A batch is a dict of tensors with `batch_size` rows. A column of lists is a `Ragged`, a column of text a
        NumPy array. Needs the extra ``stratagem[parquet]``.

        Args:
            files: a path or pattern, or a list of them.
            columns: columns to read, all by default. A dict names the tensors of the batch: each is one column, or a
                list of columns to stack into one tensor of shape [rows, columns].
            batch_size: number of rows per batch. A batch may hold rows of two files.
            options: see `ColumnOptions`.

        Raises:
            ColumnError: (when read) a column is missing, differs in type between files, has missing values without
                a fill value, or cannot be converted to a tensor.

        Example:
            >>> import pyarrow as pa, pyarrow.parquet, stratagem as sg, pathlib, tempfile
            >>> path = pathlib.Path(tempfile.mkdtemp(), "a.parquet")
            >>> table = pa.table({"x": [1.0, None, 3.0], "y": [4.0, 5.0, 6.0], "click": [0, 1, 1]})
            >>> pa.parquet.write_table(table, path)
            >>> clicks = sg.data.Dataset.from_parquet(
            ...     path, {"dense": ["x", "y"], "label": "click"}, batch_size=2, fill={"x": 0.0}
            ... )
            >>> for batch in clicks:
            ...     print(batch["dense"].tolist(), batch["label"].tolist())
            [[1.0, 4.0], [0.0, 5.0]] [0, 1]
            [[3.0, 6.0]] [1]
        """
        return cls(range_source(expand(files), ParquetColumns, columns, batch_size, options))

    @classmethod
    def from_csv(
        cls,
        files: Any,
        columns: Columns = None,
        batch_size: int = 1024,
        *,
        delimiter: str = ",",
        column_names: Sequence[str] | None = None,
        newlines_in_values: bool = False,
        **options: Unpack[ColumnOptions],
    ) -> Self:
        r"""Return a dataset of batches of columns from CSV files; see `from_parquet`.

        The types that `dtypes` does not give are inferred from the first megabyte of the first file: int64, float32,
        bool or text. Empty fields are missing values, except in text columns, where they are empty strings. Categories are hashed as text.

        Args:
            files: a path or pattern, or a list of them.
            columns: columns to read.
            batch_size: rows of a batch.
            delimiter: character between fields.
            column_names: names of the columns, for files without a header line.
            newlines_in_values: whether quoted values may hold line breaks. Such files are read from their beginning,
                not in ranges.
            options: see `ColumnOptions`.

        Example:
            >>> import stratagem as sg, pathlib, tempfile
            >>> path = pathlib.Path(tempfile.mkdtemp(), "a.csv")
            >>> _ = path.write_text("age,city\n31,lima\n,oslo\n")
            >>> list(sg.data.Dataset.from_csv(path, fill={"age": 0}, hash_buckets={"city": 100}))
            [{'age': tensor([31,  0]), 'city': tensor([50, 48])}]
        """
        form = CsvOptions(delimiter, column_names, newlines_in_values)
        kind = functools.partial(CsvColumns, options=form)
        return cls(
            range_source(expand(files), kind, columns, batch_size, options, has_row_counts=False)
        )

    @classmethod
    def from_arrow(
        cls,
        source: Any,
        columns: Columns = None,
        batch_size: int = 1024,
        **options: Unpack[ColumnOptions],
    ) -> Self:
        """Return a dataset of batches of columns from Arrow IPC (Feather) files, or from a `pyarrow.Table`.

        See `from_parquet`.

        Example:
            >>> import pyarrow as pa, stratagem as sg
            >>> table = pa.table({"tags": [[1, 2], [], [3]]})
            >>> list(sg.data.Dataset.from_arrow(table))
            [{'tags': Ragged([[1, 2], [], [3]])}]
        """
        if nests.is_arrow_table(source):
            kind = functools.partial(TableColumns, table=source)
            return cls(range_source((IN_MEMORY,), kind, columns, batch_size, options))
        return cls(range_source(expand(source), IpcColumns, columns, batch_size, options))

    @classmethod
    def from_numpy(
        cls,
        files: Any,
        columns: Columns = None,
        batch_size: int = 1024,
        **options: Unpack[ColumnOptions],
    ) -> Self:
        """Return a dataset of batches from NumPy files.

        An ``.npy`` file gives tensors, an ``.npz`` file dicts of tensors; see `from_parquet`. For arrays in memory use
        `from_tensor_slices`.

        Example:
            >>> import numpy as np, stratagem as sg, pathlib, tempfile
            >>> path = pathlib.Path(tempfile.mkdtemp(), "a.npy")
            >>> np.save(path, np.arange(6).reshape(3, 2))
            >>> [batch.tolist() for batch in sg.data.Dataset.from_numpy(path, batch_size=2)]
            [[[0, 1], [2, 3]], [[4, 5]]]
        """
        if options.get("fill"):
            raise ValueError(
                "fill= is not available for NumPy files, which have no missing values. Use .map(function)."
            )
        return cls(range_source(expand(files), NumpyColumns, columns, batch_size, options))

    @classmethod
    def from_tfrecord(
        cls,
        files: Any,
        features: Mapping[str, Feature | Any],
        batch_size: int = 1024,
        *,
        columns: Columns = None,
        verify: bool = True,
        **options: Unpack[ColumnOptions],
    ) -> Self:
        r"""Return a dataset of batches of columns from TFRecord files of ``tf.train.Example``.

        TensorFlow is not needed. See `from_parquet`.

        Args:
            files: a path or pattern, or a list of them.
            features: a `Feature`, or only its dtype for a single value, by name.
            batch_size: rows of a batch.
            columns: names in the batch, see `from_parquet`.
            verify: whether to check the checksums of the records.
            options: see `ColumnOptions`.

        Example:
            >>> import stratagem as sg, pathlib, tempfile
            >>> path = pathlib.Path(tempfile.mkdtemp(), "a.tfrecord")
            >>> example = b"\n\x0e\n\x0c\n\x03age\x12\x05\x1a\x03\n\x01\x1f"  # {"age": [31]}
            >>> sg.data.write_tfrecords(path, [example, example])
            >>> list(sg.data.Dataset.from_tfrecord(path, {"age": torch.int64}))
            [{'age': tensor([31, 31])}]
        """
        named = {
            name: each if isinstance(each, Feature) else Feature(each)
            for name, each in features.items()
        }
        kind = functools.partial(TFRecordColumns, features=named, verify=verify)
        return cls(
            range_source(expand(files), kind, columns, batch_size, options, has_row_counts=False)
        )
