"""Check that the limit of open files is high enough for a cluster."""

from __future__ import annotations

from typing import Final

from stratagem._wire.connecting import descriptor_limit
from stratagem.errors import StartupError

FILES: Final = 32  # Python, torch, a listening socket and a few connections
FILES_PER_TASK: Final = 3  # two pipes of the fork server, or the connections of a coordinator


def check_open_files(tasks: int) -> None:
    """Raise if the limit of open files is too low for a cluster of this size.

    Raises:
        StartupError: the limit, and how to raise it.
    """
    needed, limit = FILES + FILES_PER_TASK * tasks, descriptor_limit()
    if 0 <= limit < needed:  # -1 means no limit
        raise StartupError(
            f"this process may have {limit} files and sockets open, and a cluster of {tasks} tasks needs "
            f"{needed}: raise the limit with `ulimit -n {max(1024, needed)}`."
        )
