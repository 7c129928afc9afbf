"""A training script of a named job: imported by tests, and run as a process that is killed.

As a script: ``python job_training.py CLUSTER KEY DIRECTORY STEPS KILL [BACKUPS]``. KILL is ``step:N`` (after scheduling step N),
``saved:N`` (the same, after a save is complete), ``stop:N`` (make a file "stopped" and SIGSTOP itself), or ``CALL:N`` with a name of `POINTS`: at the Nth call of that method.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from waiting import wait_until

import stratagem as sg

POINTS = {
    "attach": "stratagem._ps.client.server_connection:ServerConnection.request",
    "unsent": "stratagem._cluster.coordinator.sender:Sender.add",
    "unnoted": "stratagem._cluster.coordinator.closure_table:ClosureTable.deliver",
    "between cuts": "stratagem._checkpoint.server_group:ServerGroup.ask",
    "before the manifest": "stratagem._checkpoint.directory:CheckpointDirectory.commit",
    "noting": "stratagem._ps.client.job_connection:JobConnection.note",
}


def train(
    resolver: Any,
    directory: str,
    steps: int,
    *,
    job: str | None = "job",
    after_step: Callable[[int], None] = lambda step: None,
    backups: int = 0,
    paced: bool = False,
    every_steps: int | None = 20,
) -> dict[str, Any]:
    """Train to `steps`, with `paced` one after the other; return the first step, the final state and the recoveries."""
    torch.manual_seed(0)
    strategy = sg.ParameterServerStrategy(resolver, job=job, backups=backups)
    with strategy, sg.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            model = torch.nn.Sequential(
                torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
            )
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
            counters = [
                sg.Variable(torch.zeros((), dtype=torch.float64), name=f"counter{index}")
                for index in range(2)
            ]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            for counter in counters:
                counter.assign_add(torch.ones((), dtype=torch.float64))

        checkpoint = sg.Checkpoint(
            model=model, optimizer=optimizer, scheduler=scheduler, counters=counters, note="new"
        )
        with sg.CheckpointManager(checkpoint, directory, every_steps=every_steps) as manager:
            first = manager.restore_or_initialize()
            for number in range(first, steps):
                generator = torch.Generator().manual_seed(number)
                coordinator.schedule(step, args=(torch.randn(8, 4, generator=generator),))
                if paced:
                    coordinator.join(timeout_s=120)
                scheduler.step()
                manager.step(number + 1)
                after_step(number)
            coordinator.join(timeout_s=120)
            state = optimizer.state_dict()
            return {
                "first": first,
                "weights": [each.clone() for each in model.state_dict().values()],
                "moments": [each["exp_avg"].clone() for each in state["state"].values()],
                "counters": [float(each.read_value()) for each in counters],
                "rate": optimizer.param_groups[0]["lr"],
                "recoveries": coordinator.recoveries,
            }


def kill_at_call(place: str, nth: int) -> None:
    """Let this process be killed at the nth call of a method."""
    module, _, path = place.partition(":")
    owner, name = path.split(".")
    cls = getattr(importlib.import_module(module), owner)
    real, calls = getattr(cls, name), [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(cls, name, counting)


def main(cluster: str, key: str, directory: str, steps: str, kill: str, backups: str = "0") -> None:
    """Train, and be killed."""
    what, _, text = kill.partition(":")
    nth = int(text)

    def after_step(step: int) -> None:
        if step == nth and what == "saved":
            wait_until(lambda: any(Path(directory).glob("step_*")))
        if step == nth and what in ("step", "saved"):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == nth and what == "stop":
            Path(directory, "stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    if what in POINTS:
        kill_at_call(POINTS[what], nth)
    resolver = sg.cluster_resolver.SimpleClusterResolver(
        sg.ClusterSpec(json.loads(cluster)), cluster_key=key
    )
    kept = int(backups)
    train(resolver, directory, int(steps), after_step=after_step, backups=kept, paced=kept > 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
