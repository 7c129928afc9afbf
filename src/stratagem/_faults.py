"""Injected faults: kill or stop a process, delay it, or drop a connection, at named points of the code.

`active` is None in every process without faults, so that a point costs one comparison::

    if faults.active is not None:
        faults.active.at("server.before_apply")

`stratagem.testing.inject` sets the faults of this process and, through the environment, of processes started later.
What fired is noted in files of a directory that all processes share: a killed process leaves its note.
"""

from __future__ import annotations

import fnmatch
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, final

from stratagem import config
from stratagem.errors import ConnectionLost

VARIABLE: Final = "STRATAGEM_FAULTS"
"""Names the directory of the faults to child processes."""

POINTS: Final = {
    "server.before_apply": "a parameter server has received a write and has not applied it",
    "server.after_apply": "a parameter server has applied a write and has not replied",
    "server.in_cut": "a parameter server has made its cut for a checkpoint",
    "server.in_block": "a parameter server is writing rows of a checkpoint",
    "server.in_restore": "a parameter server is reading rows of a checkpoint",
    "backup.before_forward": "a parameter server has received a write and has not sent it to its backup",
    "backup.after_forward": "a parameter server has sent a write to its backup and has not applied it",
    "backup.before_reply": "both servers have applied a write, and its sender does not know",
    "backup.in_promotion": "a backup was asked to take over",
    "backup.in_streaming": "a parameter server is sending its state to a new backup",
    "backup.receives_state": "a parameter server is receiving the state of another one",
    "save.before_fsync": "a process has written its file of a checkpoint and not flushed it",
    "coordinator.scheduled": "a closure is queued and not sent",
    "coordinator.finished": "a result has arrived and is not noted",
    "coordinator.in_attach": "a new coordinator has claimed a live job and has not adopted its variables",
    "coordinator.between_cuts": "one parameter server was asked for its cut, the next one not yet",
    "coordinator.before_manifest": "all files of a checkpoint but its manifest are on disk",
    "coordinator.before_rename": "a checkpoint is complete and not visible",
    "worker.before_closure": "a worker has received a closure and has not begun it",
    "worker.after_closure": "a worker has run a closure and has not reported it",
}
"""The points at which faults can be injected, and what has happened there."""

DROPS: Final = ("server.before_apply", "server.after_apply", "worker.before_closure")
"""Points at which a connection can be dropped."""

_FAULTS: Final = "faults.json"
_FIRED: Final = "fired"


class ConnectionDropped(ConnectionLost):
    """A connection that a fault dropped."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A failure to inject.

    Attributes:
        point: one of `stratagem.testing.POINTS`, or a pattern such as ``"server.*"``.
        action: ``"kill"`` (SIGKILL), ``"stop"`` (SIGSTOP), ``"delay"`` by `seconds`, or ``"drop"`` the connection.
        task: the task, such as ``"/job:ps/task:1"``, or a pattern; by default all tasks.
        after: how often each process passes the point before the fault.
        times: how often the fault happens, in all processes together; None for any number.
        probability: probability of the fault each time, drawn from `seed`, the task and the point.
        seed: seed of the draws.
        seconds: duration of a delay.

    Example:
        >>> import stratagem as sg
        >>> sg.testing.Fault(
        ...     point="server.after_apply", action="kill", task="/job:ps/task:1", after=10
        ... ).times
        1
    """

    point: str
    action: Literal["kill", "stop", "delay", "drop"]
    task: str = "*"
    after: int = 0
    times: int | None = 1
    probability: float = 1.0
    seed: int = 0
    seconds: float = 0.1

    def __post_init__(self) -> None:
        found = [point for point in POINTS if fnmatch.fnmatchcase(point, self.point)]
        if not found:
            raise ValueError(f"point={self.point!r}: expected one of {', '.join(POINTS)}.")
        if self.action not in ("kill", "stop", "delay", "drop"):
            raise ValueError(f"action={self.action!r}: expected 'kill', 'stop', 'delay' or 'drop'.")
        if self.after < 0:
            raise ValueError(f"after={self.after!r}: expected 0 or more.")
        if self.times is not None and self.times < 1:
            raise ValueError(f"times={self.times!r}: expected at least 1, or None.")
        if not 0 < self.probability <= 1:
            raise ValueError(f"probability={self.probability!r}: expected more than 0, at most 1.")
        if not self.seconds >= 0:
            raise ValueError(f"seconds={self.seconds!r}: expected 0 or more.")
        wrong = [point for point in found if point not in DROPS]
        if self.action == "drop" and wrong:
            raise ValueError(
                f"point={self.point!r}: a connection can be dropped at {', '.join(DROPS)} only."
            )


@dataclass(frozen=True)
class FiredFault:
    """A fault that happened: where, what, and in which process.

    Example:
        >>> import stratagem as sg
        >>> sg.testing.FiredFault("server.in_cut", "kill", "/job:ps/task:0", 4711).task
        '/job:ps/task:0'
    """

    point: str
    action: str
    task: str
    pid: int


@final
class FaultPlan:
    """The faults of one process."""

    def __init__(self, directory: Path, task: str) -> None:
        self._directory = directory
        self._task = task
        described = json.loads((directory / _FAULTS).read_text(encoding="utf-8"))
        self._faults = [
            (number, fault)
            for number, fault in enumerate(Fault(**one) for one in described)
            if fnmatch.fnmatchcase(task, fault.task)
        ]
        self._passed: dict[tuple[int, str], int] = {}
        self._draws: dict[tuple[int, str], random.Random] = {}

    def at(self, point: str) -> None:
        """Let the faults of a point happen.

        Raises:
            ConnectionDropped: the connection is to be dropped.
        """
        for number, fault in self._faults:
            if fnmatch.fnmatchcase(point, fault.point) and self._is_due(number, fault, point):
                self._note(fault, point)
                if fault.action == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif fault.action == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif fault.action == "delay":
                    time.sleep(fault.seconds)
                else:
                    raise ConnectionDropped(f"dropped by a fault at {point}")

    def _is_due(self, number: int, fault: Fault, point: str) -> bool:
        key = number, point
        self._passed[key] = self._passed.get(key, 0) + 1
        if self._passed[key] <= fault.after:
            return False
        if fault.probability < 1.0:
            draw = self._draws.get(key)
            if draw is None:
                # A task that was started again draws other numbers.
                text = f"{fault.seed} {self._task} {point} {self._starts()}"
                draw = self._draws[key] = random.Random(text)
            if draw.random() >= fault.probability:
                return False
        return fault.times is None or any(
            self._claim(f"{number}.{one}") for one in range(fault.times)
        )

    def _starts(self) -> int:
        """Return how many faults had fired in this task before."""
        return sum(one.task == self._task for one in read_fired(self._directory))

    def _claim(self, name: str) -> bool:
        try:
            os.close(os.open(self._directory / name, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
        except FileExistsError:
            return False
        return True

    def _note(self, fault: Fault, point: str) -> None:
        line = json.dumps([point, fault.action, self._task, os.getpid()]) + "\n"
        descriptor = os.open(
            self._directory / _FIRED, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
        )
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


active: FaultPlan | None = None
"""The faults of this process."""


def activate(directory: Path, task: str) -> None:
    """Set the faults of this process."""
    global active
    active = FaultPlan(directory, task)


def activate_from_environment(task: str) -> None:
    """Set the faults that the process which started this one chose."""
    named = config.environment(VARIABLE)
    if named:
        activate(Path(named), task)


def write_faults(directory: Path, faults: Sequence[Fault]) -> None:
    """Write the faults for all processes."""
    text = json.dumps([asdict(one) for one in faults])
    (directory / _FAULTS).write_text(text, encoding="utf-8")


def read_fired(directory: Path) -> list[FiredFault]:
    """Return what happened so far, in all processes."""
    try:
        lines = (directory / _FIRED).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [FiredFault(*json.loads(line)) for line in lines]
