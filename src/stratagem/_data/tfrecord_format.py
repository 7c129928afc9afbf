"""TFRecord files of Examples as columns. TensorFlow is not needed.

A file is read in blocks of some megabytes. NumPy decodes the Examples of a block at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from stratagem._data import example_proto
from stratagem._data.arrow_columns import ColumnPlan, ColumnSelection, pyarrow
from stratagem._data.example_proto import PADDING, BadExample
from stratagem._data.readers import Bad, TFRecordReader
from stratagem._data.row_ranges import ColumnFile, RowRange
from stratagem.errors import CorruptRecord

# Read and decoded at a time: NumPy's cost per call is spread over 10,000 records.
_BLOCK_BYTES = 8 << 20

_KINDS: dict[Any, tuple[str, str]] = {
    torch.int64: ("int64", "int64"),
    torch.float32: ("float", "float"),
    bytes: ("bytes", "large_binary"),
    str: ("bytes", "large_string"),
}
"""By dtype: the kind of the list in an Example, and the Arrow type of a value."""


@final
@dataclass(frozen=True)
class Feature:
    """Feature of a ``tf.train.Example``: the type and the number of its values.

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
        return _KINDS[self.dtype][0]

    def arrow(self) -> Any:
        """Return the Arrow type of the column."""
        arrow = pyarrow()
        inner = arrow.type_for_alias(_KINDS[self.dtype][1])
        if self.size == 1:
            return inner
        return arrow.large_list(inner) if self.size is None else arrow.list_(inner, self.size)


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
    """TFRecord file of Examples; a range is the whole file.

    Args:
        path: the file.
        selection: columns that the user asked for.
        features: the features that the records have.
        verify: whether to check the checksums of the records; those of the lengths are always checked.
    """

    def __init__(
        self,
        path: str,
        selection: ColumnSelection,
        features: Mapping[str, Feature],
        verify: bool,
    ) -> None:
        super().__init__(path, selection)
        self._features = features
        self._verify = verify

    def schema(self, files: Sequence[str] = ()) -> Any:
        fields = [(name, feature.arrow()) for name, feature in self._features.items()]
        return pyarrow().schema(fields)

    @override
    def check(self, plan: ColumnPlan) -> None:
        """Check nothing: records say which features they have."""

    def ranges(self) -> list[RowRange]:
        size = Path(self.path).stat().st_size
        return [RowRange(self.path, 0, 0, size, "bytes")] if size else []

    def tables(self, rows: RowRange) -> Iterator[Any]:
        for block in read_blocks(self.path, verify=self._verify):
            try:
                yield self._decode(block)
            except BadExample as error:
                number = block.first + error.record
                raise CorruptRecord(
                    f"record {number} of file {self.path!r}: {error}",
                    path=self.path,
                    record=number,
                ) from error

    def _decode(self, block: RecordBlock) -> Any:
        located = example_proto.locate(block.data, block.starts, block.stops, self.plan.names)
        columns = {}
        for name in self.plan.names:
            feature = self._features[name]
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
    values = _values(data, lists, feature)
    if feature.size is None:
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return arrow.LargeListArray.from_arrays(arrow.array(offsets, arrow.int64()), values)
    if feature.size > 1:
        values = arrow.FixedSizeListArray.from_arrays(values, feature.size)
    missing = counts == 0
    if not missing.any():
        return values
    places = np.where(missing, 0, np.cumsum(~missing) - 1)
    return values.take(arrow.array(places, mask=missing))


def _values(data: NDArray[np.uint8], lists: example_proto.Lists, feature: Feature) -> Any:
    arrow = pyarrow()
    if feature.kind != "bytes":
        return arrow.array(np.ascontiguousarray(lists.values))
    joined, offsets = example_proto.copy_pieces(data, *lists.values)
    buffers = [None, arrow.py_buffer(offsets), arrow.py_buffer(joined)]
    values = arrow.Array.from_buffers(arrow.large_binary(), len(offsets) - 1, buffers)
    return values.cast(arrow.large_string()) if feature.dtype is str else values
