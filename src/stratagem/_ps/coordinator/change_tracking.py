"""Find changes of a strategy's objects since they were last sent to workers.

An object has entries (`object_entries.py`). The tracker has a fingerprint (`_core/fingerprints.py`) of each entry as
workers know it, compares at each `schedule`, and returns an `EntryChange` for every difference. It compares

1. objects that torch's own methods noted (`_core/torch_patches/change_notes.py`);
2. parts that change without a note: ``requires_grad``, submodules, settings of optimizers; and entries that can change
   inside: containers, objects, functions, hooks, tensors that are on no server, classes of the user.

Comparing a large value at each `schedule` is slow, which a warning says. ``strategy.publish(module)`` sends a module
as it is; from then on its large values are compared only when they are assigned or published again.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final

from torch import nn
from typing_extensions import override

from stratagem._core.fingerprints import Fingerprint, Identity, plain_fingerprint
from stratagem._core.installed import is_installed
from stratagem._core.same_code import PLAIN
from stratagem._core.torch_patches.change_notes import ChangeWatch
from stratagem._ps.coordinator.object_entries import (
    Tracked,
    class_of,
    entries_of,
    entry_of,
    hook_dicts_of,
    probe_of,
)
from stratagem._ps.definitions import HOOKS, MEMBERS, Entry, EntryChange, Token
from stratagem._wire.codec import digest

_log = logging.getLogger("stratagem.ps")

LARGE_BYTES: Final = 1 << 16
"""Size of a pickle that takes about a millisecond to compare."""

_UNKNOWN: Final = (type(None), "unknown")
"""Fingerprint that no value has."""

_Entries = dict[Entry, Any]
_Seen = tuple[type, Hashable] | Fingerprint
"""An entry as workers know it."""


class _Known:
    """State of one object as workers know it."""

    def __init__(self, obj: Tracked) -> None:
        self.reference: weakref.ref[Any] = weakref.ref(obj)
        self.entries: dict[Entry, _Seen] = {}
        # Entries that are compared only when the object is noted or published: large values.
        self.fixed: set[Entry] = {"_non_persistent_buffers_set"}
        self.loose: list[Entry] = []  # all other entries that can change inside
        self.sent: set[Entry] = set()  # entries that changed after the first definition
        self.watched: tuple[int, ...] = ()


class ChangeTracker:
    """Fingerprints of every module, parameter, optimizer and user's class that workers know.

    Args:
        token_of: returns the token of an object that the strategy manages.
        name_parts: gives tokens to a module and to all of its submodules.
    """

    def __init__(
        self, token_of: Callable[[Any], Hashable | None], name_parts: Callable[[nn.Module], None]
    ) -> None:
        self._token_of = token_of
        self._name_parts = name_parts
        self._watch = ChangeWatch()
        self._known: dict[Token, _Known] = {}
        # By token: function that reads the parts that change without a note, and its last result.
        self._probes: dict[Token, tuple[weakref.ref[Any], Callable[[Any], object], object]] = {}
        self._suspects: set[Token] = set()
        self._published: set[Token] = set()
        self._found: list[tuple[Token, _Entries, set[Entry]]] = []
        self._looks: dict[int, tuple[Any, Fingerprint]] = {}  # by id of a value, during one call
        self._packed_bytes = 0

    def define(self, token: Token, obj: Tracked) -> None:
        """Note that workers get an object as it is; call this before packing its first definition."""
        known = self._known.get(token)
        if known is None or known.reference() is not obj:
            self._known[token] = _Known(obj)
            values = self._read(obj)
            self._keep(token, obj, values, set(values))
            self._looks.clear()

    def take_as_sent(self, token: Token, entries: dict[Entry, Any]) -> None:
        """Take these values of an object's entries as known to the workers, which made them."""
        for _, known, _ in self._living([token]):
            known.sent |= entries.keys()
            for entry, value in entries.items():
                known.entries[entry] = self._look(entry, value)
            self._suspects.add(token)  # the program may have set other values since
        self._looks.clear()

    def forget(self, tokens: Iterable[Token]) -> None:
        """Drop objects that no longer exist."""
        for token in tokens:
            known = self._known.pop(token, None)
            self._probes.pop(token, None)
            self._published.discard(token)
            for number in () if known is None else known.watched:
                if self._watch.keys.get(number) == token:
                    del self._watch.keys[number]

    def publish(self, tokens: Iterable[Token]) -> None:
        """Send all that can change inside these objects with the next function."""
        tokens = [*tokens]
        self._published.update(tokens)
        for token, known, obj in self._living(tokens):
            self._suspects.add(token)
            loose = [one for one, found in known.entries.items() if _can_change(found)]
            known.entries.update(dict.fromkeys(loose, _UNKNOWN))
            if isinstance(obj, nn.Module):
                self.publish([_class_token(obj)])

    def changes(self) -> list[EntryChange]:
        """Return every entry that workers do not have; the same again until `accept` is called."""
        if self._watch.touched:
            touched: Any = self._watch.take()
            self._suspects.update(touched)
        for token, (reference, probe, expected) in self._probes.items():
            obj = reference()
            if obj is not None and probe(obj) != expected:
                self._suspects.add(token)
        self._looks.clear()
        if not self._suspects:
            return []
        self._found = []
        changes: list[EntryChange] = []
        for token, known, obj in self._living(self._suspects):
            values, before = self._read(obj), known.entries
            changed = before.keys() ^ values.keys()
            changed |= {
                one
                for one in before.keys() & values.keys()
                if before[one] != self._look(one, values[one])
            }
            self._found.append((token, values, changed))
            changes += _changes(token, values, changed)
        if not changes:
            self.accept()
        self._looks.clear()
        return changes

    def outdated(self) -> list[Token]:
        """Return the objects whose definitions must be packed again for workers that connect later.

        Not those of which only immutable values changed, maybe at every step: `current` has these.
        """
        found: list[Token] = []
        for token, values, changed in self._found:
            before = self._known[token].entries
            if token[0] == "class":
                found += [
                    one for one, _, obj in self._living(self._known) if _class_token(obj) == token
                ]
            elif any(
                type(values.get(one)) not in PLAIN or isinstance(before.get(one), Fingerprint)
                for one in changed
            ):
                found.append(token)
        return found

    def accept(self) -> None:
        """Take everything that `changes` returned as known to the workers."""
        for token, values, changed in self._found:
            for _, known, obj in self._living([token]):
                known.sent |= changed
                self._keep(token, obj, values, changed)
        self._found = []
        self._suspects.clear()
        self._looks.clear()

    def current(self) -> list[EntryChange]:
        """Return every entry that changed after the first definition of its object, as it is now."""
        living = [one for one in self._living(self._known) if one[1].sent]
        return [
            change
            for token, known, obj in living
            for change in _changes(token, entries_of(obj), known.sent)
        ]

    def _living(self, tokens: Iterable[Token]) -> list[tuple[Token, _Known, Any]]:
        pairs = [(token, self._known[token]) for token in tokens if token in self._known]
        every = [(token, known, known.reference()) for token, known in pairs]
        return [one for one in every if one[2] is not None]

    def _read(self, obj: Tracked) -> _Entries:
        if isinstance(obj, nn.Module):
            for part in dict.values(vars(obj)["_modules"]):
                if part is not None:
                    self._name_parts(part)
        return entries_of(obj)

    def _keep(self, token: Token, obj: Tracked, values: _Entries, changed: set[Entry]) -> None:
        """Remember an object, of which some entries have changed."""
        known = self._known[token]
        before, after, large = [known.entries.pop(one, None) for one in changed], [], []
        for one in changed & values.keys():
            self._packed_bytes = 0
            known.entries[one] = self._look(one, values[one])
            after.append(known.entries[one])
            large += [one] if self._packed_bytes > LARGE_BYTES else []
        if None not in before and not any(
            isinstance(one, Fingerprint) for one in (*before, *after)
        ):
            # train(), eval(), a number: nothing that is watched has changed.
            if token in self._probes:
                reference, probe, _ = self._probes[token]
                self._probes[token] = reference, probe, probe(obj)
            return
        if token in self._published:
            known.fixed.update(large)
        elif large:
            _log.warning(
                "%s has %r, which has so many values that comparing them takes a millisecond or more at "
                "every `schedule`. Call strategy.publish(module) before its first use and after each change, "
                "or keep such data outside the module.",
                *(type(obj).__name__, large[0]),
            )
        known.watched = tuple([id(one) for one in hook_dicts_of(obj).values()])
        if isinstance(obj, nn.Module):
            known.watched += id(obj), *[id(vars(obj)[kind]) for kind in MEMBERS]
            if not is_installed(class_of(obj)[0].__module__):
                self.define(_class_token(obj), class_of(obj)[0])
        self._watch.keys.update(dict.fromkeys(known.watched, token))
        known.loose = [
            one
            for one, found in known.entries.items()
            if _can_change(found) and one not in known.fixed
        ]
        read = probe_of(obj)
        if known.loose:
            read = functools.partial(self._probe, known, read)
        self._probes.pop(token, None)
        if read is not None:
            self._probes[token] = known.reference, read, read(obj)

    def _probe(self, known: _Known, other: Callable[[Any], object] | None, obj: Tracked) -> object:
        changed: list[Entry] = []
        for one in known.loose:
            seen, value = known.entries[one], entry_of(obj, one)
            is_same = (
                isinstance(seen, Fingerprint)
                and seen.managed_if_same(_comparable(one, value)) is not None
            )
            if not is_same and seen != self._look(one, value):
                changed.append(one)
        return changed, None if other is None else other(obj)

    def _look(self, entry: Entry, value: Any) -> _Seen:
        if type(value) in PLAIN:
            return plain_fingerprint(value)
        known = self._looks.get(id(value))  # many modules may have one object
        if known is None:
            seen = Fingerprint(_comparable(entry, value), self._token_of, self._digest)
            seen.managed = []
            self._looks[id(value)] = known = value, seen
        return known[1]

    def _digest(self, value: Any) -> tuple[Hashable, tuple[()]]:
        try:
            found, size = digest(value, self._token_of)
        except Exception:  # noqa: BLE001 - the user's own code; sending the value raises it again
            return id(value), ()
        self._packed_bytes += size
        return found, ()

    @override
    def __repr__(self) -> str:
        return (
            f"<ChangeTracker of {len(self._known)} objects, {len(self._probes)} probed each time>"
        )


def _changes(token: Token, values: _Entries, entries: set[Entry]) -> list[EntryChange]:
    """Return changes of these entries, in the order of the object's own: its class comes first."""
    ordered = [one for one in (*values, *(entries - values.keys())) if one in entries]
    return [EntryChange(token, one, values.get(one), one in values) for one in ordered]


def _class_token(obj: object) -> Token:
    return "class", id(class_of(obj)[0]) if isinstance(obj, nn.Module) else 0


def _comparable(entry: Entry, value: Any) -> Any:
    """Return the part of an entry that is compared, in a tuple: a function is no root here."""
    if entry in MEMBERS or entry in HOOKS:
        return (".".join(map(str, value)), *value.values())  # few values; no name has a dot
    if entry == "__class__":  # its members are compared once for all modules of the class
        return Identity(value[0]), value[1]
    if isinstance(entry, tuple) and entry[1] == "params":
        return (*value["params"],)
    return (value,)


def _can_change(seen: _Seen) -> bool:
    return isinstance(seen, Fingerprint) and seen.can_change
