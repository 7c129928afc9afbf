"""CSV files as columns: pyarrow parses blocks of lines.

The first block of the first file decides the types that the user did not give, for all files. A range is some
megabytes of whole lines. A compressed file, or one with line breaks inside quotes, is one range.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from stratagem._data.arrow_columns import (
    ColumnPlan,
    ColumnSelection,
    arrow_type,
    column_error,
    pyarrow,
)
from stratagem._data.row_ranges import ColumnFile, RowRange, reading
from stratagem.errors import ColumnError

_RANGE_BYTES = 8 << 20  # bytes of a range: about 30,000 rows of 40 columns
_SAMPLE_BYTES = 1 << 20  # bytes that decide the types
_BLOCK_BYTES = 1 << 17  # bytes that pyarrow parses at a time: they stay in the cache
_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
_MISSING = ["", "NA", "N/A", "null", "NULL", "None"]  # mean a missing number; text stays as it is


@final
@dataclass(frozen=True)
class CsvOptions:
    """Form of CSV files.

    Attributes:
        delimiter: character between fields.
        column_names: names of the columns, for files without a header line.
        newlines_in_values: whether quoted values may hold line breaks.
    """

    delimiter: str
    column_names: Sequence[str] | None
    newlines_in_values: bool


@final
class CsvColumns(ColumnFile):
    """CSV file."""

    def __init__(self, path: str, selection: ColumnSelection, options: CsvOptions) -> None:
        super().__init__(path, selection)
        self._options = options
        self._header_lines = 1 if options.column_names is None else 0
        # A compressed file, or one with line breaks in values, can only be read from its beginning.
        self._is_whole = options.newlines_in_values or path.endswith(_COMPRESSED)

    @cached_property
    def _header(self) -> list[str]:
        """Names of the columns."""
        if self._options.column_names is not None:
            return list(self._options.column_names)
        with (
            pyarrow().input_stream(self.path) as raw,
            io.TextIOWrapper(raw, "utf-8-sig", newline="") as text,
        ):
            names = next(csv.reader(text, delimiter=self._options.delimiter), None)
        if names is None:
            raise ValueError("the file is empty; expected a header line, or give column_names=")
        return names

    def schema(self, files: Sequence[str] = ()) -> Any:
        """Return the types in the first lines of the first file that has any, or that the user gave."""
        arrow = pyarrow()
        types = arrow.types
        for path in files or [self.path]:
            with reading(path):
                schema, has_rows = CsvColumns(path, self.selection, self._options)._sample()
            if has_rows:
                break
        found = {field.name: field.type for field in schema}
        for name, kind in found.items():
            if name in self.selection.dtypes:
                found[name] = arrow_type(self.selection.dtypes[name])
            elif name in self.selection.hash_buckets or types.is_temporal(kind):
                found[name] = arrow.string()
            elif types.is_floating(kind) or types.is_null(kind):
                found[name] = arrow.float32()
        return arrow.schema(list(found.items()))

    def _sample(self) -> tuple[Any, bool]:
        """Return the schema of the first block of lines, and whether there is a line."""
        with self._open({}, _SAMPLE_BYTES) as reader:
            return reader.schema, any(batch.num_rows for batch in reader)

    @override
    def check(self, plan: ColumnPlan) -> None:
        for name in plan.names:
            if name not in self._header:
                raise ColumnError(
                    f"column {name!r} does not exist in file {self.path!r}. Its columns are "
                    f"{', '.join(map(repr, self._header[:40]))}.",
                    path=self.path,
                    column=name,
                )

    def ranges(self) -> list[RowRange]:
        size = Path(self.path).stat().st_size
        if self._is_whole:
            return [RowRange(self.path, 0, 0, size, "bytes")]
        found: list[RowRange] = []
        with Path(self.path).open("rb") as file:
            for _ in range(self._header_lines):
                file.readline()
            start = file.tell()
            while start < size:
                file.seek(min(size, start + _RANGE_BYTES))
                file.readline()  # to the end of a line
                found.append(RowRange(self.path, len(found), start, file.tell(), "bytes"))
                start = file.tell()
        return found

    def tables(self, rows: RowRange) -> Iterator[Any]:
        if self._is_whole:
            with self._open(self.plan.types, _RANGE_BYTES) as reader:
                for batch in reader:
                    yield self._with_missing_text(batch)
            return
        with Path(self.path).open("rb") as file:
            file.seek(rows.start)
            data = file.read(rows.stop - rows.start)
        try:
            table = self._parse(data, self.plan.types, _BLOCK_BYTES)
        except pyarrow().ArrowInvalid:
            table = self._parse_long(data)
        yield self._with_missing_text(table)

    def _with_missing_text(self, table: Any) -> Any:
        """Return lines in which an empty text is a missing value if there is a fill value for it."""
        compute = pyarrow().compute
        for place, name in enumerate(table.schema.names):
            column = table.column(place)
            if name in self.selection.fill and column.type == pyarrow().string():
                given = compute.if_else(compute.equal(column, ""), None, column)
                table = table.set_column(place, name, given)
        return table

    def _open(self, types: Mapping[str, Any], block: int) -> Any:
        return pyarrow().csv.open_csv(
            self.path, *self._arguments(types, block, skip=self._header_lines)
        )

    def _parse(self, data: bytes, types: Mapping[str, Any], block: int) -> Any:
        arrow = pyarrow()
        return arrow.csv.read_csv(arrow.BufferReader(data), *self._arguments(types, block, skip=0))

    def _arguments(self, types: Mapping[str, Any], block: int, *, skip: int) -> list[Any]:
        """Return options for pyarrow; with types it converts these columns only."""
        csv_options = pyarrow().csv
        return [
            csv_options.ReadOptions(
                use_threads=False, block_size=block, column_names=self._header, skip_rows=skip
            ),
            csv_options.ParseOptions(
                delimiter=self._options.delimiter,
                newlines_in_values=self._options.newlines_in_values,
            ),
            csv_options.ConvertOptions(
                column_types=dict(types) or None,
                include_columns=list(types) or None,
                null_values=_MISSING,
                strings_can_be_null=False,
                quoted_strings_can_be_null=False,
            ),
        ]

    def _parse_long(self, data: bytes) -> Any:
        """Parse lines that may be longer than a block; name the column that cannot be converted."""
        arrow = pyarrow()
        block = len(data) + 1
        try:
            return self._parse(data, self.plan.types, block)
        except arrow.ArrowInvalid:
            for name, kind in self.plan.types.items():
                try:
                    self._parse(data, {name: kind}, block)
                except arrow.ArrowInvalid as error:
                    self._parse(
                        data, {name: arrow.string()}, block
                    )  # raises if the lines are broken
                    problem = f"has a value that is not {kind}: {error}"
                    advice = f"Give dtypes={{{name!r}: …}} for another type, or repair the file."
                    raise column_error(name, self.path, f"{problem}. {advice}") from error
            raise
