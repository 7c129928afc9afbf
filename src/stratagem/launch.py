"""Choose the strategy of a script: from `stratagem train`, from ``TF_CONFIG``, or the default.

`auto_strategy` is the public name. The `train` command announces its strategy here before it runs the script in
the same process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stratagem import config

if TYPE_CHECKING:
    from stratagem._cluster.discovery.resolvers import ClusterResolver
    from stratagem._strategies.base import Strategy

__all__ = ["announced", "auto_strategy"]

_announced: list[Strategy] = []


@contextmanager
def announced(strategy: Strategy) -> Iterator[None]:
    """Make `auto_strategy` return `strategy` while the context is open."""
    _announced.append(strategy)
    try:
        yield
    finally:
        _announced.pop()


def auto_strategy() -> Strategy:
    """Return the strategy that this process should use.

    1. Under ``stratagem train --strategy …``: the strategy that the command created.
    2. With ``TF_CONFIG`` naming parameter servers: on the coordinator ("chief", or no task) a
       `ParameterServerStrategy`. On a worker or parameter server this call runs the task until it is
       stopped and then ends the process, so that you can start one script for every task.
    3. Otherwise: `MirroredStrategy` when there are several GPUs, else `OneDeviceStrategy` on the
       GPU or the CPU.

    Example:
        >>> import stratagem as sg
        >>> strategy = sg.auto_strategy()
        >>> strategy.num_replicas_in_sync >= 1
        True
    """
    if _announced:
        return _announced[-1]
    if config.environment("TF_CONFIG"):
        from stratagem._cluster.discovery.resolvers import TFConfigClusterResolver

        resolver = TFConfigClusterResolver()
        if "ps" in resolver.cluster_spec().jobs:
            return _on_cluster(resolver)
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus > 1:
        from stratagem._strategies.mirrored import MirroredStrategy

        return MirroredStrategy()
    from stratagem._strategies.one_device import OneDeviceStrategy

    return OneDeviceStrategy("gpu:0" if gpus else "cpu:0")


def _on_cluster(resolver: ClusterResolver) -> Strategy:
    from stratagem._cluster.launch.task_server import Server
    from stratagem._strategies.parameter_server import ParameterServerStrategy

    if resolver.task_type in ("worker", "ps"):
        with Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
        ) as server:
            server.join()
        raise SystemExit(0)
    return ParameterServerStrategy(resolver)
