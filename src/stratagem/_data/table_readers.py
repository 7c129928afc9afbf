"""Readers that yield the rows of tables in files one by one: CSV, NumPy and Parquet.

`from_csv`, `from_numpy` and `from_parquet` read the same files as batches of columns, a hundred times faster. These
readers are for rows that must be handled one by one: they skip single damaged rows, and read `.csv.gz`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import numpy as np
import torch

from stratagem._data import batch_rows
from stratagem._data.readers import Bad, Reader, open_bytes

ColumnType = torch.dtype | Literal["str"]


@final
@dataclass(frozen=True, kw_only=True)
class CsvReader(Reader):
    r"""Reader of CSV: rows as dicts from column name to scalar tensor or `str`.

    The first row decides types that are not given: int64, float32, or text.

    Example:
        >>> import stratagem as sg, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a.csv")
        >>> _ = path.write_text("id,name\n7,ann\n")
        >>> list(sg.data.Dataset.from_files(path, sg.data.CsvReader()))
        [{'id': tensor(7), 'name': 'ann'}]
    """

    columns: Sequence[str] | None = None
    """Names of the columns; by default those of the header line."""
    header: bool = True
    """True if the first line holds names."""
    delimiter: str = ","
    dtypes: Mapping[str, ColumnType] = field(default_factory=dict)
    """Types by column name."""
    select: Sequence[str] | None = None
    """Columns to read; all by default."""

    def records(self, path: str, start: int) -> Iterator[Any]:
        with (
            open_bytes(path) as raw,
            io.TextIOWrapper(raw, "utf-8", errors="surrogateescape", newline="") as text,
        ):
            rows = csv.reader(text, delimiter=self.delimiter)
            first = next(rows, None) if self.header else None
            if self.header and first is None:
                return
            names = list(self.columns or first or ())
            types: dict[str, ColumnType] = dict(self.dtypes)
            for number, values in enumerate(row for row in rows if row):
                names = names or [f"column{i}" for i in range(len(values))]
                if number == 0:
                    self._guess(names, values, types)
                if number >= start:
                    yield self._element(names, values, types)

    @staticmethod
    def _guess(names: Sequence[str], values: Sequence[str], types: dict[str, ColumnType]) -> None:
        for name, value in zip(names, values, strict=False):
            types.setdefault(name, _guess_type(value))

    def _element(
        self, names: Sequence[str], values: Sequence[str], types: Mapping[str, ColumnType]
    ) -> Any:
        if len(values) != len(names):
            return Bad(f"{len(values)} fields instead of {len(names)}")
        element: dict[str, Any] = {}
        for name, value in zip(names, values, strict=True):
            if self.select is not None and name not in self.select:
                continue
            kind = types.get(name, "str")
            try:
                element[name] = _parse(value, kind)
            except ValueError:
                return Bad(f"column {name!r}: {value!r:.60} is not {kind}")
        return element


def _guess_type(value: str) -> ColumnType:
    for convert, dtype in ((int, torch.int64), (float, torch.float32)):
        try:
            convert(value)
        except ValueError:
            continue
        return dtype
    return "str"


def _parse(value: str, kind: ColumnType) -> Any:
    if kind == "str":
        value.encode("utf-8")  # refuse bytes that are not UTF-8; they were read as surrogates
        return value
    if kind.is_floating_point:
        return torch.tensor(float(value), dtype=kind)
    if kind is torch.bool:
        if value.lower() not in ("true", "false", "1", "0"):
            raise ValueError(value)
        return torch.tensor(value.lower() in ("true", "1"))
    return torch.tensor(int(value), dtype=kind)


@final
@dataclass(frozen=True, kw_only=True)
class NumpyReader(Reader):
    """Reader of NumPy files: rows of an ``.npy`` array, or of the arrays of an ``.npz`` file as dicts.

    An ``.npy`` file is mapped into memory, not read whole.

    Example:
        >>> import numpy as np, stratagem as sg, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a.npy")
        >>> np.save(path, np.arange(4).reshape(2, 2))
        >>> list(sg.data.Dataset.from_files(path))
        [tensor([0, 1]), tensor([2, 3])]
    """

    def records(self, path: str, start: int) -> Iterator[Any]:
        try:
            loaded = np.load(path, mmap_mode="r", allow_pickle=False)
            columns = loaded if isinstance(loaded, np.ndarray) else _unpack(loaded)
            rows = batch_rows.count_rows(columns, what=f"file {path!r}")
        except FileNotFoundError:
            raise
        except (ValueError, OSError, EOFError, KeyError) as error:
            yield Bad(f"not a readable NumPy file: {error}")
            return
        for number in range(start, rows):
            yield batch_rows.row(columns, number)


def _unpack(archive: Any) -> dict[str, Any]:
    with archive:
        return {name: archive[name] for name in archive.files}


@final
@dataclass(frozen=True, kw_only=True)
class ParquetReader(Reader):
    """Reader of Parquet: rows as dicts. Needs the extra ``stratagem[parquet]``.

    Example:
        >>> import stratagem as sg
        >>> sg.data.ParquetReader(columns=["user", "item"]).columns
        ['user', 'item']
    """

    columns: Sequence[str] | None = None
    """Columns to read; all by default."""

    def records(self, path: str, start: int) -> Iterator[Any]:
        parquet = _import_parquet()
        with open_bytes(path) as raw:
            try:
                file = parquet.ParquetFile(raw)
            except (ValueError, OSError) as error:
                yield Bad(f"not a readable Parquet file: {error}")
                return
            before = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if before + rows > start:
                    names = None if self.columns is None else list(self.columns)
                    try:
                        table = file.read_row_group(group, columns=names)
                    except (ValueError, OSError) as error:
                        yield from [Bad(f"row group {group}: {error}")] * (
                            before + rows - max(before, start)
                        )
                        before += rows
                        continue
                    yield from _table_rows(table, max(0, start - before))
                before += rows


def _import_parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(
            "reading Parquet files needs pyarrow, which is not installed: "
            "pip install 'stratagem[parquet]'"
        ) from error
    return parquet


def _table_rows(table: Any, start: int) -> Iterator[dict[str, Any]]:
    columns = {name: _arrow_column(table.column(name)) for name in table.column_names}
    for number in range(start, table.num_rows):
        yield {name: values[number] for name, values in columns.items()}


def _arrow_column(column: Any) -> Any:
    """Return a column as a NumPy array of numbers, or as a list of Python values."""
    if column.null_count == 0:
        try:
            return column.combine_chunks().to_numpy(zero_copy_only=False)
        except (ValueError, NotImplementedError):
            pass
    return column.to_pylist()
