"""Find the clusters of this user on this machine, from the notices of their running tasks."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._wire.task_notices import TaskNotice, read_notices
from stratagem._wire.tls import TlsFiles

_COMMAND_LIMIT = 60  # characters of a command line that fit in a terminal beside the rest


@final
@dataclass(frozen=True, kw_only=True)
class AnnouncedCluster:
    """A cluster of which at least one task runs on this machine."""

    owner: int
    """Process that started the tasks; 0 if they were started one by one (``stratagem server``)."""
    pids: tuple[int, ...]
    """Processes of the tasks on this machine."""
    spec: ClusterSpec
    key: str = field(repr=False)
    tls: TlsFiles | None = None

    @property
    def number(self) -> int:
        """Process number by which a user chooses the cluster."""
        return self.owner or min(self.pids)

    def is_same(self, other: AnnouncedCluster) -> bool:
        """Return whether `other` is this cluster at another time; tasks may have been replaced."""
        if self.owner or other.owner:
            return (self.owner, self.key) == (other.owner, other.key)
        return self.key == other.key and bool(
            set(_addresses(self.spec)) & set(_addresses(other.spec))
        )

    def describe(self) -> str:
        """Return one line: process number, number of tasks, command."""
        jobs = [
            (self.spec.num_tasks(job), name)
            for job, name in (("worker", "worker"), ("ps", "parameter server"))
            if job in self.spec.jobs
        ]
        counts = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in jobs]
        return f"{self.number}: {', '.join(counts)}, {_command(self.number)}"


def find_clusters() -> list[AnnouncedCluster]:
    """Return the clusters of this user on this machine, by process number."""
    groups: dict[tuple[object, ...], list[TaskNotice]] = {}
    for notice in read_notices():
        group = notice.key, notice.owner, json.dumps(notice.cluster, sort_keys=True)
        groups.setdefault(group, []).append(notice)
    found = [_cluster_of(notices) for notices in groups.values()]
    return sorted(found, key=lambda cluster: cluster.number)


def _cluster_of(notices: list[TaskNotice]) -> AnnouncedCluster:
    first = notices[0]
    jobs = dict(ClusterSpec(first.cluster).as_dict()) if first.cluster else {}
    tasks = {
        job: dict(enumerate(listed) if isinstance(listed, list) else listed.items())
        for job, listed in jobs.items()
    }
    for notice in notices:
        tasks.setdefault(notice.job, {})[notice.index] = notice.address
    return AnnouncedCluster(
        owner=first.owner,
        pids=tuple(sorted({notice.pid for notice in notices})),
        spec=ClusterSpec(tasks),
        key=first.key,
        tls=TlsFiles(**dict(zip(("cert", "key", "ca"), first.tls, strict=True)))
        if first.tls
        else None,
    )


def _addresses(spec: ClusterSpec) -> list[str]:
    return [spec.task_address(job, index) for job in spec.jobs for index in spec.task_indices(job)]


def _command(pid: int) -> str:
    """Return the command line of a process."""
    line = b""
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    words = line.decode("utf-8", "replace").rstrip("\0").split("\0")
    text = " ".join([words[0].rpartition("/")[2], *words[1:]])
    return text if len(text) <= _COMMAND_LIMIT else f"{text[: _COMMAND_LIMIT - 1]}…"
