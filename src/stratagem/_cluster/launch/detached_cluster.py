"""`DetachedCluster`: a local cluster owned by a background process, which outlives the script."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final, final

from typing_extensions import override

from stratagem import config
from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._cluster.discovery.resolvers import ClusterResolver
from stratagem._cluster.launch.cluster_file import (
    ClusterFile,
    lock_of,
    owner_of,
    read_cluster_file,
    resolver_of,
)
from stratagem._cluster.launch.launcher import import_meanwhile
from stratagem._cluster.launch.local_cluster import START_TIMEOUT_S, LocalCluster
from stratagem._cluster.launch.supervised_cluster import check_count
from stratagem.errors import StartupError

_NAME: Final = re.compile(r"[\w.-]{1,100}")

STOP_TIMEOUT_S: Final = 15.0
"""How long `stop` waits for the owner, which needs a fraction of a second; then it is killed."""

_LOOK_S: Final = 0.1
"""How often the owner looks whether addresses have changed, and waits look again."""

_LOG_LINES: Final = 20
"""Lines of the owner's output in an error."""


@final
class DetachedCluster:
    """A local cluster that a background process owns, so that it outlives the script.

    Creating the object starts the cluster, or uses the running one of this name. `stop`, or ``stratagem cluster stop
    --name NAME``, ends it. All tasks end with the owner process, even if that is killed.

    Args:
        name: name of the cluster.
        workers: number of workers.
        ps: number of parameter servers.
        start_timeout_s: how long the start may take.

    Raises:
        TypeError, ValueError: an argument is not a valid name or number.
        StartupError: the cluster could not start, or the running one of this name has other numbers of tasks.

    Example::

        cluster = sg.DetachedCluster("dev", workers=2, ps=2)
        strategy = sg.ParameterServerStrategy(cluster.resolver, job="ctr-v3")

    Names are checked before anything starts:

        >>> import stratagem as sg
        >>> sg.DetachedCluster("two words")
        Traceback (most recent call last):
        ...
        ValueError: 'two words' is not a valid cluster name: expected up to 100 letters, digits, dots, dashes and underscores.
    """

    def __init__(
        self,
        name: str,
        workers: int = 2,
        ps: int = 1,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        check_count("workers", workers)
        check_count("ps", ps)
        self.name = name
        self._path = path_of(name)
        if not is_running(name):
            _start(name, workers, ps, start_timeout_s)
        spec = self.cluster_spec
        found = spec.num_tasks("worker"), spec.num_tasks("ps")
        if found != (workers, ps):
            raise StartupError(
                f"cluster {name!r} runs with {found[0]} workers and {found[1]} parameter servers, not with "
                f"{workers} and {ps}. Stop it with `stratagem cluster stop --name {name}`, or choose another name."
            )

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The addresses of the tasks."""
        return self.resolver.cluster_spec()

    @property
    def resolver(self) -> ClusterResolver:
        """The resolver for a strategy of this process. It always returns the current addresses."""
        return resolver_of(self._path)

    @property
    def pid(self) -> int:
        """Process number of the owner; 0 if the cluster has ended."""
        return owner_of(self._path)

    def stop(self) -> None:
        """End the cluster and all its tasks. May be called again."""
        stop(self.name)

    @override
    def __repr__(self) -> str:
        return f"<DetachedCluster {self.name!r}, process {self.pid or 'none'}>"


def path_of(name: str) -> Path:
    """Return the address file of a cluster, given by name or by the path of the file itself.

    Raises:
        ValueError: it is neither.
    """
    if name.endswith(".json") and os.sep in name:
        return Path(name)
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a valid cluster name: expected up to 100 letters, digits, dots, dashes and "
            "underscores."
        )
    return config.user_directory() / "clusters" / f"{name}.json"


def names() -> list[str]:
    """Return the names of the clusters of this user that run."""
    folder = config.user_directory() / "clusters"
    return sorted(path.stem for path in folder.glob("*.json") if owner_of(path))


def is_running(name: str) -> bool:
    """Return whether a cluster of this name is ready."""
    path = path_of(name)
    return bool(owner_of(path)) and path.exists()


def stop(name: str) -> bool:
    """End a cluster; return False if none of this name runs."""
    path = path_of(name)
    pid = owner_of(path)
    if not pid:
        for one in (path, lock_of(path)):  # of an owner that was killed
            one.unlink(missing_ok=True)
        return False
    deadline = time.monotonic() + STOP_TIMEOUT_S
    number = signal.SIGTERM
    while owner_of(path) == pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        while owner_of(path) == pid and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        number, deadline = signal.SIGKILL, time.monotonic() + STOP_TIMEOUT_S
    for one in (path, lock_of(path), path.with_suffix(".log")):
        one.unlink(missing_ok=True)
    return True


def own_cluster(name: str, workers: int, ps: int) -> None:
    """Own a cluster in this process until SIGTERM or SIGINT: what ``stratagem cluster run`` does."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with ClusterFile(path_of(name)) as file, LocalCluster(workers, ps) as cluster:
        key = cluster.resolver.cluster_key_text() or ""
        while not ended.is_set():
            file.write(cluster.cluster_spec, key)
            ended.wait(_LOOK_S)


def _start(name: str, workers: int, ps: int, timeout_s: float) -> None:
    path = path_of(name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = path.with_suffix(".log")
    command = [sys.executable, "-m", "stratagem", "cluster", "run", "--name", name]
    command += ["--workers", str(workers), "--ps", str(ps)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C and the end of the terminal are not for it
        )
    deadline = time.monotonic() + timeout_s
    import_meanwhile()
    while not is_running(name):
        if process.poll() is not None or time.monotonic() > deadline:
            late = process.poll() is None
            if late:
                process.kill()
                process.wait()
            lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            shown = "".join(f"\n    {line}" for line in lines)
            what = f"was not ready within {timeout_s:g} s" if late else "ended while it started"
            raise StartupError(f"cluster {name!r} {what}. Its last lines ({log}):{shown}")
        time.sleep(_LOOK_S / 2)
    # The thread reaps the process when it ends, so that it leaves no zombie.
    threading.Thread(target=process.wait, name="stratagem-detached-wait", daemon=True).start()


def describe(name: str) -> str:
    """Return one line about a cluster that runs."""
    record = read_cluster_file(path_of(name))
    spec = ClusterSpec(record.cluster)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.since))
    return (
        f"{name}: {spec.num_tasks('worker')} workers, {spec.num_tasks('ps')} parameter servers, "
        f"process {record.pid} since {when}"
    )
