"""Readers that yield the records of one file, one by one.

A reader yields elements, and `Bad` for a record that it cannot read; `file_source.py` decides whether that is an
error or the record is skipped. A position in a file is the number of the next record.
"""

from __future__ import annotations

import gzip
from abc import ABC, abstractmethod
from collections.abc import Iterator
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
