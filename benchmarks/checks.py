"""Checks that all sides do the same work: pure comparisons of the facts that sides report."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.results import Check

Facts = dict[str, Any]

# Asynchronous sides apply the same gradients in another order and a little stale.
ALIKE = 0.15
# The same arithmetic in another order of additions, some hundred steps in float32.
EQUAL = 2e-3


def compare(
    row: str,
    facts: dict[str, Facts],
    parity: Facts | None,
    *,
    within: tuple[float, float] | None = None,
) -> list[Check]:
    """Compare the facts of the sides of a row.

    Args:
        row: the row's name.
        facts: answers to ``check``, by the side's label.
        parity: our answer in the deterministic form of the row, to be compared with the limit's.
        within: the last loss of every side, as a multiple of the limit's after as many steps, is between these.
    """
    checks = [*_counted(row, facts), *_sums(row, facts), *_losses(row, facts)]
    if within is not None and "loss_after" in facts.get("limit", {}):
        checks += _last_losses(row, facts, within)
    if parity is not None and "parameters" in facts.get("limit", {}):
        checks.append(_parity(row, parity, facts["limit"]))
    return checks


def _counted(row: str, facts: dict[str, Facts]) -> list[Check]:
    return [
        Check(
            row=row,
            text=f"{label}: {said['counted']:g} additions found of {said['scheduled']:g} scheduled",
            passed=said["counted"] == said["scheduled"],
        )
        for label, said in facts.items()
        if "counted" in said
    ]


def _sums(row: str, facts: dict[str, Facts]) -> list[Check]:
    return [
        Check(
            row=row,
            text=f"{label}: read a sum of {said['sum']:g}, {said['expected']:g} expected",
            passed=math.isclose(said["sum"], said["expected"], rel_tol=1e-6),
        )
        for label, said in facts.items()
        if "sum" in said
    ]


def _losses(row: str, facts: dict[str, Facts]) -> list[Check]:
    told = {label: said for label, said in facts.items() if "loss_after" in said}
    checks = []
    for label, said in told.items():
        before, after = said["loss_before"], said["loss_after"]
        checks.append(
            Check(
                row=row,
                text=f"{label}: loss falls from {before:.4f} to {after:.4f}",
                passed=after < before,
            )
        )
    if len(told) > 1:
        firsts = [said["loss_before"] for said in told.values()]
        falls = [1 - said["loss_after"] / said["loss_before"] for said in told.values()]
        checks.append(
            Check(
                row=row,
                text=f"all sides start from the same loss ({min(firsts):.5f} to {max(firsts):.5f})",
                passed=max(firsts) - min(firsts) <= EQUAL * max(firsts),
            )
        )
        checks.append(
            Check(
                row=row,
                text=f"losses fall alike (by {min(falls):.0%} to {max(falls):.0%})",
                passed=max(falls) - min(falls) <= ALIKE,
            )
        )
    return checks


def _last_losses(row: str, facts: dict[str, Facts], within: tuple[float, float]) -> list[Check]:
    limit = facts["limit"]["loss_after"]
    multiples = {
        label: said["loss_after"] / limit
        for label, said in facts.items()
        if label != "limit" and "loss_after" in said
    }
    least, most = within
    return [
        Check(
            row=row,
            text=f"{label}: the last loss is {multiple:.2f} × the limit's ({least:g} to {most:g} expected)",
            passed=least <= multiple <= most,
        )
        for label, multiple in multiples.items()
    ]


def _parity(row: str, ours: Facts, limit: Facts) -> Check:
    pairs = list(zip(ours["parameters"], limit["parameters"], strict=True))
    worst = max(abs(a[0] - b[0]) / max(abs(b[0]), 1e-12) for a, b in pairs)
    # The second number is a sum of terms of both signs: its error is measured against the first one's size.
    order = max(abs(a[1] - b[1]) / max(abs(b[0]), 1e-12) for a, b in pairs)
    return Check(
        row=row,
        text=f"our parameters equal a plain run's, done deterministically (difference {max(worst, order):.1e})",
        passed=max(worst, order) <= EQUAL,
    )
