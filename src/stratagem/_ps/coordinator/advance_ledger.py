"""Apply each advance that closures made on schedulers, gradient scalers and settings once.

The coordinator's objects have the state that counts: `state_dict()` of a scheduler is current when `join` returns. A
worker continues with its own state. It gets the coordinator's before a closure if another worker, or the program
itself, has changed something since.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Final

from torch.optim import Optimizer
from typing_extensions import override

from stratagem._core.counters import CounterSlot, Owner
from stratagem._ps.definitions import COUNTER, Entry, Token
from stratagem._ps.training_state import (
    Advance,
    SettingWritten,
    Stateful,
    StateSnapshot,
    load_state,
    make_advance,
    state_of,
)

REPORTS: Final = 64
"""Reports that a worker keeps until a snapshot that contains them; more than that, and it gets one."""


class _Progress:
    """Advances that one incarnation of a worker has reported and received."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.reported = 0
        self.received = 0  # of `reported`, those in the last snapshot
        self.is_behind = True
        self.tokens = 0  # objects in the last snapshot


class AdvanceLedger:
    """States of the coordinator's objects that scheduled functions advance.

    The methods may be called in any thread. A thread that reads these objects to compare them holds `lock`.

    Args:
        object_of: returns the object of a token, None if it is gone.
    """

    def __init__(self, object_of: Callable[[Token], Any]) -> None:
        self.lock = threading.RLock()
        self._find = object_of
        self._counters: dict[Hashable, tuple[int, CounterSlot]] = {}  # number and slot
        self._slots: dict[Token, CounterSlot] = {}
        self._last_counter = 0
        self._states: dict[Token, Any] = {}  # as last seen; optimizers before their schedulers
        self._workers: dict[int, _Progress] = {}
        self._settings: dict[Token, dict[Entry, Any]] = {}  # set by advances

    @property
    def is_used(self) -> bool:
        """True if scheduled functions advance any object."""
        return bool(self._states)

    def watch(self, token: Token, obj: Stateful) -> None:
        """Keep the state of an object in step on all workers."""
        with self.lock:
            if token not in self._states:
                self._states[token] = state_of(obj)
                self._send_to_all()

    def forget(self, token: Token) -> None:
        """Drop an object that no longer exists."""
        with self.lock:
            self._states.pop(token, None)
            self._settings.pop(token, None)

    def count(self, owner: Owner, name: str) -> int:
        """Keep a counter in step on all workers; return its number."""
        with self.lock:
            key = CounterSlot.key(owner, name)
            number, slot = self._counters.get(key, (0, None))
            if slot is None or slot.is_gone:
                self._last_counter += 1
                number, slot = self._last_counter, CounterSlot(owner, name)
                self._counters[key] = number, slot
                self._slots[COUNTER, number] = slot
                self.watch((COUNTER, number), slot)
                for token in [token for token, slot in self._slots.items() if slot.is_gone]:
                    del self._slots[token], self._states[token]
            return number

    def _object_of(self, token: Token) -> Any:
        slot = self._slots.get(token)
        return self._find(token) if slot is None else slot

    def look(self) -> None:
        """Note the changes that the program itself made."""
        if not self._states:
            return
        with self.lock:
            for token in (*self._states,):
                self._look_at(token)

    def settings(self) -> dict[Token, dict[Entry, Any]]:
        """Return, once, the settings that advances have changed, with their values."""
        found, self._settings = self._settings, {}
        return found

    def advance(self, worker: int, incarnation: int, number: int, made: Sequence[Advance]) -> None:
        """Make the advances of one closure on the coordinator's objects.

        Args:
            worker: number of the worker.
            incarnation: its incarnation.
            number: number of the report; a later report has a larger one.
            made: the advances; none if the closure does not count.
        """
        with self.lock:
            progress = self._progress(worker, incarnation)
            progress.reported = number
            if not made or number - progress.received >= REPORTS:
                progress.is_behind = True
            for one in made:
                obj = self._object_of(one.token)
                if obj is None:
                    continue  # the program has dropped it
                self.watch(one.token, obj)
                concerned = [one.token, *self._optimizer_of(obj)]
                for token in concerned:
                    self._look_at(token)
                try:
                    make_advance(obj, one)
                except BaseException:
                    for token in concerned:
                        load_state(self._object_of(token), self._states[token])
                    raise
                for token in concerned:
                    self._keep(token, one)
                for other, its in self._workers.items():
                    its.is_behind |= other != worker

    def snapshot(
        self, worker: int, incarnation: int, known: Collection[Token]
    ) -> StateSnapshot | None:
        """Return the state that a worker must have before its next closure, None if it has it."""
        if not self._states:
            return None
        with self.lock:
            progress = self._progress(worker, incarnation)
            states = {
                token: state
                for token, state in self._states.items()
                if token in known or token[0] == COUNTER
            }
            if not progress.is_behind and len(states) == progress.tokens:
                return None
            progress.is_behind = False
            progress.tokens = len(states)
            progress.received = progress.reported
            return StateSnapshot(progress.reported, states)

    def _progress(self, worker: int, incarnation: int) -> _Progress:
        found = self._workers.get(worker)
        if found is None or found.incarnation != incarnation:
            found = self._workers[worker] = _Progress(incarnation)
        return found

    def _send_to_all(self) -> None:
        for progress in self._workers.values():
            progress.is_behind = True

    def _look_at(self, token: Token) -> None:
        obj = self._object_of(token)
        if obj is not None and not _equal(now := state_of(obj), self._states[token]):
            self._states[token] = now
            self._send_to_all()

    def _optimizer_of(self, obj: Any) -> list[Token]:
        """Return the token of the optimizer that a scheduler changes."""
        optimizer = getattr(obj, "optimizer", None)
        return [token for token in self._states if self._object_of(token) is optimizer]

    def _keep(self, token: Token, made: Advance) -> None:
        obj = self._object_of(token)
        before, now = self._states[token], state_of(obj)
        self._states[token] = now
        if isinstance(obj, Optimizer):
            changed = self._settings.setdefault(token, {})
            for number, group in enumerate(now):
                for name, value in group.items():
                    if name not in before[number] or before[number][name] != value:
                        changed[number, name] = value
            if isinstance(made, SettingWritten):
                changed[made.group, made.name] = now[made.group][made.name]

    @override
    def __repr__(self) -> str:
        return f"<AdvanceLedger of {len(self._states)} objects>"


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - the user's own values, such as tensors
        return False
