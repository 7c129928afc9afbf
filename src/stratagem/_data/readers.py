"""Readers that yield the records of one file, one by one.

A reader yields elements, and `Bad` for a record that it cannot read; `file_source.py` decides whether that is an
error or the record is skipped. A position in a file is the number of the next record.
"""

from __future__ import annotations

import functools
import gzip
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast, final


@dataclass(frozen=True)
class Bad:
    """Placeholder that a `Reader` yields for a record that it cannot read.

    Example:
        >>> from stratagem.data import Bad
        >>> Bad("2 fields instead of 3")
        Bad(reason='2 fields instead of 3')
    """

    reason: str


class Reader(ABC):
    """Reader of one file format. Subclass it to read another format.

    Example:
        >>> from stratagem.data import LineReader, Reader
        >>> isinstance(LineReader(), Reader)
        True
    """

    @abstractmethod
    def records(self, path: str, start: int) -> Iterator[Any]:
        """Yield the elements of a file from record number `start` on; `Bad` for unreadable ones.

        Raises:
            OSError: the file cannot be opened.
        """


def open_bytes(path: str) -> IO[bytes]:
    """Open a file for reading; unpack ``.gz``."""
    if path.endswith(".gz"):
        return cast("IO[bytes]", gzip.open(path, "rb"))
    return Path(path).open("rb")


@final
@dataclass(frozen=True, kw_only=True)
class LineReader(Reader):
    r"""Reader of text: lines without their line ends, each one a `str`.

    Example:
        >>> import stratagem as sg, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a.txt")
        >>> _ = path.write_text("one\ntwo\n")
        >>> list(sg.data.Dataset.from_files(path, sg.data.LineReader()))
        ['one', 'two']
    """

    encoding: str = "utf-8"
    skip_lines: int = 0
    """Number of lines at the top that are not records, such as a header."""

    def records(self, path: str, start: int) -> Iterator[Any]:
        with open_bytes(path) as file:
            for number, line in enumerate(file, -self.skip_lines):
                if number < max(start, 0):
                    continue
                try:
                    yield line.rstrip(b"\r\n").decode(self.encoding)
                except UnicodeDecodeError as error:
                    yield Bad(f"not {self.encoding} text: {error.reason} at byte {error.start}")


_HEAD = struct.Struct("<QI")
_TAIL = struct.Struct("<I")


@functools.cache
def _crc32c() -> Callable[[bytes], int]:
    import google_crc32c  # only here: most programs read no TFRecord files

    return cast("Callable[[bytes], int]", google_crc32c.value)


def _masked(crc: int) -> int:
    """Return a checksum as the files store it: rotated by 15 bits, plus a constant."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@final
@dataclass(frozen=True, kw_only=True)
class TFRecordReader(Reader):
    """Reader of TFRecord files: records as `bytes`. Decode them in a `map`.

    Layout of a record::

        u64 length | u32 masked CRC-32C of length | length bytes | u32 masked CRC-32C of the bytes

    Example:
        >>> import stratagem as sg, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a.tfrecord")
        >>> sg.data.write_tfrecords(path, [b"one", b"two"])
        >>> list(sg.data.Dataset.from_files(path))
        [b'one', b'two']
    """

    verify: bool = True
    """True if the checksums of the bytes are checked; those of the lengths always are."""

    def records(self, path: str, start: int) -> Iterator[Any]:
        crc32c = _crc32c()
        with open_bytes(path) as file:
            number = 0
            while head := file.read(12):
                if len(head) < 12:
                    yield Bad(f"the file ends within a record's head ({len(head)} of 12 bytes)")
                    return
                size, check = _HEAD.unpack(head)
                if _masked(crc32c(head[:8])) != check:
                    yield Bad(
                        "the checksum of its length does not match, so the rest is unreadable"
                    )
                    return
                data = file.read(size)
                tail = file.read(4)
                if len(data) < size or len(tail) < 4:
                    yield Bad(f"the file ends within the record ({len(data)} of {size} bytes)")
                    return
                number += 1
                if number <= start:
                    continue
                if self.verify and _masked(crc32c(data)) != _TAIL.unpack(tail)[0]:
                    yield Bad("the checksum of its bytes does not match")
                else:
                    yield data


def write_tfrecords(path: str | Path, records: Sequence[bytes]) -> None:
    """Write a TFRecord file.

    Example:
        >>> import stratagem as sg, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a.tfrecord")
        >>> sg.data.write_tfrecords(path, [b"one"])
        >>> path.stat().st_size
        19
    """
    crc32c = _crc32c()
    with Path(path).open("wb") as file:
        for record in records:
            head = struct.pack("<Q", len(record))
            file.write(head + _TAIL.pack(_masked(crc32c(head))))
            file.write(record + _TAIL.pack(_masked(crc32c(record))))
