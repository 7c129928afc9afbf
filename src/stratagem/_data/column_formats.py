"""Columnar file formats that pyarrow and NumPy read: Parquet, Arrow IPC, tables in memory, NumPy arrays.

CSV is in `csv_format.py`, TFRecord in `tfrecord_format.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from typing_extensions import override

from stratagem._data import batch_rows, nests
from stratagem._data.arrow_columns import ColumnPlan, ColumnSelection, pyarrow
from stratagem._data.hashing import hash_bucket
from stratagem._data.row_ranges import CHUNK_ROWS, ColumnFile, ColumnFormat, RowRange
from stratagem.errors import ColumnError


@dataclass(frozen=True)
class ArrowFormat(ColumnFormat):
    """Format whose files pyarrow reads as tables."""

    selection: ColumnSelection

    @abstractmethod
    def schema(self, path: str) -> Any:
        """Return the schema of a file."""

    def plan(self, path: str, files: Sequence[str]) -> ColumnPlan:
        """Return the plan for the columns of the first file, checked against the file `path`."""
        first = files[0]
        plan = self._plans.get(first)
        if plan is None:
            plan = self._plans[first] = self.selection.resolve(self.schema(first), first)
        if path != first:
            plan.check(self.schema(path), path)
        return plan

    @cached_property
    def _plans(self) -> dict[str, ColumnPlan]:
        return {}

    @property
    @override
    def counts_rows(self) -> bool:
        return self.selection.filters is None


@final
@dataclass(frozen=True)
class ParquetFormat(ArrowFormat):
    """Parquet files; a range is a row group."""

    def schema(self, path: str) -> Any:
        return pyarrow().parquet.read_schema(path)

    def open(self, path: str, files: Sequence[str]) -> ColumnFile:
        return ParquetColumns(path, self.plan(path, files))


@final
class ParquetColumns(ColumnFile):
    """One Parquet file."""

    def __init__(self, path: str, plan: ColumnPlan) -> None:
        self._path = path
        self._plan = plan
        self._metadata = pyarrow().parquet.read_metadata(path)

    def ranges(self) -> list[RowRange]:
        kept = self._kept_groups()
        found: list[RowRange] = []
        start = 0
        for group in range(self._metadata.num_row_groups):
            stop = start + self._metadata.row_group(group).num_rows
            if group in kept and stop > start:
                found.append(RowRange(self._path, group, start, stop))
            start = stop
        return found

    def _kept_groups(self) -> set[int]:
        """Return the row groups whose statistics do not exclude all rows."""
        everything = set(range(self._metadata.num_row_groups))
        if self._plan.expression is None or not everything:
            return everything
        arrow = pyarrow()
        fragment = arrow.dataset.ParquetFileFormat().make_fragment(
            self._path, arrow.fs.LocalFileSystem()
        )
        try:
            parts = fragment.split_by_row_group(self._plan.expression)
        except arrow.ArrowException:
            return everything  # a filter that does not fit the types is reported when rows are read
        return {group.id for part in parts for group in part.row_groups}

    def read(self, rows: RowRange) -> Iterator[Any]:
        arrow = pyarrow()
        with arrow.parquet.ParquetFile(self._path, metadata=self._metadata) as file:
            batches = file.iter_batches(
                CHUNK_ROWS,
                row_groups=[rows.index],
                columns=self._plan.names,
                # Threads read several row groups; columns are read in parallel only where there is one.
                use_threads=rows.stop - rows.start > CHUNK_ROWS,
            )
            for batch in batches:
                yield self._plan.convert(batch, self._path)


@final
@dataclass(frozen=True)
class IpcFormat(ArrowFormat):
    """Arrow IPC files (Feather); a range is a record batch. A stream file is one range."""

    def schema(self, path: str) -> Any:
        with pyarrow().memory_map(path) as source:
            return _ipc_reader(source).schema

    def open(self, path: str, files: Sequence[str]) -> ColumnFile:
        return IpcColumns(path, self.plan(path, files))


def _ipc_reader(source: Any, names: Sequence[str] | None = None) -> Any:
    """Return a reader of some columns, of the file format or else of the stream format."""
    arrow = pyarrow()
    if source.size() == 0:
        raise ValueError("the file is empty; expected an Arrow IPC file")
    try:
        kind = arrow.ipc.open_file
        schema = kind(source).schema
    except arrow.ArrowInvalid:
        kind = arrow.ipc.open_stream
        source.seek(0)
        schema = kind(source).schema
    source.seek(0)
    fields = [schema.get_field_index(name) for name in names or ()]
    # Columns that are left out are not decompressed.
    return kind(source, options=arrow.ipc.IpcReadOptions(included_fields=fields or None))


@final
class IpcColumns(ColumnFile):
    """One Arrow IPC file, mapped into memory."""

    def __init__(self, path: str, plan: ColumnPlan) -> None:
        self._path = path
        self._plan = plan

    def ranges(self) -> list[RowRange]:
        arrow = pyarrow()
        with arrow.memory_map(self._path) as source:
            reader = _ipc_reader(source, self._plan.names[:1])
            if isinstance(reader, arrow.RecordBatchStreamReader):
                return [RowRange(self._path, 0, 0, sum(len(batch) for batch in reader))]
            sizes = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
        bounds = np.cumsum([0, *sizes]).tolist()
        return [
            RowRange(self._path, i, bounds[i], bounds[i + 1])
            for i, size in enumerate(sizes)
            if size
        ]

    def read(self, rows: RowRange) -> Iterator[Any]:
        arrow = pyarrow()
        with arrow.memory_map(self._path) as source:
            reader = _ipc_reader(source, self._plan.names)
            if isinstance(reader, arrow.RecordBatchStreamReader):
                batches = iter(reader)
            else:
                batches = iter([reader.get_batch(rows.index)])
            for batch in batches:
                for start in range(0, len(batch), CHUNK_ROWS):
                    yield self._plan.convert(batch.slice(start, CHUNK_ROWS), self._path)


IN_MEMORY = "<table in memory>"
"""Stands for the path of a table in memory."""


@final
@dataclass(frozen=True)
class TableFormat(ArrowFormat):
    """Arrow table in memory; a range is a slice."""

    table: Any

    def schema(self, path: str) -> Any:
        return self.table.schema

    def open(self, path: str, files: Sequence[str]) -> ColumnFile:
        return TableColumns(self.table, self.plan(path, files))


@final
class TableColumns(ColumnFile):
    """Slices of a table in memory."""

    def __init__(self, table: Any, plan: ColumnPlan) -> None:
        self._table = table
        self._plan = plan

    def ranges(self) -> list[RowRange]:
        return sliced(IN_MEMORY, len(self._table))

    def read(self, rows: RowRange) -> Iterator[Any]:
        piece = self._table.select(self._plan.names).slice(rows.start, rows.stop - rows.start)
        yield self._plan.convert(piece, IN_MEMORY)


def sliced(path: str, rows: int) -> list[RowRange]:
    """Return ranges of `CHUNK_ROWS` rows."""
    starts = range(0, rows, CHUNK_ROWS)
    return [
        RowRange(path, index, start, min(rows, start + CHUNK_ROWS))
        for index, start in enumerate(starts)
    ]


@final
@dataclass(frozen=True)
class NumpyFormat(ColumnFormat):
    """NumPy files: one array (``.npy``), or several arrays by name (``.npz``); a range is a slice."""

    selection: ColumnSelection

    def __post_init__(self) -> None:
        if self.selection.filters is not None or self.selection.fill:
            raise ValueError(
                "filters= and fill= are not available for NumPy files, which have no missing values. Use "
                ".filter(function)."
            )

    def open(self, path: str, files: Sequence[str]) -> ColumnFile:
        first = files[0]
        columns = NumpyColumns(path, self.selection)
        columns.check_options()
        if first not in self._layouts:
            like = columns if path == first else NumpyColumns(first, self.selection)
            self._layouts[first] = like.layout()
        columns.check(self._layouts[first], first)
        return columns

    @cached_property
    def _layouts(self) -> dict[str, dict[str, Any]]:
        return {}

    @property
    @override
    def counts_rows(self) -> bool:
        return True


@final
class NumpyColumns(ColumnFile):
    """One NumPy file; an ``.npy`` file is mapped into memory."""

    def __init__(self, path: str, selection: ColumnSelection) -> None:
        self._path = path
        self._selection = selection
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            self._columns: Any = loaded
        else:
            with loaded:
                self._columns = self._chosen(loaded)
        self._rows = batch_rows.count_rows(self._columns, what=f"file {path!r}")

    def _chosen(self, archive: Any) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        for name, source in self._selection.sources(archive.files).items():
            if not isinstance(source, str):
                raise TypeError("columns= of NumPy files cannot be stacked; save one 2-D array")
            if source not in archive.files:
                raise ColumnError(
                    f"array {source!r} does not exist in file {self._path!r}; it has "
                    f"{', '.join(map(repr, archive.files))}",
                    path=self._path,
                    column=source,
                )
            columns[name] = archive[source]
        return columns

    def check_options(self) -> None:
        """Raise if options name arrays that are not read."""
        read = (
            self._selection.chosen(list(self._columns)) if isinstance(self._columns, dict) else []
        )
        for option in ("dtypes", "hash_buckets"):
            for name in getattr(self._selection, option):
                if name not in read:
                    has = (
                        ", ".join(map(repr, read)) or "one array without a name: use .map(function)"
                    )
                    raise ColumnError(
                        f"{option} names array {name!r}, which is not read from file {self._path!r}; it has {has}",
                        path=self._path,
                        column=name,
                    )

    def layout(self) -> dict[str, Any]:
        """Return type and row shape of the arrays by name."""
        arrays = nests.named_leaves(self._columns)
        return {name: f"{each.dtype} of row shape {each.shape[1:]}" for name, each in arrays}

    def check(self, expected: dict[str, Any], first: str) -> None:
        """Raise if arrays differ from those of the first file in name, type or row shape."""
        own = self.layout()
        for name in {**own, **expected}:
            if own.get(name) != expected.get(name):
                raise ColumnError(
                    f"array {name} of file {self._path!r} is {own.get(name, 'missing')}, but "
                    f"{expected.get(name, 'missing')} in {first!r}",
                    path=self._path,
                    column=name,
                )

    def ranges(self) -> list[RowRange]:
        return sliced(self._path, self._rows)

    def read(self, rows: RowRange) -> Iterator[Any]:
        if not isinstance(self._columns, dict):
            yield self._convert("", np.array(self._columns[rows.start : rows.stop]))
            return
        sources = self._selection.sources(list(self._columns))
        yield {
            name: self._convert(str(sources[name]), np.array(array[rows.start : rows.stop]))
            for name, array in self._columns.items()
        }

    def _convert(self, name: str, array: Any) -> Any:
        """Return rows of an array as a tensor, by the rules for columns of other files."""
        buckets = self._selection.hash_buckets.get(name)
        dtype = self._selection.dtypes.get(name)
        kind = array.dtype.kind
        if buckets is not None:
            if kind not in "USOiub":
                raise self._refused(name, array, "cannot be hashed; expected text or integers")
            return hash_bucket(nests.array_to_tensor(array), buckets)
        if kind in "Mm" and dtype is not None:
            array = array.astype(np.int64)
        elif kind in "Mm" or (kind in "USO" and dtype is not None):
            raise self._refused(name, array, "cannot become a tensor. Convert it, or leave it out")
        if dtype is None:
            if array.dtype.itemsize == 1 or kind != "u":
                return nests.array_to_tensor(array)
            dtype = torch.int32 if array.dtype.itemsize == 2 else torch.int64
        # By way of NumPy, which compares all of its types.
        tensor = nests.array_to_tensor(array).to(dtype)
        if not dtype.is_floating_point and not np.array_equal(tensor.numpy(), array):
            raise self._refused(name, array, f"has values that {dtype} cannot hold")
        return tensor

    def _refused(self, name: str, array: Any, reason: str) -> ColumnError:
        return ColumnError(
            f"array {name!r} of file {self._path!r} ({array.dtype}) {reason}.",
            path=self._path,
            column=name,
        )
