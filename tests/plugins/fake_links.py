"""Links without workers: they keep sent messages and report the events that a test chooses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from plain_strategy import PlainOnCoordinator

from stratagem._cluster.coordinator.engine import Engine
from stratagem._cluster.coordinator.remote_values import RemoteValue
from stratagem._cluster.coordinator.sender import Closure
from stratagem._cluster.coordinator.worker_link import SentObjects
from stratagem._wire import frames, messages
from stratagem._wire.codec import Outgoing, pack
from stratagem._wire.failures import failure_from
from stratagem._wire.messages import Frame, Message
from stratagem.config import ClusterOptions


class FakeLink:
    """The part of a `WorkerLink` that the engine uses."""

    def __init__(self, engine: Engine, number: int, task_index: int) -> None:
        self.engine = engine
        self.number = number
        self.task_index = task_index
        self.task = f"/job:worker/task:{task_index}"
        self.address = f"fake:{task_index}"
        self.incarnation = 0
        self.sending = threading.Lock()
        self.sent = SentObjects()
        self.connected = False
        self.started = self.left = False
        self.taken = self.refused = False
        self.last_error: Exception | None = None
        self.messages: list[Message] = []

    # The engine calls.

    def start(self) -> None:
        self.started = True

    def send(self, batch: Sequence[tuple[Message, object]]) -> bool:
        assert self.sending.locked(), "messages of two threads would mix"
        assert not self.engine.lock.locked(), "nothing that can wait is done under the lock"
        if self.connected:
            self.messages += [message for message, _ in batch]
        return self.connected

    def notify(self, message: Message) -> bool:
        self.messages.append(message)
        return self.connected

    def leave(self) -> None:
        self.left = True
        self.connected = False

    def join(self, timeout_s: float) -> None:
        pass

    def why_down(self) -> str:
        return f"{self.task} at {self.address!r}: {self.last_error}"

    # The test calls.

    def come_up(self) -> None:
        self.incarnation = self.engine.new_incarnation(self)  # type: ignore[arg-type]
        self.sent = SentObjects()
        self.connected = True
        self.engine.worker_up(self)  # type: ignore[arg-type]

    def get_lost(self, reason: str = "gone") -> None:
        self.connected = False
        self.engine.worker_lost(self, ConnectionError(reason))  # type: ignore[arg-type]

    def report(self, *reports: Message | tuple[Message, Outgoing]) -> None:
        found = []
        for one in reports:
            message, outgoing = one if isinstance(one, tuple) else (one, Outgoing())
            found.append(frame_of(message, outgoing))
        self.engine.worker_reports(self, found)  # type: ignore[arg-type]

    def running(self) -> list[int]:
        """Closures sent to the present incarnation, oldest first."""
        return [one.closure for one in self.messages if isinstance(one, messages.Run)]

    def take(self, kind: type[Message]) -> list[Any]:
        """Messages of one kind since the last call."""
        found = [one for one in self.messages if isinstance(one, kind)]
        self.messages = [one for one in self.messages if not isinstance(one, kind)]
        return found


def frame_of(message: Message, outgoing: Outgoing) -> Frame:
    """A frame as it would have arrived."""
    places = tuple(memoryview(bytearray(one)) for one in outgoing.buffers)
    spans = tuple((0, len(one)) for one in places)
    frame = Frame(frames.NOTIFY, 0, b"", memoryview(b""), spans, places=places)
    frame.message = message
    return frame


def finished(closure: int, value: object = None, ran_s: float = 1.0) -> tuple[Message, Outgoing]:
    """The report of a result."""
    outgoing = Outgoing()
    packed = None if value is None else pack(value, outgoing)
    return messages.Finished(closure=closure, value=packed, ran_s=ran_s), outgoing


def failed(closure: int, error: Exception, **more: Any) -> Message:
    """The report of an exception."""
    failure = failure_from(error, task="/job:worker/task:?", with_pickle=True)
    return messages.Failed(closure=closure, failure=failure, **more)


class FakeCluster:
    """An engine with a real queue and sender, and fake links.

    Args:
        workers: how many; they are down.
        views: the strategy's side.
        options: fields of `ClusterOptions`.
    """

    def __init__(
        self, workers: int, views: PlainOnCoordinator | None = None, **options: Any
    ) -> None:
        self.views = views or PlainOnCoordinator()
        self.links: list[FakeLink] = []
        self.engine = Engine(
            self.views,
            ClusterOptions(**options),
            self._make_link,  # type: ignore[arg-type]
            range(workers),
        )

    def _make_link(self, engine: Engine, number: int, task_index: int) -> FakeLink:
        self.links.append(FakeLink(engine, number, task_index))
        return self.links[-1]

    def come_up(self) -> FakeCluster:
        for link in self.links:
            link.come_up()
        return self

    def schedule(self, function: Callable[..., Any], *args: Any, **options: Any) -> RemoteValue:
        engine = self.engine
        call = engine.sender.pack(function, args, None)
        value = RemoteValue(engine.result_condition, call.function.name)
        with engine.changed:
            actions = engine.locked_add(Closure(0, call, value, 0.0, **options))
        engine.execute(actions)
        return value

    def take_error(self) -> BaseException | None:
        with self.engine.changed:
            return self.engine.locked_take_error()
