"""Tasks of all roles are killed while named jobs train (`random_kills.py`); every step counts once."""

from __future__ import annotations

from pathlib import Path

import pytest
import random_kills


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_task_after_the_other(tmp_path: Path) -> None:
    """A checkpoint after a takeover holds no step that the loop repeats; servers at different steps are not adopted."""
    plan = ["chief 0", "ps 0", "worker 0", "ps 1", "chief 0"]
    values = random_kills.planned(plan, tmp_path)
    assert values == [float(random_kills.STEPS)] * 6


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_random_tasks_at_random_moments(tmp_path: Path) -> None:
    """A part of the nightly run, whose totals are in docs/reliability.md."""
    totals = random_kills.soak(60, doubles=6, seed=1, folder=tmp_path)
    print(totals)
    assert totals.failures == []
    assert sum(totals.kills.values()) >= 60
    assert totals.doubled == 0
