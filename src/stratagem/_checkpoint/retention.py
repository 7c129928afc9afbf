"""Decide when to save, and which checkpoints to keep.

Pure: facts in, decisions out. `manager.py` carries them out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stratagem._checkpoint.directory import SavedCheckpoint


@dataclass(frozen=True, slots=True)
class Due:
    """Rule for the steps at which a save is due.

    Attributes:
        every_s: after so many seconds since the last one, or None.
        every_steps: after so many steps since the last one, or None.
    """

    every_s: float | None
    every_steps: int | None

    @property
    def is_ever(self) -> bool:
        """True if saves are ever due by themselves."""
        return self.every_s is not None or self.every_steps is not None

    def at(self, *, step: int, last_step: int, since_s: float) -> bool:
        """Return whether to save at `step`.

        Example:
            >>> Due(every_s=None, every_steps=10).at(step=20, last_step=10, since_s=0.0)
            True
        """
        if step == last_step:
            return False
        by_steps = self.every_steps is not None and step - last_step >= self.every_steps
        by_time = self.every_s is not None and since_s >= self.every_s
        return by_steps or by_time


@dataclass(frozen=True, slots=True)
class Best:
    """Ranking of checkpoints by a metric.

    Attributes:
        metric: the metric's name; with a leading ``-`` smaller is better.
        count: how many of the best are kept.
    """

    metric: str
    count: int = 1

    def rank(self, checkpoints: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """Return those that have the metric, best first; of equal ones the later first."""
        name = self.metric.removeprefix("-")
        sign = -1.0 if self.metric.startswith("-") else 1.0
        scored = [
            (sign * one.metrics[name], one.manifest.serial, one)
            for one in checkpoints
            if not math.isnan(one.metrics.get(name, math.nan))
        ]
        return [each for _, _, each in sorted(scored, key=lambda one: one[:2], reverse=True)]


def to_delete(
    checkpoints: Sequence[SavedCheckpoint],
    *,
    max_to_keep: int | None,
    best: Best | None = None,
    damaged: Collection[str] = (),
) -> list[SavedCheckpoint]:
    """Return the checkpoints to delete, in an order in which no delta ever lacks its parent.

    Kept are the `max_to_keep` newest, the best, and everything these build on. Of two checkpoints of
    one step only the later counts. Damaged ones do not count.
    """
    if max_to_keep is None:
        return []
    parents = {each.path.name: each.manifest.parent for each in checkpoints}
    ordered = sorted(checkpoints, key=lambda each: each.manifest.serial, reverse=True)
    sound: list[SavedCheckpoint] = []
    for each in ordered:
        if each.path.name not in damaged and all(each.step != other.step for other in sound):
            sound.append(each)
    newest = sound[:max_to_keep]
    kept = [*newest, *([] if best is None else best.rank(sound)[: best.count])]
    # A damaged one stays, for people to look at, until enough sound ones are newer.
    oldest = newest[-1].manifest.serial if len(newest) == max_to_keep else -1
    kept += [one for one in ordered if one.path.name in damaged and one.manifest.serial > oldest]
    keep = {each.path.name for each in kept}
    for name in list(keep):
        while name := parents.get(name, ""):
            keep.add(name)
    return [each for each in ordered if each.path.name not in keep]
