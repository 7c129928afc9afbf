"""Unnamed files for tables that may be larger than memory.

A file has all its space from the start, so that writing to a mapping of it never fails for want of space. It has no name
in any directory: nothing is left behind however its process ends.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from stratagem import config

_MEMORY_SYSTEMS: Final = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_NO_NAMELESS_FILES: Final = frozenset((errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL))
_NO_SPACE: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def open_table_file(size: int) -> int:
    """Return the descriptor of a new file of `size` bytes, zeros, in ``STRATAGEM_TABLE_DIRECTORY``.

    Raises:
        ValueError: the directory does not exist, or its files are in memory.
        OSError: there is no space for the file, or it cannot be created.
    """
    directory = config.table_directory()
    if not directory.is_dir():
        raise ValueError(
            f"STRATAGEM_TABLE_DIRECTORY={str(directory)!r} is not a directory: expected a directory on a disk of "
            f"{os.uname().nodename}."
        )
    kind = _file_system(directory)
    if kind in _MEMORY_SYSTEMS:
        raise ValueError(
            f"files in {str(directory)!r} on {os.uname().nodename} are in memory ({kind}): set "
            "STRATAGEM_TABLE_DIRECTORY to a directory on a disk."
        )
    # Asked first: some file systems take all the space that they have before they refuse.
    if size > shutil.disk_usage(directory).free:
        raise _no_space(directory, size, errno.ENOSPC)
    descriptor = _open(directory)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _NO_SPACE:
            raise _no_space(directory, size, error.errno) from error
        raise
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _no_space(directory: Path, size: int, code: int) -> OSError:
    free = shutil.disk_usage(directory).free
    return OSError(
        code,
        f"no space for a table of {size / 1e9:,.1f} GB in {str(directory)!r} on {os.uname().nodename}, where "
        f"{free / 1e9:,.1f} GB are free: lower max_rows, use more servers, free space, or set "
        "STRATAGEM_TABLE_DIRECTORY to a directory on another disk",
    )


def _open(directory: Path) -> int:
    flags = os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(directory, flags, 0o600)
    except OSError as error:
        if error.errno not in _NO_NAMELESS_FILES:
            raise
    descriptor, name = tempfile.mkstemp(prefix="stratagem-", dir=directory)
    Path(name).unlink()
    return descriptor


def _file_system(path: Path) -> str:
    """Return the kind of the file system of a path, "" if the kernel does not say."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return ""
