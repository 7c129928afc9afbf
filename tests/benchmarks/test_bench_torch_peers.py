"""Programs of PyTorch alone beside ours: they do the plain run's work (issue 18, point 8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.checks import compare
from benchmarks.curves import CURVES, TORCH
from benchmarks.limits import side as limits
from benchmarks.row import tiny
from benchmarks.sides import SideProcess
from benchmarks.torch_peers import hogwild
from benchmarks.torch_peers.trainer import Place

ROWS = {row.name: tiny(row) for row in CURVES if row.name.endswith("_torch")}


def size_of(name: str) -> dict[str, Any]:
    return ROWS[name].points[0].size


@pytest.mark.parametrize("name", ROWS)
def test_one_worker_of_hogwild_does_the_plain_runs_work(name: str, tmp_path: Path):
    """The shared parameters, and Adagrad's sums, end as those of plain PyTorch."""
    row, size = name.removesuffix("_torch"), size_of(name)
    plain = limits.make(row, size)
    shared = hogwild.shared(row, size)
    place = Place(
        row=row,
        size=size,
        index=0,
        workers=1,
        servers=0,
        meeting=str(tmp_path / "meeting"),
        shared=shared,
    )
    worker = hogwild.Worker(place)
    before = worker.mean_loss()
    for _ in range(size["check_steps"]):
        worker.step()
    facts = plain.check()
    assert facts["loss_before"] == pytest.approx(before)
    assert facts["loss_after"] == pytest.approx(worker.mean_loss())
    for found, expected in zip(shared["values"], plain.model.parameters(), strict=True):
        assert found.equal(expected.detach())


@pytest.mark.soak
@pytest.mark.parametrize("side", TORCH[1:], ids=lambda side: side.size["form"])
@pytest.mark.parametrize("name", ROWS)
def test_a_pytorch_program_runs_and_its_loss_falls_as_the_plain_one_does(name: str, side):
    """Real processes; both workers make steps, and the loss after them is close to the plain run's."""
    size = {**size_of(name), **side.size}
    with SideProcess("torch") as process:
        process.ask("setup", timeout_s=180, row=name, size=size)
        facts = process.ask("check", timeout_s=180)
        answer = process.ask("sample", timeout_s=60, seconds=0.05)
        processes = set(process.processor_seconds())
    assert answer["value"] > 0
    servers = {"ps 0", "ps 1"} if side.size["form"] == "rpc" else set()
    assert processes == {"main", "worker 0", "worker 1", *servers}
    plain = limits.make(name.removesuffix("_torch"), size_of(name)).check()
    checks = compare(name, {"torch": facts, "limit": plain}, None)
    assert len(checks) == 4
    assert all(check.passed for check in checks), checks
