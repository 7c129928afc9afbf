"""TFRecord files of Examples as columns. TensorFlow is not needed.

A file is read in blocks of some megabytes. NumPy decodes the Examples of a block at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from stratagem._data import example_proto
from stratagem._data.arrow_columns import ColumnPlan, ColumnSelection, pyarrow
from stratagem._data.example_proto import PADDING, BadExample
from stratagem._data.readers import Bad
from stratagem._data.row_ranges import ColumnFile, ColumnFormat, RowRange
from stratagem._data.tfrecord_files import TFRecordReader
from stratagem.errors import CorruptRecord

# Read and decoded at a time: NumPy's cost per call is spread over 10,000 records.
_BLOCK_BYTES = 8 << 20

_KINDS: dict[Any, str] = {
    torch.int64: "int64",
    torch.float32: "float",
    bytes: "bytes",
    str: "bytes",
}


@final
@dataclass(frozen=True)
class Feature:
    """Feature of an Example: type, and number of values.

    Attributes:
        dtype: ``torch.int64``, ``torch.float32``, ``bytes`` or ``str``.
        size: values in each record: 1 gives a column of single values, n a tensor of shape [rows, n], `None` a
            `Ragged` column.

    Example:
        >>> import torch, stratagem as sg
        >>> sg.data.Feature(torch.int64, size=None)
        Feature(dtype=torch.int64, size=None)
    """

    dtype: Any
    size: int | None = 1

    def __post_init__(self) -> None:
        if self.dtype not in _KINDS:
            raise TypeError(
                f"a feature of type {self.dtype!r} is not known; expected torch.int64, torch.float32, bytes "
                "or str"
            )

    @property
    def kind(self) -> str:
        """Kind of the list in an Example."""
        return _KINDS[self.dtype]

    def arrow(self) -> Any:
        """Return the Arrow type of the column."""
        arrow = pyarrow()
        inner = {
            torch.int64: arrow.int64(),
            torch.float32: arrow.float32(),
            bytes: arrow.large_binary(),
            str: arrow.large_string(),
        }[self.dtype]
        if self.size == 1:
            return inner
        return arrow.large_list(inner) if self.size is None else arrow.list_(inner, self.size)


@final
@dataclass(frozen=True)
class TFRecordFormat(ColumnFormat):
    """TFRecord files of Examples; a range is a file.

    Attributes:
        selection: options of the user.
        features: features to decode; `None` takes them from the first record of the first file.
        verify: whether to check the checksums of the records; those of the lengths are always checked.
    """

    selection: ColumnSelection
    features: Mapping[str, Feature] | None = None
    verify: bool = True

    def open(self, path: str, files: Sequence[str]) -> ColumnFile:
        first = files[0]
        if first not in self._plans:
            features = self.features if self.features is not None else self._infer(files)
            schema = pyarrow().schema([(name, each.arrow()) for name, each in features.items()])
            self._plans[first] = (self.selection.resolve(schema, first), dict(features))
        plan, features = self._plans[first]
        return TFRecordColumns(
            path, plan, {name: features[name] for name in plan.names}, self.verify
        )

    @cached_property
    def _plans(self) -> dict[str, tuple[ColumnPlan, dict[str, Feature]]]:
        return {}

    def _infer(self, files: Sequence[str]) -> dict[str, Feature]:
        """Return the features of the first record."""
        blocks = (block for path in files for block in read_blocks(path, verify=self.verify))
        for block in blocks:
            record = block.data[block.starts[0] : block.stops[0]].tobytes()
            dtypes: dict[str, Any] = {"int64": torch.int64, "float": torch.float32, "bytes": bytes}
            try:
                found = example_proto.names_of(record)
            except BadExample as error:
                raise ValueError(f"record 0: {error}") from error
            return {
                name: Feature(dtypes[kind], 1 if count == 1 else None)
                for name, (kind, count) in found.items()
            }
        return {}


@dataclass(frozen=True)
class RecordBlock:
    """Some records of a file.

    Attributes:
        data: bytes, with unused bytes after the records.
        starts: first byte of each record.
        stops: end of each record.
        first: number of the first record in the file.
    """

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    first: int


def read_blocks(path: str, *, verify: bool) -> Iterator[RecordBlock]:
    """Yield the records of a file in blocks.

    Raises:
        CorruptRecord: a checksum does not match, or the file ends within a record.
    """
    first, size, records = 0, 0, list[bytes]()
    for number, record in enumerate(TFRecordReader(verify=verify).records(path, 0)):
        if isinstance(record, Bad):
            raise CorruptRecord(
                f"record {number} of file {path!r}: {record.reason}. Repair or remove the file.",
                path=path,
                record=number,
            )
        records.append(record)
        size += len(record)
        if size >= _BLOCK_BYTES:
            yield _block(records, first)
            first, size, records = number + 1, 0, []
    if records:
        yield _block(records, first)


def _block(records: Sequence[bytes], first: int) -> RecordBlock:
    data = np.frombuffer(b"".join([*records, bytes(PADDING)]), dtype=np.uint8)
    bounds = np.cumsum([0, *map(len, records)])
    return RecordBlock(data, bounds[:-1], bounds[1:], first)


@final
class TFRecordColumns(ColumnFile):
    """One TFRecord file."""

    def __init__(
        self, path: str, plan: ColumnPlan, features: dict[str, Feature], verify: bool
    ) -> None:
        self._path = path
        self._plan = plan
        self._features = features
        self._verify = verify

    def ranges(self) -> list[RowRange]:
        size = Path(self._path).stat().st_size
        return [RowRange(self._path, 0, 0, size, "bytes")] if size else []

    def read(self, rows: RowRange) -> Iterator[Any]:
        for block in read_blocks(self._path, verify=self._verify):
            try:
                table = self._decode(block)
            except BadExample as error:
                number = block.first + error.record
                raise CorruptRecord(
                    f"record {number} of file {self._path!r}: {error}",
                    path=self._path,
                    record=number,
                ) from error
            yield self._plan.convert(table, self._path)

    def _decode(self, block: RecordBlock) -> Any:
        located = example_proto.locate(block.data, block.starts, block.stops, list(self._features))
        columns = {}
        for name, feature in self._features.items():
            located[name].refuse_kind(name, feature.kind)
            lists = example_proto.DECODERS[feature.kind](block.data, located[name], name)
            columns[name] = _column(block.data, lists, feature, name)
        return pyarrow().table(columns)


def _column(
    data: NDArray[np.uint8], lists: example_proto.Lists, feature: Feature, name: str
) -> Any:
    """Return the values of a feature as an Arrow column; a record without values has a missing value."""
    arrow = pyarrow()
    counts = lists.counts
    if feature.size is not None:
        wrong = np.flatnonzero((counts != feature.size) & (counts != 0))
        if len(wrong):
            raise BadExample(
                int(wrong[0]),
                f"feature {name!r} has {counts[wrong[0]]} values, not {feature.size}. Give "
                "features= with its size, or size=None for a Ragged column",
            )
    missing = counts == 0 if feature.size is not None else np.zeros(len(counts), np.bool_)
    values = _values(data, lists, feature)
    if feature.size is None:
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return arrow.LargeListArray.from_arrays(arrow.array(offsets, arrow.int64()), values)
    if feature.size > 1 and not missing.any():
        return arrow.FixedSizeListArray.from_arrays(values, feature.size)
    if not missing.any():
        return values
    places = np.where(missing, 0, np.cumsum(~missing) - 1)
    if feature.size > 1:
        values = arrow.FixedSizeListArray.from_arrays(values, feature.size)
    return values.take(arrow.array(places, mask=missing))


def _values(data: NDArray[np.uint8], lists: example_proto.Lists, feature: Feature) -> Any:
    arrow = pyarrow()
    if feature.kind != "bytes":
        return arrow.array(np.ascontiguousarray(lists.values))
    joined, offsets = example_proto.copy_pieces(data, *lists.values)
    buffers = [None, arrow.py_buffer(offsets), arrow.py_buffer(joined)]
    values = arrow.Array.from_buffers(arrow.large_binary(), len(offsets) - 1, buffers)
    return values.cast(arrow.large_string()) if feature.dtype is str else values
