"""Files as a source: which ones, in which order, what happens to a record that cannot be read."""

from __future__ import annotations

import glob
import os
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, final

from typing_extensions import override

from stratagem._data import nests, specs
from stratagem._data.node import END, Cursor, CursorContext, Node, NumberedCursor, Skipped
from stratagem._data.readers import Bad, Reader
from stratagem._data.sources import Closable
from stratagem.errors import CorruptRecord, MissingFile

OnError = Literal["raise", "skip"]


class FileSource(Node):
    """A source made of files, so that workers can share it by file."""

    files: tuple[str, ...]

    @abstractmethod
    def with_files(self, files: Sequence[str]) -> FileSource:
        """The same source over other files."""


def expand(patterns: Any) -> tuple[str, ...]:
    """Paths from a path, a pattern or a list of them; what a pattern matches is sorted.

    A path without wildcards need not exist here: a worker's disk may have it.
    """
    given = [patterns] if isinstance(patterns, str | os.PathLike) else list(patterns)
    paths: list[str] = []
    for item in given:
        text = os.fspath(item)
        if not isinstance(text, str):
            raise TypeError(f"{item!r} is no path: expected text or a pathlib.Path")
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


@final
class ListFilesNode(FileSource):
    """The paths themselves, as text."""

    def __init__(self, files: Sequence[str]) -> None:
        self.files = tuple(files)

    @override
    def with_files(self, files: Sequence[str]) -> FileSource:
        return ListFilesNode(files)

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return NumberedCursor(len(self.files), self.files.__getitem__)

    @override
    def cardinality(self) -> int:
        return len(self.files)

    @override
    def spec(self) -> Any:
        return specs.ObjectSpec((), "str")


@final
class FilesNode(FileSource):
    """The records of files, one file after the other."""

    def __init__(self, files: Sequence[str], reader: Reader, on_error: OnError) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error={on_error!r} is unknown; expected 'raise' or 'skip'")
        self.files = tuple(files)
        self._reader = reader
        self._on_error: OnError = on_error

    @override
    def with_files(self, files: Sequence[str]) -> FileSource:
        return FilesNode(files, self._reader, self._on_error)

    @override
    def open(self, frame: CursorContext) -> Cursor:
        skipped = frame.run.skipped if self._on_error == "skip" else None
        return FilesCursor(self.files, self._reader, skipped)


@final
class FilesCursor(Cursor):
    """Opens one file at a time; its position is (file, record)."""

    KEPT = ("file", "record")

    def __init__(
        self, files: tuple[str, ...], reader: Reader, skipped: list[Skipped] | None
    ) -> None:
        self._files = files
        self._reader = reader
        self._skipped = skipped
        self._file = 0
        self._record = 0
        self._stream: Any = None

    @override
    def next(self) -> Any:
        while self._file < len(self._files):
            path = self._files[self._file]
            try:
                if self._stream is None:
                    self._stream = self._reader.records(path, self._record)
                item = next(self._stream, END)
            except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
                self._pass_over(path, -1, f"cannot be opened: {error.strerror}", error)
                item = END
            except (OSError, EOFError) as error:  # such as a damaged gzip file
                self._pass_over(path, self._record, f"cannot be read on: {error}", error)
                item = END
            if item is END:
                self.close()
                self._file, self._record = self._file + 1, 0
                continue
            self._record += 1
            if not isinstance(item, Bad):
                return nests.to_element(item)
            self._pass_over(path, self._record - 1, item.reason, None)
        return END

    def _pass_over(self, path: str, record: int, reason: str, error: BaseException | None) -> None:
        if self._skipped is not None:
            self._skipped.append(Skipped(path=path, record=record, reason=reason))
            return
        advice = "Repair or remove it, or pass on_error='skip' to pass over such records."
        if isinstance(error, FileNotFoundError):
            raise MissingFile(f"file {path!r} does not exist. {advice}", path=path) from error
        where = f"record {record} of file {path!r}" if record >= 0 else f"file {path!r}"
        raise CorruptRecord(f"{where}: {reason}. {advice}", path=path, record=record) from error

    @override
    def close(self) -> None:
        stream, self._stream = self._stream, None
        if isinstance(stream, Closable):
            stream.close()
