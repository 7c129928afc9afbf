"""`backups=1` with a `DynamicEmbedding`: the backup makes the same rows for the same keys (recovery.md section 3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from waiting import wait_until

import stratagem as sg
from stratagem import ClusterCoordinator, LocalCluster
from stratagem.config import ClusterOptions

OPTIONS = ClusterOptions(heartbeat_s=0.2, heartbeat_limit_s=60.0, restart_pause_s=0.05)
LIMIT_S = 120.0
STEPS = 60
HALVES = sg.partitioners.FixedShardsPartitioner(2)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"evict": "age", "admit_after": 2},
    {"max_age": 70, "admit_probability": 0.5},
]
"""Rows that stay; rows that leave, and ids that must be seen twice; rows that leave by age, ids admitted by chance."""


class Run:
    """A dynamic table, trained by one worker on ids of a fixed sequence."""

    def __init__(self, strategy: sg.ParameterServerStrategy, **settings: Any) -> None:
        with strategy.scope():
            # Rows begin with sums of 0.5, those of the backup as well.
            table = sg.nn.DynamicEmbedding(4, max_rows=600, seed=5, **settings)
            optimizer = torch.optim.Adagrad([table.weight], lr=0.1, initial_accumulator_value=0.5)
        self.table, self.optimizer = table, optimizer

        def step(ids: Tensor) -> None:
            optimizer.zero_grad()
            table(ids).square().sum().backward()
            optimizer.step()

        self.step = step

    def train(self, coordinator: ClusterCoordinator, first: int, last: int) -> None:
        for number in range(first, last):
            generator = torch.Generator().manual_seed(number)
            ids = torch.randint(0, 60 + 20 * number, (16,), generator=generator)
            coordinator.schedule(self.step, args=(ids * 10**15,))
        coordinator.join(timeout_s=LIMIT_S)

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        ids, rows = self.table.export()
        sums = self.optimizer.state_dict()["state"][0]["sum"]
        return ids, rows, sums[sums.sum(1) > 0.5 * 4].sort(0).values


def unbroken(settings: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    with (
        LocalCluster(workers=1, ps=2, in_process=True) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, HALVES) as strategy,
        ClusterCoordinator(strategy, options=OPTIONS) as coordinator,
    ):
        run = Run(strategy, **settings)
        run.train(coordinator, 0, STEPS)
        return run.state()


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(SETTINGS[0], id="stay"),
        pytest.param(SETTINGS[1], id="evict", marks=pytest.mark.slow),
        pytest.param(SETTINGS[2], id="age", marks=pytest.mark.slow),
    ],
)
def test_servers_are_killed_and_every_row_is_there(settings: dict[str, Any]) -> None:
    """Each server is lost in turn; keys, rows and optimizer state equal those of an unbroken run, bit for bit."""
    expected = unbroken(settings)
    with (
        LocalCluster(workers=1, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, HALVES, backups=1) as strategy,
        ClusterCoordinator(strategy, options=OPTIONS) as coordinator,
    ):
        run = Run(strategy, **settings)
        servers = strategy._cluster_views().servers
        for turn, killed in enumerate((1, 0)):
            run.train(coordinator, 20 * turn, 20 * turn + 10)
            cluster.kill_ps(killed)
            run.train(coordinator, 20 * turn + 10, 20 * turn + 20)
            # The loss may be noticed after the steps, and the other server must not be killed before.
            wait_until(lambda turn=turn: len(coordinator.recoveries) > turn, timeout_s=LIMIT_S)  # type: ignore[misc]
            wait_until(lambda: not servers.lack_backups(), timeout_s=LIMIT_S)
        run.train(coordinator, 40, STEPS)
        found = run.state()
        assert {one.task for one in coordinator.recoveries} == {"/job:ps/task:0", "/job:ps/task:1"}
        assert all(one.backup and not one.updates for one in coordinator.recoveries)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    if settings:
        assert len(expected[0]) < 60 * 16  # rows left, or never came


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_server_is_killed_while_ids_are_looked_up() -> None:
    """A lookup whose server dies is repeated on the backup; no id gets two rows, and every id has one."""
    kill = sg.testing.Fault(
        point="backup.after_forward", action="kill", task="/job:ps/task:1", after=25
    )
    with (
        sg.testing.inject(kill) as injected,
        LocalCluster(workers=2, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, HALVES, backups=1) as strategy,
        ClusterCoordinator(strategy, options=OPTIONS) as coordinator,
    ):
        run = Run(strategy)
        run.train(coordinator, 0, 40)
        wait_until(lambda: injected.count() == 1, timeout_s=LIMIT_S)
        ids, rows = run.table.export()
        wanted = torch.cat(
            [
                torch.randint(0, 60 + 20 * n, (16,), generator=torch.Generator().manual_seed(n))
                for n in range(40)
            ]
        )
        assert torch.equal(ids, torch.unique(wanted * 10**15))
        assert len(coordinator.recoveries) >= 1
        with torch.no_grad():
            found = nn.functional.embedding(torch.arange(len(ids)), rows)
        assert torch.isfinite(found).all()
