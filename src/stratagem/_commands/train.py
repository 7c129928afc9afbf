"""``stratagem train``: run a user's script with the strategy that the command line names."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stratagem import launch

if TYPE_CHECKING:
    from stratagem._cluster.discovery.resolvers import ClusterResolver
    from stratagem._cluster.launch.supervised_cluster import SupervisedCluster
    from stratagem._strategies.base import Strategy


def run(options: argparse.Namespace) -> int:
    """Run a script as ``__main__``, in this process or, with ``--restarts``, in processes of its own."""
    if options.strategy is None:
        options.strategy = "one" if options.on == "local" else "ps"
    has_servers = options.strategy == "ps"
    if options.on != "local" and (not has_servers or options.cluster is not None):
        raise ValueError(f"--on {options.on} is for --strategy ps, and not with --cluster")
    if not has_servers and (options.cluster or options.job):
        raise ValueError(f"--cluster and --job are for --strategy ps, not for {options.strategy}")
    if not has_servers and (options.workers or options.ps):
        sys.stderr.write(
            f"stratagem: --workers and --ps have no effect with --strategy {options.strategy}; "
            "use --strategy ps for workers and parameter servers\n"
        )
    path = Path(options.script)
    if not path.is_file():
        raise FileNotFoundError(
            f"no script {options.script!r} (current folder: {Path.cwd()}); expected the path of a Python file"
        )
    if options.restarts and options.cluster is None:
        return _run_again(options)
    _run_here(options)
    return 0


def _run_here(options: argparse.Namespace) -> None:
    """Run the script; `sg.auto_strategy()` returns the strategy in it."""
    if options.owner:  # this process ends with that one, even if that is killed
        from stratagem._cluster.launch.fork_server import die_with_parent

        die_with_parent(options.owner)
    saved = sys.argv, sys.path[:]
    with open_strategy(options) as made, launch.announced(made), _watched(made, options):
        sys.argv = [options.script, *options.arguments]
        sys.path.insert(0, str(Path(options.script).resolve().parent))
        try:
            runpy.run_path(options.script, run_name="__main__")
        finally:
            sys.argv, sys.path[:] = saved


def _run_again(options: argparse.Namespace) -> int:
    """Run the script in a process of its own, again after each crash; own its cluster. Return the exit code."""
    from stratagem._cluster.launch.cluster_file import ClusterFile
    from stratagem._cluster.launch.restarting_script import run_again

    script = options.script
    command = [sys.executable, "-m", "stratagem", "train", script, "--strategy", options.strategy]
    command += ["--owner", str(os.getpid())]
    for name in ("report", "tensorboard", "replicas"):
        if value := getattr(options, name):
            command += [f"--{name}", str(value)]
    with ExitStack() as opened:
        keep_addresses: Callable[[], None] = lambda: None
        if options.strategy == "ps":
            folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="stratagem-"))
            path = Path(folder, "cluster.json")
            file = opened.enter_context(ClusterFile(path))
            cluster = opened.enter_context(_start_cluster(options))
            key = cluster.resolver.cluster_key_text() or ""
            keep_addresses = lambda: file.write(cluster.cluster_spec, key)
            keep_addresses()
            command += ["--cluster", str(path), "--job", options.job or Path(script).stem]
        command += ["--", *options.arguments]
        return run_again(command, options.restarts, name=script, while_running=keep_addresses)


def _start_cluster(options: argparse.Namespace) -> SupervisedCluster:
    workers, ps = options.workers or 2, options.ps or 2
    if options.on == "ray":
        from stratagem._cluster.launch.ray_cluster import RayCluster

        return RayCluster(
            workers,
            ps,
            resources_per_worker=options.resources_per_worker,
            resources_per_ps=options.resources_per_ps,
        )
    from stratagem._cluster.launch.local_cluster import LocalCluster

    if isinstance(workers, tuple) or options.resources_per_worker or options.resources_per_ps:
        raise ValueError("a range of workers, and resources, are for --on ray")
    return LocalCluster(workers, ps)


@contextmanager
def _watched(strategy: Strategy, options: argparse.Namespace) -> Iterator[None]:
    """Sample the run if a report or scalars are wanted; write the report at the end, also of a script that fails."""
    if options.report is None and options.tensorboard is None:
        yield
        return
    from stratagem._monitor.dashboard import require_bokeh
    from stratagem._monitor.monitor import Monitor
    from stratagem._monitor.sample_sources import ProgramSource

    if options.report is not None:
        require_bokeh()
    with Monitor(ProgramSource(strategy), tensorboard=options.tensorboard) as monitor:
        monitor.start()
        try:
            yield
        finally:
            view = monitor.look()
            if options.report is not None:
                from stratagem._monitor.page import write_report

                write_report(view, options.report, title=Path(options.script).name)


@contextmanager
def open_strategy(options: argparse.Namespace) -> Iterator[Strategy]:
    """Create the strategy, with its cluster if it needs one; close both at the end."""
    with ExitStack() as opened:
        made: Strategy
        resolver: ClusterResolver
        if options.strategy == "ps":
            from stratagem._strategies.parameter_server import ParameterServerStrategy

            if options.cluster is not None:
                from stratagem._cluster.launch.cluster_file import resolver_of
                from stratagem._cluster.launch.detached_cluster import path_of

                resolver = resolver_of(path_of(options.cluster))
            else:
                resolver = opened.enter_context(_start_cluster(options)).resolver
            made = ParameterServerStrategy(resolver, job=options.job)
        elif options.strategy == "central":
            from stratagem._strategies.central_storage import CentralStorageStrategy

            made = CentralStorageStrategy(_devices(options.replicas), parameter_device="cpu:0")
        elif options.strategy == "mirrored":
            from stratagem._strategies.mirrored import MirroredStrategy

            made = MirroredStrategy(_devices(options.replicas))
        else:
            from stratagem._strategies.one_device import OneDeviceStrategy

            made = OneDeviceStrategy(_devices(options.replicas)[0])
        yield opened.enter_context(made)


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
