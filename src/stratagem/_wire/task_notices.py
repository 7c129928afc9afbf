"""Notices in which the tasks of this user on this machine announce themselves to ``stratagem top``.

A notice is a `memfd` of the task's process: a file without a name in any directory, which ends with the process however
that ends. Others read it through ``/proc/<pid>/fd``, which the kernel allows only to the same user (and root), so that it
may hold the cluster key.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, final

from typing_extensions import override

from stratagem._owner import Owner

_NAME: Final = "stratagem-task"
_LINK: Final = f"/memfd:{_NAME} "


@dataclass(frozen=True, kw_only=True)
class TaskNotice:
    """Address of a task, and what a connection to it needs."""

    pid: int
    job: str
    index: int
    address: str
    key: str = field(repr=False)
    tls: Sequence[str] = ()
    """Certificate, key and authority files; empty without encryption."""
    owner: int = 0
    """Process that started the task and supervises it; 0 if none does."""
    cluster: Mapping[str, Any] = field(default_factory=dict)
    """Addresses of all tasks, if the task knows them."""


@final
class NoticeHolder(Owner):
    """Keeps a notice readable until `close`, or until this process ends; None: there is nothing to read."""

    def __init__(self, notice: TaskNotice | None) -> None:
        self._fd = -1
        if notice is None:
            return
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        data: Any = json.dumps(asdict(notice)).encode()
        while data:
            data = data[os.write(self._fd, data) :]

    @override
    def close(self) -> None:
        """Withdraw the notice. May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_notices() -> list[TaskNotice]:
    """Return the notices of all running tasks of this user on this machine, by process number."""
    pids = sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [notice for pid in pids for notice in _notices_of(pid)]


def _notices_of(pid: int) -> Iterator[TaskNotice]:
    # A process may end, or close a descriptor, while we look; those of other users are refused.
    with contextlib.suppress(OSError):
        folder = Path(f"/proc/{pid}/fd")
        if folder.stat().st_uid != os.geteuid():  # root can read notices of others
            return
        for link in sorted(folder.iterdir()):
            with contextlib.suppress(OSError, ValueError, TypeError):
                if not str(link.readlink()).startswith(_LINK):
                    continue
                notice = TaskNotice(**json.loads(link.read_bytes()))
                if notice.pid == pid:  # a fork has the descriptors of its parent
                    yield notice
