"""Results of evaluations, one line each in the file ``evaluations.jsonl``.

An `Evaluator` in any process appends to it; the manager reads it to know which checkpoint is best.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

from stratagem._checkpoint.directory import CheckpointDirectory, SavedCheckpoint
from stratagem.errors import CheckpointError

NAME = "evaluations.jsonl"


@dataclass(frozen=True)
class Evaluation:
    """One checkpoint's evaluation.

    Attributes:
        identity: the checkpoint's.
        step: its training step.
        metrics: the results.
        seconds: duration of the evaluation.
        time: when it ended, in seconds since 1970.
    """

    identity: str
    step: int
    metrics: Mapping[str, float]
    seconds: float
    time: float


@contextmanager
def opened(directory: Path) -> Iterator[BinaryIO]:
    """Open the file to append to it.

    Raises:
        CheckpointError: that is not possible.
    """
    path = directory / NAME
    try:
        with path.open("ab+") as file:
            yield file
    except OSError as error:
        raise CheckpointError(
            f"results of evaluations cannot be written to {path}: {error}. An evaluator writes them beside the "
            "checkpoints, where the manager looks for the best one: let it write to this directory, and free "
            "disk space if there is none."
        ) from error


def append(directory: Path, evaluation: Evaluation) -> None:
    """Add a line, on disk when this returns."""
    line = json.dumps(asdict(evaluation)) + "\n"
    with opened(directory) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":  # a line that was cut off by a crash
                line = "\n" + line
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def read(directory: Path) -> list[Evaluation]:
    """Return the evaluations, oldest first; a line that was cut off by a crash is skipped."""
    try:
        lines = (directory / NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(Evaluation(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def with_evaluations(directory: CheckpointDirectory) -> list[SavedCheckpoint]:
    """Return the complete checkpoints of a directory, with the metrics of evaluations."""
    evaluated = {one.identity: one.metrics for one in read(directory.path)}
    found = []
    for saved in directory.scan():
        more = evaluated.get(saved.manifest.identity, {})
        manifest = replace(saved.manifest, metrics={**saved.metrics, **more})
        found.append(SavedCheckpoint(saved.path, manifest))
    return found
