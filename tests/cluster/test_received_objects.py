"""What a worker has received, and whose error it is when something cannot be unpacked."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from fake_links import frame_of
from plain_strategy import PlainOnWorker

from stratagem._cluster.worker.received_objects import ReceivedObjects
from stratagem._wire import messages
from stratagem._wire.codec import Outgoing, pack
from stratagem._wire.messages import Frame
from stratagem.errors import ClosureInputError


class Views(PlainOnWorker):
    """Rebuilds what was defined; fails at what the test names."""

    def __init__(self) -> None:
        self.objects: dict[Hashable, list[object]] = {}
        self.broken: list[object] = []
        self.applied: list[object] = []

    def define(self, token: Hashable, definition: object, *, last: bool) -> None:
        if definition in self.broken:
            raise OSError(f"{definition} cannot be built here")
        self.objects.setdefault(token, []).append(definition)

    def rebuild(self, token: Hashable) -> object:
        return self.objects[token]

    def apply(self, updates: Sequence[Any]) -> Any:
        if "unreadable" in self.broken:
            raise OSError("not even that")
        self.applied += updates
        failures = {token: OSError(f"{token} cannot move") for token in updates if token != "gone"}
        return failures, [token for token in ("a", "b") if "gone" in updates]


class Named:
    """Travels as its token."""

    def __init__(self, kind: str, value: Hashable) -> None:
        self.token = (kind, value)


def describe(obj: object) -> Any:
    return obj.token if isinstance(obj, Named) else None


class Pack:
    """A field of a message that is packed."""

    def __init__(self, value: object) -> None:
        self.value = value


def frame(kind: type[messages.Message], **fields: Any) -> Frame:
    outgoing = Outgoing()
    packed = {
        name: pack(one.value, outgoing, describe=describe) if isinstance(one, Pack) else one
        for name, one in fields.items()
    }
    return frame_of(kind(**packed), outgoing)


def function(value: Any, digest: bytes = b"f") -> Frame:
    return frame(messages.Define, value=Pack(value), function=digest)


def define(token: str, definition: Any, stage: int = 0, *, last: bool = True) -> Frame:
    return frame(messages.Define, value=Pack(definition), token=Pack(token), stage=stage, last=last)


def update(*tokens: str) -> Frame:
    return frame(messages.Update, updates=Pack(list(tokens)))


def run(objects: ReceivedObjects, *args: Any) -> Any:
    """Prepare and make a call as a session does."""
    call = frame(messages.Run, closure=1, function=b"f", arguments=Pack((args, {})))
    found = objects.function(b"f")
    values, named = objects.arguments(call, call.message)  # type: ignore[arg-type]
    return found(*values, **named)


@pytest.fixture
def views() -> Views:
    return Views()


@pytest.fixture
def objects(views: Views) -> ReceivedObjects:
    made = ReceivedObjects(views, "/job:worker/task:3")
    made.receive(function(lambda *args: args))
    return made


A, B = Named("v", "a"), Named("v", "b")


def test_objects_are_rebuilt_from_all_their_definitions(objects: Any, views: Views) -> None:
    objects.receive(define("a", 1, last=False))
    objects.receive(define("a", 2, stage=1))
    assert run(objects, A, 5) == ([1, 2], 5)
    assert not objects.lacks


def test_a_function_is_unpacked_once_and_can_be_forgotten(objects: Any) -> None:
    assert objects.function(b"f") is objects.function(b"f")
    objects.receive(frame(messages.Forget, functions=(b"f",)))
    with pytest.raises(KeyError):
        objects.function(b"f")


def test_only_closures_that_need_a_failed_definition_fail(objects: Any, views: Views) -> None:
    views.broken.append(1)
    objects.receive(define("a", 1, last=False))
    objects.receive(define("a", 2, stage=1))  # the rest of what failed
    objects.receive(define("b", 7))
    assert run(objects, B) == ([7],)
    for _ in range(2):
        with pytest.raises(OSError, match="1 cannot be built here"):
            run(objects, A)
        assert objects.lacks
    assert run(objects, B) == ([7],)
    assert not objects.lacks


class Leaving:
    """What ends the program where it is unpacked, as a script does that parses its command line at its top level."""

    def __reduce__(self) -> Any:
        return sys.exit, (2,)


def test_code_that_ends_the_program_when_it_is_imported_does_not_end_the_worker(
    objects: Any,
) -> None:
    objects.receive(define("a", Leaving()))
    objects.receive(function(Leaving(), b"leaving"))
    for use in (lambda: run(objects, A), lambda: objects.function(b"leaving")):
        with pytest.raises(ImportError, match=r"SystemExit\(2\).*command line.*__main__"):
            use()


def test_all_closures_fail_after_an_update_failed(objects: Any, views: Views) -> None:
    """Until the session ends: the next one gets definitions with the change."""
    objects.receive(define("a", 1))
    objects.receive(define("c", 3))
    objects.receive(update("a"))
    for needs in (A, Named("v", "c")):
        with pytest.raises(OSError, match="a cannot move"):
            run(objects, needs)
        assert objects.lacks


def test_all_closures_fail_after_an_unreadable_update(objects: Any, views: Views) -> None:
    views.broken.append("unreadable")
    objects.receive(update("a"))
    views.broken.clear()
    objects.receive(update("gone"))
    for _ in range(2):
        with pytest.raises(OSError, match="not even that"):
            run(objects)
        assert objects.lacks


def test_a_resource_is_found_fails_and_is_forgotten(objects: Any) -> None:
    """CCO-25: its error is that of its users."""
    shelf = Named("r", 4)
    objects.keep_resource(4, "value")
    assert run(objects, shelf) == ("value",)
    assert objects.resources == 1
    objects.fail_resource(4, ValueError("no such shelf"))
    with pytest.raises(ClosureInputError, match="failed to build on /job:worker/task:3") as caught:
        run(objects, shelf)
    assert isinstance(caught.value.original_exception, ValueError)
    assert not objects.lacks, "it would fail again"
    objects.receive(frame(messages.Forget, resources=(4,)))
    with pytest.raises(KeyError):
        run(objects, shelf)


def test_a_message_that_is_garbage_does_not_end_the_worker(objects: Any) -> None:
    garbage = messages.Packed(payload=b"not a pickle")
    objects.receive(frame_of(messages.Define(value=garbage, token=garbage), Outgoing()))
    with pytest.raises(pickle.UnpicklingError):
        run(objects)
    assert objects.lacks


class CountingViews(Views):
    def __init__(self) -> None:
        super().__init__()
        self.rebuilt = 0

    def rebuild(self, token: Hashable) -> object:
        self.rebuilt += 1
        return super().rebuild(token)


def test_the_same_arguments_are_unpacked_once() -> None:
    """As long as nothing else has arrived."""
    views = CountingViews()
    objects = ReceivedObjects(views, "w")
    objects.receive(define("a", "one"))
    objects.receive(function(lambda *args: args))
    named = Named("v", "a")
    assert run(objects, named, 3) == run(objects, named, 3) == (["one"], 3)
    assert views.rebuilt == 1
    assert run(objects, named, 4) == (["one"], 4)
    assert views.rebuilt == 2
    objects.receive(define("elsewhere", 1))
    run(objects, named, 4)
    assert views.rebuilt == 3


def test_arguments_that_a_function_may_change_are_unpacked_for_each_call() -> None:
    objects = ReceivedObjects(Views(), "w")
    objects.receive(function(lambda values: (values.append(1), values)[1]))
    assert run(objects, []) == [1]
    assert run(objects, []) == [1]


def test_arguments_follow_the_resource_that_they_name() -> None:
    objects = ReceivedObjects(Views(), "w")
    objects.receive(function(lambda value: value))
    resource = Named("r", 7)
    for value in ("first", "second"):
        objects.keep_resource(7, value)
        assert run(objects, resource) == run(objects, resource) == value
    objects.fail_resource(7, OSError("gone"))
    with pytest.raises(ClosureInputError, match="gone"):
        run(objects, resource)


def test_an_update_that_failed_is_an_error_also_with_the_same_arguments() -> None:
    objects = ReceivedObjects(Views(), "w")
    objects.receive(define("a", "one"))
    objects.receive(function(lambda value: value))
    named = Named("v", "a")
    run(objects, named)
    run(objects, named)
    objects.receive(update("a"))
    for _ in range(2):
        with pytest.raises(OSError, match="a cannot move"):
            run(objects, named)
