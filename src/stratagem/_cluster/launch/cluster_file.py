"""The address file of a detached cluster: addresses of the tasks, cluster key, and owner process.

The owner writes the file and keeps it up to date; only its user can read it. A lock on a second file says whether the
owner runs: the system ends it with the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

from typing_extensions import override

from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._cluster.discovery.resolvers import LiveResolver
from stratagem._owner import Owner
from stratagem.errors import StartupError, UnavailableError

_FLOCK: Final = "hhqqi4x"
"""``struct flock`` on 64-bit Linux: type, whence, start, length, process."""


@dataclass(frozen=True, kw_only=True)
class ClusterRecord:
    """Content of an address file."""

    cluster: dict[str, Any]
    key: str
    pid: int
    since: float


def read_cluster_file(path: Path) -> ClusterRecord:
    """Return what an address file says.

    Raises:
        UnavailableError: there is none, or it is no address file.
        PermissionError: the file belongs to another user.
    """
    try:
        facts = path.stat()
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UnavailableError(
            f"there is no cluster at {str(path)!r} ({error}). `stratagem cluster ls` lists those that run; "
            "`stratagem cluster start --name NAME` starts one.",
            task="/job:worker",
        ) from error
    if facts.st_uid not in (0, os.geteuid()):
        raise PermissionError(
            f"{str(path)!r} belongs to user {facts.st_uid}, not to this process's user {os.geteuid()}."
        )
    try:
        return ClusterRecord(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise UnavailableError(
            f"{str(path)!r} is not an address file of a cluster: {error}.", task="/job:worker"
        ) from error


@final
class ClusterFile(Owner):
    """The address file of a cluster of this process.

    Args:
        path: the file; its directory is created.

    Raises:
        StartupError: another process has a cluster of this name.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: ClusterSpec | None = None
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(lock_of(path), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            self._lock = -1
            raise StartupError(
                f"a cluster {path.stem!r} is running already (process {owner_of(path)}). Stop it with "
                f"`stratagem cluster stop --name {path.stem}`, or choose another name."
            ) from None
        path.unlink(missing_ok=True)  # of an owner that was killed

    def write(self, spec: ClusterSpec, key: str) -> None:
        """Write the file if the addresses have changed."""
        if spec == self._written:
            return
        record = ClusterRecord(cluster=spec.as_dict(), key=key, pid=os.getpid(), since=time.time())
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(record), file)
        temporary.rename(self._path)
        self._written = spec

    @override
    def close(self) -> None:
        """Remove the files. May be called again."""
        if self._lock >= 0:
            self._path.unlink(missing_ok=True)
            lock_of(self._path).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


def lock_of(path: Path) -> Path:
    """Return the file whose lock the owner of an address file holds."""
    return path.with_suffix(".lock")


def owner_of(path: Path) -> int:
    """Return the process that owns the cluster of an address file; 0 if none does."""
    try:
        descriptor = os.open(lock_of(path), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    finally:
        os.close(descriptor)
    return 0 if kind == fcntl.F_UNLCK else int(pid)


def resolver_of(path: Path) -> LiveResolver:
    """Return the resolver of a cluster that another process of this user owns; it reads the file at every access."""
    return LiveResolver(
        lambda: ClusterSpec(read_cluster_file(path).cluster), lambda: read_cluster_file(path).key
    )
