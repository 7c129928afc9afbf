"""``stratagem train``: run a user's script with the strategy that the command line names."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stratagem import launch

if TYPE_CHECKING:
    from stratagem._cluster.launch.supervised_cluster import SupervisedCluster
    from stratagem._strategies.base import Strategy

STRATEGIES = ("one", "central", "mirrored", "ps")


@dataclass(frozen=True, kw_only=True)
class ClusterSize:
    """The cluster of parameter servers that a command asks for.

    Attributes:
        workers: number of workers, or on Ray the smallest and the largest number.
        ps: number of parameter servers.
        on: "local" for this machine, "ray" for the nodes of a Ray cluster.
        resources_per_worker: that Ray reserves.
        resources_per_ps: that Ray reserves.
    """

    workers: int | tuple[int, int]
    ps: int
    on: str = "local"
    resources_per_worker: Mapping[str, float] | None = None
    resources_per_ps: Mapping[str, float] | None = None

    def start(self) -> SupervisedCluster:
        """Start the cluster."""
        if self.on == "ray":
            from stratagem._cluster.launch.ray_cluster import RayCluster

            return RayCluster(
                self.workers,
                self.ps,
                resources_per_worker=self.resources_per_worker,
                resources_per_ps=self.resources_per_ps,
            )
        from stratagem._cluster.launch.local_cluster import LocalCluster

        if isinstance(self.workers, tuple) or self.resources_per_worker or self.resources_per_ps:
            raise ValueError("a range of workers, and resources, are for --on ray")
        return LocalCluster(self.workers, self.ps)


def run_script(
    script: str,
    arguments: Sequence[str],
    *,
    strategy: str,
    replicas: int,
    size: ClusterSize,
    report: str | None = None,
    tensorboard: str | None = None,
    cluster: str | None = None,
    job: str | None = None,
    owner: int = 0,
) -> None:
    """Run `script` as ``__main__``; `sg.auto_strategy()` returns the strategy in it.

    `cluster`: name or address file of a cluster that runs. `job`: name of the training job, for parameter servers.
    `owner`: process with which this one ends, even if that is killed; 0 for none. A report is written also when the
    script fails.
    """
    if owner:
        from stratagem._cluster.launch.fork_server import die_with_parent

        die_with_parent(owner)
    path = _script(script)
    saved = sys.argv, sys.path[:]
    with (
        open_strategy(strategy, replicas=replicas, size=size, cluster=cluster, job=job) as made,
        launch.announced(made),
        _watched(made, title=path.name, report=report, tensorboard=tensorboard),
    ):
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(path.resolve().parent))
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            sys.argv, sys.path[:] = saved


def run_script_again(
    script: str,
    arguments: Sequence[str],
    *,
    restarts: int,
    strategy: str,
    replicas: int,
    size: ClusterSize,
    job: str | None,
    report: str | None = None,
    tensorboard: str | None = None,
) -> int:
    """Run `script` in a process of its own, again after each crash; own its cluster. Return the exit code."""
    from stratagem._cluster.launch.cluster_file import ClusterFile
    from stratagem._cluster.launch.restarting_script import run_again

    path = _script(script)
    command = [sys.executable, "-m", "stratagem", "train", script, "--strategy", strategy]
    command += ["--owner", str(os.getpid())]
    command += ["--report", report] if report else []
    command += ["--tensorboard", tensorboard] if tensorboard else []
    if strategy != "ps":
        command += ["--replicas", str(replicas)] if replicas else []
        command += ["--", *arguments]
        return run_again(command, restarts, name=script, while_running=lambda: None)
    with (
        tempfile.TemporaryDirectory(prefix="stratagem-") as folder,
        ClusterFile(Path(folder, "cluster.json")) as file,
        size.start() as cluster,
    ):
        key = cluster.resolver.cluster_key_text() or ""

        def keep_addresses() -> None:
            file.write(cluster.cluster_spec, key)

        keep_addresses()
        command += ["--cluster", str(Path(folder, "cluster.json")), "--job", job or path.stem]
        command += ["--", *arguments]
        return run_again(command, restarts, name=script, while_running=keep_addresses)


def _script(script: str) -> Path:
    path = Path(script)
    if not path.is_file():
        raise FileNotFoundError(
            f"no script {script!r} (current folder: {Path.cwd()}); expected the path of a Python file"
        )
    return path


@contextmanager
def _watched(
    strategy: Strategy, *, title: str, report: str | None, tensorboard: str | None
) -> Iterator[None]:
    """Sample the run if a report or scalars are wanted; write them at the end."""
    if report is None and tensorboard is None:
        yield
        return
    from stratagem._monitor.dashboard import require_bokeh
    from stratagem._monitor.monitor import Monitor
    from stratagem._monitor.sample_sources import ProgramSource

    if report is not None:
        require_bokeh()
    with Monitor(ProgramSource(strategy), tensorboard=tensorboard) as monitor:
        monitor.start()
        try:
            yield
        finally:
            view = monitor.look()
            if report is not None:
                from stratagem._monitor.page import write_report

                write_report(view, report, title=title)


@contextmanager
def open_strategy(
    name: str,
    *,
    replicas: int,
    size: ClusterSize,
    cluster: str | None = None,
    job: str | None = None,
) -> Iterator[Strategy]:
    """Create the strategy called `name`, with its cluster if it needs one; close both at the end.

    Example:
        >>> with open_strategy(
        ...     "central", replicas=2, size=ClusterSize(workers=1, ps=1)
        ... ) as strategy:
        ...     strategy.num_replicas_in_sync
        2
    """
    from stratagem._strategies.central_storage import CentralStorageStrategy
    from stratagem._strategies.mirrored import MirroredStrategy
    from stratagem._strategies.one_device import OneDeviceStrategy

    if name != "ps" and (cluster or job):
        raise ValueError(f"--cluster and --job are for --strategy ps, not for {name}")
    devices = _devices(replicas)
    if name == "one":
        with OneDeviceStrategy(devices[0]) as one:
            yield one
    elif name == "central":
        with CentralStorageStrategy(devices, parameter_device="cpu:0") as central:
            yield central
    elif name == "mirrored":
        with MirroredStrategy(devices) as mirrored:
            yield mirrored
    elif name == "ps":
        from stratagem._strategies.parameter_server import ParameterServerStrategy

        if cluster is not None:
            from stratagem._cluster.launch.cluster_file import resolver_of
            from stratagem._cluster.launch.detached_cluster import path_of

            with ParameterServerStrategy(resolver_of(path_of(cluster)), job=job) as served:
                yield served
            return
        with (
            size.start() as own,
            ParameterServerStrategy(own.resolver, job=job) as served,
        ):
            yield served
    else:
        raise ValueError(f"unknown strategy {name!r}; expected one of {', '.join(STRATEGIES)}")


def _devices(replicas: int) -> list[str]:
    """Return one device per replica: GPUs if there are any, else logical CPUs."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = replicas or gpus or 2
    if gpus and count > gpus:
        raise ValueError(
            f"--replicas {count}: this machine has {gpus} GPUs. Use --replicas {gpus} or fewer."
        )
    return [f"{'gpu' if gpus else 'cpu'}:{i}" for i in range(count)]
