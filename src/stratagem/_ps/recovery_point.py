"""Recovery point of a lost parameter server: the rows of the last checkpoint, and the writes it contains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stratagem._wire.messages import ReadParts


@dataclass(frozen=True)
class RecoveryPoint:
    """A committed checkpoint, as orders to the servers to read their rows.

    Attributes:
        step: its training step.
        path: its directory.
        cut_at: when the servers made their cut, in seconds of `time.monotonic`.
        orders: by server, the order to read its rows.
        facts: by server, ``versions`` of its variables and its ``ledger`` at the cut. Of a server that was
            restored from this checkpoint, the versions after that, and ``since`` when it had them.
    """

    step: int
    path: str
    cut_at: float
    orders: Mapping[int, ReadParts]
    facts: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def facts_of(self, server: int) -> Mapping[str, Any]:
        return self.facts.get(server, {})


@dataclass(frozen=True)
class ServerRecovery:
    """A parameter server that was lost and restored.

    Attributes:
        task: the server.
        step: the training step of the checkpoint it was restored from; -1 if it came back with its variables.
        path: that checkpoint.
        lost_s: seconds of training that its variables lost: from the checkpoint's cut to the loss.
        variables: names of its variables.
        updates: by name, how many updates of the variable were lost. A variable is missing if that is not known,
            because the server was on another host.
        seconds: from the loss until training went on.
        backup: the server whose backup took over; empty if there was none.
    """

    task: str
    step: int
    path: str
    lost_s: float
    variables: tuple[str, ...]
    updates: Mapping[str, int]
    seconds: float
    backup: str = ""

    def __str__(self) -> str:
        if self.backup:
            return (
                f"{self.task} was lost; the backup of its variables on {self.backup} took over in "
                f"{self.seconds:.1f} s. Lost: nothing that was acknowledged"
            )
        if self.step < 0:
            return f"{self.task} answers again after {self.seconds:.1f} s; nothing was lost"
        known = f", {sum(self.updates.values())} updates" if self.updates else ""
        shown = ", ".join(self.variables[:5])
        more = f" and {len(self.variables) - 5} more" if len(self.variables) > 5 else ""
        return (
            f"{self.task} was lost and restored from step {self.step} ({self.path}) in "
            f"{self.seconds:.1f} s. Lost: {self.lost_s:.1f} s{known} of {shown}{more}"
        )
