"""Encode nests of plain values and tensors for a checkpoint, and decode them.

The tensors go into block files. The rest, the *skeleton*, goes into ``coordinator.pt`` and holds only
types that ``torch.load(weights_only=True)`` reads. In it, dictionaries with a key that begins with ``$``
stand for something else:

======================================  ================================================
``{"$tensor": name, …}``                a tensor, with its strides if it is not contiguous
``{"$array": name}``                    a NumPy array, stored as a tensor
``{"$bytes": [type, shape, bytes]}``    a NumPy array of a type that torch lacks (text, dates)
``{"$number": [type, value]}``          a NumPy number
``{"$set": [is frozen, items]}``        a set
``{"$dict": [[key, value], …]}``        a dictionary that has such a key itself
``{"$object": kind, "state": …}``       an object with a state dict (`live_state`)
======================================  ================================================
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stratagem.errors import CheckpointError

Path = tuple[str | int, ...]

_LEAVES: Final = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
)
_STRIDED: Final = (Tensor, nn.Parameter, nn.Buffer)

BLOB_LIMIT: Final = 1000
"""Plain values of one object that torch's index lists one by one; each costs 100 µs and a kilobyte.
Objects with more are in ``coordinator.pt`` only."""


class StoredElsewhere:
    """Base of objects that stand in a nest for a tensor that another process stores."""


@dataclass
class TakenApart:
    """The contents of a checkpoint, taken apart.

    Attributes:
        skeleton: the nest without its tensors.
        tensors: the tensors by name, as they are.
        elsewhere: tensors that other processes store, by name.
        plain: values that are no tensors, by name, for torch's index.
        paths: the place of all of these in the nest.
        allow_pickle: accept values of any class in the skeleton.
    """

    allow_pickle: bool = False
    skeleton: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    elsewhere: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    def encode(self, value: Any, path: Path) -> Any:
        """Return the skeleton of a nest; its tensors and plain values are noted."""
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, StoredElsewhere):
            name = self._free_name(path)
            self.elsewhere[name] = value
            return {"$tensor": name}
        if type(value) is np.ndarray and value.dtype.kind in "biufcSUmM":
            return self._array(value, path)
        if type(value) in _MAPPINGS:
            return self._mapping(value, path)
        if type(value) in (list, tuple) and _holds_more(value):
            return type(value)(self.encode(each, (*path, i)) for i, each in enumerate(value))
        self._note_plain(value, path)
        return self.plain_copy(value, path)

    def _mapping(self, value: dict[Any, Any], path: Path) -> Any:
        items = [(key, self.encode(each, (*path, str(key)))) for key, each in value.items()]
        if any(isinstance(key, str) and key.startswith("$") for key, _ in items):
            return {"$dict": [list(item) for item in items]}
        return type(value)(items)

    def _tensor(self, value: Tensor, path: Path) -> Any:
        if type(value) not in _STRIDED or value.layout != torch.strided or value.is_quantized:
            if is_lazy(value):
                raise CheckpointError(
                    f"{_shown(path)} has no value yet: its lazy module has not seen a batch. Run one "
                    "batch through the model before saving."
                )
            plain_class = type(value) in _STRIDED
            if not (plain_class or self.allow_pickle):
                raise _refusal(value, path)
            return value.detach().clone()  # sparse and the like: torch.save knows how
        entry: dict[str, Any] = {"$tensor": self._named(value.detach(), path)}
        if value.device.type != "cpu":
            entry["device"] = str(value.device)
        if not value.is_contiguous() and _is_dense(value):
            entry["stride"] = list(value.stride())
        return entry

    def _array(self, value: np.ndarray[Any, Any], path: Path) -> Any:
        try:
            return {"$array": self._named(torch.from_numpy(value.copy()), path)}
        except (TypeError, ValueError):  # text, dates, another machine's byte order
            return {"$bytes": [value.dtype.str, list(value.shape), value.tobytes()]}

    def _named(self, tensor: Tensor, path: Path) -> str:
        name = self._free_name(path)
        self.tensors[name] = tensor
        return name

    def _note_plain(self, value: Any, path: Path) -> None:
        name = self._free_name(path)
        self.plain[name] = self.plain_copy(value, path, for_torch=True)

    def _free_name(self, path: Path) -> str:
        name = ".".join(map(str, path))
        while name in self.paths:  # {"a.b": 1, "a": {"b": 2}}
            name += "~"
        self.paths[name] = path
        return name

    def plain_copy(self, value: Any, path: Path, *, for_torch: bool = False) -> Any:
        """Return a copy of a plain value: as the skeleton has it, or (`for_torch`) as torch may read it."""
        kind = type(value)
        if kind in _LEAVES:
            return value
        if isinstance(value, np.generic):
            number = value.item()
            return number if for_torch else {"$number": [value.dtype.str, number]}
        if kind in (list, tuple):
            return kind(self.plain_copy(each, path, for_torch=for_torch) for each in value)
        if kind in (set, frozenset):
            items = [self.plain_copy(each, path, for_torch=True) for each in value]
            return set(items) if for_torch else {"$set": [kind is frozenset, items]}
        if kind in (bytearray, Counter):
            return kind(value)
        if not self.allow_pickle:
            raise _refusal(value, path)
        return copy.deepcopy(value)

    def blobs(self) -> dict[str, bytes]:
        """Return the plain values as ``torch.save`` writes them, those of huge objects left out."""
        count = Counter(self.paths[name][0] for name in self.plain)
        return {
            name: torch_bytes(value)
            for name, value in self.plain.items()
            if count[self.paths[name][0]] <= BLOB_LIMIT
        }


def _holds_more(values: Iterable[Any]) -> bool:
    """Return True for a list with tensors or dictionaries in it; torch names its items one by one."""
    return any(
        isinstance(each, Tensor | Mapping | np.ndarray | StoredElsewhere)
        or (type(each) in (list, tuple) and _holds_more(each))
        for each in values
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return True if the elements fill their memory in another order, such as channels last."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _refusal(value: Any, path: Path) -> CheckpointError:
    if isinstance(value, Tensor):
        try:
            value.__reduce_ex__(2)
        except TypeError as error:  # a table whose rows the servers have freed
            return CheckpointError(f"{_shown(path)} cannot be saved: {error}")
    return CheckpointError(
        f"{_shown(path)} is a {type(value).__module__}.{type(value).__qualname__}, which only pickle "
        "can save, and reading pickles can run code. Keep plain values and tensors in the state, or "
        "allow it with allow_pickle=True, for saving and for restoring."
    )


def _shown(path: Path) -> str:
    return ".".join(map(str, path))


def torch_bytes(value: Any) -> bytes:
    """Return the bytes that ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def from_torch_bytes(data: bytes, path: str, *, allow_pickle: bool) -> Any:
    """Return the value that `torch_bytes` made bytes of.

    Raises:
        CheckpointError: only pickle can read it, and that was not allowed.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds values that only pickle can read, and reading pickles can run code. If you "
            f"trust the file, pass allow_pickle=True. ({_reason(error)})"
        ) from None


def _reason(error: pickle.UnpicklingError) -> str:
    """Return the sentence that says what pickle is needed for; the rest is advice about `torch.load`."""
    sentences = str(error).replace("\n", ". ").split(". ")
    found = [one.strip() for one in sentences if "GLOBAL" in one or "Unsupported" in one]
    return (
        found[0].removeprefix("WeightsUnpickler error: ")
        if found
        else "weights_only=True refuses it"
    )


def tensor_names(skeleton: Any) -> Iterator[str]:
    """Yield the names of the tensors a skeleton refers to."""
    if type(skeleton) in _MAPPINGS:
        name = skeleton.get("$tensor", skeleton.get("$array"))
        if name is not None:
            yield name
            return
        for each in skeleton.values():
            yield from tensor_names(each)
    elif type(skeleton) in (list, tuple):
        for each in skeleton:
            yield from tensor_names(each)


def decode(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the nest that a skeleton and its tensors came from.

    Example:
        >>> apart = TakenApart()
        >>> skeleton = apart.encode({"a": [torch.ones(2), 3]}, ("x",))
        >>> skeleton, list(apart.tensors)
        ({'a': [{'$tensor': 'x.a.0'}, 3]}, ['x.a.0'])
        >>> decode(skeleton, apart.tensors)
        {'a': [tensor([1., 1.]), 3]}
    """
    if type(skeleton) in _MAPPINGS:
        mark = next(iter(skeleton), None)
        if isinstance(mark, str) and mark in _MARKS:
            return _MARKS[mark](skeleton, tensors)
        return type(skeleton)((key, decode(value, tensors)) for key, value in skeleton.items())
    if type(skeleton) in (list, tuple):
        return type(skeleton)(decode(each, tensors) for each in skeleton)
    return skeleton


def _decode_tensor(entry: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    found = tensors[entry["$tensor"]]
    if "stride" in entry:
        memory = torch.empty_strided(found.shape, entry["stride"], dtype=found.dtype)
        found = memory.copy_(found)
    device = torch.device(entry.get("device", "cpu"))
    if device.type == "cuda" and (device.index or 0) < torch.cuda.device_count():
        return found.to(device)
    return found


def _decode_number(entry: Any, _tensors: Mapping[str, Tensor]) -> Any:
    kind, number = entry["$number"]
    return np.dtype(kind).type(number)


def _decode_bytes(entry: Any, _tensors: Mapping[str, Tensor]) -> Any:
    kind, shape, data = entry["$bytes"]
    return np.frombuffer(data, dtype=np.dtype(kind)).reshape(shape).copy()


_MAPPINGS: Final = (dict, OrderedDict)
_MARKS: Final[dict[str, Callable[[Any, Mapping[str, Tensor]], Any]]] = {
    "$tensor": _decode_tensor,
    "$array": lambda entry, tensors: tensors[entry["$array"]].numpy(),
    "$bytes": _decode_bytes,
    "$number": _decode_number,
    "$set": lambda entry, _: (frozenset if entry["$set"][0] else set)(entry["$set"][1]),
    "$dict": lambda entry, tensors: {k: decode(v, tensors) for k, v in entry["$dict"]},
    "$object": lambda entry, tensors: decode(entry["state"], tensors),
}
