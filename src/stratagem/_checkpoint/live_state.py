"""Collect the state of live objects.

*Live* objects have a state that can be put back in place: modules, optimizers, variables, generators, and
everything with ``state_dict`` and ``load_state_dict``. They may be nested in dictionaries, lists and tuples. `matching.py`
puts state back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem._checkpoint import optimizer_names
from stratagem._checkpoint.encoding import Path, TakenApart
from stratagem._checkpoint.server_group import (
    RemoteTensor,
    ServerGroup,
    frozen,
    is_plain_module,
    layout_of,
)
from stratagem._core.values import Convertible, convert_to_tensor
from stratagem._core.variables import Variable, VariableSynchronization
from stratagem._ps.placement import Description

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@runtime_checkable
class HasState(Protocol):
    """Anything with a state dict."""

    def state_dict(self) -> Any:
        """The state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over a state."""


@runtime_checkable
class Assignable(Protocol):
    """A variable in several pieces: one value, that can be assigned."""

    def assign(self, value: Any) -> Any:
        """Set the value."""


def kind_of(value: Any) -> str:
    """Return how an object's state is read: its kind, or "" for plain values and containers."""
    if isinstance(value, type):
        return ""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, Variable):
        return "variable"
    if isinstance(value, Convertible) and isinstance(value, Assignable):
        return "assignable"
    if isinstance(value, torch.Generator):
        return "generator"
    return "stateful" if isinstance(value, HasState) else ""


def check_objects(value: Any, path: Path) -> None:
    """Refuse objects that cannot be saved or restored.

    Raises:
        TypeError: names it.
    """
    if kind_of(value) or isinstance(value, Tensor) or type(value) in _PLAIN:
        return
    if isinstance(value, dict):
        for key, each in value.items():
            if str(key).startswith("$"):
                raise TypeError(f"key {key!r} of {'.'.join(map(str, path))} begins with '$'.")
            check_objects(each, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            check_objects(each, (*path, place))
    elif type(value).__module__ != "numpy":
        hint = ""
        if isinstance(value, torch.utils.data.DataLoader):
            hint = " A DataLoader keeps no position: wrap it, as in sg.data.as_dataset(loader)."
        raise TypeError(
            f"{'.'.join(map(str, path))} has type {type(value).__name__}: expected something with "
            "state_dict() and load_state_dict(), a variable, a tensor, or plain values (numbers, text, "
            f"lists, dictionaries).{hint}"
        )


def live_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every live object in a nest, with its place."""
    if kind_of(value):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from live_in(each, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from live_in(each, (*path, place))


def modules_in(objects: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the modules of a checkpoint, by dotted name."""
    found = live_in(dict(objects))
    return {".".join(map(str, path)): one for path, one in found if isinstance(one, nn.Module)}


# ------------------------------------------------------------------ collecting


@runtime_checkable
class ClosurePosition(Protocol):
    """Object whose position depends on which closures have finished."""

    def pinned(self) -> AbstractContextManager[None]:
        """Let `state_dict` return the present position inside the context."""

    def state_dict_when_finished(self) -> dict[str, Any]:
        """Return the position of a program that continues when all present closures have finished."""


def pin_positions(live: Iterable[object]) -> ExitStack:
    """Return a context in which the positions of these objects do not change.

    Enter it before the servers make their cuts: closures that have finished by then are in the cuts.
    """
    pins = ExitStack()
    for value in live:
        if isinstance(value, ClosurePosition):
            pins.enter_context(value.pinned())
    return pins


class RowsOnServers(Protocol):
    """Rows on the servers of one strategy, which are not collected."""

    @property
    def takes_all(self) -> bool:
        """True if they include those of modules with a state dict of their own."""

    @property
    def group(self) -> ServerGroup:
        """The servers."""

    def optimizer_state(self, where: Description, optimizer: int) -> dict[str, Any]:
        """Return what stands in a state dict for the state of a variable."""


def collect(
    objects: Mapping[str, Any],
    *,
    allow_pickle: bool,
    rows: Sequence[RowsOnServers] = (),
    when_finished: bool = False,
) -> TakenApart:
    """Return the state of objects, taken apart: tensors not copied, or left on servers.

    With `when_finished`, positions are those after all present closures.
    """
    apart = TakenApart(allow_pickle)
    collector = _Collector(apart, modules_in(objects), rows, when_finished)
    for name, value in objects.items():
        apart.skeleton[name] = collector.collect(value, (name,))
    return apart


@dataclass
class _Collector:
    apart: TakenApart
    modules: Mapping[str, nn.Module]
    rows: Sequence[RowsOnServers]
    when_finished: bool

    def collect(self, value: Any, path: Path) -> Any:
        kind = kind_of(value)
        if kind:
            state, extra = self._state_of(kind, value)
            entry = {"$object": kind, "class": class_name(value), **extra}
            return {**entry, "state": self.apart.encode(state, path)}
        if next(live_in(value), None) is None:
            return self.apart.encode(_plain_containers(value), path)
        if isinstance(value, dict):
            return {key: self.collect(each, (*path, str(key))) for key, each in value.items()}
        made = (self.collect(each, (*path, place)) for place, each in enumerate(value))
        return list(made) if isinstance(value, list) else tuple(made)

    def _state_of(self, kind: str, value: Any) -> tuple[Any, dict[str, Any]]:
        """Return an object's state, and further facts that restoring it needs."""
        if kind == "module":
            return self._module_state(value)
        if kind == "optimizer":
            return self._optimizer_state(value)
        if kind in ("variable", "assignable"):
            remote = self._on_servers(value)
            if remote is not None:
                return remote, {}
            is_variable = kind == "variable"
            return (
                _variable_state(value) if is_variable else convert_to_tensor(value).detach()
            ), {}
        if kind == "generator":
            return value.get_state(), {}
        if self.when_finished and isinstance(value, ClosurePosition):
            return value.state_dict_when_finished(), {}
        return value.state_dict(), {}

    def _on_servers(self, value: Any) -> RemoteTensor | None:
        found = (layout_of(one.group, value) for one in self.rows)
        return next((one for one in found if one is not None), None)

    def _module_state(self, module: nn.Module) -> tuple[Any, dict[str, Any]]:
        state: Any
        if self.rows and (self.rows[0].takes_all or is_plain_module(module)):
            with frozen(one.group for one in self.rows):
                state = kept_state(module)
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = self._on_servers(value) or value.detach()
        else:
            state = module.state_dict()
        # Versions of the modules' state, by which they read older ones. torch keeps it as an attribute.
        versions = vars(state).get("_metadata", {}) if isinstance(state, OrderedDict) else {}
        plain = OrderedDict(state) if isinstance(state, Mapping) else state
        return plain, {"versions": {name: dict(known) for name, known in versions.items()}}

    def _optimizer_state(self, optimizer: Optimizer) -> tuple[Any, dict[str, Any]]:
        with frozen(one.group for one in self.rows):
            state: Any = optimizer.state_dict()
        if not optimizer_names.has_usual_form(state):
            return state, {}
        for one in self.rows:
            if (number := one.group.number_of(optimizer)) is None:
                continue
            for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
                for parameter, key in zip(group["params"], saved["params"], strict=True):
                    where = one.group.find(parameter)
                    if where is not None:
                        state["state"].pop(key, None)
                        if found := one.optimizer_state(where, number):
                            state["state"][key] = found
        names = optimizer_names.parameter_names(optimizer, self.modules)
        return optimizer_names.to_names(state, names), {"by_name": True}


def remote_tensors(values: Iterable[Any], group: ServerGroup) -> list[RemoteTensor]:
    """Return the tensors of live objects that are on the servers of one strategy."""
    found = []
    for value in values:
        if isinstance(value, nn.Module):
            if is_plain_module(value):
                with frozen([group]):
                    found += [layout_of(group, one) for one in kept_state(value).values()]
        elif isinstance(value, Optimizer):
            for parameters in value.param_groups:
                found += [layout_of(group, one) for one in parameters["params"]]
        else:
            found.append(layout_of(group, value))
    return [one for one in found if one is not None]


def kept_state(module: nn.Module) -> OrderedDict[str, Any]:
    """Return a module's state dict of the parameters and buffers themselves."""
    state: Any = module.state_dict(keep_vars=True)
    return cast("OrderedDict[str, Any]", state)  # with torch's versions as an attribute


def _plain_containers(value: Any) -> Any:
    """Return a nest with dictionaries and lists of our users' classes as plain ones."""
    if isinstance(value, dict):
        return {key: _plain_containers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain_containers(each) for each in value]
    return value


def _variable_state(variable: Variable) -> Any:
    values = [part.read_value() for part in variable.values]
    on_read = variable.synchronization is VariableSynchronization.ON_READ
    # Copies that are kept equal are saved once, and fit any number of replicas.
    same = all(torch.equal(values[0], each.to(values[0].device)) for each in values[1:])
    return values[0] if len(values) == 1 or (same and not on_read) else values


def class_name(value: Any) -> str:
    """Return the dotted name of an object's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
