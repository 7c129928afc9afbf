"""Columnar files that pyarrow and NumPy read: Parquet, Arrow IPC, tables in memory, NumPy arrays.

CSV is in `csv_format.py`, TFRecord in `tfrecord_format.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
from typing_extensions import override

from stratagem._data import batch_rows
from stratagem._data.arrow_columns import ColumnSelection, pyarrow
from stratagem._data.row_ranges import CHUNK_ROWS, ColumnFile, RowRange
from stratagem.errors import ColumnError


@final
class ParquetColumns(ColumnFile):
    """Parquet file; a range is a row group."""

    def __init__(self, path: str, selection: ColumnSelection) -> None:
        super().__init__(path, selection)
        self._metadata = pyarrow().parquet.read_metadata(path)

    def schema(self, files: Sequence[str] = ()) -> Any:
        return self._metadata.schema.to_arrow_schema()

    def ranges(self) -> list[RowRange]:
        kept = self._kept_groups()
        found: list[RowRange] = []
        start = 0
        for group in range(self._metadata.num_row_groups):
            stop = start + self._metadata.row_group(group).num_rows
            if group in kept and stop > start:
                found.append(RowRange(self.path, group, start, stop))
            start = stop
        return found

    def _kept_groups(self) -> set[int]:
        """Return the row groups whose statistics do not exclude all rows."""
        everything = set(range(self._metadata.num_row_groups))
        if self.plan.expression is None or not everything:
            return everything
        arrow = pyarrow()
        fragment = arrow.dataset.ParquetFileFormat().make_fragment(
            self.path, arrow.fs.LocalFileSystem()
        )
        try:
            parts = fragment.split_by_row_group(self.plan.expression)
        except arrow.ArrowException:
            return everything  # a filter that does not fit the types is reported when rows are read
        return {group.id for part in parts for group in part.row_groups}

    def tables(self, rows: RowRange) -> Iterator[Any]:
        arrow = pyarrow()
        with arrow.parquet.ParquetFile(self.path, metadata=self._metadata) as file:
            yield from file.iter_batches(
                CHUNK_ROWS,
                row_groups=[rows.index],
                columns=self.plan.names,
                # Threads read several row groups; columns are read in parallel only where there is one.
                use_threads=rows.stop - rows.start > CHUNK_ROWS,
            )


@final
class IpcColumns(ColumnFile):
    """Arrow IPC file (Feather), mapped into memory; a range is a record batch. A stream file is one range."""

    def schema(self, files: Sequence[str] = ()) -> Any:
        with pyarrow().memory_map(self.path) as source:
            return self._reader(source).schema

    def _reader(self, source: Any, names: Sequence[str] | None = None) -> Any:
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

    def ranges(self) -> list[RowRange]:
        arrow = pyarrow()
        with arrow.memory_map(self.path) as source:
            reader = self._reader(source, self.plan.names[:1])
            if isinstance(reader, arrow.RecordBatchStreamReader):
                return [RowRange(self.path, 0, 0, sum(len(batch) for batch in reader))]
            sizes = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
        bounds = np.cumsum([0, *sizes]).tolist()
        return [
            RowRange(self.path, i, bounds[i], bounds[i + 1]) for i, size in enumerate(sizes) if size
        ]

    def tables(self, rows: RowRange) -> Iterator[Any]:
        arrow = pyarrow()
        with arrow.memory_map(self.path) as source:
            reader = self._reader(source, self.plan.names)
            is_stream = isinstance(reader, arrow.RecordBatchStreamReader)
            for batch in reader if is_stream else [reader.get_batch(rows.index)]:
                for start in range(0, len(batch), CHUNK_ROWS):
                    yield batch.slice(start, CHUNK_ROWS)


IN_MEMORY = "<table in memory>"
"""Stands for the path of a table in memory."""


@final
class TableColumns(ColumnFile):
    """Arrow table in memory; a range is a slice."""

    def __init__(self, path: str, selection: ColumnSelection, table: Any) -> None:
        super().__init__(path, selection)
        self._table = table

    def schema(self, files: Sequence[str] = ()) -> Any:
        return self._table.schema

    def ranges(self) -> list[RowRange]:
        return sliced(self.path, len(self._table))

    def tables(self, rows: RowRange) -> Iterator[Any]:
        yield self._table.select(self.plan.names).slice(rows.start, rows.stop - rows.start)


def sliced(path: str, rows: int) -> list[RowRange]:
    """Return ranges of `CHUNK_ROWS` rows."""
    starts = range(0, rows, CHUNK_ROWS)
    return [
        RowRange(path, index, start, min(rows, start + CHUNK_ROWS))
        for index, start in enumerate(starts)
    ]


SINGLE = "<array>"
"""Name of the array of an ``.npy`` file."""


@final
class NumpyColumns(ColumnFile):
    """NumPy file: one array (``.npy``, mapped into memory), or arrays by name (``.npz``); a range is a slice."""

    def __init__(self, path: str, selection: ColumnSelection) -> None:
        super().__init__(path, selection)
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        self._is_single = isinstance(loaded, np.ndarray)
        if self._is_single:
            self._arrays: dict[str, Any] = {SINGLE: loaded}
            self._others: list[str] = []
        else:
            with loaded:
                read = selection.read(loaded.files)
                self._arrays = {name: loaded[name] for name in loaded.files if name in read}
                self._others = [name for name in loaded.files if name not in read]
        self._rows = 0
        if self._arrays:
            self._rows = batch_rows.count_rows(self._arrays, what=f"file {path!r}")

    def schema(self, files: Sequence[str] = ()) -> Any:
        arrow = pyarrow()
        fields = [(name, self._column(name, 0, 0).type) for name in self._arrays]
        return arrow.schema([*fields, *((name, arrow.null()) for name in self._others)])

    def ranges(self) -> list[RowRange]:
        return sliced(self.path, self._rows)

    def tables(self, rows: RowRange) -> Iterator[Any]:
        names = self.plan.names
        columns = [self._column(name, rows.start, rows.stop) for name in names]
        yield pyarrow().record_batch(columns, names)

    def _column(self, name: str, start: int, stop: int) -> Any:
        """Return rows of an array as an Arrow column; further dimensions become lists of a fixed size."""
        arrow = pyarrow()
        array = self._arrays[name]
        try:
            native = array[start:stop].astype(array.dtype.newbyteorder("="), copy=False)
            column = arrow.array(native.reshape(-1))
            for size in array.shape[:0:-1]:
                column = arrow.FixedSizeListArray.from_arrays(column, size)
        except arrow.ArrowException as error:
            raise ColumnError(
                f"array {name!r} of file {self.path!r} ({array.dtype} of row shape {array.shape[1:]}) cannot become "
                f"a column: {error}. Leave it out of columns=, or save it in another type.",
                path=self.path,
                column=name,
            ) from error
        return column

    @override
    def batches(self, rows: RowRange) -> Iterator[Any]:
        for batch in super().batches(rows):
            yield batch[SINGLE] if self._is_single else batch
