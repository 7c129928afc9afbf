"""Collect the state of live objects, match it with a checkpoint, and restore it.

*Live* objects have a state that can be put back in place: modules, optimizers, variables, generators, and
everything with ``state_dict`` and ``load_state_dict``. They may be nested in dictionaries, lists and tuples.

Restoring has two parts. `Match` compares the objects with the checkpoint, without changing them, and lists
missing names, unexpected names and the tensors to read. `Match.apply` then puts the state back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stratagem._checkpoint import optimizer_names
from stratagem._checkpoint.encoding import Path, TakenApart, decode, tensor_names
from stratagem._checkpoint.server_group import is_plain_module
from stratagem._checkpoint.server_parts import ServerCut
from stratagem._checkpoint.server_reads import ServerReads
from stratagem._checkpoint.server_state import (
    kept_state,
    note_server_state,
    on_servers,
    take_state,
    without_rows,
)
from stratagem._core.values import Convertible, convert_to_tensor
from stratagem._core.variables import Variable, VariableAggregation, VariableSynchronization
from stratagem._ps.blocks.manifest import StoredTensor
from stratagem._ps.tables.dynamic_embedding import note_restored
from stratagem._ps.tables.sharded_variable import ShardedVariable
from stratagem.errors import CheckpointMismatch

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


def collect(
    objects: Mapping[str, Any], *, allow_pickle: bool, cuts: Sequence[ServerCut] = ()
) -> TakenApart:
    """Return the state of objects, taken apart: tensors not copied, or left on servers with a cut."""
    apart = TakenApart(allow_pickle)
    modules = modules_in(objects)
    for name, value in objects.items():
        apart.skeleton[name] = _collect(value, (name,), apart, modules, cuts)
    return apart


def _collect(
    value: Any,
    path: Path,
    apart: TakenApart,
    modules: Mapping[str, nn.Module],
    cuts: Sequence[ServerCut],
) -> Any:
    kind = kind_of(value)
    if kind:
        state, extra = _state_of(kind, value, modules, cuts)
        entry = {"$object": kind, "class": _class_name(value), **extra}
        return {**entry, "state": apart.encode(state, path)}
    if next(live_in(value), None) is None:
        return apart.encode(_plain_containers(value), path)
    if isinstance(value, dict):
        return {k: _collect(v, (*path, str(k)), apart, modules, cuts) for k, v in value.items()}
    made = (_collect(v, (*path, i), apart, modules, cuts) for i, v in enumerate(value))
    return list(made) if isinstance(value, list) else tuple(made)


def _plain_containers(value: Any) -> Any:
    """Return a nest with dictionaries and lists of our users' classes as plain ones."""
    if isinstance(value, dict):
        return {key: _plain_containers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain_containers(each) for each in value]
    return value


def _state_of(
    kind: str, value: Any, modules: Mapping[str, nn.Module], cuts: Sequence[ServerCut]
) -> tuple[Any, dict[str, Any]]:
    """Return an object's state, and further facts that restoring it needs."""
    if kind in ("variable", "assignable"):
        remote = on_servers(value, cuts)
        if remote is not None:
            return remote, {}
    if kind == "variable":
        return _variable_state(value), {}
    if kind == "assignable":
        return convert_to_tensor(value).detach(), {}
    if kind == "generator":
        return value.get_state(), {}
    plain_module = kind == "module" and bool(cuts) and is_plain_module(value)
    with ExitStack() as frozen:
        for cut in cuts if kind == "optimizer" or plain_module else ():
            frozen.enter_context(cut.group.frozen())
        state: Any
        if plain_module:
            state = without_rows(kept_state(value), cuts)
        else:
            state = value.state_dict()
    if kind == "optimizer":
        note_server_state(value, state, cuts)
    if kind == "module":
        # Versions of the modules' state, by which they read older ones. torch keeps it as an attribute.
        versions = vars(state).get("_metadata", {}) if isinstance(state, OrderedDict) else {}
        plain = OrderedDict(state) if isinstance(state, Mapping) else state
        return plain, {"versions": {name: dict(known) for name, known in versions.items()}}
    if kind == "optimizer" and optimizer_names.has_usual_form(state):
        names = optimizer_names.parameter_names(value, modules)
        return optimizer_names.to_names(state, names), {"by_name": True}
    return state, {}


def _variable_state(variable: Variable) -> Any:
    values = [part.read_value() for part in variable.values]
    on_read = variable.synchronization is VariableSynchronization.ON_READ
    # Copies that are kept equal are saved once, and fit any number of replicas.
    same = all(torch.equal(values[0], each.to(values[0].device)) for each in values[1:])
    return values[0] if len(values) == 1 or (same and not on_read) else values


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# ------------------------------------------------------------------ restoring


@final
class Match:
    """A checkpoint compared with the objects it should be restored into.

    Args:
        objects: the live objects; plain values in it are replaced by `apply`.
        skeleton: of the checkpoint.
        tensors: of the checkpoint, by name.
        partial: ignore objects that only the checkpoint has.
        servers: parameter servers that read their tensors by themselves.

    Attributes:
        missing: names that the objects have and the checkpoint lacks.
        unexpected: names that the checkpoint has and the objects lack.
        different: names that cannot be restored, such as tensors of another shape.
        doubtful: names that can be restored but probably should not: other types of numbers, another
            class of optimizer.
        needed: the tensors that must be read.
    """

    def __init__(
        self,
        objects: MutableMapping[str, Any],
        skeleton: Mapping[str, Any],
        tensors: Mapping[str, StoredTensor],
        *,
        partial: bool = False,
        servers: ServerReads | None = None,
    ) -> None:
        self._stored = tensors
        self._servers = servers
        self._modules = modules_in(objects)
        self._actions: list[Callable[[Mapping[str, Tensor], bool], None]] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.different: list[str] = []
        self.doubtful: list[str] = []
        self.needed: list[str] = []
        for name in objects:
            if name not in skeleton:
                self.missing.append(name)
            else:
                self._compare(objects, name, skeleton[name], (name,))
        if not partial:
            self.unexpected.extend(name for name in skeleton if name not in objects)
        if servers is not None:
            elsewhere = servers.names
            self.needed = [name for name in self.needed if name not in elsewhere]

    def check(self, path: str, *, strict: bool) -> None:
        """Raise if the two do not fit.

        Raises:
            CheckpointMismatch: lists what is missing, unexpected and different.
        """
        wrong = [*self.different, *(self.doubtful if strict else ())]
        if not wrong and not (strict and (self.missing or self.unexpected)):
            return
        parts = [f"the checkpoint {path} does not fit: build the objects as saved, or use another."]
        if strict and self.missing:
            parts.append(f"Missing in the checkpoint: {_listed(self.missing)}.")
        if strict and self.unexpected:
            parts.append(f"In the checkpoint only: {_listed(self.unexpected)}.")
        if wrong:
            parts.append(f"Different: {_listed(wrong)}.")
        if not self.different:
            parts.append("To restore what fits and leave the rest as it is, pass strict=False.")
        raise CheckpointMismatch(
            " ".join(parts), missing=self.missing, unexpected=self.unexpected, different=wrong
        )

    def apply(self, tensors: Mapping[str, Tensor], *, strict: bool) -> None:
        """Put the state back."""
        for action in self._actions:
            action(tensors, strict)

    def _compare(self, holder: Any, key: Any, skeleton: Any, path: Path) -> None:
        value = holder[key]
        kind = kind_of(value)
        if kind:
            self._compare_live(kind, value, skeleton, path)
        elif next(live_in(value), None) is not None:
            self._compare_container(value, skeleton, path)
        else:
            self._need(skeleton)
            self._actions.append(
                lambda tensors, strict: _replace(holder, key, decode(skeleton, tensors))
            )
            if isinstance(value, Tensor):
                self._fits(value, skeleton, path)

    def _compare_container(self, value: Any, skeleton: Any, path: Path) -> None:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if isinstance(skeleton, dict):
            saved = [] if "$object" in skeleton else list(skeleton)
        else:
            saved = list(range(len(skeleton))) if isinstance(skeleton, list | tuple) else []
        self.missing.extend(_shown((*path, key)) for key in keys if key not in saved)
        self.unexpected.extend(_shown((*path, key)) for key in saved if key not in keys)
        for key in keys:
            if key in saved:
                self._compare(value, key, skeleton[key], (*path, key))

    def _compare_live(self, kind: str, value: Any, skeleton: Any, path: Path) -> None:
        saved_kind = skeleton.get("$object") if isinstance(skeleton, dict) else None
        # A variable may be in one piece here and in several there.
        if saved_kind != kind and {saved_kind, kind} != {"variable", "assignable"}:
            was = "plain values" if saved_kind is None else f"a {saved_kind}"
            self.different.append(f"{_shown(path)} ({was} in the checkpoint, a {kind} here)")
            return
        self._need(skeleton)
        if kind == "module":
            self._module(value, skeleton, path)
        elif kind == "optimizer":
            self._optimizer(value, skeleton, path)
        else:
            self._other(value, skeleton, path)

    def _module(self, module: nn.Module, skeleton: Any, path: Path) -> None:
        saved = skeleton["state"]
        servers = self._servers if is_plain_module(module) else None
        with nullcontext() if servers is None else servers.frozen():
            current: Mapping[str, Any]
            current = module.state_dict() if servers is None else kept_state(module)
        elsewhere: set[str] = set()
        self.missing.extend(_shown((*path, key)) for key in current if key not in saved)
        self.unexpected.extend(_shown((*path, key)) for key in saved if key not in current)
        for key, value in current.items():
            if key in saved and isinstance(value, Tensor) and not is_lazy(value):
                self._fits(value, saved[key], (*path, key))
                if servers is not None and self._take(value, saved[key]):
                    elsewhere.add(key)

        def load(tensors: Mapping[str, Tensor], strict: bool) -> None:
            note_restored(module)
            own = type(saved)((key, each) for key, each in saved.items() if key not in elsewhere)
            state = decode(own, tensors)
            if isinstance(state, OrderedDict):
                vars(state)["_metadata"] = OrderedDict(skeleton["versions"])
            # What is missing in the checkpoint was found before.
            module.load_state_dict(state, strict=strict and not elsewhere)

        self._actions.append(load)

    def _optimizer(self, optimizer: Optimizer, skeleton: Any, path: Path) -> None:
        if not skeleton.get("by_name"):
            self._other(optimizer, skeleton, path)
            return
        if skeleton["class"] != _class_name(optimizer):
            self.doubtful.append(
                f"{_shown(path)} ({skeleton['class']} in the checkpoint, {_class_name(optimizer)} here)"
            )
        saved = skeleton["state"]
        names = optimizer_names.parameter_names(optimizer, self._modules)
        missing, unexpected = optimizer_names.differences(saved, names)
        self.missing.extend(f"{_shown(path)}: parameter {name}" for name in missing)
        self.unexpected.extend(f"{_shown(path)}: state of {name}" for name in unexpected)
        elsewhere: set[str] = set()
        if self._servers is not None:
            elsewhere = take_state(self._servers, optimizer, saved["state"], names, self._stored)

        def load(tensors: Mapping[str, Tensor], strict: bool) -> None:
            kept = {key: each for key, each in saved["state"].items() if key not in elsewhere}
            state = decode({**saved, "state": kept}, tensors)
            with nullcontext() if self._servers is None else self._servers.frozen():
                current = optimizer.state_dict()
            numbered = optimizer_names.to_numbers(state, names, current)
            optimizer.load_state_dict(numbered)

        self._actions.append(load)

    def _take(self, value: Any, entry: Any) -> bool:
        """Let servers read a tensor; False if it is not theirs, or not of their kind."""
        name = entry.get("$tensor", "") if isinstance(entry, dict) else ""
        stored = self._stored.get(name)
        return (
            self._servers is not None
            and stored is not None
            and self._servers.take(value, name, stored)
        )

    def _other(self, value: Any, skeleton: Any, path: Path) -> None:
        saved_entry = skeleton["state"]
        if isinstance(value, Variable | ShardedVariable) and self._take(value, saved_entry):
            self._fits(value, saved_entry, path)
            return

        def load(tensors: Mapping[str, Tensor], strict: bool) -> None:
            state = decode(skeleton["state"], tensors)
            if isinstance(value, Variable):
                _assign(value, state if isinstance(state, list) else [state])
            elif isinstance(value, Convertible):
                assert isinstance(value, Assignable)
                value.assign(state)
            elif isinstance(value, torch.Generator):
                value.set_state(state)
            else:
                value.load_state_dict(state)

        if isinstance(value, Variable):
            saved = skeleton["state"]
            pieces = saved if isinstance(saved, list) else [saved]
            for piece in pieces:
                self._fits(value, piece, path)
            alone = value.aggregation is VariableAggregation.NONE
            if len(pieces) > 1 and len(pieces) != len(value.values) and alone:
                self.different.append(
                    f"{_shown(path)} ({len(pieces)} replicas' values in the checkpoint, "
                    f"{len(value.values)} here, and no aggregation)"
                )
        self._actions.append(load)

    def _fits(self, value: Any, entry: Any, path: Path) -> None:
        stored = self._stored.get(entry.get("$tensor", "")) if isinstance(entry, dict) else None
        if stored is None:
            return
        here, there = tuple(value.shape), stored.shape
        if here != there:
            self.different.append(f"{_shown(path)} (shape {there} in the checkpoint, {here} here)")
        elif value.dtype != stored.torch_dtype:
            dtype = str(value.dtype).removeprefix("torch.")
            self.doubtful.append(f"{_shown(path)} ({stored.dtype} in the checkpoint, {dtype} here)")

    def _need(self, skeleton: Any) -> None:
        self.needed.extend(tensor_names(skeleton))


def _replace(holder: Any, key: Any, restored: Any) -> None:
    """Put a plain value back: into the same tensor or container where that can be, else in its place."""
    current = holder[key]
    if (
        isinstance(current, Tensor)
        and isinstance(restored, Tensor)
        and current.shape == restored.shape
    ):
        with torch.no_grad():
            current.copy_(restored)
    elif isinstance(current, dict) and isinstance(restored, dict):
        for gone in current.keys() - restored.keys():
            del current[gone]
        for each in restored:
            if each in current:
                _replace(current, each, restored[each])
            else:
                current[each] = restored[each]
    elif isinstance(current, list) and isinstance(restored, list):
        del current[len(restored) :]
        for place in range(len(current)):
            _replace(current, place, restored[place])
        current.extend(restored[len(current) :])
    elif isinstance(holder, tuple):
        raise CheckpointMismatch(
            f"item {key} of a tuple with live objects is the plain value {current!r}, which cannot be "
            "restored in place. Use a list.",
            different=[str(key)],
        )
    else:
        holder[key] = restored


def _assign(variable: Variable, saved: list[Tensor]) -> None:
    """Write a variable's copies; if their number has changed, write their aggregate."""
    parts = variable.values
    if len(saved) == len(parts) > 1:
        for part, value in zip(parts, saved, strict=True):
            part.assign(value)
    elif len(saved) == 1 or variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        variable.assign(saved[0])
    else:
        total = torch.stack(saved).sum(0)
        if variable.aggregation is VariableAggregation.MEAN:
            total = total / len(saved)
        variable.assign(total.to(saved[0].dtype))


def _shown(path: Path) -> str:
    return ".".join(map(str, path))


def _listed(names: list[str], most: int = 10) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
