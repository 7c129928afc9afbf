"""Limits of a cluster, from arguments and from the environment."""

from __future__ import annotations

import pytest

from stratagem.config import ClusterOptions


def test_defaults_find_a_silent_task_within_five_seconds() -> None:
    """Issue 4, section 4; a beat must fit into the limit several times."""
    options = ClusterOptions()
    assert options.heartbeat_limit_s + options.heartbeat_s < 5
    assert options.heartbeat_limit_s > 4 * options.heartbeat_s


def test_names_of_tf_distribute_are_read_beside_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """WDG-1, FLT-10, FLT-11, CCO-3; ours wins when both are set."""
    for name, value in {
        "TF_CLUSTER_COORDINATOR_WATCH_DOG_TIMEOUT": "7",
        "TF_COORDINATOR_IGNORE_TRANSIENT_PS_FAILURES": "5",
        "TF_COORDINATOR_IGNORE_TRANSIENT_TIMEOUTS": "2",
        "TF_COORDINATOR_SCHEDULE_START_DELAY": "0.5",
        "TF_COORDINATOR_SCHEDULE_START_DELAY_MAX": "3",
        "STRATAGEM_START_DELAY_S": "0.25",
        "STRATAGEM_QUEUE_LIMIT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    options = ClusterOptions.from_environment()
    assert (options.watchdog_s, options.transient_ps_failures) == (7.0, 5)
    assert (options.transient_timeouts, options.start_delay_max_s) == (2, 3.0)
    assert (options.start_delay_s, options.queue_limit) == (0.25, 0)


@pytest.mark.parametrize("text", ["soon", "-1"])
def test_unusable_settings_are_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the name, the value and what was expected."""
    monkeypatch.setenv("STRATAGEM_WATCHDOG_S", text)
    with pytest.raises(ValueError, match=f"STRATAGEM_WATCHDOG_S='{text}'"):
        ClusterOptions.from_environment()


def test_limits_that_cannot_work_are_refused() -> None:
    """A limit below the beat would lose every task."""
    with pytest.raises(ValueError, match="every task would count as lost"):
        ClusterOptions(heartbeat_s=2.0, heartbeat_limit_s=1.0)
    with pytest.raises(ValueError, match="connect_timeout_s=0"):
        ClusterOptions(connect_timeout_s=0)
