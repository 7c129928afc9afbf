"""What a worker receives before and with a closure, and in which order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from fake_links import FakeLink
from plain_strategy import PlainOnCoordinator

from stratagem._cluster.coordinator.sender import Call, Closure, Sender
from stratagem._wire import messages
from stratagem._wire.codec import unpack_from


class Thing:
    """An object of the strategy; `parts` are others that its definition names."""

    def __init__(self, name: str, *parts: Thing) -> None:
        self.name = name
        self.parts = parts


class Things(PlainOnCoordinator):
    """A strategy whose objects are `Thing`, and whose state is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.version = self.sent = 0
        self.known: dict[str, Thing] = {}

    def describe(self, obj: object) -> Hashable | None:
        if isinstance(obj, Thing):
            self.known[obj.name] = obj
            return obj.name
        return None

    def definitions(self, token: Hashable) -> Sequence[object]:
        return ("made", self.known[str(token)].parts)

    def changes(self) -> tuple[Sequence[object], Sequence[Hashable]]:
        updates = [f"{self.sent}-{self.version}"] if self.version > self.sent else []
        return updates, ()

    def accept(self) -> None:
        self.sent = self.version

    def current(self) -> Sequence[object]:
        return [f"0-{self.version}"] if self.version else []


class Engine:
    """Enough for a `FakeLink`."""

    class lock:
        @staticmethod
        def locked() -> bool:
            return False


def link_of() -> FakeLink:
    engine: Any = Engine()
    link = FakeLink(engine, 0, 0)
    link.connected = True
    return link


def bring(sender: Sender, link: FakeLink, *calls: Call) -> list[str]:
    """Send closures; return in short what goes out."""
    batch: list[Any] = []
    with link.sending:
        for number, call in enumerate(calls):
            value: Any = None
            sender.add(link, Closure(number, call, value, 0.0), batch)  # type: ignore[arg-type]
    return [short(message, buffers) for message, buffers in batch]


def short(message: Any, buffers: Any) -> str:
    if isinstance(message, messages.Define):
        if message.token is None:
            return "function"
        return f"{unpack_from(message.token, buffers)}.{message.stage}"
    if isinstance(message, messages.Update):
        (update,) = unpack_from(message.updates, buffers)
        return f"update {update}"
    return type(message).__name__


def use(*things: Any) -> None:
    pass


def test_functions_and_definitions_are_sent_once_per_incarnation() -> None:
    """Parts before the definition that names them."""
    sender, link = Sender(Things()), link_of()
    part = Thing("part")
    whole = Thing("whole", part)
    call = sender.pack(use, (whole,), None)
    first = bring(sender, link, call)
    assert first == ["function", "whole.0", "part.0", "part.1", "whole.1", "Run"]
    assert bring(sender, link, call, sender.pack(use, (part,), None)) == ["Run", "Run"]
    assert bring(sender, link_of(), call) == first, "another worker has received nothing"


def test_updates_go_before_the_first_closure_that_must_see_them() -> None:
    views = Things()
    sender, link = Sender(views), link_of()
    before = sender.pack(use, None, None)
    views.version = 1
    after = sender.pack(use, None, None)
    views.version = 2
    later = sender.pack(use, None, None)
    assert bring(sender, link, before) == ["function", "Run"]
    assert bring(sender, link, after) == ["update 0-1", "Run"]
    assert bring(sender, link, later, after) == ["update 1-2", "Run", "Run"]


def test_a_new_incarnation_is_brought_up_to_date_at_once() -> None:
    views = Things()
    sender, link = Sender(views), link_of()
    call = sender.pack(use, None, None)
    sender.catch_up(link)  # type: ignore[arg-type]
    assert link.messages == []
    views.version = 3
    later = sender.pack(use, None, None)
    sender.catch_up(link)  # type: ignore[arg-type]
    assert [type(one).__name__ for one in link.messages] == ["Update"]
    assert bring(sender, link, call, later) == ["function", "Run", "Run"]


def test_forgotten_functions_and_resources_are_dropped_on_the_workers() -> None:
    sender, link = Sender(Things()), link_of()
    calls = [sender.pack(eval(f"lambda: {number}"), None, None) for number in range(300)]
    bring(sender, link, *calls[:10])
    sender.forget([link], [5])  # type: ignore[list-item]
    (forget,) = link.take(messages.Forget)
    assert forget.resources == (5,)
    assert set(forget.functions) == {call.function.digest for call in calls[:10]}
    sender.forget([link], [])  # type: ignore[list-item]
    assert link.messages == []
