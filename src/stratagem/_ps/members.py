"""What workers were told modules have: parameters, buffers, parts, and hooks on parameters.

One that is replaced, added or taken away afterwards is told as well, before the next closure. Looked for
only when the clock of `_core/structure.py` moved, so that `schedule` pays nothing for large models.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from stratagem._core import structure
from stratagem._ps import definitions
from stratagem._ps.definitions import Token
from stratagem._ps.homes import CoordinatorHome

KINDS = ("_parameters", "_buffers", "_modules")
"""The dicts a module keeps its members in."""

Reference = Callable[[], object | None]
Members = dict[tuple[str, str], Reference]
"""By kind and name."""

HookKeys = tuple[tuple[int, ...], tuple[int, ...]]
"""torch's numbers of the hooks on a parameter, which it never gives twice."""


class ToldMembers:
    """The books: what workers know of every module and parameter that was defined.

    Args:
        buffer_home: the home of a buffer, if it has one.
    """

    def __init__(self, buffer_home: Callable[[Tensor], object | None]) -> None:
        self._buffer_home = buffer_home
        self._modules: dict[Token, tuple[weakref.ref[nn.Module], Members]] = {}
        self._hooks: dict[Token, tuple[weakref.ref[CoordinatorHome], HookKeys, bool]] = {}
        self._unnoted: set[Token] = set()  # parameters whose hooks move no clock
        self._clock = structure.now()

    def tell_module(self, token: Token, module: nn.Module) -> None:
        """A module is being defined as it is."""
        self._modules[token] = weakref.ref(module), self._members_of(module)

    def tell_hooks(self, token: Token, home: CoordinatorHome) -> None:
        """A parameter is being defined with the hooks it has."""
        if not structure.note_hooks(home.central):
            self._unnoted.add(token)
        self._hooks[token] = weakref.ref(home), _hook_keys(home.central), home.as_table

    def moved(self) -> Iterator[definitions.Moved]:
        """What is not as it was told; from now on it counts as told.

        Raises:
            ValueError: a parameter workers know as a table of rows got a hook.
        """
        if self._clock != (clock := structure.now()):
            yield from self._moved_hooks(list(self._hooks))
            yield from self._moved_members()
            self._clock = clock  # not if a hook was refused: the next call is to refuse it again
        elif self._unnoted:
            yield from self._moved_hooks(list(self._unnoted))

    def _moved_hooks(self, tokens: list[Token]) -> Iterator[definitions.Moved]:
        for token in tokens:
            reference, told, was_table = self._hooks[token]
            home = reference()
            if home is None:
                del self._hooks[token]
                self._unnoted.discard(token)
            elif (keys := _hook_keys(home.central)) != told:
                if was_table and any(keys):
                    raise ValueError(
                        f"parameter {home.name!r} got a gradient hook after its first use in a "
                        "scheduled function: workers look up rows of it, and a hook wants the whole "
                        "gradient. Register the hook before you schedule anything with the model, or "
                        "remove it and change the rows' gradients in the function, between backward() "
                        "and step()."
                    )
                self._hooks[token] = reference, keys, was_table
                yield definitions.Moved(token, "hooks", "")

    def _moved_members(self) -> Iterator[definitions.Moved]:
        for token, (reference, told) in list(self._modules.items()):
            module = reference()
            if module is None:
                del self._modules[token]
                continue
            members = self._members_of(module)
            names = {**told, **members}
            moved = [name for name in names if not _is_same(told.get(name), members.get(name))]
            if moved:
                self._modules[token] = reference, members
                for kind, name in moved:
                    yield definitions.Moved(token, kind, name)

    def _members_of(self, module: nn.Module) -> Members:
        return {
            (kind, name): _no_member if value is None else weakref.ref(self._identity(value))
            for kind in KINDS
            # As the dict holds them: looking values up would ask the servers for each.
            for name, value in dict.items(vars(module)[kind])
        }

    def _identity(self, value: Any) -> Any:
        # A buffer that is assigned another tensor may keep its home: workers have the values then.
        home = self._buffer_home(value) if isinstance(value, Tensor) else None
        return value if home is None else home

    @override
    def __repr__(self) -> str:
        return f"<ToldMembers of {len(self._modules)} modules, {len(self._hooks)} parameters>"


def member_now(module: nn.Module, moved: definitions.Moved) -> definitions.SetMember:
    """The member that moved, as it is now."""
    held: dict[str, Any] = vars(module)[moved.kind]
    is_there = moved.name in held
    value = dict.__getitem__(held, moved.name) if is_there else None
    return definitions.SetMember(moved.token, moved.kind, moved.name, value, is_there)


def _no_member() -> None:
    """A reference to None: a name registered without a tensor or part."""


def _is_same(told: Reference | None, found: Reference | None) -> bool:
    if told is None or found is None or told is _no_member or found is _no_member:
        return told is found
    return told() is found()


def _hook_keys(parameter: Tensor) -> HookKeys:
    return tuple(parameter._backward_hooks or ()), tuple(
        parameter._post_accumulate_grad_hooks or ()
    )
