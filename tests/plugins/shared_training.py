"""One epoch over Parquet files whose result says how often each row was trained; also run as a script that is killed.

As a script: ``python shared_training.py CLUSTER KEY FOLDER KILL``, with KILL as in `job_training.py`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from job_training import POINTS, kill_at_call

import stratagem as sg

LIMIT_S = 240.0


class EpochResult(NamedTuple):
    """How often each row counts in the variables, the account, and the steps scheduled before and in this run."""

    counts: torch.Tensor
    ledger: Any
    first: int
    steps: int


def write_files(folder: Path, *, rows: int, files: int, group: int) -> None:
    """Write Parquet files with the rows 0, 1, 2, …"""
    folder.mkdir(exist_ok=True)
    for number in range(files):
        mine = list(range(number, rows, files))
        pq.write_table(pa.table({"row": mine}), folder / f"{number}.parquet", row_group_size=group)


def dataset_of(folder: Path, batch_size: int = 8) -> sg.data.Dataset:
    """Return the rows of the files, shuffled."""
    files = str(folder / "*.parquet")
    return sg.data.Dataset.from_parquet(files, batch_size=batch_size).shuffle(64)


def counting_step(strategy: Any, rows: int) -> tuple[Any, Callable[[Any], int]]:
    """Return a variable with a count for each row, and a function that counts a batch."""
    with strategy.scope():
        counts = sg.Variable(torch.zeros(rows, dtype=torch.float64), name="counts")

    def step(batch: Any) -> int:
        counts.assign_add(torch.bincount(batch["row"], minlength=rows).double())
        return len(batch["row"])

    return counts, step


def train_epoch(
    resolver: Any,
    folder: Path,
    rows: int,
    *,
    job: str | None = "job",
    after_step: Callable[[int], None] = lambda step: None,
) -> EpochResult:
    """Train one epoch with checkpoints, as a named job."""
    strategy = sg.ParameterServerStrategy(resolver, job=job)
    with strategy, sg.ClusterCoordinator(strategy) as coordinator:
        counts, step = counting_step(strategy, rows)
        data = coordinator.create_shared_dataset(lambda: dataset_of(folder))

        def train(batches: Any) -> None:
            for batch in batches:
                step(batch)

        checkpoint = sg.Checkpoint(counts=counts, data=data)
        with sg.CheckpointManager(checkpoint, folder / "saved", every_steps=20) as manager:
            number = first = manager.restore_or_initialize()
            while True:
                try:
                    coordinator.schedule(train, args=(data,))
                except sg.errors.EndOfData:
                    break
                number += 1
                manager.step(number)
                after_step(number)
            coordinator.join(timeout_s=LIMIT_S)
            return EpochResult(counts.read_value().clone(), data.ledger, first, number)


def main(cluster: str, key: str, folder: str, rows: str, kill: str) -> None:
    """Train, and be killed."""
    what, _, text = kill.partition(":")

    def after_step(step: int) -> None:
        if what == "step" and step == int(text):
            os.kill(os.getpid(), signal.SIGKILL)

    if what in POINTS:
        kill_at_call(POINTS[what], int(text))
    resolver = sg.cluster_resolver.SimpleClusterResolver(
        sg.ClusterSpec(json.loads(cluster)), cluster_key=key
    )
    train_epoch(resolver, Path(folder), int(rows), after_step=after_step)


if __name__ == "__main__":
    main(*sys.argv[1:])
