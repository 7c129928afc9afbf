"""Which checkpoints are kept, when a save is due, and when a delta is not worth it."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem._checkpoint.directory import SavedCheckpoint
from stratagem._checkpoint.retention import Best, Due, to_delete
from stratagem._ps.blocks.manifest import Manifest


def known(
    serial: int, *, parent: str = "", step: int | None = None, **metrics: float
) -> SavedCheckpoint:
    step = serial if step is None else step
    manifest = Manifest(step, serial, "", 0.0, {}, (), {}, parent=parent, metrics=metrics)
    return SavedCheckpoint(Path(f"c{serial}"), manifest)


def names(found: list[SavedCheckpoint]) -> list[str]:
    return [each.path.name for each in found]


def test_the_newest_are_kept_and_the_oldest_deleted() -> None:
    assert names(to_delete([known(n) for n in range(1, 6)], max_to_keep=2)) == ["c3", "c2", "c1"]
    assert to_delete([known(n) for n in range(1, 6)], max_to_keep=None) == []


def test_the_best_are_kept_beside_the_newest() -> None:
    found = [known(1, auc=0.9), known(2, auc=0.5), known(3, auc=0.8), known(4, auc=math.nan)]
    found += [known(5), known(6, auc=0.1)]
    assert names(to_delete(found, max_to_keep=1, best=Best("auc", 2))) == ["c5", "c4", "c2"]
    assert names(to_delete(found, max_to_keep=1, best=Best("-auc"))) == [
        "c5",
        "c4",
        "c3",
        "c2",
        "c1",
    ]


def test_of_one_step_only_the_later_save_counts() -> None:
    found = [known(1, step=10), known(2, step=20), known(3, step=20)]
    assert names(to_delete(found, max_to_keep=2)) == ["c2"]


def test_damaged_ones_do_not_count_and_stay_while_they_are_among_the_newest() -> None:
    found = [known(n) for n in range(1, 6)]
    assert names(to_delete(found, max_to_keep=2, damaged={"c4", "c5"})) == ["c1"]
    assert names(to_delete(found, max_to_keep=2, damaged={"c1"})) == ["c3", "c2", "c1"]
    assert names(to_delete(found, max_to_keep=5, damaged={"c1"})) == []


@st.composite
def histories(draw: st.DrawFn) -> list[SavedCheckpoint]:
    found: list[SavedCheckpoint] = []
    for serial in range(1, draw(st.integers(1, 12)) + 1):
        parent = draw(st.sampled_from(found)).path.name if found and draw(st.booleans()) else ""
        found.append(known(serial, parent=parent, auc=draw(st.floats(0, 1))))
    return found


@settings(deadline=None)
@given(histories(), st.integers(1, 4), st.booleans(), st.integers(1, 3))
def test_nothing_needed_is_ever_deleted(
    found: list[SavedCheckpoint], keep: int, by_metric: bool, count: int
) -> None:
    """At every moment of the deletion, every checkpoint that exists has its parents."""
    best = Best("auc", count) if by_metric else None
    left = {each.path.name: each for each in found}
    for going in to_delete(found, max_to_keep=keep, best=best):
        del left[going.path.name]
        assert all(
            not each.manifest.parent or each.manifest.parent in left for each in left.values()
        )
    assert names(sorted(found, key=lambda each: -each.manifest.serial)[:keep])[0] in left
    assert {
        each.path.name for each in sorted(found, key=lambda each: -each.manifest.serial)[:keep]
    } <= left.keys()
    if best is not None:
        assert set(names(best.rank(found)[:count])) <= left.keys()


def test_a_save_is_due_by_steps_or_by_time() -> None:
    due = Due(every_s=60.0, every_steps=100)
    assert not due.at(step=99, last_step=0, since_s=59.0)
    assert due.at(step=100, last_step=0, since_s=0.0)
    assert due.at(step=1, last_step=0, since_s=60.0)
    assert not due.at(step=100, last_step=100, since_s=1e9)
    assert not Due(None, None).at(step=10**9, last_step=0, since_s=1e9)
