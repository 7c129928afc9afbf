"""Which checkpoints are kept, when a save is due, and when a delta is not worth it."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem._checkpoint.retention import Best, Due, KnownCheckpoint, to_delete, write_full


def known(
    serial: int, *, parent: str = "", step: int | None = None, **metrics: float
) -> KnownCheckpoint:
    return KnownCheckpoint(f"c{serial}", serial, serial if step is None else step, parent, metrics)


def names(found: list[KnownCheckpoint]) -> list[str]:
    return [each.name for each in found]


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
def histories(draw: st.DrawFn) -> list[KnownCheckpoint]:
    found: list[KnownCheckpoint] = []
    for serial in range(1, draw(st.integers(1, 12)) + 1):
        parent = draw(st.sampled_from(found)).name if found and draw(st.booleans()) else ""
        found.append(known(serial, parent=parent, auc=draw(st.floats(0, 1))))
    return found


@settings(deadline=None)
@given(histories(), st.integers(1, 4), st.booleans(), st.integers(1, 3))
def test_nothing_needed_is_ever_deleted(
    found: list[KnownCheckpoint], keep: int, by_metric: bool, count: int
) -> None:
    """At every moment of the deletion, every checkpoint that exists has its parents."""
    best = Best("auc", count) if by_metric else None
    left = {each.name: each for each in found}
    for going in to_delete(found, max_to_keep=keep, best=best):
        del left[going.name]
        assert all(not each.parent or each.parent in left for each in left.values())
    assert names(sorted(found, key=lambda each: -each.serial)[:keep])[0] in left
    assert {
        each.name for each in sorted(found, key=lambda each: -each.serial)[:keep]
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


def test_a_full_save_comes_when_deltas_are_many_or_large() -> None:
    assert not write_full(deltas_since_full=0, full_every=5, delta_bytes=50, full_bytes=100)
    assert write_full(deltas_since_full=0, full_every=5, delta_bytes=51, full_bytes=100)
    assert write_full(deltas_since_full=4, full_every=5, delta_bytes=1, full_bytes=100)
