"""A session's bookkeeping: closures run in order, are given back, and every one is reported once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_links import frame_of
from plain_strategy import PlainOnWorker, PlainSetup
from waiting import wait_until

from stratagem._cluster.worker.coordinator_session import CoordinatorSession
from stratagem._wire import messages
from stratagem._wire.codec import Outgoing, pack, unpack
from stratagem.errors import ConnectionLost, ProtocolError


class Channel:
    """A channel without a socket: the test puts in and takes out messages."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, Any]] = []
        self.replies: list[Any] = []
        self.closed = False
        self.silent = 0.0

    def receive_some(self, *, timeout_s: float, most: int) -> list[Any]:
        return []

    def notify(self, message: Any) -> None:
        self.sent.append((message, ()))

    def notify_all(self, batch: Any) -> None:
        self.sent += batch

    def reply(self, frame: Any, message: Any) -> None:
        self.replies.append(message)

    def silent_s(self) -> float:
        return self.silent

    def close(self) -> None:
        self.closed = True

    def of(self, kind: type) -> list[Any]:
        return [message for message, _ in self.sent if isinstance(message, kind)]


class Owner:
    task = "/job:worker/task:3"
    key = None
    owns_process = False


class BrokenSetup:
    def connect(self, **_: Any) -> PlainOnWorker:
        raise OSError("no server is there")


def make(setup: Any = None, **order: Any) -> tuple[Any, Channel]:
    outgoing = Outgoing()
    opening = messages.OpenWorker(
        coordinator="me",
        worker=3,
        incarnation=2,
        setup=pack(setup or PlainSetup(), outgoing),
        **{"heartbeat_s": 1000.0, "heartbeat_limit_s": 4000.0, **order},
    )
    channel: Any = Channel()
    owner: Any = Owner()
    return CoordinatorSession(owner, channel, frame_of(opening, outgoing)), channel


def define(session: CoordinatorSession, function: Callable[..., Any], digest: bytes = b"f") -> None:
    outgoing = Outgoing()
    value = pack(function, outgoing)
    session.take_in(frame_of(messages.Define(value=value, function=digest), outgoing))


def run(
    session: CoordinatorSession, closure: int, *args: Any, resource: int = 0, digest: bytes = b"f"
) -> None:
    outgoing = Outgoing()
    arguments = pack((args, {}), outgoing) if args else None
    message = messages.Run(closure=closure, function=digest, arguments=arguments, resource=resource)
    session.take_in(frame_of(message, outgoing))


def work(session: CoordinatorSession) -> None:
    """Run everything that has come in, wait for the reports, and end."""
    channel: Any = session.channel
    expected = session.waiting
    thread = threading.Thread(target=session.work)
    thread.start()
    wait_until(
        lambda: (
            session._ended
            or len(channel.of(messages.Finished)) + len(channel.of(messages.Failed)) == expected
        ),
        tell=lambda: session,
    )
    session.end()
    thread.join(30)


def test_closures_run_in_order_and_their_results_are_reported() -> None:
    session, channel = make()
    define(session, lambda n: n * 2)
    for closure in range(3):
        run(session, closure, closure + 10)
    assert session.waiting == 3
    work(session)
    assert isinstance(channel.replies[0], messages.WorkerOpened)
    reports = [message for message, _ in channel.sent]
    assert [report.closure for report in reports] == [0, 1, 2]
    values = [unpack(m.value, frame_of(m, Outgoing())) for m in reports]
    assert values == [20, 22, 24]
    assert (session.waiting, session.steps, channel.closed) == (0, 3, True)


def test_a_recalled_closure_is_given_back_and_never_runs() -> None:
    session, channel = make()
    define(session, int)
    for closure in range(3):
        run(session, closure)
    session.take_in(frame_of(messages.Recall(closures=(1, 2, 9)), Outgoing()))
    assert channel.of(messages.Returned) == [messages.Returned(closures=(1, 2))]
    work(session)
    assert [one.closure for one in channel.of(messages.Finished)] == [0]


def test_a_closure_is_started_or_given_back_never_both() -> None:
    """Two threads reach for the same closures, again and again."""
    session, _ = make()
    both: list[list[int]] = [[], []]
    session._waiting.update(range(20_000))
    start = threading.Barrier(2)

    def claim(found: list[int]) -> None:
        start.wait(30)
        found += [closure for closure in range(20_000) if session._claim(closure)]

    threads = [threading.Thread(target=claim, args=(found,)) for found in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(both[0] + both[1]) == list(range(20_000))


def test_an_exception_is_reported_and_the_next_closure_runs() -> None:
    session, channel = make()

    def maybe(n: int) -> int:
        if n == 0:
            raise SystemExit(3)
        if n == 1:
            raise StopIteration
        return n

    define(session, maybe)
    for closure in range(3):
        run(session, closure, closure)
    work(session)
    first, second = channel.of(messages.Failed)
    assert first.failure.type_name.endswith("SystemExit")
    assert "its dataset is used up" in second.failure.traceback
    assert [one.closure for one in channel.of(messages.Finished)] == [2]
    assert session.steps == 1


def test_a_result_that_cannot_be_sent_is_the_closure_s_error() -> None:
    session, channel = make()
    define(session, lambda: (n for n in range(3)))
    run(session, 5)
    work(session)
    (report,) = channel.of(messages.Failed)
    assert "its result, a generator, cannot be sent back" in report.failure.traceback


def test_resources_stay_here_and_their_errors_are_those_of_their_users() -> None:
    session, channel = make()
    define(session, lambda: [40])
    define(session, lambda: 1 / 0, b"broken")
    run(session, 1, resource=7)
    run(session, 2, resource=8, digest=b"broken")
    work(session)
    (kept,) = channel.of(messages.Finished)
    assert (kept.closure, kept.value) == (1, None)
    (report,) = channel.of(messages.Failed)
    assert report.closure == 2


def test_a_setup_that_fails_is_the_answer_to_the_coordinator() -> None:
    session, channel = make(BrokenSetup())
    run(session, 1)
    work(session)
    (failure,) = channel.replies
    assert isinstance(failure, messages.RemoteFailure)
    assert failure.text == "no server is there"
    assert channel.sent == []


def test_a_session_that_ends_discards_waiting_closures() -> None:
    session, channel = make()
    define(session, print)
    run(session, 1)
    session.take_in(frame_of(messages.Leave(), Outgoing()))
    work(session)
    assert channel.sent == []
    assert channel.closed


def test_a_message_for_another_kind_of_task_is_refused() -> None:
    session, _ = make()
    with pytest.raises(ProtocolError, match="a worker does not expect Hello"):
        session.take_in(frame_of(messages.Hello(), Outgoing()))


@pytest.fixture
def listening() -> Iterator[
    Callable[[CoordinatorSession, Callable[[], None]], list[BaseException]]
]:
    threads: list[tuple[CoordinatorSession, threading.Thread]] = []

    def listen(session: CoordinatorSession, turn_away: Callable[[], None]) -> list[BaseException]:
        errors: list[BaseException] = []

        def run() -> None:
            try:
                session.listen(turn_away)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        threads.append((session, thread))
        thread.start()
        return errors

    yield listen
    for session, thread in threads:
        session.end()
        thread.join(30)


def test_the_receiving_thread_sends_heartbeats_and_answers_others(listening: Any) -> None:
    session, channel = make(heartbeat_s=0.001)
    others: list[int] = []
    errors = listening(session, lambda: others.append(1))
    wait_until(lambda: len(channel.of(messages.Beat)) > 3 and others)
    assert errors == []


def test_a_silent_coordinator_is_given_up(listening: Any) -> None:
    """Only if nothing of it waits to be read."""
    session, channel = make(heartbeat_s=0.001, heartbeat_limit_s=0.01)
    looked: list[int] = []
    errors = listening(session, lambda: looked.append(1))
    wait_until(lambda: len(looked) > 2)
    assert errors == []
    channel.silent = 1.0
    wait_until(lambda: errors)
    assert isinstance(errors[0], ConnectionLost)
