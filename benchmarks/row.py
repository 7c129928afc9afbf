"""Types of the benchmark's rows: work, sides, sizes and targets, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Better = Literal["more", "less"]
Kind = Literal["ours", "peer", "torch", "limit", "bound", "bare"]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a row: the program that does the work, and its form."""

    kind: Kind
    label: str
    size: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Target of a row.

    A multiple of the fastest TensorFlow side (``peer``), a fraction of the limit, the bound or the bare program, a largest
    (``most``) or smallest (``least``) value, or a value above the limit (``above``: at most the limit and this much more).
    """

    against: Literal["peer", "limit", "bound", "bare", "most", "least", "above"]
    factor: float

    def __str__(self) -> str:
        words = {"most": "≤ {}", "least": "≥ {}", "above": "≤ limit + {}", "peer": "≥ {} × TF"}
        return words.get(self.against, f"≥ {{}} × {self.against}").format(f"{self.factor:g}")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One size of a row."""

    label: str
    size: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table, or one curve of a plot if it has several points."""

    name: str
    title: str
    unit: str
    sides: tuple[Side, ...]
    points: tuple[Point, ...]
    better: Better = "more"
    targets: tuple[Target, ...] = ()
    checked: bool = True
    #: our side's size for a run that must end with exactly the limit's parameters; at the first point only
    parity: dict[str, Any] | None = None
    #: each side's last loss as a multiple of the limit's, least and most; at the first point only
    last_loss: tuple[float, float] | None = None
    repetitions: int = 5
    seconds: float = 1.5
    #: heading of the table that has this row
    section: str = ""
    #: is one of the rows that README shows
    front: bool = False
    #: a row and a figure of its samples: this row is that figure and runs nothing itself
    figure_of: tuple[str, str] | None = None
    #: axis of the plot; without one there is none
    axis: str = ""
    #: the row in whose picture this one is drawn, at its right
    beside: str = ""


def point(*sizes: dict[str, Any], label: str = "", **more: Any) -> Point:
    """Return a point whose size is the union of ``sizes`` and ``more``."""
    merged: dict[str, Any] = {}
    for size in sizes:
        merged.update(size)
    return Point(label=label, size={**merged, **more})


_TINY: dict[str, Any] = {
    "inputs": 12,
    "hidden": 8,
    "classes": 3,
    "batch": 6,
    "batches": 4,
    "rows": 64,
    "hot": 24,
    "width": 2,
    "columns": 3,
    "variables": 2,
    "megabytes": 0.125,
    "check_steps": 8,
    "steps": 8,
    "parts": 2,
    "test_rows": 64,
    "tiny": True,
    "delta_s": 0.2,
    "long_s": 1.0,
    "every_s": 0.2,
}


def tiny(row: Row) -> Row:
    """Return the same row at a small size, for tests of the harness."""
    points = tuple(
        replace(point, size={**point.size, **{k: v for k, v in _TINY.items() if k in point.size}})
        for point in row.points[:1]
    )
    # What losses are expected depends on the size.
    return replace(row, points=points, repetitions=2, seconds=0.05, last_loss=None)
