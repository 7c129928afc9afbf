"""Decide when to save, whether to save a delta, and which checkpoints to keep.

Pure: facts in, decisions out. `manager.py` carries them out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownCheckpoint:
    """Facts about one complete checkpoint that decide whether it is kept.

    Attributes:
        name: the directory's name.
        serial: its number among the saves; later ones are larger.
        step: its training step.
        parent: the name of the checkpoint it builds on, or empty.
        metrics: its metrics.
    """

    name: str
    serial: int
    step: int
    parent: str = ""
    metrics: Mapping[str, float] | None = None


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

    def rank(self, checkpoints: Sequence[KnownCheckpoint]) -> list[KnownCheckpoint]:
        """Return those that have the metric, best first; of equal ones the later first.

        Example:
            >>> a, b = (
            ...     KnownCheckpoint("a", 1, 1, metrics={"loss": 2.0}),
            ...     KnownCheckpoint("b", 2, 2, metrics={"loss": 1.0}),
            ... )
            >>> [each.name for each in Best("-loss").rank([a, b])]
            ['b', 'a']
        """
        name = self.metric.removeprefix("-")
        sign = -1.0 if self.metric.startswith("-") else 1.0
        scored = [
            (sign * each.metrics[name], each.serial, each)
            for each in checkpoints
            if each.metrics is not None and not math.isnan(each.metrics.get(name, math.nan))
        ]
        return [each for _, _, each in sorted(scored, key=lambda one: one[:2], reverse=True)]


def to_delete(
    checkpoints: Sequence[KnownCheckpoint],
    *,
    max_to_keep: int | None,
    best: Best | None = None,
    damaged: Collection[str] = (),
) -> list[KnownCheckpoint]:
    """Return the checkpoints to delete, in an order in which no delta ever lacks its parent.

    Kept are the `max_to_keep` newest, the best, and everything these build on. Of two checkpoints of
    one step only the later counts. Damaged ones do not count.
    """
    if max_to_keep is None:
        return []
    by_name = {each.name: each for each in checkpoints}
    ordered = sorted(checkpoints, key=lambda each: each.serial, reverse=True)
    sound: list[KnownCheckpoint] = []
    for each in ordered:
        if each.name not in damaged and all(each.step != other.step for other in sound):
            sound.append(each)
    newest = sound[:max_to_keep]
    keep = {each.name for each in newest}
    if best is not None:
        keep.update(each.name for each in best.rank(sound)[: best.count])
    # A damaged one stays, for people to look at, until enough sound ones are newer.
    oldest = newest[-1].serial if len(newest) == max_to_keep else -1
    keep.update(each.name for each in ordered if each.name in damaged and each.serial > oldest)
    for name in list(keep):
        while (one := by_name.get(name)) is not None and one.parent:
            name = one.parent
            keep.add(name)
    return [each for each in ordered if each.name not in keep]


def write_full(
    *, deltas_since_full: int, full_every: int, delta_bytes: int, full_bytes: int
) -> bool:
    """Return whether the next save is a full one rather than a delta.

    A delta of more than half a full save costs more at restore than it saves.

    Example:
        >>> write_full(deltas_since_full=3, full_every=10, delta_bytes=10, full_bytes=100)
        False
    """
    return deltas_since_full + 1 >= full_every or 2 * delta_bytes > full_bytes
