"""Source that reads files by ranges of rows, for all columnar datasets.

A `RowRange` is a part of a file that can be read on its own: a Parquet row group, an Arrow record batch, some
megabytes of a CSV file. A `RangeSource` lists its ranges, reads any subset of them, and yields batches of columns in
order. Threads read several ranges at the same time.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final
from zipfile import BadZipFile

from typing_extensions import override

from stratagem._data import batch_rows
from stratagem._data.arrow_columns import ColumnPlan, ColumnSelection
from stratagem._data.background import Pool, wait_for
from stratagem._data.column_cursors import ChunkCursor
from stratagem._data.cursor import Cursor, CursorContext
from stratagem._data.file_source import FileSource
from stratagem._data.node import UNKNOWN
from stratagem._data.sources import Closable
from stratagem.errors import CorruptRecord, DataError, MissingFile

# Rows decoded at a time: 20 MB for 40 columns, and the cost per column is spread.
CHUNK_ROWS = 1 << 16
_MOST_THREADS = 4  # by default; more readers than that outrun a training step


@final
@dataclass(frozen=True)
class RowRange:
    """Rows of one file that can be read on their own.

    A range is plain data: a coordinator sends it to the worker that reads the rows.

    Attributes:
        path: the file.
        index: number of the range in the file, from 0.
        start: first row of the range, or first byte.
        stop: end of the range, exclusive.
        unit: unit of `start` and `stop`; formats without a row index, such as CSV, use bytes.

    Example:
        >>> from stratagem._data.row_ranges import RowRange
        >>> RowRange(path="a.parquet", index=1, start=1000, stop=1500).rows
        500
    """

    path: str
    index: int
    start: int
    stop: int
    unit: Literal["rows", "bytes"] = "rows"

    @property
    def rows(self) -> int | None:
        """Number of rows, before filters; `None` if it is not known before reading."""
        return self.stop - self.start if self.unit == "rows" else None


class ColumnFile(ABC):
    """One file of a columnar format.

    Args:
        path: the file.
        selection: columns that the user asked for.
    """

    plan: ColumnPlan
    """Conversion of its tables to batches; set by `ColumnFormat.open`."""

    def __init__(self, path: str, selection: ColumnSelection) -> None:
        self.path = path
        self.selection = selection

    @abstractmethod
    def schema(self, files: Sequence[str] = ()) -> Any:
        """Return the Arrow schema.

        Args:
            files: all files, if this is the first one and decides for all; it may have no rows.
        """

    def check(self, plan: ColumnPlan) -> None:
        """Raise if the file does not have the columns of the first file."""
        plan.check(self.schema(), self.path)

    @abstractmethod
    def ranges(self) -> list[RowRange]:
        """Return the ranges of the file, in order. Ranges that filters exclude are left out."""

    @abstractmethod
    def tables(self, rows: RowRange) -> Iterator[Any]:
        """Yield the rows of a range as Arrow tables or record batches of any size.

        Different threads may read different ranges at the same time.
        """

    def batches(self, rows: RowRange) -> Iterator[Any]:
        """Yield the rows of a range as batches of tensors of any size."""
        for table in self.tables(rows):
            yield self.plan.convert(table, self.path)


@final
@dataclass(frozen=True)
class ColumnFormat:
    """File format, with the options of the user. Picklable.

    Attributes:
        kind: makes a `ColumnFile` of a path and a selection.
        selection: columns that the user asked for.
        has_row_counts: whether ranges tell their number of rows.
    """

    kind: Callable[[str, ColumnSelection], ColumnFile]
    selection: ColumnSelection
    has_row_counts: bool = True

    def open(self, path: str, files: Sequence[str]) -> ColumnFile:
        """Open one of several files; the columns of the first file decide.

        Raises:
            ColumnError: a column is missing or has another type.
        """
        first = files[0]
        file = self.kind(path, self.selection)
        plan = self._plans.get(first)
        if plan is None:
            like = file if path == first else self.kind(first, self.selection)
            plan = self.selection.resolve(like.schema(files), first)
            self._plans[first] = plan
        if path != first:
            file.check(plan)
        file.plan = plan
        return file

    @cached_property
    def _plans(self) -> dict[str, ColumnPlan]:
        return {}

    @property
    def counts_rows(self) -> bool:
        """True if ranges tell how many rows a batch stream has."""
        return self.has_row_counts and self.selection.filters is None


@final
@dataclass(frozen=True, eq=False)
class RangeSource(FileSource):
    """Batches of columns from files.

    Attributes:
        format: how to read a file.
        batch_size: rows of a batch.
        drop_remainder: whether to drop a last batch with fewer rows.
        threads: number of threads that read; 0 to read in the caller's thread, -1 to choose.
        only: the ranges to read; `None` for all ranges of the files.
        reference: file whose columns all files must have; `None` for the first file.
    """

    format: ColumnFormat
    batch_size: int
    drop_remainder: bool = False
    threads: int = -1
    only: tuple[RowRange, ...] | None = None
    reference: str | None = None

    @property
    @override
    def rows_per_batch(self) -> int | None:
        return self.batch_size

    @property
    @override
    def rows_vary(self) -> bool:
        return not self.drop_remainder

    def open(self, context: CursorContext) -> Cursor:
        return RangesCursor(self, context)

    def open_file(self, path: str) -> ColumnFile:
        """Open one of the files.

        Raises:
            MissingFile: the file does not exist.
            CorruptRecord: the file cannot be read.
        """
        with reading(path):
            # Another worker's file may be on another worker's disk.
            other = self.reference is not None and Path(self.reference).exists()
            files = (str(self.reference), *self.files) if other else self.files
            return self.format.open(path, files)

    def file_ranges(self, path: str) -> tuple[ColumnFile, list[RowRange]]:
        """Return an opened file and its ranges."""
        file = self.open_file(path)
        with reading(path):
            return file, file.ranges()

    @cached_property
    def ranges(self) -> tuple[RowRange, ...]:
        """All ranges that this source reads, in order. Reads the metadata of all files."""
        if self.only is not None:
            return self.only
        return tuple(each for path in self.files for each in self.file_ranges(path)[1])

    @override
    def cardinality(self) -> int:
        if not self.format.counts_rows:
            return UNKNOWN
        rows = sum(each.rows or 0 for each in self.ranges)
        return rows // self.batch_size if self.drop_remainder else -(-rows // self.batch_size)

    def shared(self, workers: int, index: int) -> RangeSource:
        """Return the share of one worker: every n-th file, or ranges of rows if there are too few files."""
        if self.only is not None or len(self.files) < workers:
            return replace(self, only=self.ranges[index::workers])
        reference = self.reference or self.files[0]
        return replace(self, files=self.files[index::workers], reference=reference)

    def with_batches(self, size: int, *, drop_remainder: bool) -> RangeSource:
        """Return the same rows in batches of another size."""
        return replace(self, batch_size=size, drop_remainder=drop_remainder)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn errors of a file into errors that name the file."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise MissingFile(f"file {path!r} does not exist", path=path) from error
    except (OSError, EOFError, ValueError, NotImplementedError, BadZipFile, zlib.error) as error:
        reason = str(error) or type(error).__name__
        raise CorruptRecord(
            f"file {path!r} cannot be read: {reason}", path=path, record=-1
        ) from error


@dataclass
class _OpenRange:
    """Range that is being read.

    Attributes:
        place: section and number of the range, see `RangesCursor`.
        path: the file.
        chunks: chunks of the range.
        rows: rows of the chunks read so far.
        pending: next chunk, if a thread reads it.
    """

    place: tuple[int, int]
    path: str
    chunks: Iterator[Any]
    rows: int = 0
    pending: Future[Any] | None = None

    def read(self) -> Any:
        """Return the next chunk, or `None`."""
        with reading(self.path):
            return next(self.chunks, None)


@final
class RangesCursor(ChunkCursor[RangeSource]):
    """Reads ranges in order, several at the same time, and cuts their rows into batches.

    The position of a chunk is (section, range, row). A section is a file; a source with chosen ranges has only one
    section.
    """

    def __init__(self, node: RangeSource, context: CursorContext) -> None:
        super().__init__(node, context)
        self._start = (0, 0)  # section and range to begin with
        self._upcoming: Iterator[_OpenRange] | None = None
        self._open: deque[_OpenRange] = deque()
        self._threads = default_threads() if node.threads < 0 else node.threads
        self._pool: Pool | None = None

    @property
    def _size(self) -> int:
        return self._node.batch_size

    @property
    @override
    def _drops_remainder(self) -> bool:
        return self._node.drop_remainder

    def _ranges(self) -> Iterator[_OpenRange]:
        node = self._node
        first, number = self._start
        if node.only is not None:
            file: tuple[str, ColumnFile] | None = None
            for place, rows in enumerate(node.only[number:], number):
                if file is None or file[0] != rows.path:
                    file = (rows.path, node.open_file(rows.path))
                yield _OpenRange((0, place), rows.path, file[1].batches(rows))
            return
        for section in range(first, len(node.files)):
            path = node.files[section]
            opened, ranges = node.file_ranges(path)
            for place, rows in enumerate(ranges[number:], number):
                yield _OpenRange((section, place), path, opened.batches(rows))
            number = 0

    def _next_chunk(self) -> tuple[Any, Any, int] | None:
        while self._open_ahead():
            current = self._open[0]
            chunk = self._result(current)
            if chunk is None:
                self._open.popleft()
                continue
            rows = batch_rows.count_rows(chunk, what=f"the columns of file {current.path!r}")
            if rows:
                place = [*current.place, current.rows]
                current.rows += rows
                return place, chunk, rows
        self.close()
        return None

    def _open_ahead(self) -> bool:
        """Open ranges, one more than there are threads; return whether there is one."""
        if self._upcoming is None:
            self._upcoming = self._ranges()
        while len(self._open) <= self._threads and (more := next(self._upcoming, None)):
            self._submit(more)
            self._open.append(more)
        return bool(self._open)

    def _submit(self, opened: _OpenRange) -> None:
        if self._threads:
            if self._pool is None:
                self._pool = Pool(_OpenRange.read, self._threads, "stratagem-read")
            opened.pending = self._pool.submit(opened)

    def _result(self, opened: _OpenRange) -> Any:
        if opened.pending is None:
            return opened.read()
        chunk = wait_for(opened.pending, f"reading file {opened.path!r}")
        if chunk is not None:
            self._submit(opened)  # read the next chunk while this one is used
        return chunk

    @override
    def _go_to(self, place: Any) -> int:
        section, number, row = place
        self._start = (section, number)
        return int(row)

    @override
    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        while self._open:
            chunks = self._open.popleft().chunks
            # A thread that close() did not wait for any longer still runs the generator.
            with contextlib.suppress(ValueError):
                if isinstance(chunks, Closable):
                    chunks.close()


def default_threads() -> int:
    """Return how many threads read ranges unless the user says otherwise."""
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)
