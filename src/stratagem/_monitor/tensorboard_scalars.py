"""Scalars for TensorBoard: logged values, steps per second and staleness."""

from __future__ import annotations

import math
import os
from typing import Any, final

from typing_extensions import override

from stratagem._monitor.cluster_view import ClusterView
from stratagem._owner import Owner


@final
class TensorBoardScalars(Owner):
    """Writer of new values in a directory for TensorBoard. The steps of the cluster are the global step.

    Args:
        directory: of one run, such as ``runs/ctr-v3``.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "scalars for TensorBoard need the package tensorboard: pip install "
                "'stratagem[tensorboard]'"
            ) from error
        self._writer: Any = SummaryWriter(os.fspath(directory))
        self._written: dict[str, float] = {}  # time of the last point, by name

    def write(self, view: ClusterView) -> None:
        """Write the values that are new in a view."""
        for scalar in view.scalars:
            last = self._written.get(scalar.name, -math.inf)
            for time_s, value in scalar.points:
                if time_s > last:
                    self._add(scalar.name, value, view.steps, time_s)
                    self._written[scalar.name] = time_s
        for name, found in (
            ("stratagem/steps_per_s", view.steps_per_s),
            ("stratagem/staleness_mean", view.staleness_mean),
            ("stratagem/staleness_p99", view.staleness_p99),
        ):
            if found is not None:
                self._add(name, found, view.steps, view.time_s)

    def _add(self, name: str, value: float, step: int, time_s: float) -> None:
        self._writer.add_scalar(name, value, global_step=step, walltime=time_s)

    @override
    def close(self) -> None:
        """Write everything to disk. May be called again."""
        self._writer.close()
