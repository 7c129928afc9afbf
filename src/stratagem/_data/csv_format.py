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

from stratagem._data.arrow_columns import ColumnPlan, ColumnSelection, arrow_type, pyarrow
from stratagem._data.row_ranges import ColumnFile, ColumnFormat, RowRange, reading
from stratagem.errors import ColumnError

_RANGE_BYTES = 8 << 20  # bytes of a range: about 30,000 rows of 40 columns
_SAMPLE_BYTES = 1 << 20  # bytes that decide the types
_BLOCK_BYTES = 1 << 17  # bytes that pyarrow parses at a time: they stay in the cache
_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
_MISSING = ["", "NA", "N/A", "null", "NULL", "None"]  # mean a missing number; text stays as it is


@final
@dataclass(frozen=True)
class CsvFormat(ColumnFormat):
    """CSV files.

    Attributes:
        selection: options of the user.
        delimiter: character between fields.
        column_names: names of the columns, for files without a header line.
        newlines_in_values: whether quoted values may hold line breaks.
    """

    selection: ColumnSelection
    delimiter: str = ","
    column_names: tuple[str, ...] | None = None
    newlines_in_values: bool = False

    def open(self, path: str, files: Sequence[str]) -> ColumnFile:
        if files[0] not in self._plans:
            self._plans[files[0]] = self._plan(files)
        plan = self._plans[files[0]]
        header = self.header(path)
        for name in plan.names:
            if name not in header:
                raise ColumnError(
                    f"column {name!r} does not exist in file {path!r}. Its columns are "
                    f"{', '.join(map(repr, header[:40]))}.",
                    path=path,
                    column=name,
                )
        return CsvColumns(path, self, plan, header)

    @cached_property
    def _plans(self) -> dict[str, ColumnPlan]:
        return {}

    def header(self, path: str) -> list[str]:
        """Return the names of a file's columns."""
        if self.column_names is not None:
            return list(self.column_names)
        with (
            pyarrow().input_stream(path) as raw,
            io.TextIOWrapper(raw, "utf-8-sig", newline="") as text,
        ):
            names = next(csv.reader(text, delimiter=self.delimiter), None)
        if names is None:
            raise ValueError("the file is empty; expected a header line, or give column_names=")
        return names

    def _sample(self, files: Sequence[str]) -> tuple[Any, str]:
        """Return the schema of the first block of lines, and its file; files without rows have none."""
        schema, path = None, files[0]
        for path in files:
            with reading(path):
                options = self.options(self.header(path), {}, _SAMPLE_BYTES, self.header_lines)
                with pyarrow().csv.open_csv(path, *options) as reader:
                    schema = reader.schema
                    if any(batch.num_rows for batch in reader):
                        return schema, path
        return schema, path

    def _plan(self, files: Sequence[str]) -> ColumnPlan:
        """Return the plan for all files, with types found in the first lines."""
        arrow = pyarrow()
        types = arrow.types
        schema, path = self._sample(files)
        found = {field.name: field.type for field in schema}
        for name, kind in found.items():
            if name in self.selection.dtypes:
                found[name] = arrow_type(self.selection.dtypes[name])
            elif name in self.selection.hash_buckets or types.is_temporal(kind):
                found[name] = arrow.string()
            elif types.is_floating(kind) or types.is_null(kind):
                found[name] = arrow.float32()
        return self.selection.resolve(arrow.schema(list(found.items())), path)

    def options(
        self, names: list[str], types: Mapping[str, Any], block: int, skip: int
    ) -> list[Any]:
        """Return options for pyarrow; with types it converts these columns only."""
        csv_options = pyarrow().csv
        return [
            csv_options.ReadOptions(
                use_threads=False, block_size=block, column_names=names, skip_rows=skip
            ),
            csv_options.ParseOptions(
                delimiter=self.delimiter, newlines_in_values=self.newlines_in_values
            ),
            csv_options.ConvertOptions(
                column_types=dict(types) or None,
                include_columns=list(types) or None,
                null_values=_MISSING,
                strings_can_be_null=False,
                quoted_strings_can_be_null=False,
            ),
        ]

    @property
    def header_lines(self) -> int:
        """Number of header lines of a file."""
        return 1 if self.column_names is None else 0


@final
class CsvColumns(ColumnFile):
    """One CSV file."""

    def __init__(self, path: str, format: CsvFormat, plan: ColumnPlan, header: list[str]) -> None:
        self._path = path
        self._format = format
        self._plan = plan
        self._header = header

    @property
    def _whole(self) -> bool:
        """True if the file can only be read from its beginning."""
        return self._format.newlines_in_values or self._path.endswith(_COMPRESSED)

    def ranges(self) -> list[RowRange]:
        size = Path(self._path).stat().st_size
        if self._whole:
            return [RowRange(self._path, 0, 0, size, "bytes")]
        found: list[RowRange] = []
        with Path(self._path).open("rb") as file:
            for _ in range(self._format.header_lines):
                file.readline()
            start = file.tell()
            while start < size:
                file.seek(min(size, start + _RANGE_BYTES))
                file.readline()  # to the end of a line
                found.append(RowRange(self._path, len(found), start, file.tell(), "bytes"))
                start = file.tell()
        return found

    def read(self, rows: RowRange) -> Iterator[Any]:
        arrow = pyarrow()
        if self._whole:
            skip = self._format.header_lines
            options = self._format.options(self._header, self._plan.types, _RANGE_BYTES, skip)
            with arrow.csv.open_csv(self._path, *options) as reader:
                for batch in reader:
                    yield self._convert(batch)
            return
        with Path(self._path).open("rb") as file:
            file.seek(rows.start)
            data = file.read(rows.stop - rows.start)
        try:
            table = self._parse(data, self._plan.types, _BLOCK_BYTES)
        except arrow.ArrowInvalid:
            table = self._parse_long(data)
        yield self._convert(table)

    def _convert(self, table: Any) -> dict[str, Any]:
        """Return lines as a batch of tensors. An empty text is a missing value if there is a fill value for it."""
        compute = pyarrow().compute
        for place, name in enumerate(table.schema.names):
            column = table.column(place)
            if name in self._plan.selection.fill and column.type == pyarrow().string():
                given = compute.if_else(compute.equal(column, ""), None, column)
                table = table.set_column(place, name, given)
        return self._plan.convert(table, self._path)

    def _parse(self, data: bytes, types: Mapping[str, Any], block: int) -> Any:
        arrow = pyarrow()
        options = self._format.options(self._header, types, block, 0)
        return arrow.csv.read_csv(arrow.BufferReader(data), *options)

    def _parse_long(self, data: bytes) -> Any:
        """Parse lines that may be longer than a block; name the column that cannot be converted."""
        arrow = pyarrow()
        block = len(data) + 1
        try:
            return self._parse(data, self._plan.types, block)
        except arrow.ArrowInvalid:
            # Raises again if the lines themselves are broken.
            text = self._parse(data, dict.fromkeys(self._plan.types, arrow.string()), block)
            for name, kind in self._plan.types.items():
                try:
                    self._parse(data, {name: kind}, block)
                except arrow.ArrowInvalid as error:
                    example = next(
                        value
                        for value in text.column(name).drop_null().unique().to_pylist()
                        if not _converts(value, kind)
                    )
                    raise ColumnError(
                        f"column {name!r} of file {self._path!r}: {example!r:.60} is not {kind}. Give "
                        f"dtypes={{{name!r}: …}} for another type, or repair the file.",
                        path=self._path,
                        column=name,
                    ) from error
            raise


def _converts(value: str, kind: Any) -> bool:
    arrow = pyarrow()
    try:
        arrow.array([value]).cast(kind)
    except arrow.ArrowInvalid:
        return False
    return True
