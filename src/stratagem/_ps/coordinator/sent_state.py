"""What workers were told modules and optimizers have: attributes, parameters, buffers, parts and hooks.

One that is changed, replaced, added or taken away afterwards is told as well, before the next closure. What
was touched is known from `_core/torch_patches/change_notes.py`, so that `schedule` pays nothing for large models; only what
can change without a trace (a list, a dict, a tensor that is an attribute) is looked at every time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from stratagem._core.torch_patches import change_notes
from stratagem._core.torch_patches.private_api import version_of
from stratagem._ps.coordinator.attribute_snapshot import AttributeSnapshot
from stratagem._ps.coordinator.coordinator_variables import CoordinatorParameter
from stratagem._ps.coordinator.module_definitions import (
    Hooked,
    attributes_of,
    class_of,
    hook_dicts_of,
)
from stratagem._ps.definitions import ATTRIBUTE, CLASS, HOOKS, ORDER, Moved, Token

KINDS = ("_parameters", "_buffers", "_modules")
"""The dicts a module keeps its members in."""

Reference = Callable[[], object | None]
Members = dict[tuple[str, str], tuple[Reference, int]]
"""By kind and name: what it is; and the version of a tensor that is on no server, -1 for all others."""

Attributes = dict[str, AttributeSnapshot]

HookKeys = tuple[tuple[int, ...], ...]
"""torch's numbers of the hooks in each dict, which it never gives twice."""


@dataclass(slots=True)
class _Told:
    """What workers know of one object."""

    object: weakref.ref[Any]
    hooks: HookKeys
    was_table: bool = False
    kind: tuple[weakref.ref[type], tuple[str, ...]] | None = None
    """A module's class, and which of its tensors are computed (parametrized)."""
    members: Members = field(default_factory=dict)
    attributes: Attributes = field(default_factory=dict)
    loose: tuple[str, ...] = ()
    """Attributes that may change inside."""
    foreign: tuple[tuple[Reference, int], ...] = ()
    """Members that are on no server, and may be written in place."""
    ids: tuple[int, ...] = ()
    """What is watched for its sake."""

    @property
    def is_loose(self) -> bool:
        """Whether it may change without a trace."""
        return bool(self.loose or self.foreign or any(self.hooks))


class SentState:
    """The books: what workers know of every module, parameter and optimizer that was defined.

    Args:
        managed_buffer: the home of a buffer, if it has one.
        is_handle: whether workers have their own view of an object.
        name_part: makes a module one of those that workers have views of.
    """

    def __init__(
        self,
        managed_buffer: Callable[[Tensor], object | None],
        is_handle: Callable[[object], bool],
        name_part: Callable[[nn.Module], None],
    ) -> None:
        self._managed_buffer = managed_buffer
        self._is_handle = is_handle
        self._name_part = name_part
        self._watch = change_notes.ChangeWatch()
        self._told: dict[Token, _Told] = {}
        self._loose: dict[Token, _Told] = {}  # those to be looked at every time
        self._pending: dict[Token, set[str]] = {}  # touched, with the names of attributes

    def tell(self, token: Token, obj: Hooked) -> None:
        """An object is being defined as it is; when it is defined again, what moved is known."""
        if token not in self._told:
            self._keep(token, self._look_at(obj))

    def forget(self, tokens: Iterable[Token]) -> None:
        """These objects are gone."""
        for token in tokens:
            told = self._told.pop(token, None)
            self._loose.pop(token, None)
            for number in () if told is None else told.ids:
                if self._watch.keys.get(number) == token:
                    del self._watch.keys[number]

    def moved(self) -> Iterable[Moved]:
        """What is not as it was told; from now on it counts as told.

        Raises:
            ValueError: a parameter workers know as a table of rows got a hook.
        """
        if self._watch.touched or self._loose or self._pending:
            return self._moved()
        return ()

    def _moved(self) -> Iterator[Moved]:
        pending: dict[Any, set[str]] = self._pending
        for key, name in self._watch.take():
            pending.setdefault(key, set()).add(name)
        for token, told in self._loose.items():
            if not _is_loosely_as_told(told):
                pending.setdefault(token, set()).add("")  # that is no attribute: all is looked at
        for token in list(self._pending):
            yield from self._moved_of(token, self._pending[token])
            del self._pending[
                token
            ]  # not if a hook was refused: the next call is to refuse it again

    def _moved_of(self, token: Token, names: set[str]) -> Iterator[Moved]:
        told = self._told.get(token)
        obj = None if told is None else told.object()
        if told is None or obj is None:
            return
        if all(name in told.attributes and name in vars(obj) for name in names):
            yield from self._moved_attributes(token, told, obj, names)
            return
        now = self._look_at(obj)
        now.was_table = told.was_table
        if now.hooks != told.hooks:
            _refuse_hooks_of_tables(obj, now)
            yield Moved(token, HOOKS, "")
        if now.kind != told.kind:
            yield Moved(token, CLASS, "")
        yield from _moved_members(token, told.members, now.members)
        for name in {**told.attributes, **now.attributes}:
            before, after = told.attributes.get(name), now.attributes.get(name)
            if _differ(before, after, was_assigned=name in names):
                yield _moved_attribute(token, name, before, after)
        self.forget((token,))
        self._keep(token, now)

    def _moved_attributes(
        self, token: Token, told: _Told, obj: object, names: set[str]
    ) -> Iterator[Moved]:
        """Nothing else was touched: train() and eval() of large models come here."""
        for name in names:
            before, after = (
                told.attributes[name],
                AttributeSnapshot(vars(obj)[name], self._is_handle),
            )
            if _differ(before, after, was_assigned=True):
                told.attributes[name] = after
                yield _moved_attribute(token, name, before, after)
            if before.may_change or after.may_change:
                told.loose = _loose(told.attributes)
                self.forget((token,))
                self._keep(token, told)

    def _look_at(self, obj: Hooked) -> _Told:
        dicts = hook_dicts_of(obj)
        found = _Told(weakref.ref(obj), _hook_keys(obj), ids=tuple(id(one) for one in dicts))
        if isinstance(obj, CoordinatorParameter):
            found.was_table = obj.as_table
        elif isinstance(obj, nn.Module):
            held = vars(obj)
            if type(held["_modules"]) is not change_notes.NotedParts:
                held["_modules"] = change_notes.NotedParts(held["_modules"])
            for part in held["_modules"].values():
                if part is not None:
                    self._name_part(part)
            plain, computed = class_of(obj)
            found.kind = weakref.ref(plain), computed
            found.members = self._members_of(obj)
            found.foreign = tuple(one for one in found.members.values() if one[1] >= 0)
            found.attributes = self._attributes_of(obj)
            found.loose = _loose(found.attributes)
            found.ids += id(obj), *(id(held[kind]) for kind in KINDS)
        return found

    def _keep(self, token: Token, told: _Told) -> None:
        self._told[token] = told
        self._watch.keys.update(dict.fromkeys(told.ids, token))
        if told.is_loose:
            self._loose[token] = told

    def _attributes_of(self, module: nn.Module, names: set[str] | None = None) -> Attributes:
        return {
            name: AttributeSnapshot(value, self._is_handle)
            for name, value in attributes_of(module)
            if names is None or name in names
        }

    def _members_of(self, module: nn.Module) -> Members:
        return {
            (kind, name): self._member(value)
            for kind in KINDS
            # As the dict holds them: looking values up would ask the servers for each.
            for name, value in dict.items(vars(module)[kind])
        }

    def _member(self, value: Any) -> tuple[Reference, int]:
        if value is None:
            return _no_member, -1
        if not isinstance(value, Tensor):
            return weakref.ref(value), -1
        # A buffer that is assigned another tensor may keep its home: workers have the values then.
        managed = self._managed_buffer(value)
        if managed is not None:
            return weakref.ref(managed), -1
        return weakref.ref(value), -1 if self._is_handle(value) else _version_of_foreign(value)

    @override
    def __repr__(self) -> str:
        return f"<SentState of {len(self._told)} objects, {len(self._loose)} looked at each time>"


def _is_loosely_as_told(told: _Told) -> bool:
    """Whether what may change without a trace did not."""
    obj = told.object()
    if obj is None:
        return True  # `forget` comes for it
    if any(told.hooks) and _hook_keys(obj) != told.hooks:
        return False
    for name in told.loose:
        held = vars(obj)
        if name not in held or not told.attributes[name].is_of(held[name]):
            return False
    for reference, version in told.foreign:
        tensor: Any = reference()
        if tensor is None or _version_of_foreign(tensor) != version:
            return False
    return True


def _version_of_foreign(tensor: Tensor) -> int:
    """Another number when the tensor was written, frozen or thawed."""
    return 2 * version_of(tensor) + tensor.requires_grad


def _loose(attributes: Attributes) -> tuple[str, ...]:
    # A buffer that comes or goes is noted anyway; and every module has this set.
    own = {name: one for name, one in attributes.items() if name != "_non_persistent_buffers_set"}
    return tuple(name for name, one in own.items() if one.may_change)


def _moved_members(token: Token, told: Members, now: Members) -> Iterator[Moved]:
    for which in {**told, **now}:
        if not _is_same(told.get(which), now.get(which)):
            yield Moved(token, *which)
    # Workers put new parts behind the others; the order is that in which a Sequential calls them.
    there = [which for which in told if which in now] + [
        which for which in now if which not in told
    ]
    for kind in KINDS:
        if [one for one in there if one[0] == kind] != [one for one in now if one[0] == kind]:
            yield Moved(token, ORDER, kind)


def _is_same(told: tuple[Reference, int] | None, found: tuple[Reference, int] | None) -> bool:
    if told is None or found is None:
        return told is found
    if told[0] is _no_member or found[0] is _no_member:
        return told[0] is found[0]
    return told[0]() is found[0]() and told[1] == found[1]


def _differ(
    before: AttributeSnapshot | None, after: AttributeSnapshot | None, *, was_assigned: bool
) -> bool:
    """Whether an attribute is another; one that cannot be looked into is, when it was assigned."""
    if before is None or after is None:
        return before is not after
    return (after.is_opaque and was_assigned) or not before.is_same(after)


def _moved_attribute(
    token: Token, name: str, before: AttributeSnapshot | None, after: AttributeSnapshot | None
) -> Moved:
    # Lives that come later hear of numbers by updates alone: those may change at every step.
    is_plain = (before is None or before.is_plain) and (after is None or after.is_plain)
    return Moved(token, ATTRIBUTE, name, is_plain=is_plain)


def _no_member() -> None:
    """A reference to None: a name registered without a tensor or part."""


def _hook_keys(obj: Hooked) -> HookKeys:
    return tuple([tuple(hooks) for hooks in hook_dicts_of(obj)])


def _refuse_hooks_of_tables(obj: Hooked, now: _Told) -> None:
    if isinstance(obj, CoordinatorParameter) and now.was_table and any(now.hooks):
        raise ValueError(
            f"parameter {obj.name!r} got a gradient hook after its first use in a "
            "scheduled function: workers look up rows of it, and a hook wants the whole "
            "gradient. Register the hook before you schedule anything with the model, or "
            "remove it and change the rows' gradients in the function, between backward() "
            "and step()."
        )
