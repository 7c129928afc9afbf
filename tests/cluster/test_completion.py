"""How programs follow closures: callbacks, completion order, cancelling, errors that were seen already."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from waiting import Gate, pass_gate, wait_until

from stratagem import ClusterCoordinator, LocalCluster, RemoteValue
from stratagem.errors import ClosureCancelled, DeadlineExceeded, MisuseError

pytestmark = pytest.mark.process


def fail() -> None:
    raise ArithmeticError("on purpose")


def test_values_arrive_in_the_order_in_which_they_finish(
    coordinator: ClusterCoordinator, gate: Gate
) -> None:
    late = coordinator.schedule(pass_gate, args=(gate.path,))
    soon = [coordinator.schedule(lambda n: n, args=(n,)) for n in range(3)]
    completed = coordinator.as_completed([late, *soon, late], timeout_s=60)
    first = [next(completed) for _ in soon]
    assert set(first) == set(soon)
    gate.open()
    assert list(completed) == [late]


def test_waiting_for_completion_has_a_limit(coordinator: ClusterCoordinator, gate: Gate) -> None:
    values = [coordinator.schedule(pass_gate, args=(gate.path,))]
    with pytest.raises(DeadlineExceeded, match=r"0 of 1 values are done after 0\.1 s"):
        list(coordinator.as_completed(values, timeout_s=0.1))
    gate.open()
    assert list(coordinator.as_completed(values, timeout_s=60)) == values


def test_callbacks_run_once_for_results_errors_and_cancelled_closures(
    coordinator: ClusterCoordinator, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[RemoteValue] = []
    good = coordinator.schedule(lambda: 1)
    good.add_done_callback(seen.append)
    good.add_done_callback(lambda _: 1 / 0)
    wait_until(lambda: seen == [good])
    wait_until(lambda: "ZeroDivisionError" in caplog.text)
    good.add_done_callback(seen.append)
    assert seen == [good, good], "a callback of a finished value runs at once"

    bad = coordinator.schedule(fail)
    bad.add_done_callback(seen.append)
    wait_until(lambda: bad in seen)
    with pytest.raises(ArithmeticError):
        coordinator.join()

    held = [coordinator.schedule(pass_gate, args=(gate.path,)) for _ in range(50)]
    held[-1].add_done_callback(seen.append)
    coordinator.close()
    assert seen[-1] is held[-1]
    with pytest.raises(ClosureCancelled):
        held[-1].get()
    gate.open()


def test_a_callback_cannot_wait(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """It runs in the thread that receives results."""
    errors: list[str] = []
    blocked = coordinator.schedule(pass_gate, args=(gate.path,))
    calls = [
        lambda: coordinator.schedule(len),
        coordinator.join,
        blocked.get,
        lambda: list(coordinator.as_completed([blocked])),
    ]

    def call_all(_: RemoteValue) -> None:
        for call in calls:
            with pytest.raises(MisuseError) as found:
                call()
            errors.append(str(found.value))

    coordinator.schedule(lambda: 1).add_done_callback(call_all)
    wait_until(lambda: len(errors) == len(calls))
    assert "schedule() in a callback" in errors[0]
    gate.open()
    coordinator.join(timeout_s=60)


def test_cancel_drops_what_no_worker_has_started(
    coordinator: ClusterCoordinator, gate: Gate
) -> None:
    """A long queue ends when the running closures do, without an error of `join`."""
    running = coordinator.schedule(pass_gate, args=(gate.path,))
    gate.wait_for_arrival()
    queued = [coordinator.schedule(pass_gate, args=(gate.path,)) for _ in range(500)]
    coordinator.cancel()
    with pytest.raises(ClosureCancelled, match=r"cancelled by cancel\(\)"):
        queued[-1].get(timeout_s=60)
    # The other worker may have started one; the workers return what was sent ahead.
    wait_until(lambda: len([value for value in queued if "Cancelled" in repr(value)]) >= 499)
    gate.open()
    coordinator.join(timeout_s=60)
    running.get(timeout_s=60)
    assert coordinator.schedule(lambda: 5).get(timeout_s=60) == 5


def test_an_error_that_get_raised_is_not_raised_again(
    coordinator: ClusterCoordinator, gate: Gate
) -> None:
    bad = coordinator.schedule(fail)
    with pytest.raises(ArithmeticError):
        bad.get(timeout_s=60)
    coordinator.join(timeout_s=60)
    assert coordinator.schedule(lambda: 2).get(timeout_s=60) == 2
    coordinator.schedule(fail)
    with pytest.raises(ArithmeticError):
        coordinator.join(timeout_s=60)
    coordinator.join(timeout_s=60)


def test_large_arguments_hold_schedule_back(
    cluster: LocalCluster, connect: Any, gate: Gate
) -> None:
    """The limit counts the bytes of closures that are not done; nothing is lost."""
    coordinator = connect(cluster, queue_bytes=8 << 20)

    def size(path: str, tensor: torch.Tensor) -> int:
        pass_gate(path)
        return tensor.numel()

    values: list[RemoteValue] = []

    def schedule_all() -> None:
        for _ in range(24):
            values.append(coordinator.schedule(size, args=(gate.path, torch.zeros(1 << 18))))

    scheduling = threading.Thread(target=schedule_all)
    scheduling.start()
    wait_until(lambda: len(values) >= 8)
    scheduling.join(0.5)
    try:
        assert scheduling.is_alive(), "schedule() did not wait"
        assert len(values) == 8, "8 MB of arguments in pieces of 1 MB"
    finally:
        gate.open()
        scheduling.join(60)
    assert coordinator.fetch(values) == [1 << 18] * 24


def test_prints_of_workers_appear_without_any_setting(
    coordinator: ClusterCoordinator, capfd: pytest.CaptureFixture[str]
) -> None:
    printed = ""
    coordinator.schedule(lambda: print("spoken aloud")).get(timeout_s=60)

    def seen() -> bool:
        nonlocal printed
        printed += capfd.readouterr().out
        return "spoken aloud" in printed

    wait_until(seen)
    assert "[/job:worker/task:" in printed
    assert printed.count("spoken aloud") == 1
    assert not logging.getLogger("stratagem.tasks").isEnabledFor(logging.INFO)
