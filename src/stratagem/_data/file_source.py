"""Source of records from files: the files, their order, their reader, and the handling of unreadable records."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, final

import numpy as np
import torch
from typing_extensions import override

from stratagem._data import nests
from stratagem._data.cursor import END, Cursor, CursorContext, Skipped
from stratagem._data.node import Node
from stratagem._data.readers import Bad, LineReader, Reader, TFRecordReader
from stratagem._data.row_numbers import IndexedSource
from stratagem._data.sources import Closable
from stratagem._data.table_readers import CsvReader, NumpyReader, ParquetReader
from stratagem.errors import CorruptRecord, MissingFile

OnError = Literal["raise", "skip"]


@dataclass(frozen=True, eq=False)
class FileSource(Node):
    """Source made of files, so that workers can share it by file."""

    files: tuple[str, ...]

    def with_files(self, files: Sequence[str]) -> Self:
        """Return the same source over other files."""
        return replace(self, files=tuple(files))


def expand(patterns: Any) -> tuple[str, ...]:
    """Return the paths that a path, a pattern or a list of them names; matches of a pattern are sorted.

    A path without wildcards need not exist here: it may exist on a worker's disk.
    """
    given = [patterns] if isinstance(patterns, str | os.PathLike) else list(patterns)
    paths: list[str] = []
    for item in given:
        text = os.fspath(item)
        if not isinstance(text, str):
            raise TypeError(f"{item!r} is not a path: expected text or a pathlib.Path")
        if not glob.has_magic(text):
            paths.append(text)
            continue
        found = sorted(glob.glob(text, recursive=True))  # noqa: PTH207 - patterns may be absolute
        if not found:
            raise MissingFile(
                f"no file matches {text!r}. Check the pattern; relative ones start at {str(Path.cwd())!r}.",
                path=text,
            )
        paths.extend(found)
    if not paths:
        raise ValueError(f"{patterns!r} names no file: expected at least one path or pattern")
    return tuple(paths)


_BY_NAME: dict[str, Reader] = {
    "lines": LineReader(),
    "csv": CsvReader(),
    "numpy": NumpyReader(),
    "parquet": ParquetReader(),
    "tfrecord": TFRecordReader(),
}
_BY_SUFFIX = {
    ".txt": "lines",
    ".csv": "csv",
    ".npy": "numpy",
    ".npz": "numpy",
    ".parquet": "parquet",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
}


def reader_for(choice: Reader | str | None, paths: Sequence[str]) -> Reader:
    """Return the reader for an argument of `from_files`, or for the names of the files."""
    if isinstance(choice, Reader):
        return choice
    names = ", ".join(map(repr, _BY_NAME))
    if choice is None:
        suffixes = {Path(path.removesuffix(".gz")).suffix for path in paths}
        found = {_BY_SUFFIX.get(suffix) for suffix in suffixes}
        if len(found) != 1 or None in found:
            raise ValueError(
                f"files ending in {', '.join(sorted(map(repr, suffixes)))} have no default reader; give reader= "
                f"one of {names}, or a Reader"
            )
        (choice,) = found
    if choice not in _BY_NAME:
        raise ValueError(
            f"reader={choice!r} is not a reader; expected a Reader such as sg.data.CsvReader(), or one of {names}"
        )
    return _BY_NAME[choice]


@final
@dataclass(frozen=True, eq=False)
class ListFilesNode(FileSource, IndexedSource):
    """Paths of files, as text."""

    @property
    def size(self) -> int:
        return len(self.files)

    def at(self, index: int) -> str:
        return self.files[index]

    def gather(self, indices: torch.Tensor) -> Any:
        return np.array([self.files[index] for index in indices.tolist()], dtype=object)


@final
@dataclass(frozen=True, eq=False)
class FilesNode(FileSource):
    """Records of files, one file after the other."""

    reader: Reader
    on_error: OnError

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f"on_error={self.on_error!r} is unknown; expected 'raise' or 'skip'")

    def open(self, context: CursorContext) -> Cursor:
        return FilesCursor(self, context.run.skipped if self.on_error == "skip" else None)


@final
class FilesCursor(Cursor):
    """Reads one file at a time; the position is (file, record)."""

    KEPT = ("file", "record")
    _file = 0
    _record = 0
    _stream: Any = None

    def __init__(self, node: FilesNode, skipped: list[Skipped] | None) -> None:
        self._node = node
        self._skipped = skipped

    def next(self) -> Any:
        files = self._node.files
        while self._file < len(files):
            path = files[self._file]
            try:
                if self._stream is None:
                    self._stream = self._node.reader.records(path, self._record)
                item = next(self._stream, END)
            except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
                self._refuse(path, -1, f"cannot be opened: {error.strerror}", error)
                item = END
            except (OSError, EOFError) as error:  # such as a damaged gzip file
                self._refuse(path, self._record, f"cannot be read any further: {error}", error)
                item = END
            if item is END:
                self.close()
                self._file, self._record = self._file + 1, 0
                continue
            self._record += 1
            if not isinstance(item, Bad):
                return nests.to_element(item)
            self._refuse(path, self._record - 1, item.reason, None)
        return END

    def _refuse(self, path: str, record: int, reason: str, error: BaseException | None) -> None:
        """Raise an error for an unreadable record, or note that it is skipped."""
        if self._skipped is not None:
            self._skipped.append(Skipped(path=path, record=record, reason=reason))
            return
        advice = "Repair or remove it, or pass on_error='skip' to skip such records."
        if isinstance(error, FileNotFoundError):
            raise MissingFile(f"file {path!r} does not exist. {advice}", path=path) from error
        where = f"record {record} of file {path!r}" if record >= 0 else f"file {path!r}"
        raise CorruptRecord(f"{where}: {reason}. {advice}", path=path, record=record) from error

    @override
    def close(self) -> None:
        stream, self._stream = self._stream, None
        if isinstance(stream, Closable):
            stream.close()
