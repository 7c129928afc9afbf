"""Match a checkpoint with live objects, and restore them.

`Match` compares the objects with the checkpoint, without changing them, and lists missing names, unexpected names and the
tensors to read. `Match.apply` then puts the state back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stratagem._checkpoint import optimizer_names
from stratagem._checkpoint.encoding import Path, decode, tensor_names
from stratagem._checkpoint.live_state import (
    Assignable,
    class_name,
    kept_state,
    kind_of,
    live_in,
    modules_in,
)
from stratagem._checkpoint.server_group import is_plain_module
from stratagem._core.managed import find_managed
from stratagem._core.values import Convertible
from stratagem._core.variables import Variable, VariableAggregation
from stratagem._ps.blocks.manifest import StoredTensor
from stratagem._ps.coordinator.coordinator_variables import CoordinatorParameter
from stratagem._ps.tables.dynamic_embedding import note_restored
from stratagem._ps.tables.sharded_variable import ShardedVariable
from stratagem.errors import CheckpointCorrupt, CheckpointMismatch

LEAST_BYTES: Final = 1 << 20
"""Smaller tensors are read once, into new memory."""

_NUMBERS = (type(None), bool, int, float)


class TakenByServers(Protocol):
    """Tensors of a checkpoint that parameter servers read, or have."""

    @property
    def takes_all(self) -> bool:
        """True if they include those of modules with a state dict of their own."""

    @property
    def names(self) -> set[str]:
        """Names of the tensors taken so far."""

    def frozen(self) -> AbstractContextManager[None]:
        """Fetch nothing from the servers while state dicts are made."""

    def take(self, value: Any, name: str, stored: StoredTensor) -> bool:
        """Note that servers are to read a tensor into `value`; False if they cannot."""

    def take_state(
        self,
        optimizer: Optimizer,
        parameter: Tensor,
        name: str,
        state: Mapping[str, tuple[str, StoredTensor]],
        plain: Mapping[str, Any],
    ) -> set[str]:
        """Note that servers are to read an optimizer's state of a parameter; return its name, or nothing if they cannot."""


@contextmanager
def changing_objects() -> Iterator[None]:
    """Let errors about files say that objects are partly restored: a file was damaged after it was verified."""
    try:
        yield
    except CheckpointCorrupt as error:
        error.objects_changed = True
        raise


@final
class Match:
    """A checkpoint compared with the objects it should be restored into.

    Args:
        objects: the live objects; plain values in it are replaced by `apply`.
        skeleton: of the checkpoint.
        tensors: of the checkpoint, by name.
        partial: ignore objects that only the checkpoint has.
        servers: take the tensors of parameter servers.

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
        servers: TakenByServers,
        *,
        partial: bool = False,
    ) -> None:
        self._stored = tensors
        self._servers = servers
        self._places: dict[str, Tensor] = {}
        self._shared: set[str] = set()  # names of memory that several names have
        self._name_at: dict[int, str] = {}
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
        self.needed = [name for name in self.needed if name not in servers.names]

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

    @property
    def places(self) -> dict[str, Tensor]:
        """Memory of live tensors by their names in the checkpoint, where these can be read in place.

        A restore changes nothing before everything is verified. Large tensors in host memory are therefore read twice: once to
        compare checksums, in a small buffer, and once into their place. Reading them into a second copy first would take longer,
        because the kernel has to provide the memory for it.
        """
        shared = self._shared | {one.same_as for one in self._stored.values()}
        return {name: one for name, one in self._places.items() if name not in shared}

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
            self.different.extend(
                f"{_shown(place)} (a {saved} in the checkpoint, plain values here)"
                for place, saved in _kinds_in(skeleton, path)
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
        is_plain = self._servers.takes_all or is_plain_module(module)
        with self._servers.frozen() if is_plain else nullcontext():
            current: Mapping[str, Any] = kept_state(module) if is_plain else module.state_dict()
        elsewhere: set[str] = set()
        self.missing.extend(_shown((*path, key)) for key in current if key not in saved)
        self.unexpected.extend(_shown((*path, key)) for key in saved if key not in current)
        for key, value in current.items():
            if key in saved and isinstance(value, Tensor) and not is_lazy(value):
                self._fits(value, saved[key], (*path, key))
                if is_plain and self._take(value, saved[key]):
                    elsewhere.add(key)
                elif is_plain:
                    self._note_place(value, saved[key])

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
        if skeleton["class"] != class_name(optimizer):
            self.doubtful.append(
                f"{_shown(path)} ({skeleton['class']} in the checkpoint, {class_name(optimizer)} here)"
            )
        saved = skeleton["state"]
        names = optimizer_names.parameter_names(optimizer, self._modules)
        missing, unexpected = optimizer_names.differences(saved, names)
        self.missing.extend(f"{_shown(path)}: parameter {name}" for name in missing)
        self.unexpected.extend(f"{_shown(path)}: state of {name}" for name in unexpected)
        elsewhere: set[str] = set()
        for group, group_names in zip(optimizer.param_groups, names, strict=True):
            for parameter, name in zip(group["params"], group_names, strict=True):
                elsewhere |= self._state(optimizer, parameter, name, saved["state"].get(name, {}))

        def load(tensors: Mapping[str, Tensor], strict: bool) -> None:
            kept = {key: each for key, each in saved["state"].items() if key not in elsewhere}
            state = decode({**saved, "state": kept}, tensors)
            with self._servers.frozen():
                current = optimizer.state_dict()
            numbered = optimizer_names.to_numbers(state, names, current)
            optimizer.load_state_dict(numbered)

        self._actions.append(load)

    def _state(
        self, optimizer: Optimizer, parameter: Tensor, name: str, saved: Mapping[str, Any]
    ) -> set[str]:
        """Let servers take the state of a parameter; return its name, or nothing if it is not theirs."""
        tensors: dict[str, tuple[str, StoredTensor]] = {}
        plain: dict[str, Any] = {}
        known: Any = optimizer.state  # not by index, which would make an entry
        present = known.get(parameter, {})
        for key, entry in saved.items():
            tensor = entry.get("$tensor") if isinstance(entry, dict) else None
            if tensor is None:
                plain[key] = entry
                continue
            tensors[key] = tensor, self._stored[tensor]
            value = present.get(key)
            if isinstance(value, Tensor) and not _is_on_servers(parameter):
                self._note_place(value, entry)
        if not tensors or any(type(one) not in _NUMBERS for one in plain.values()):
            return set()
        return self._servers.take_state(optimizer, parameter, name, tensors, plain)

    def _take(self, value: Any, entry: Any) -> bool:
        """Let servers take a tensor; False if it is not theirs, or not of their kind."""
        name = entry.get("$tensor", "") if isinstance(entry, dict) else ""
        stored = self._stored.get(name)
        return stored is not None and self._servers.take(value, name, stored)

    def _note_place(self, value: Tensor, entry: Any) -> None:
        """Note that a tensor can be read into the memory of a live one, which is loaded by a copy into it."""
        if not (isinstance(entry, Mapping) and set(entry) == {"$tensor"}):
            return
        name = entry["$tensor"]
        other = self._name_at.setdefault(value.data_ptr(), name)
        if other != name:
            self._shared |= {name, other}
        elif _can_be_read_into(value, self._stored[name]):
            self._places[name] = value.detach()

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


def _kinds_in(skeleton: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the objects with a state in a skeleton: where, and of which kind."""
    if isinstance(skeleton, dict) and "$object" in skeleton:
        yield path, skeleton["$object"]
    elif isinstance(skeleton, dict):
        for key, value in skeleton.items():
            yield from _kinds_in(value, (*path, key))
    elif isinstance(skeleton, list | tuple):
        for key, value in enumerate(skeleton):
            yield from _kinds_in(value, (*path, key))


def _shown(path: Path) -> str:
    return ".".join(map(str, path))


def _listed(names: list[str], most: int = 10) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _is_on_servers(parameter: Tensor) -> bool:
    return isinstance(find_managed(parameter), CoordinatorParameter)


def _can_be_read_into(tensor: Tensor, stored: StoredTensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        and (tuple(tensor.shape), tensor.dtype) == (stored.shape, stored.torch_dtype)
        and tensor.nbytes >= LEAST_BYTES
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and not (stored.per_shard or stored.has_holes or stored.same_as)
        and not _is_on_servers(tensor)
    )
