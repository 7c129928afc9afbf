"""Results wait for their writes to be acknowledged, and for each other; never for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from stratagem._cluster.worker.results import BATCH, COPY_BYTES, HOLD_S, Results
from stratagem._wire import messages
from stratagem.errors import (
    ClosureInputError,
    DeadlineExceeded,
    ParameterServerLost,
    WriteFenced,
)


class Channel:
    """Keeps the batches."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[Any, Sequence[Any]]]] = []

    def notify_all(self, batch: Any) -> None:
        self.batches.append(list(batch))

    def sent(self) -> list[int]:
        return [message.closure for batch in self.batches for message, _ in batch]


class Writes:
    """Views whose writes are made and acknowledged by the test."""

    def __init__(self) -> None:
        self.made = self.done = 0
        self.failures: dict[int, Exception] = {}

    def written(self) -> int:
        return self.made

    def acknowledged(self, *, wait: bool) -> int:
        if wait:
            self.done = self.made
        return self.done

    def reaches(self, task: str) -> bool:
        return task != "/job:ps/task:1"

    def late_failure(self, number: int) -> Exception | None:
        return self.failures.pop(number, None)


@pytest.fixture
def parts() -> tuple[Any, Channel, Any]:
    channel: Any = Channel()
    return Results(channel, "/job:worker/task:3"), channel, Writes()


def test_results_are_sent_in_order_and_in_one_batch(parts: Any) -> None:
    results, channel, writes = parts
    for closure in range(5):
        results.hold(messages.Finished(closure=closure), (), writes)
    assert len(results) == 5
    assert channel.batches == []
    results.flush(writes)
    assert channel.sent() == [0, 1, 2, 3, 4]
    assert len(channel.batches) == 1
    results.flush(writes)
    assert len(channel.batches) == 1, "nothing is left"


def test_a_result_waits_until_its_writes_are_acknowledged(parts: Any) -> None:
    """`flush_ready` never waits; `flush` does."""
    results, channel, writes = parts
    for closure in range(3):
        writes.made += 1
        results.hold(messages.Finished(closure=closure), (), writes)
    results.flush_ready(writes)
    assert channel.sent() == []
    writes.done = 2
    results.flush_ready(writes)
    assert channel.sent() == [0, 1]
    results.flush(writes)
    assert channel.sent() == [0, 1, 2]


def test_a_write_that_fails_late_is_the_closure_s_error(parts: Any) -> None:
    results, channel, writes = parts
    for closure in range(2):
        results.hold(messages.Finished(closure=closure), (), writes)
    writes.failures[1] = WriteFenced("too late")
    results.flush(writes)
    (first, _), (second, _) = channel.batches[0]
    assert isinstance(first, messages.Finished)
    assert isinstance(second, messages.Failed)
    assert second.failure.text == "too late"


def test_small_results_are_copied_and_large_ones_sent_at_once(parts: Any) -> None:
    """The closure's memory may change as soon as the next closure runs."""
    results, channel, writes = parts
    small, large = bytearray(COPY_BYTES), bytearray(COPY_BYTES + 1)
    results.hold(messages.Finished(closure=0), [small], writes)
    small[0] = 9
    assert channel.batches == []
    results.hold(messages.Finished(closure=1), [large], writes)
    assert channel.sent() == [0, 1]
    ((_, (copied,)), (_, (same,))) = channel.batches[0]
    assert copied[0] == 0
    assert same is large


def test_results_are_due_by_number_by_age_and_before_a_long_closure(parts: Any) -> None:
    results, _, writes = parts
    assert not results.is_due(time.perf_counter(), 1000.0), "there are none"
    results.hold(messages.Finished(closure=0), (), writes)
    now = results._held_since
    assert not results.is_due(now)
    assert results.is_due(now + 2 * HOLD_S)
    assert results.is_due(now, next_takes_s=2 * HOLD_S)
    for closure in range(1, BATCH):
        results.hold(messages.Finished(closure=closure), (), writes)
    assert results.is_due(now)


def test_one_thread_flushes_while_the_other_goes_on(parts: Any) -> None:
    """The receiving thread does not wait for the working thread's flush."""
    results, channel, writes = parts
    waiting, go_on = threading.Event(), threading.Event()

    class Slow(Writes):
        def acknowledged(self, *, wait: bool) -> int:
            waiting.set()
            assert go_on.wait(30)
            return 0

    results.hold(messages.Finished(closure=0), (), writes)
    thread = threading.Thread(target=results.flush, args=(Slow(),))
    thread.start()
    assert waiting.wait(30)
    results.flush_ready(writes)
    assert channel.sent() == []
    go_on.set()
    thread.join(30)
    assert channel.sent() == [0]


@pytest.mark.parametrize(
    ("error", "blame"),
    [
        (ValueError("mine"), "user"),
        (ClosureInputError("no", original_exception=OSError()), "input"),
        (ParameterServerLost("gone", task="/job:ps/task:0"), "server"),
        (ParameterServerLost("unreachable", task="/job:ps/task:1"), "path"),
        (DeadlineExceeded("late"), "deadline"),
    ],
)
def test_errors_are_blamed_on_their_cause(parts: Any, error: Exception, blame: str) -> None:
    results, _, writes = parts
    report = results.failure(7, error, writes, lacks=True)
    assert (report.closure, report.blame, report.lacks) == (7, blame, True)
    assert report.failure.task == "/job:worker/task:3"
