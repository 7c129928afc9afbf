"""A worker that stops in the middle of a large message is noticed, and nobody else suffers (FLT-1)."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import Tensor

import stratagem as sg
from stratagem.config import ClusterOptions

pytestmark = pytest.mark.process

LARGE = 64 << 20
"""More than a socket holds, so that sending it to a stopped process waits."""


def size(x: Tensor) -> int:
    return x.numel()


@pytest.mark.slow
def test_a_worker_that_hangs_while_it_is_sent_a_large_argument_is_noticed() -> None:
    options = ClusterOptions(heartbeat_s=0.25, heartbeat_limit_s=8.0)
    with sg.LocalCluster(workers=2, ps=1, restart=False) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with sg.ClusterCoordinator(strategy, options=options) as coordinator:
            large = torch.zeros(LARGE, dtype=torch.uint8)
            cluster.kill_worker(0, signal.SIGSTOP)
            values = [coordinator.schedule(size, args=(large,)) for _ in range(4)]
            coordinator.join(timeout_s=200)
            assert coordinator.fetch(values) == [LARGE] * 4
            lost, healthy = coordinator.workers
            assert not lost.connected
            # The other one was told all the while that its coordinator lives.
            assert (healthy.connected, healthy.incarnation) == (True, 1)
