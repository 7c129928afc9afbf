"""Check that files with secrets belong to this user and are not readable by others."""

from __future__ import annotations

import os
from pathlib import Path


def check_private(path: Path, what: str) -> None:
    """Raise unless only this user (or root) can read a file.

    Args:
        path: the file.
        what: its contents in error messages, such as ``"the key file"``.

    Raises:
        OSError: the file does not exist, or its directory cannot be read.
        PermissionError: other users can read the file, or it belongs to one of them.
    """
    facts = path.stat()
    # Kubernetes mounts secrets as files of root that the pod's group reads.
    allowed = 0o740 if facts.st_uid == 0 and os.geteuid() != 0 else 0o700
    if facts.st_mode & 0o777 & ~allowed:
        raise PermissionError(
            f"{what} {str(path)!r} has mode {facts.st_mode & 0o777:04o}: other users can read the "
            f"key. Expected mode 0600: run `chmod 600 {path}`, and replace the key if others may have "
            f"read it."
        )
    if facts.st_uid not in (0, os.geteuid()):
        raise PermissionError(
            f"{what} {str(path)!r} belongs to user {facts.st_uid}, not to this process's user "
            f"{os.geteuid()}: expected a file that belongs to you."
        )
