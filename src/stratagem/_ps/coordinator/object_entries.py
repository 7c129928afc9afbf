"""The state of a module, parameter or optimizer as a flat dict of entries.

A module's entries are its class and its attributes, among them the dicts of parameters, buffers, submodules and
hooks. A parameter's are ``requires_grad`` and its dicts of hooks; an optimizer's are its groups, their settings
and its dicts of hooks. A class, whose methods may change, has itself as its only entry.
"""

from __future__ import annotations

import copyreg
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

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
    ModuleDefinition,
    ModuleState,
    Token,
    make_module,
    make_parametrized,
)
from stratagem._ps.optimizer_settings import own_attributes, plain_settings, settings_of

Tracked = CoordinatorParameter | Optimizer | nn.Module | type
"""Objects that have entries; a `CoordinatorParameter` stands for its parameter."""

_MARKS = {mark for marks in HOOK_MARKS.values() for mark in marks}
_NOT_ENTRIES = {"_compiled_call_impl", *MEMBERS, *HOOK_MARKS, *_MARKS}
_ENTRIES_OF_TORCH = {"_non_persistent_buffers_set", "_is_full_backward_hook"}


def define_module(module: nn.Module) -> Sequence[object]:
    """Return the two halves of a module's pickle: how it is made, then its state.

    Example:
        >>> made, state = define_module(nn.Linear(2, 1))
        >>> made.arguments[0].__name__, sorted(state.state["_parameters"])
        ('Linear', ['bias', 'weight'])
    """
    state: Any
    if parametrize.is_parametrized(module):  # torch does not pickle a class that is made on the fly
        made, state = ModuleDefinition(make_parametrized, class_of(module)), vars(module)
    else:
        reduced: Any = module.__reduce_ex__(4)
        make, arguments = reduced[:2]
        if make is vars(copyreg)["__newobj__"] and len(arguments) == 1:
            make = make_module
        made, state = ModuleDefinition(make, arguments), reduced[2] if len(reduced) > 2 else None
    if type(state) is dict:
        # Plain dicts of members: others would ask the servers for current values.
        plain = {kind: dict(dict.items(state[kind])) for kind in MEMBERS if kind in state}
        state = {**state, **plain}
    return (made,) if state is None else (made, ModuleState(state))


def class_of(module: Any) -> tuple[type[nn.Module], tuple[str, ...]]:
    """Return a module's class as its author wrote it, and the names of its computed tensors.

    Example:
        >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 1))
        >>> class_of(layer)[0].__name__, class_of(layer)[1]
        ('Linear', ('weight',))
    """
    plain, computed = type(module), ()
    if "parametrizations" in vars(module)["_modules"]:
        plain = parametrize.type_before_parametrizations(module)
        computed = tuple(module.parametrizations)
    return getattr(plain, "_plain_class", plain), computed  # one of `special_modules`


def hook_dicts_of(obj: Tracked) -> dict[str, dict[int, Any]]:
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
    """Return an object's state, entry by entry.

    Example:
        >>> entries_of(nn.Dropout(0.25))["p"]
        0.25
    """
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
    for kind, hooks in hook_dicts_of(obj).items():
        if hooks:
            found[kind] = _hooks_of(obj, kind, hooks)
    return found


def entry_of(obj: Tracked, entry: Entry) -> Any:
    """Return one entry of an object, more quickly than `entries_of`; None if it does not exist."""
    if entry in HOOKS:
        return _hooks_of(obj, str(entry), hook_dicts_of(obj)[str(entry)])
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


def hook_entries(token: Token, obj: Tracked) -> list[EntryChange]:
    """Return the hooks on a parameter or optimizer, which its definition leaves out."""
    return [
        EntryChange(token, entry, value, exists=True)
        for entry, value in entries_of(obj).items()
        if entry in HOOKS and value
    ]


def probe_of(obj: Tracked) -> Callable[[Any], object] | None:
    """Return a quick function that reads the parts of an object which change without a note."""
    if isinstance(obj, nn.Module):
        return _read_parts if vars(obj)["_modules"] else None
    if isinstance(obj, Optimizer):
        return _read_groups
    return None if isinstance(obj, type) else operator.attrgetter("central.requires_grad")


def _read_parts(module: nn.Module) -> object:
    parts = dict.values(vars(module)["_modules"])
    return [None if part is None else weakref.ref(part) for part in parts]


def _read_groups(optimizer: Optimizer) -> object:
    # dict.items: a group that answers by context would look all its parameters up.
    pairs = [pair for group in optimizer.param_groups for pair in dict.items(group)]
    return [
        tuple(map(id, value))
        if name == "params"
        else float(value)
        if isinstance(value, Tensor)
        else value
        for name, value in pairs
    ]
