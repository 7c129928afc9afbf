"""One parameter server without a cluster, and clients of it, for tests of either side."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from waiting import wait_until

from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.server_connection import Membership
from stratagem._ps.server.loop import ParameterServer

CHIEF = Membership(session="s", task="/job:chief/task:0", is_owner=True, lease_s=0.2)
"""Whose session ends soon after it is gone."""

STEADY = Membership(session="s", task="/job:chief/task:0", is_owner=True)
WORKER = Membership(session="s", task="/job:worker/task:0")

W = ShardLocation(0, 1, (2,), torch.float32)
"""The variable of these tests."""


def listed(server: ParameterServer) -> list[tuple[str, str]]:
    """Return the server as clients list it."""
    return [(server.task, server.address)]


def add_one(client: PsClient) -> None:
    """Send a write to `W` without waiting for its acknowledgement."""
    batch = client.batch()
    batch.assign(0, 1, "add", torch.ones(2))
    client.send(batch)


def stop(pid: int) -> None:
    """Send SIGSTOP and wait until the process has really stopped."""
    os.kill(pid, signal.SIGSTOP)

    def states() -> set[str]:
        try:
            return {
                (task / "stat").read_text().rpartition(")")[2].split()[0]
                for task in Path(f"/proc/{pid}/task").iterdir()
            }
        except OSError:  # a thread that has just ended
            return set()

    wait_until(lambda: states() == {"T"})
