"""A link connects, reports and reconnects: real sockets, no worker behind them."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
from waiting import wait_until

import stratagem as sg
from stratagem._cluster.coordinator.worker_link import (
    LinkSettings,
    WorkerAddresses,
    WorkerLink,
    close_links,
    log_output,
)
from stratagem._wire import messages
from stratagem._wire.channel import Channel
from stratagem._wire.failures import failure_from
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.listener import Listener
from stratagem._wire.messages import Frame
from stratagem.config import ClusterOptions
from stratagem.errors import ConnectionLost, UnavailableError, WorkerBusy, WorkerLost

KEY = ClusterKey(b"the key of this cluster")
OPTIONS = ClusterOptions(restart_pause_s=0.01, connect_timeout_s=120)


class Events:
    """Notes what a link reports."""

    def __init__(self) -> None:
        self.name = "me"
        self.seen: list[tuple[str, Any]] = []
        self.incarnation = 0
        self.job, self.before_first = None, 0

    def new_incarnation(self, link: WorkerLink) -> int:
        self.incarnation += 1
        return self.incarnation

    def worker_up(self, link: WorkerLink) -> None:
        self.seen.append(("up", link.incarnation))

    def worker_reports(self, link: WorkerLink, frames: Sequence[Frame]) -> None:
        self.seen += [("report", frame.message) for frame in frames]

    def worker_lost(self, link: WorkerLink, reason: Exception) -> None:
        self.seen.append(("lost", reason))

    def worker_unreachable(self, link: WorkerLink, error: Exception) -> None:
        self.seen.append(("unreachable", error))

    def of(self, kind: str) -> list[Any]:
        return [what for seen, what in self.seen if seen == kind]


KEY = ClusterKey.random()


class Peer:
    """Stands where a worker listens: answers `OpenWorker` as told, and keeps the channels."""

    def __init__(self, answer: Callable[[], messages.Message]) -> None:
        self.listener = Listener("127.0.0.1:0", key=KEY, may_unpickle=True)
        self.answer = answer
        self.channels: list[Channel] = []
        self.opened: list[messages.OpenWorker] = []
        self._ended = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ended:
            channel = self.listener.accept(timeout_s=0.05)
            if channel is not None:
                self.channels.append(channel)
                with contextlib.suppress(ConnectionLost):  # the link may be closed meanwhile
                    frame = channel.receive(timeout_s=60.0)
                    assert frame is not None
                    assert isinstance(frame.message, messages.OpenWorker)
                    self.opened.append(frame.message)
                    channel.reply(frame, self.answer())

    def close(self) -> None:
        self._ended = True
        self._thread.join(30)
        self.listener.close()
        for channel in self.channels:
            channel.close()


def opened() -> messages.Message:
    return messages.WorkerOpened()


@pytest.fixture
def peers() -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def make(answer: Callable[[], messages.Message] = opened) -> Peer:
        made.append(Peer(answer))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


@pytest.fixture
def links() -> Iterator[Callable[..., WorkerLink]]:
    made: list[WorkerLink] = []

    def make(
        events: Events, address: Callable[[int], str], options: ClusterOptions = OPTIONS
    ) -> WorkerLink:
        settings = LinkSettings(
            options=options, setup=lambda: "the setup", addresses=address, key=KEY
        )
        link = WorkerLink(events, 0, 4, settings=settings)  # type: ignore[arg-type]
        made.append(link)
        link.start()
        return link

    yield make
    close_links(made, 30.0)
    assert not any(link._thread.is_alive() for link in made)


def test_a_link_opens_a_session_and_passes_messages_on(peers: Any, links: Any) -> None:
    peer, events = peers(), Events()
    link = links(events, lambda task: peer.listener.address)
    wait_until(lambda: events.of("up"))
    assert link.connected
    assert (peer.opened[0].coordinator, peer.opened[0].worker) == ("me", 4)
    (channel,) = peer.channels
    for closure in range(3):
        channel.notify(messages.Finished(closure=closure))
    wait_until(lambda: len(events.of("report")) == 3)
    assert [one.closure for one in events.of("report")] == [0, 1, 2]
    with link.sending:
        assert link.notify(messages.Recall(closures=(7,)))
    frame = channel.receive(timeout_s=120)
    assert frame is not None
    assert frame.message == messages.Recall(closures=(7,))
    link.leave()
    frame = channel.receive(timeout_s=120)
    assert frame is not None
    assert isinstance(frame.message, messages.Leave)
    link.join(30.0)
    assert events.of("lost") == [], "who leaves has lost nobody"


def test_a_worker_that_comes_back_elsewhere_is_found_there(peers: Any, links: Any) -> None:
    """The address is looked up at every attempt; the next incarnation starts from nothing."""
    first, events = peers(), Events()
    where = [first.listener.address]
    link = links(events, lambda task: where[0])
    wait_until(lambda: events.of("up") == [1])
    link.sent.functions.add(b"f")
    second = peers()
    where[0] = second.listener.address
    first.channels[0].close()
    wait_until(lambda: events.of("up") == [1, 2])
    assert isinstance(events.of("lost")[0], ConnectionLost)
    assert link.address == second.listener.address
    assert link.sent.functions == set()
    assert second.opened[0].incarnation == 2


def test_a_resolver_that_fails_for_a_while_is_asked_again(peers: Any, links: Any) -> None:
    """Nobody refused: the worker may still come."""
    peer, events = peers(), Events()
    answers: list[Any] = [RuntimeError("pod 'w-4' is Pending"), ValueError("no task 4"), None]

    def cluster_spec() -> sg.ClusterSpec:
        if len(answers) > 1:
            raise answers.pop(0)
        return sg.ClusterSpec({"worker": {4: peer.listener.address}})

    link = links(events, WorkerAddresses(cluster_spec, 0.0))
    wait_until(lambda: events.of("up"))
    assert [str(error) for error in events.of("unreachable")] == [
        "the cluster resolver gave no address: pod 'w-4' is Pending",
        "the cluster resolver gave no address: no task 4",
    ]
    assert not link.refused


def test_one_lookup_serves_all_links_for_a_while() -> None:
    """A resolver may have to ask another system."""
    asked = []

    def cluster_spec() -> sg.ClusterSpec:
        asked.append(1)
        return sg.ClusterSpec({"worker": ["a:1", "b:1"]})

    patient = WorkerAddresses(cluster_spec, 1000.0)
    assert [patient(0), patient(1), patient(0)] == ["a:1", "b:1", "a:1"]
    assert len(asked) == 1
    eager = WorkerAddresses(cluster_spec, 0.0)
    assert [eager(0), eager(1)] == ["a:1", "b:1"]
    assert len(asked) == 3
    with pytest.raises(ConnectionLost, match="has no task 2"):
        eager(2)


def test_a_busy_worker_is_distinguished_from_a_missing_one(peers: Any, links: Any) -> None:
    refusal = UnavailableError("this is another worker", task="/job:worker/task:5")
    peer = peers(lambda: failure_from(refusal, task="there", with_pickle=True))
    events = Events()
    link = links(events, lambda task: peer.listener.address)
    wait_until(lambda: link.refused)
    assert "this is another worker" in link.why_down()
    absent = Events()
    nobody = links(absent, lambda task: "127.0.0.1:1")
    wait_until(lambda: absent.of("unreachable"))
    assert not nobody.refused
    assert "connection refused" in nobody.why_down()


@pytest.mark.parametrize(("heard_s", "taken"), [(0.0, True), (1000.0, False)])
def test_a_worker_of_another_coordinator_is_left_to_it_if_that_one_is_alive(
    peers: Any, links: Any, heard_s: float, taken: bool
) -> None:
    """It is alive if the worker has heard it after our first attempt."""

    def busy() -> messages.Message:
        error = WorkerBusy("busy", task="w", coordinator="another", heard_s=heard_s)
        return failure_from(error, task="there", with_pickle=True)

    peer, events = peers(busy), Events()
    link = links(events, lambda task: peer.listener.address)
    if taken:
        wait_until(lambda: link.taken)
    else:
        began = time.monotonic()
        wait_until(lambda: time.monotonic() > began + 1.5 and len(events.of("unreachable")) > 2)
        assert not link.taken
    assert not link.refused


def test_a_silent_worker_is_given_up(peers: Any, links: Any) -> None:
    peer, events = peers(), Events()
    options = ClusterOptions(heartbeat_s=0.1, heartbeat_limit_s=3.0, restart_pause_s=0.01)
    link = links(events, lambda task: peer.listener.address, options)
    wait_until(lambda: events.of("up"))
    link.watch(time.monotonic(), send_heartbeat=True)
    assert link.connected
    frame = peer.channels[0].receive(timeout_s=120)
    assert frame is not None
    assert isinstance(frame.message, messages.Beat)

    def given_up() -> bool:
        link.watch(time.monotonic(), send_heartbeat=False)
        return bool(events.of("lost"))

    wait_until(given_up)
    (lost,) = events.of("lost")[:1]
    assert isinstance(lost, WorkerLost)
    assert "no sign of life for" in str(lost)


def test_an_error_in_handling_a_report_ends_the_session_not_the_link(
    peers: Any, links: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Events):
        def worker_reports(self, link: WorkerLink, frames: Sequence[Frame]) -> None:
            raise ZeroDivisionError("ours")

    peer, events = peers(), Broken()
    links(events, lambda task: peer.listener.address)
    wait_until(lambda: events.of("up"))
    peer.channels[0].notify(messages.Finished(closure=1))
    wait_until(lambda: events.of("up") == [1, 2])
    assert isinstance(events.of("lost")[0], ZeroDivisionError)
    assert "handling its messages failed" in caplog.text


class NotingStop(threading.Event):
    """Stops the link before it connects, and notes how long it would have waited before."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float | None] = []
        self.set()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout)
        return True


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (ClusterOptions(), [0.0, 0.0, 0.0, 0.0]),
        (ClusterOptions(start_delay_s=2.0), [0.0, 2.0, 4.0, 6.0]),
        (ClusterOptions(start_delay_s=2.0, start_delay_max_s=3.0), [0.0, 2.0, 3.0, 3.0]),
    ],
)
def test_workers_start_one_after_another(options: ClusterOptions, expected: list[float]) -> None:
    """CCO-3."""
    found: list[float | None] = []
    for number in range(4):
        settings = LinkSettings(options=options, setup=object, addresses=lambda task: "nowhere:1")
        link = WorkerLink(Events(), number, number, settings=settings)  # type: ignore[arg-type]
        link._stop = stop = NotingStop()
        link._run()
        found += stop.waited
    assert found == expected


def test_a_printed_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has its own thread here, and a second write would leave room for another line."""
    stream = Mock()
    monkeypatch.setattr(sys, "stdout", stream)
    line = messages.LogLine(level=logging.INFO, logger="", text="in the step")
    log_output("/job:worker/task:0", line)
    stream.write.assert_called_once_with("[/job:worker/task:0] in the step\n")
