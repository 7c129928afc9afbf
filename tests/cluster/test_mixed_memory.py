"""Variables that move from a server that shares memory to one that does not (STRATAGEM_SHARED_MEMORY=0), and back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conserved import STEP_LIMIT_S
from torch import nn
from waiting import wait_until
from warm_start import Program

import stratagem as sg
from stratagem.cluster_resolver import SimpleClusterResolver

SERVER = """
import sys
import stratagem as sg
with sg.Server({"ps": ["127.0.0.1:0"]}, checkpoint_directories=[sys.argv[1]]) as server:
    print(server.address, flush=True)
    server.join()
"""


class MovingResolver(SimpleClusterResolver):
    """A resolver whose cluster changes."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.spec = spec

    def cluster_spec(self) -> Any:
        return self.spec


class Servers:
    """Parameter servers in processes of their own."""

    def __init__(self, directory: Path, worker: str) -> None:
        self._directory = directory
        self._worker = worker
        self.programs: list[Any] = []
        self.addresses: list[str] = []
        self.add(shares=True)
        self.add(shares=False)
        self.resolver = MovingResolver(self._spec())

    def _spec(self) -> Any:
        return sg.ClusterSpec({"ps": self.addresses[:2], "worker": [self._worker]})

    def add(self, *, shares: bool) -> None:
        env = {**os.environ, "STRATAGEM_SHARED_MEMORY": str(int(shares))}
        command = [sys.executable, "-c", SERVER, str(self._directory)]
        program = Program(command, stdout=subprocess.PIPE, text=True, env=env)
        self.programs.append(program)
        self.addresses.append(program.stdout.readline().strip())

    def replace(self, number: int, *, shares: bool) -> None:
        """Kill a server and start another one in its place."""
        self.programs[number].kill()
        self.add(shares=shares)
        self.addresses[number] = self.addresses.pop()
        self.programs.append(self.programs[number])
        self.programs[number] = self.programs.pop(-2)
        self.resolver.spec = self._spec()

    def close(self) -> None:
        for program in self.programs:
            program.kill()
            program.communicate(timeout=STEP_LIMIT_S)


@contextmanager
def servers(directory: Path) -> Iterator[Servers]:
    with sg.Server({"worker": ["127.0.0.1:0"]}) as worker, ExitStack() as stack:
        found = Servers(directory, worker.address)
        stack.callback(found.close)
        yield found


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backups", [0, 1])
def test_a_shard_moves_to_a_server_that_does_not_share_memory(tmp_path: Path, backups: int) -> None:
    """From its backup, or from a checkpoint; then back to one that shares. Every step counts once."""
    with servers(tmp_path) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver, backups=backups)
        with strategy, sg.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                first = sg.Variable(torch.zeros(3, dtype=torch.float64), name="first")
                second = sg.Variable(torch.zeros(3, dtype=torch.float64), name="second")
                table = nn.Embedding(9000, 2, sparse=True)
                nn.init.zeros_(table.weight)
                optimizer = torch.optim.SGD(table.parameters(), lr=1.0)

            def step() -> None:
                first.assign_add(torch.ones(3, dtype=torch.float64))
                second.assign_add(torch.ones(3, dtype=torch.float64))
                optimizer.zero_grad()
                table(torch.arange(50)).sum().neg().backward()
                optimizer.step()

            def run(steps: int) -> None:
                for _ in range(steps):
                    coordinator.schedule(step)
                coordinator.join(timeout_s=STEP_LIMIT_S)

            def check(steps: int) -> None:
                assert first.numpy().tolist() == second.numpy().tolist() == [float(steps)] * 3
                assert table.weight[:50].unique().tolist() == [float(steps)]

            checkpoint = sg.Checkpoint(first=first, second=second, table=table, optimizer=optimizer)
            with sg.CheckpointManager(checkpoint, tmp_path) as manager:
                run(4)
                check(4)
                for done, shares in (6, False), (8, True):
                    manager.save(done - 2, wait=True)
                    cluster.replace(0, shares=shares)
                    run(2)
                    check(done)
                    if backups:
                        views = strategy._cluster_views().servers
                        wait_until(lambda: not views.lack_backups(), timeout_s=120.0)
                assert len(coordinator.recoveries) == (1 if backups else 2)
