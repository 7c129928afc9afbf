"""Find changes of a strategy's objects since they were last sent to workers.

An object has *entries*. A module's are its class and its attributes, among them the dicts of parameters, buffers,
submodules and hooks. A parameter's are ``requires_grad`` and its dicts of hooks; an optimizer's are its groups, their
settings and its dicts of hooks. A class, whose methods may change, has itself as its only entry.

The tracker has a fingerprint (`_core/fingerprints.py`) of each entry as workers know it, compares at each `schedule`, and
returns an `EntryChange` for every difference. It compares

1. objects that torch's own methods noted (`_core/torch_patches/change_notes.py`);
2. parts that change without a note: ``requires_grad``, submodules, settings of optimizers; and entries that can change
   inside: containers, objects, functions, hooks, tensors that are on no server, classes of the user.

Comparing a large value at each `schedule` is slow, which a warning says. ``strategy.publish(module)`` sends a module
as it is; from then on its large values are compared only when they are assigned or published again.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from stratagem._core.fingerprints import PLAIN, Fingerprint, Identity, plain_fingerprint
from stratagem._core.installed import is_installed
from stratagem._core.torch_patches.change_notes import ChangeWatch
from stratagem._ps.coordinator.coordinator_variables import CoordinatorParameter
from stratagem._ps.coordinator.wrapped_optimizers import inner_of, wrapper_attributes
from stratagem._ps.definitions import (
    ATTRIBUTES,
    GRADIENT_HOOKS,
    HOOK_MARKS,
    HOOKS,
    MEMBERS,
    STEP_HOOKS,
    Entry,
    EntryChange,
    Token,
    class_of,
)
from stratagem._ps.optimizer_settings import own_attributes, plain_settings, settings_of
from stratagem._wire.codec import digest

_log = logging.getLogger("stratagem.ps")

LARGE_BYTES: Final = 1 << 16
"""Size of a pickle that takes about a millisecond to compare."""

Tracked = CoordinatorParameter | Optimizer | nn.Module | type
"""Objects that have entries; a `CoordinatorParameter` stands for its parameter."""

_NOT_ENTRIES = {"_compiled_call_impl", *MEMBERS, *HOOK_MARKS, *sum(HOOK_MARKS.values(), ())}
_ENTRIES_OF_TORCH = {"_non_persistent_buffers_set", "_is_full_backward_hook"}

_Entries = dict[Entry, Any]
_Probe = Callable[[Any], object]
_Seen = tuple[type, Hashable] | Fingerprint
"""An entry as workers know it."""


class _Known:
    """State of one object as workers know it."""

    def __init__(self, token: Token, obj: Tracked) -> None:
        self.token = token
        self.reference: weakref.ref[Any] = weakref.ref(obj)
        self.entries: dict[Entry, _Seen] = {}
        # Entries that are compared only when the object is noted or published: large values.
        self.fixed: set[Entry] = {"_non_persistent_buffers_set"}
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
        # By token: what reads the parts that change without a note, its last result, and all entries
        # that can change inside.
        self._probes: dict[Token, tuple[weakref.ref[Any], _Probe, object, list[Entry]]] = {}
        self._suspects: set[Token] = set()
        self._published: set[Token] = set()
        self._found: list[tuple[_Known, _Entries, set[Entry]]] = []
        self._looks: dict[int, tuple[Any, Fingerprint]] = {}  # by id of a value, during one call
        self._packed_bytes = 0

    def define(self, token: Token, obj: Tracked) -> None:
        """Note that workers get an object as it is; call this before packing its first definition."""
        known = self._known.get(token)
        if known is None or known.reference() is not obj:
            known = self._known[token] = _Known(token, obj)
            values = self._read(obj)
            self._keep(known, obj, values, set(values))
            self._looks.clear()

    def take_as_sent(self, token: Token, entries: dict[Entry, Any]) -> None:
        """Take these values of an object's entries as known to the workers, which made them."""
        for known, _ in self._living([token]):
            known.sent |= entries.keys()
            known.entries.update({one: self._look(one, value) for one, value in entries.items()})
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
        named = {*tokens}
        named |= {_class_token(obj) for _, obj in self._living(named)}
        self._published |= named
        for known, _ in self._living(named):
            self._suspects.add(known.token)
            for one in [one for one, seen in known.entries.items() if _can_change(seen)]:
                del known.entries[one]

    def changes(self) -> list[EntryChange]:
        """Return every entry that workers do not have; the same again until `accept` is called."""
        self._suspects |= self._watch.take()
        for token, (reference, probe, expected, loose) in self._probes.items():
            obj = reference()
            if obj is not None and (
                probe(obj) != expected or (loose and self._differs(token, obj, loose))
            ):
                self._suspects.add(token)
        self._found = []
        changes: list[EntryChange] = []
        for known, obj in self._living(self._suspects):
            values, before = self._read(obj), known.entries
            changed = {
                one
                for one in before.keys() | values.keys()
                if before.get(one) != (self._look(one, values[one]) if one in values else None)
            }
            self._found.append((known, values, changed))
            changes += _changes(known.token, values, changed)
        if not changes:
            self.accept()
        self._looks.clear()
        return changes

    def outdated(self) -> list[Token]:
        """Return the objects whose definitions must be packed again for workers that connect later.

        Not those of which only immutable values changed, maybe at every step: `current` has these.
        """
        found: list[Token] = []
        for known, values, changed in self._found:
            if known.token[0] == "class":
                living = self._living(self._known)
                found += [one.token for one, obj in living if _class_token(obj) == known.token]
            elif any(
                type(values.get(one)) not in PLAIN or type(known.entries.get(one)) is Fingerprint
                for one in changed
            ):
                found.append(known.token)
        return found

    def accept(self) -> None:
        """Take everything that `changes` returned as known to the workers."""
        for known, values, changed in self._found:
            for _, obj in self._living([known.token]):
                known.sent |= changed
                self._keep(known, obj, values, changed)
        self._found = []
        self._suspects.clear()
        self._looks.clear()

    def current(self) -> list[EntryChange]:
        """Return every entry that changed after the first definition of its object, as it is now."""
        living = [(known, obj) for known, obj in self._living(self._known) if known.sent]
        return [
            change
            for known, obj in living
            for change in _changes(known.token, entries_of(obj), known.sent)
        ]

    def _living(self, tokens: Iterable[Token]) -> list[tuple[_Known, Any]]:
        every = [self._known[token] for token in tokens if token in self._known]
        return [(known, obj) for known in every if (obj := known.reference()) is not None]

    def _read(self, obj: Tracked) -> _Entries:
        if isinstance(obj, nn.Module):
            for part in dict.values(vars(obj)["_modules"]):
                if part is not None:
                    self._name_parts(part)
        return entries_of(obj)

    def _keep(self, known: _Known, obj: Tracked, values: _Entries, changed: set[Entry]) -> None:
        """Remember an object, of which some entries have changed."""
        before, after, large = [known.entries.pop(one, None) for one in changed], [], []
        for one in changed & values.keys():
            self._packed_bytes = 0
            known.entries[one] = self._look(one, values[one])
            after.append(known.entries[one])
            large += [one] if self._packed_bytes > LARGE_BYTES else []
        if not all(type(one) is tuple for one in (*before, *after)):
            self._watch_parts(known, obj, large)
        # Else train(), eval(), a number: nothing that is watched has changed.
        can_change = [one for one, seen in known.entries.items() if _can_change(seen)]
        loose = [one for one in can_change if one not in known.fixed]
        probe = _probe_of(obj)
        self._probes.pop(known.token, None)
        if loose or probe is not type:
            self._probes[known.token] = known.reference, probe, probe(obj), loose

    def _watch_parts(self, known: _Known, obj: Tracked, large: Sequence[Entry]) -> None:
        """Have changes of an object noted that torch's own methods make."""
        if known.token in self._published:
            known.fixed.update(large)
        elif large:
            _log.warning(
                "%s has %r, which has so many values that comparing them takes a millisecond or more at "
                "every `schedule`. Call strategy.publish(module) before its first use and after each change, "
                "or keep such data outside the module.",
                *(type(obj).__name__, large[0]),
            )
        known.watched = tuple([id(one) for one in _hook_dicts_of(obj).values()])
        if isinstance(obj, nn.Module):
            known.watched += id(obj), *[id(vars(obj)[kind]) for kind in MEMBERS]
            if not is_installed(class_of(obj)[0].__module__):
                self.define(_class_token(obj), class_of(obj)[0])
        self._watch.keys.update(dict.fromkeys(known.watched, known.token))

    def _differs(self, token: Token, obj: Tracked, loose: Sequence[Entry]) -> bool:
        """Return whether one of these entries has changed inside."""
        entries = self._known[token].entries
        for one in loose:
            seen, value = entries.get(one), _entry_of(obj, one)
            part = _comparable(one, value)
            if type(seen) is Fingerprint and seen.managed_if_same(part) is not None:
                continue
            if seen != (now := self._look(one, value)):
                return True
            entries[one] = now  # equal, but for a name that `copyreg` adds to a class
        return False

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
        return f"<ChangeTracker of {len(self._known)} objects, {len(self._probes)} read each time>"


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


def _hook_dicts_of(obj: Tracked) -> dict[str, dict[int, Any]]:
    """Return the dicts in which torch keeps an object's hooks, by name."""
    held: Any  # torch's own annotations do not know all of these attributes
    if isinstance(obj, nn.Module | Optimizer):
        held = vars(obj)
        names = HOOK_MARKS if isinstance(obj, nn.Module) else STEP_HOOKS
        # A class around an optimizer may not call `Optimizer.__init__`.
        return {name: held[name] for name in names if name in held}
    if isinstance(obj, type) or obj.kept.plan is not None:
        return {}  # a table that is nowhere in one piece takes no hooks
    # torch creates a tensor's dicts with the first hook; create them now, so that they can be watched.
    held = obj.central
    for name in GRADIENT_HOOKS:
        if getattr(held, name) is None:
            setattr(held, name, OrderedDict())
    return {name: getattr(held, name) for name in GRADIENT_HOOKS}


def entries_of(obj: Tracked) -> dict[Entry, Any]:
    """Return an object's state, entry by entry."""
    found: dict[Entry, Any] = {}
    if isinstance(obj, type):
        return {"members": obj}
    if isinstance(obj, nn.Module):
        found["__class__"] = class_of(obj)
        # As the dicts hold them: a lookup would ask the servers for current values.
        found.update({kind: dict(dict.items(vars(obj)[kind])) for kind in MEMBERS})
        found.update(_attributes_of(obj))
    elif isinstance(obj, Optimizer) and inner_of(obj) is not None:
        own = wrapper_attributes(obj)  # the groups are those of the optimizer inside
        found.update({ATTRIBUTES: own} if own else {})
    elif isinstance(obj, Optimizer):
        own = plain_settings(own_attributes(obj))
        found.update({ATTRIBUTES: own} if own else {})
        for number, settings in settings_of(obj).items():
            found[number, "params"] = dict(obj.param_groups[number])
            found.update({(number, name): value for name, value in settings.items()})
    else:
        found["requires_grad"] = obj.central.requires_grad
    for kind, hooks in _hook_dicts_of(obj).items():
        if hooks:
            found[kind] = _hooks_of(obj, kind, hooks)
    return found


def _entry_of(obj: Tracked, entry: Entry) -> Any:
    """Return one entry of an object, more quickly than `entries_of`; None if it does not exist."""
    if entry in HOOKS:
        return _hooks_of(obj, str(entry), _hook_dicts_of(obj)[str(entry)])
    if isinstance(obj, nn.Module) and entry not in MEMBERS:
        return vars(obj).get(str(entry))
    return entries_of(obj).get(entry)


def _hooks_of(obj: Tracked, kind: str, hooks: dict[int, Any]) -> dict[int, Any]:
    """Return the hooks of one kind, each with the dicts in which torch marks it."""
    marks = HOOK_MARKS[kind] if isinstance(obj, nn.Module) else ()
    return {
        number: (hook, tuple([mark for mark in marks if number in vars(obj)[mark]]))
        for number, hook in hooks.items()
    }


def _attributes_of(module: Any) -> dict[str, Any]:
    """Return the attributes that a module pickles, without names that torch derives from others."""
    torchs: tuple[Any, ...] = nn.Module.__getstate__, nn.RNNBase.__getstate__
    plain, computed = class_of(module)
    own = None if computed or plain.__getstate__ in torchs else module.__getstate__()
    is_torchs = type(module).__module__.startswith("torch.")
    is_recurrent = isinstance(module, nn.RNNBase)
    return {
        name: value
        for name, value in (own if isinstance(own, dict) else vars(module)).items()
        if name not in _NOT_ENTRIES
        and not (is_torchs and name[:1] == "_" and name not in _ENTRIES_OF_TORCH)
        and not (is_recurrent and name.startswith("_flat_weight"))
    }


def _probe_of(obj: Tracked) -> _Probe:
    """Return a quick function that reads the parts of an object which change without a note."""
    if isinstance(obj, nn.Module):
        return _read_parts if vars(obj)["_modules"] else type
    if isinstance(obj, Optimizer):
        return _read_groups
    return type if isinstance(obj, type) else operator.attrgetter("central.requires_grad")


def _read_parts(module: nn.Module) -> object:
    parts = dict.values(vars(module)["_modules"])
    return [None if part is None else weakref.ref(part) for part in parts]


def _read_groups(optimizer: Optimizer) -> object:
    # dict.items: a group that answers by context would look all its parameters up.
    pairs = [pair for group in optimizer.param_groups for pair in dict.items(group)]
    found = [tuple(map(id, value)) if name == "params" else value for name, value in pairs]
    return [float(one) if isinstance(one, Tensor) else one for one in found]
