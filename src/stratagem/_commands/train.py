"""``stratagem train``: run a user's script with the strategy that the command line names."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stratagem import launch

if TYPE_CHECKING:
    from stratagem._strategies.base import Strategy

__all__ = ["STRATEGIES", "open_strategy", "run_script"]

STRATEGIES = ("one", "central", "mirrored", "ps")


def run_script(
    script: str,
    arguments: Sequence[str],
    *,
    strategy: str,
    replicas: int,
    workers: int,
    ps: int,
    report: str | None = None,
    tensorboard: str | None = None,
) -> None:
    """Run `script` as ``__main__``; `sg.auto_strategy()` returns the strategy in it.

    A report is written also when the script fails.
    """
    path = Path(script)
    if not path.is_file():
        raise FileNotFoundError(
            f"no script {script!r} (current folder: {Path.cwd()}); expected the path of a Python file"
        )
    saved = sys.argv, sys.path[:]
    with (
        open_strategy(strategy, replicas=replicas, workers=workers, ps=ps) as made,
        launch.announced(made),
        _watched(made, title=path.name, report=report, tensorboard=tensorboard),
    ):
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(path.resolve().parent))
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            sys.argv, sys.path[:] = saved


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
    with ExitStack() as opened:
        listeners = []
        if tensorboard is not None:
            from stratagem._monitor.tensorboard_scalars import TensorBoardScalars

            listeners.append(opened.enter_context(TensorBoardScalars(tensorboard)).write)
        monitor = Monitor(ProgramSource(strategy), listeners=tuple(listeners))
        opened.enter_context(monitor.start())
        try:
            yield
        finally:
            view = monitor.look()
            if report is not None:
                from stratagem._monitor.report import write_report

                write_report(view, report, title=title)


@contextmanager
def open_strategy(name: str, *, replicas: int, workers: int, ps: int) -> Iterator[Strategy]:
    """Create the strategy called `name`, with its cluster if it needs one; close both at the end.

    Example:
        >>> with open_strategy("central", replicas=2, workers=1, ps=1) as strategy:
        ...     strategy.num_replicas_in_sync
        2
    """
    from stratagem._strategies.central_storage import CentralStorageStrategy
    from stratagem._strategies.mirrored import MirroredStrategy
    from stratagem._strategies.one_device import OneDeviceStrategy

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
        from stratagem._cluster.launch.local_cluster import LocalCluster
        from stratagem._strategies.parameter_server import ParameterServerStrategy

        with (
            LocalCluster(workers=workers, ps=ps) as cluster,
            ParameterServerStrategy(cluster.resolver) as served,
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
