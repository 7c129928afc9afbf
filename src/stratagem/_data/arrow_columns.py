"""Convert Arrow tables to batches of tensors: selection, filters, missing values, hashing, types.

A `ColumnSelection` holds the user's options. `ColumnSelection.resolve` compares them with the schema of a file and
returns a `ColumnPlan`, which converts tables. Every error names the file and the column.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from stratagem._data.hashing import Hashes, hash_bytes, hash_integers, to_buckets
from stratagem._data.ragged import Ragged
from stratagem.errors import ColumnError

_OPERATORS = ("=", "==", "!=", "<", ">", "<=", ">=", "in", "not in")

_ARROW_NAMES = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "float32",  # converted by torch
    torch.float32: "float32",
    torch.float64: "float64",
}


@functools.cache
def pyarrow() -> Any:
    """Import pyarrow with the modules that the readers use."""
    try:
        import pyarrow as pa
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.dataset
        import pyarrow.fs
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "reading columns from files needs pyarrow, which is not installed: "
            "pip install 'stratagem[parquet]'"
        ) from error
    return pa


def arrow_type(dtype: torch.dtype) -> Any:
    """Return the Arrow type of a torch dtype."""
    return pyarrow().type_for_alias(_ARROW_NAMES[dtype])


@final
@dataclass(frozen=True)
class ColumnSelection:
    """Columns that the user asked for, and how to convert them.

    Attributes:
        columns: names; or a dict from names in the batch to a column, or to a list of columns to stack into
            one tensor; `None` for all columns.
        filters: rows to keep, as tuples (column, operator, value) that must all hold, or a list of such
            lists of which one must hold.
        fill: values for missing values, by column.
        dtypes: types to convert to, by column.
        hash_buckets: numbers of buckets for columns of categories.
    """

    columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None
    filters: Sequence[Any] | None = None
    fill: Mapping[str, Any] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    hash_buckets: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.columns, str):
            raise TypeError(f"columns={self.columns!r} must be a list of names, or a dict")
        for name, dtype in self.dtypes.items():
            if dtype not in _ARROW_NAMES:
                known = ", ".join(str(each).removeprefix("torch.") for each in _ARROW_NAMES)
                raise TypeError(
                    f"dtypes[{name!r}]={dtype!r} is not supported; expected a torch dtype, one of {known}"
                )
        for name, buckets in self.hash_buckets.items():
            if buckets < 1:
                raise ValueError(f"hash_buckets[{name!r}]={buckets!r}: expected an integer >= 1")
        for name, operator, _ in self._conditions():
            if operator not in _OPERATORS:
                raise ValueError(
                    f"filter on column {name!r}: {operator!r} is not an operator; expected one of "
                    f"{', '.join(map(repr, _OPERATORS))}"
                )

    def _conditions(self) -> list[tuple[str, str, Any]]:
        """Return all conditions of the filters."""
        flat: list[Any] = []
        filters = self.filters if self.filters is not None else ()
        for item in filters if isinstance(filters, list | tuple) else (filters,):
            flat.extend(item if isinstance(item, list) else [item])
        for condition in flat:
            if not (isinstance(condition, tuple) and len(condition) == 3):
                raise TypeError(
                    f"filters={self.filters!r:.80}: expected tuples (column, operator, value), or lists "
                    "of such tuples. For other conditions use .filter(function)."
                )
        return flat

    def sources(self, available: Sequence[str]) -> dict[str, str | list[str]]:
        """Return the columns to read for each name in the batch."""
        if self.columns is None:
            return {name: name for name in available}
        if isinstance(self.columns, Mapping):
            return {
                name: source if isinstance(source, str) else list(source)
                for name, source in self.columns.items()
            }
        return {name: name for name in self.columns}

    def chosen(self, available: Sequence[str]) -> list[str]:
        """Return the columns to read, without those of filters."""
        return [name for each in self.sources(available).values() for name in _listed(each)]

    def read(self, available: Sequence[str]) -> list[str]:
        """Return the columns to read, those of filters included."""
        filtered = [name for name, _, _ in self._conditions()]
        return list(dict.fromkeys([*self.chosen(available), *filtered]))

    def resolve(self, schema: Any, path: str) -> ColumnPlan:
        """Return the plan for files of a schema.

        Raises:
            ColumnError: a column does not exist, or cannot become a tensor.
        """
        sources = self.sources(schema.names)
        chosen = self.chosen(schema.names)
        names = self.read(schema.names)
        for name in names:
            what = "the filter's column" if name not in chosen else "column"
            _find(schema, name, path, what=what)
        for option in ("fill", "dtypes", "hash_buckets"):
            for name in getattr(self, option):
                if name not in chosen:
                    raise ColumnError(
                        f"{option} names column {name!r}, which is not read; the columns are "
                        f"{_names(chosen)}",
                        path=path,
                        column=name,
                    )
        expression = None
        if self.filters:
            expression = pyarrow().parquet.filters_to_expression(list(self.filters))
        types = {name: schema.field(name).type for name in names}
        plan = ColumnPlan(self, sources, types, expression)
        plan.refuse_types(path)
        return plan


def _listed(source: str | list[str]) -> list[str]:
    return [source] if isinstance(source, str) else source


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:40]))
    return f"{shown}, …" if len(names) > 40 else shown


def column_error(name: str, path: str, problem: str) -> ColumnError:
    """Return the error for a column of a file."""
    return ColumnError(f"column {name!r} of file {path!r} {problem}", path=path, column=name)


def _find(schema: Any, name: str, path: str, *, what: str = "column") -> Any:
    places = schema.get_all_field_indices(name)
    if len(places) == 1:
        return schema.field(places[0])
    problem = "does not exist" if not places else f"occurs {len(places)} times"
    raise ColumnError(
        f"{what} {name!r} {problem} in file {path!r}. Its columns are {_names(schema.names)}.",
        path=path,
        column=name,
    )


@final
@dataclass(frozen=True)
class ColumnPlan:
    """Conversion of tables of one schema to batches.

    Attributes:
        selection: options of the user.
        sources: columns to read for each name in the batch.
        types: Arrow types of all columns that are read, those of filters included.
        expression: filter, or `None`.
    """

    selection: ColumnSelection
    sources: Mapping[str, str | list[str]]
    types: Mapping[str, Any]
    expression: Any

    @property
    def names(self) -> list[str]:
        """Columns to read from a file."""
        return list(self.types)

    def refuse_types(self, path: str) -> None:
        """Raise if a column cannot become a tensor."""
        for source in self.sources.values():
            for name in _listed(source):
                self._refuse_type(name, self.types[name], path)

    def _refuse_type(self, name: str, kind: Any, path: str) -> None:
        types = pyarrow().types
        inner = kind
        while types.is_fixed_size_list(inner):
            inner = inner.value_type
        if types.is_list(kind) or types.is_large_list(kind):
            inner = kind.value_type
        if types.is_dictionary(inner):
            inner = inner.value_type
        if name in self.selection.hash_buckets:
            if _is_text(inner) or types.is_integer(inner) or types.is_boolean(inner):
                return
            problem = f"has type {kind}, which cannot be hashed; expected text, bytes or integers"
            raise column_error(name, path, f"{problem}. Leave it out of hash_buckets=.")
        if name in self.selection.dtypes and not types.is_nested(inner):
            return  # an explicit conversion; Arrow knows whether it exists
        if types.is_boolean(inner) or types.is_integer(inner) or types.is_floating(inner):
            return
        if _is_text(inner) and inner is kind:
            return
        if types.is_dictionary(kind) and _is_text(inner):
            return
        advice = "Leave it out of columns=."
        if _is_text(inner):
            advice = "Give hash_buckets= to turn the text into numbers."
        elif not types.is_nested(inner):
            advice = "Give dtypes= to convert it, or leave it out of columns=."
        problem = f"has type {kind}, which cannot become a tensor. {advice}"
        raise column_error(name, path, problem)

    def check(self, schema: Any, path: str) -> None:
        """Raise if the columns of a file differ from those of the first file."""
        for name, expected in self.types.items():
            found = _find(schema, name, path).type
            if found != expected and name not in self.selection.dtypes:
                problem = f"has type {found}, but {expected} in the first file"
                advice = f"Give dtypes={{{name!r}: …}} to convert both to one type."
                raise column_error(name, path, f"{problem}. {advice}")

    def convert(self, table: Any, path: str) -> dict[str, Any]:
        """Return a table or record batch as a batch of tensors."""
        if self.expression is not None:
            table = self._filtered(table, path)
        return {
            name: self._leaf(source, table.column(source), path)
            if isinstance(source, str)
            else self._stacked(name, source, table, path)
            for name, source in self.sources.items()
        }

    def _filtered(self, table: Any, path: str) -> Any:
        arrow = pyarrow()
        if isinstance(table, arrow.RecordBatch):
            table = arrow.Table.from_batches([table])
        try:
            return table.filter(self.expression)
        except arrow.ArrowException as error:
            raise ColumnError(
                f"filters={self.selection.filters!r:.120} do not fit file {path!r}: {error}",
                path=path,
                column=self.selection._conditions()[0][0],
            ) from error

    def _stacked(self, name: str, sources: list[str], table: Any, path: str) -> torch.Tensor:
        columns = [self._leaf(source, table.column(source), path) for source in sources]
        for source, column in zip(sources, columns, strict=True):
            flat = isinstance(column, torch.Tensor) and column.ndim == 1
            if not flat or column.dtype != columns[0].dtype:
                kind = column.dtype if flat else "not a column of single numbers"
                raise ColumnError(
                    f"columns {_names(sources)} cannot be stacked into {name!r}: {source!r} is {kind} "
                    f"in file {path!r}, {sources[0]!r} is {getattr(columns[0], 'dtype', 'text')}. Give "
                    "dtypes= to make them one type.",
                    path=path,
                    column=source,
                )
        return torch.stack(columns, dim=1)

    def _leaf(self, name: str, column: Any, path: str) -> Any:
        arrow = pyarrow()
        try:
            array = column
            if isinstance(column, arrow.ChunkedArray):
                if self._is_plain(name, column):  # the usual case: one copy
                    return torch.from_numpy(_own(column.to_numpy()))
                array = column.combine_chunks()
            if isinstance(array, arrow.ExtensionArray):
                array = array.storage
            return self._convert(name, array, path)
        except arrow.ArrowException as error:
            problem = f"({column.type}) cannot be converted: {error}"
            raise column_error(name, path, problem) from error

    def _is_plain(self, name: str, column: Any) -> bool:
        """Return whether a column needs no conversion: signed integers or floats, none missing."""
        types = pyarrow().types
        number = types.is_signed_integer(column.type) or types.is_floating(column.type)
        options = self.selection
        chosen = name in options.dtypes or name in options.hash_buckets
        return bool(number) and column.null_count == 0 and not chosen

    def _convert(self, name: str, array: Any, path: str) -> Any:
        arrow = pyarrow()
        types = arrow.types
        kind = array.type
        if types.is_list(kind) or types.is_large_list(kind):
            return self._ragged(name, array, path)
        if types.is_fixed_size_list(kind):
            if array.null_count:
                raise _missing(name, array, path, "Lists of a fixed size cannot be filled.")
            items = self._convert(name, array.flatten(), path)
            return items.reshape(len(array), kind.list_size, *items.shape[1:])
        array = self._fill(name, array, path)
        buckets = self.selection.hash_buckets.get(name)
        if buckets is not None:
            return to_buckets(hash_column(array), buckets)
        if types.is_dictionary(array.type):
            array = array.dictionary_decode()
        dtype = self.selection.dtypes.get(name)
        if dtype is None and _is_text(array.type):
            return array.to_numpy(zero_copy_only=False)
        if dtype is not None:
            array = _cast(array, dtype)
        elif types.is_uint16(kind) or types.is_uint32(kind) or types.is_uint64(kind):
            array = arrow.compute.cast(array, "int32" if types.is_uint16(kind) else "int64")
        tensor = torch.from_numpy(_own(array.to_numpy(zero_copy_only=False)))
        return tensor.to(dtype) if dtype is torch.bfloat16 else tensor

    def _ragged(self, name: str, array: Any, path: str) -> Ragged:
        compute = pyarrow().compute
        self._fill(name, array, path, lists=True)
        lengths = compute.fill_null(compute.list_value_length(array), 0).to_numpy()
        offsets = np.zeros(len(array) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Ragged(self._convert(name, array.flatten(), path), torch.from_numpy(offsets))

    def _fill(self, name: str, array: Any, path: str, *, lists: bool = False) -> Any:
        """Replace missing values; a missing list becomes an empty one."""
        if array.null_count == 0:
            return array
        if name not in self.selection.fill:
            advice = f"Give fill={{{name!r}: value}} to replace them."
            raise _missing(name, array, path, advice)
        if lists:
            return array
        if pyarrow().types.is_dictionary(array.type):
            array = array.dictionary_decode()
        dtype = self.selection.dtypes.get(name)
        if dtype is not None and name not in self.selection.hash_buckets:
            array = _cast(array, dtype)
        value = self.selection.fill[name]
        if (
            pyarrow().types.is_integer(array.type)
            and isinstance(value, float | np.floating)
            and value % 1
        ):
            raise ColumnError(
                f"fill={{{name!r}: {value!r}}}: column {name!r} of file {path!r} is {array.type}, which "
                f"cannot hold {value!r}. Give an integer, or dtypes={{{name!r}: torch.float32}}.",
                path=path,
                column=name,
            )
        return pyarrow().compute.fill_null(array, value)


def _missing(name: str, array: Any, path: str, advice: str) -> ColumnError:
    problem = f"has {array.null_count} missing value(s) in {len(array)} rows. {advice}"
    return column_error(name, path, problem)


def _cast(array: Any, dtype: torch.dtype) -> Any:
    """Convert an array, to integers only without loss; a conversion to a shorter float is meant to round."""
    kind = arrow_type(dtype)
    if pyarrow().types.is_date32(array.type):
        array = array.cast("int32")  # Arrow converts days to no other type
    return pyarrow().compute.cast(array, kind, safe=not dtype.is_floating_point)


def _own(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that may be written to; the memory of Arrow may be a file."""
    return array if array.flags.writeable and array.flags.owndata else array.copy()


def _is_text(kind: Any) -> bool:
    types = pyarrow().types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_string_view(kind)
        or types.is_binary_view(kind)
    )


def hash_column(array: Any, seed: int = 0) -> Hashes:
    """Return the 64-bit hashes of an Arrow column of text, bytes or integers."""
    arrow = pyarrow()
    types = arrow.types
    if isinstance(array, arrow.ChunkedArray):
        array = array.combine_chunks()
    if array.null_count:
        raise ValueError(f"{array.null_count} of {len(array)} values to hash are missing")
    if types.is_dictionary(array.type):
        places: NDArray[Any] = array.indices.to_numpy(zero_copy_only=False)
        found: Hashes = hash_column(array.dictionary, seed)[places]
        return found
    if types.is_integer(array.type) or types.is_boolean(array.type):
        return hash_integers(array.to_numpy(zero_copy_only=False), seed)
    if not _is_text(array.type):
        raise TypeError(f"text, bytes or integers can be hashed, not {array.type}")
    array = array.cast(arrow.large_binary())
    _, offsets_buffer, data = array.buffers()
    offsets: NDArray[np.int64] = np.frombuffer(offsets_buffer, dtype=np.int64)
    offsets = offsets[array.offset : array.offset + len(array) + 1]
    begin, end = int(offsets[0]), int(offsets[-1])
    return hash_bytes(data[begin:end] if data is not None else b"", offsets - begin, seed)
