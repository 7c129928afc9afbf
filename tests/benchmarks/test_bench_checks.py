"""Same work on both sides (issue 6.2): the comparisons notice when it is not."""

from __future__ import annotations

from benchmarks.checks import compare


def outcome(facts, parity=None):
    return {check.text: check.passed for check in compare("row", facts, parity)}


def loss(before, after, **more):
    return {"loss_before": before, "loss_after": after, **more}


def test_losses_that_fall_alike_pass():
    assert all(outcome({"ours": loss(2.0, 1.0), "peer": loss(2.0, 1.1)}).values())


def test_losses_that_fall_differently_fail():
    found = outcome({"ours": loss(2.0, 1.9), "peer": loss(2.0, 1.0)})
    assert [passed for text, passed in found.items() if "alike" in text] == [False]


def test_a_different_start_fails():
    found = outcome({"ours": loss(2.0, 1.0), "peer": loss(2.1, 1.05)})
    assert [passed for text, passed in found.items() if "same loss" in text] == [False]


def test_a_loss_that_does_not_fall_fails():
    found = outcome({"ours": loss(2.0, 2.0)})
    assert list(found.values()) == [False]


def test_a_lost_or_doubled_addition_fails():
    found = outcome({"ours": {"counted": 19.0, "scheduled": 20.0}})
    assert list(found.values()) == [False]


def test_a_wrong_sum_fails():
    found = outcome({"ours": {"sum": 99.0, "expected": 100.0}})
    assert list(found.values()) == [False]


def test_a_last_loss_far_from_the_limits_fails():
    """Too high is an update lost, too low one applied twice; without a limit there is nothing to compare with."""
    sides = {"limit": loss(0.7, 0.04), "ours": loss(0.7, 0.06), "peer": loss(0.7, 0.16)}
    texts = {check.text: check.passed for check in compare("row", sides, None, within=(0.7, 3.0))}
    assert [passed for text, passed in texts.items() if "last loss" in text] == [True, False]
    sides["peer"] = loss(0.7, 0.02)
    texts = {check.text: check.passed for check in compare("row", sides, None, within=(0.7, 3.0))}
    assert [passed for text, passed in texts.items() if "last loss" in text] == [True, False]
    del sides["limit"]
    assert not any("last loss" in c.text for c in compare("row", sides, None, within=(0.7, 3.0)))


def test_parameters_that_differ_from_a_plain_run_fail():
    """Parity compares size and order of every parameter with the limit's."""
    limit = loss(2.0, 1.0, parameters=[[10.0, 1.0], [5.0, -2.0]])
    same = loss(2.0, 1.0, parameters=[[10.001, 1.001], [5.0, -2.0]])
    swapped = loss(2.0, 1.0, parameters=[[10.0, 1.0], [5.0, 2.0]])
    for parity, expected in ((same, True), (swapped, False)):
        found = outcome({"limit": limit}, parity)
        assert [passed for text, passed in found.items() if "plain run" in text] == [expected]
