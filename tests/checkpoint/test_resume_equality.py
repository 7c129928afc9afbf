"""A run that is killed and resumed equals an unbroken one, bit for bit.

The program, with everything that has a state, is `resumed_training.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from warm_start import run_program

PROGRAM = Path(__file__).with_name("resumed_training.py")

RUNS = [
    pytest.param("none", ["adam"], [5], marks=pytest.mark.soak),
    pytest.param("one", ["momentum", "adagrad"], [1, 12], marks=pytest.mark.soak),
    pytest.param("one, DataLoader", ["sgd"], [2, 9], marks=pytest.mark.process),
    pytest.param("central", ["adamw", "rmsprop"], [7, 18], marks=pytest.mark.soak),
    pytest.param("mirrored", ["nadam", "sgd"], [3, 6, 21], marks=pytest.mark.soak),
    pytest.param("mirrored", ["adadelta"], [13], marks=pytest.mark.process),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "optimizers", "stops"), RUNS)
def test_a_resumed_run_equals_an_unbroken_one(
    tmp_path: Path, strategy: str, optimizers: list[str], stops: list[int]
) -> None:
    """Killed at arbitrary steps; at odd ones the save was complete, at even ones perhaps not."""
    job = {
        "directory": str(tmp_path),
        "strategy": strategy,
        "optimizers": optimizers,
        "stops": stops,
    }
    done = run_program(
        [sys.executable, str(PROGRAM), json.dumps(job)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line[0] for line in found] == optimizers
    for optimizer, unbroken, resumed, starts in found:
        assert unbroken == resumed, f"{optimizer} under {strategy} after starts at {starts}"
        assert starts[0] == 0
        assert starts == sorted(starts)
    # At least one of them did resume in the middle.
    assert any(start > 0 for _, _, _, starts in found for start in starts)
