"""States of a connection to a server, without sockets."""

from __future__ import annotations

import itertools

import pytest

from stratagem._ps.client.connection_state import ConnectionState, Phase


def after(*events: tuple[str, ...]) -> ConnectionState:
    state = ConnectionState()
    for name, *arguments in events:
        getattr(state, name)(*arguments)
    return state


OPENED, BROKEN, LOST, CLOSED = (
    ("opened", "a"),
    ("broken", "is late"),
    ("lost", "is gone"),
    ("closed",),
)


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        ((), Phase.NEW),
        ((OPENED,), Phase.OPEN),
        ((BROKEN,), Phase.BROKEN),
        ((BROKEN, OPENED), Phase.OPEN),
        ((OPENED, BROKEN), Phase.BROKEN),
        ((OPENED, BROKEN, BROKEN), Phase.BROKEN),
        ((OPENED, BROKEN, OPENED), Phase.OPEN),
        ((OPENED, OPENED), Phase.OPEN),
        ((OPENED, LOST), Phase.LOST),
        ((LOST,), Phase.LOST),
        ((OPENED, BROKEN, LOST), Phase.LOST),
        ((OPENED, CLOSED), Phase.CLOSED),
    ],
)
def test_transitions(events: tuple[tuple[str, ...], ...], phase: Phase) -> None:
    state = after(*events)
    assert state.phase is phase
    assert state.is_usable == (phase in (Phase.OPEN, Phase.BROKEN))


def test_a_connection_that_was_late_once_is_as_good_as_before() -> None:
    """A timeout is no verdict: the next request may connect again."""
    state = after(OPENED, BROKEN)
    assert (state.reason, state.server) == ("is late", "a")
    state.opened("a")
    assert (state.phase, state.reason) == (Phase.OPEN, "")


def test_another_server_process_does_not_have_the_variables() -> None:
    state = after(OPENED, BROKEN, ("opened", "b"))
    assert state.phase is Phase.LOST
    assert "lost its variables" in state.reason
    assert state.server == "a"


@pytest.mark.parametrize("last", [LOST, CLOSED])
def test_nothing_leads_out_of_the_last_states(last: tuple[str, ...]) -> None:
    for events in itertools.product((OPENED, BROKEN, ("opened", "b")), repeat=3):
        assert after(OPENED, last, *events).phase is (Phase.LOST if last is LOST else Phase.CLOSED)
    assert after(OPENED, LOST, CLOSED).phase is Phase.CLOSED
    assert after(OPENED, CLOSED, LOST).phase is Phase.CLOSED


def test_every_order_of_events_is_accepted() -> None:
    for events in itertools.product((OPENED, BROKEN, LOST, CLOSED, ("opened", "b")), repeat=4):
        state = after(*events)
        assert state.is_usable == (state.phase in (Phase.OPEN, Phase.BROKEN))
        assert bool(state.reason) == (state.phase in (Phase.BROKEN, Phase.LOST, Phase.CLOSED))
