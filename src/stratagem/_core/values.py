"""Values that have one component per replica, and the walk through nested structures.

`PerReplica` and `Mirrored` are what goes into and comes out of ``run``. `split` cuts arguments into one
tree per replica, `merge` puts results together again; both are on the path of every run, so the usual
containers are walked by hand and everything else by torch's own pytree registry.
Reducing values is `reduction.py`'s business, variables are `variables.py`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch.utils import _pytree as pytree
from typing_extensions import override

from stratagem._core import devices
from stratagem._core.context import current_replica

# Leaves compared by value when results are merged (spec 13.5).
_BY_VALUE = frozenset({type(None), bool, int, float, str, bytes})


class Convertible(ABC):
    """Anything of ours that stands for a tensor and can be turned into one."""

    __slots__ = ()

    @abstractmethod
    def _to_tensor(self) -> Any:
        """The tensor (or plain value) this stands for in the context of the caller."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        value = to_numpy(convert_to_tensor(self))
        return np.array(value, dtype=dtype) if copy else np.asarray(value, dtype=dtype)

    # torch.tensor, as_tensor and asarray look for these, and never ask __torch_function__.
    def __dlpack__(self, **options: Any) -> Any:
        return convert_to_tensor(self).detach().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return convert_to_tensor(self).__dlpack_device__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch functions see the tensor this stands for."""
        args = tuple(map_leaves(_as_torch, args))
        return func(*args, **map_leaves(_as_torch, kwargs or {}))


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor of ours as an array; says what to do where NumPy has no such type."""
    try:
        return tensor.detach().cpu().numpy()
    except TypeError as error:
        raise TypeError(
            f"a value of dtype {tensor.dtype} and layout {tensor.layout} cannot become a NumPy array: "
            f"{error}. Convert it first: for bfloat16 and other short floats torch.as_tensor(value)"
            ".float().numpy(), which is exact; for a sparse value .to_dense().numpy()."
        ) from error


def _as_torch(leaf: Any) -> Any:
    return leaf._to_tensor() if isinstance(leaf, Convertible) else leaf


class DistributedValues(Convertible):
    """A value with one component per replica: `PerReplica` or `Mirrored`.

    Example:
        >>> import stratagem as sg
        >>> isinstance(sg.PerReplica([1, 2]), sg.DistributedValues)
        True
    """

    __slots__ = ("_values",)

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = tuple(values)

    @property
    def values(self) -> tuple[Any, ...]:
        """The components, in replica order."""
        return self._values

    def component(self, replica_id: int) -> Any:
        """The component of one replica."""
        try:
            return self._values[replica_id]
        except IndexError:
            raise IndexError(
                f"replica {replica_id} has no component in a {type(self).__name__} of "
                f"{len(self._values)}: expected at least one component per replica."
            ) from None

    @override
    def __repr__(self) -> str:
        lines = [f"  {i}: {value!r}" for i, value in enumerate(self._values)]
        return f"{type(self).__name__}:{{\n" + ",\n".join(lines) + "\n}"


@final
class PerReplica(DistributedValues):
    """Components that may differ from replica to replica; ``run`` hands each replica its own.

    Args:
        values: one component per replica.
        rows: how many rows of the global batch each replica got, where that is known.

    Example:
        >>> import stratagem as sg
        >>> sg.PerReplica(["a", "b"]).values
        ('a', 'b')
    """

    __slots__ = ("_rows",)

    def __init__(self, values: Iterable[Any], *, rows: Sequence[int] | None = None) -> None:
        super().__init__(values)
        self._rows = None if rows is None else tuple(rows)

    @property
    def rows(self) -> tuple[int, ...] | None:
        """Rows of the global batch per replica, or None if nobody said."""
        return self._rows

    @override
    def _to_tensor(self) -> Any:
        replica = current_replica()
        if replica is None:
            raise ValueError(
                f"a PerReplica of {len(self._values)} components has no single value outside a "
                "replica. Use strategy.reduce(...), strategy.gather(...) or "
                "strategy.local_results(...)."
            )
        return self.component(replica.id)


_OPERATORS = [
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "floordiv",
    "rfloordiv",
    "mod",
    "rmod",
    "pow",
    "rpow",
    "matmul",
    "rmatmul",
    "and",
    "rand",
    "or",
    "ror",
    "xor",
    "rxor",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "neg",
    "pos",
    "abs",
    "invert",
    "getitem",
]


def delegate_operators(cls: type[Any]) -> type[Any]:
    """Class decorator: Python's operators act on what ``_to_tensor()`` returns."""

    def operator_method(name: str) -> Callable[..., Any]:
        def method(self: Any, *others: Any) -> Any:
            value = self._to_tensor()
            result = getattr(value, name)(*[_as_torch(each) for each in others])
            if result is NotImplemented and others:
                # A plain Python number against a tensor: let torch decide.
                result = getattr(torch.as_tensor(value), name)(*[_as_torch(o) for o in others])
            return result

        method.__name__ = name
        method.__qualname__ = f"{cls.__qualname__}.{name}"
        return method

    for each in _OPERATORS:
        if f"__{each}__" not in vars(cls):  # a class may index in its own way
            setattr(cls, f"__{each}__", operator_method(f"__{each}__"))
    return cls


@final
@delegate_operators
class Mirrored(DistributedValues):
    """Components that are equal on all replicas; usable like its value in any context.

    Example:
        >>> import torch, stratagem as sg
        >>> sg.Mirrored([torch.tensor(2.0), torch.tensor(2.0)]) + 1
        tensor(3.)
    """

    __slots__ = ()
    __hash__: ClassVar[Any] = object.__hash__

    @override
    def _to_tensor(self) -> Any:
        replica = current_replica()
        if replica is not None:
            return self.component(replica.id)
        here = devices.current_device()
        for value in self._values:
            if isinstance(value, torch.Tensor) and value.device == here:
                return value
        return self._values[0]


def convert_to_tensor(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of ``value``: a number, array, variable, sharded variable or distributed value.

    Inside a replica a `PerReplica` gives this replica's component; elsewhere it is refused.

    Args:
        value: what to convert.
        dtype: the type asked for; a variable is not silently converted to another one.

    Raises:
        ValueError: a `PerReplica` outside a replica, or a tensor-like of another dtype.
        TypeError: what is no tensor and no number.

    Example:
        >>> import stratagem as sg
        >>> sg.convert_to_tensor([1.0, 2.0])
        tensor([1., 2.])
    """
    while isinstance(value, Convertible):
        value = value._to_tensor()
        if isinstance(value, torch.Tensor) and dtype not in (None, value.dtype):
            raise ValueError(
                f"cannot convert a value of dtype {value.dtype} to {dtype}: ask for "
                f"{value.dtype} and convert the tensor with .to({dtype})."
            )
    try:
        return torch.as_tensor(value, dtype=dtype)
    except (TypeError, RuntimeError) as error:
        if isinstance(value, torch.Tensor | np.ndarray):
            raise  # torch knows best what is wrong with it
        raise TypeError(
            f"{value!r:.200}, a {type(value).__name__}, cannot be made a tensor ({error}): expected a "
            "tensor, an array, a number, a variable, or lists of numbers."
        ) from error


# ------------------------------------------------------------------ nested structures


# What a type is in a structure never changes, and the isinstance checks that find out are slow.
_ROLE_OF: dict[type, str] = {list: "list", tuple: "tuple", dict: "dict", torch.Tensor: "leaf"}


def _role(kind: type) -> str:
    role = "leaf"
    if not issubclass(kind, torch.Tensor | Convertible):
        if issubclass(kind, tuple) and getattr(kind, "_fields", None) is not None:
            role = "namedtuple"
        elif kind in pytree.SUPPORTED_NODES:
            role = "registered"
        elif issubclass(kind, Mapping):
            role = "mapping"
        elif issubclass(kind, list | tuple) and kind is not torch.Size:
            role = "sequence"
    _ROLE_OF[kind] = role
    return role


def open_node(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any], Any] | None:
    """Children, rebuilding function and keys of a container; None for a leaf."""
    kind: Any = type(tree)
    role = _ROLE_OF.get(kind) or _role(kind)
    if role == "leaf":
        return None
    if role == "list":
        return tree, list, len(tree)
    if role == "tuple":
        return list(tree), tuple, len(tree)
    if role == "dict":
        keys = list(tree)
        return list(tree.values()), lambda values: dict(zip(keys, values, strict=True)), keys
    if role == "namedtuple":
        return list(tree), lambda values: kind(*values), kind._fields
    if role == "registered":
        node = pytree.SUPPORTED_NODES[kind]
        children, spec = node.flatten_fn(tree)
        return list(children), lambda values: node.unflatten_fn(values, spec), len(children)
    if role == "sequence":
        return list(tree), kind, len(tree)
    keys = list(tree)
    return (
        [tree[key] for key in keys],
        lambda values: kind(dict(zip(keys, values, strict=True))),
        keys,
    )


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure with ``fn`` applied to every leaf (a distributed value is a leaf).

    Example:
        >>> from stratagem._core.values import map_leaves
        >>> map_leaves(lambda x: x + 1, {"a": [1, 2], "b": (3,)})
        {'a': [2, 3], 'b': (4,)}
    """
    node = open_node(tree)
    if node is None:
        return fn(tree)
    children, rebuild, _ = node
    return rebuild([map_leaves(fn, child) for child in children])


def leaves(tree: Any) -> list[Any]:
    """All leaves, in order."""
    node = open_node(tree)
    if node is None:
        return [tree]
    return [leaf for child in node[0] for leaf in leaves(child)]


class RowCount:
    """Finds out, while arguments are cut, how many rows each replica got.

    What a distributed dataset says wins; else the first rank ≥ 1 tensors found decide.
    """

    __slots__ = ("guessed", "told")

    def __init__(self) -> None:
        self.told: tuple[int, ...] | None = None
        self.guessed: tuple[int, ...] | None = None

    def look_at(self, value: PerReplica, size: int) -> None:
        """Take note of one distributed argument."""
        if self.told is None and value.rows is not None:
            self.told = value.rows
        if self.guessed is None and self.told is None:
            first = value.component(0)
            if type(first) is not torch.Tensor:
                first = next(
                    (x for x in leaves(first) if isinstance(x, torch.Tensor) and x.ndim), None
                )
                self.guessed = self._guess_from_nest(value, size) if first is not None else None
            elif first.ndim:
                self.guessed = self._sizes(value.values[:size])

    def _guess_from_nest(self, value: PerReplica, size: int) -> tuple[int, ...] | None:
        found = [
            next(
                (x for x in leaves(value.component(i)) if isinstance(x, torch.Tensor) and x.ndim),
                None,
            )
            for i in range(size)
        ]
        return self._sizes(found)

    @staticmethod
    def _sizes(tensors: Sequence[Any]) -> tuple[int, ...] | None:
        if any(not isinstance(t, torch.Tensor) or t.ndim == 0 for t in tensors):
            return None
        return tuple(t.shape[0] for t in tensors)

    @property
    def rows(self) -> tuple[int, ...] | None:
        """Rows per replica, or None if no argument tells."""
        return self.told if self.told is not None else self.guessed


def split(tree: Any, size: int, count: RowCount | None = None) -> list[Any] | None:
    """One tree per replica, distributed values replaced by components; None if there are none.

    What holds no distributed value is passed on as the same object.

    Example:
        >>> from stratagem._core.values import PerReplica, split
        >>> split({"x": PerReplica([1, 2]), "y": 3}, 2)
        [{'x': 1, 'y': 3}, {'x': 2, 'y': 3}]
    """
    kind: Any = type(tree)
    if kind is torch.Tensor:
        return None
    if kind is PerReplica or kind is Mirrored:
        if count is not None and kind is PerReplica:
            count.look_at(tree, size)
        return [tree.component(i) for i in range(size)]
    node = open_node(tree)
    if node is None:
        return None
    children, rebuild, _ = node
    parts = [split(child, size, count) for child in children]
    if all(part is None for part in parts):
        return None
    return [
        rebuild([c if p is None else p[i] for c, p in zip(children, parts, strict=True)])
        for i in range(size)
    ]


def split_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], size: int, count: RowCount
) -> list[tuple[Sequence[Any], Mapping[str, Any]]] | None:
    """The arguments of one call, for each replica; None if there is no distributed value in them.

    Example:
        >>> from stratagem._core.values import PerReplica, RowCount, split_call
        >>> split_call((PerReplica([1, 2]), 3), {}, 2, RowCount())
        [((1, 3), {}), ((2, 3), {})]
    """
    columns, found = [], False
    for each in args:
        parts = split(each, size, count)
        found = found or parts is not None
        columns.append([each] * size if parts is None else parts)
    named = split(kwargs, size, count) if kwargs else None
    if not found and named is None:
        return None
    rows = list(zip(*columns, strict=True)) or [()] * size
    return [(rows[i], kwargs if named is None else named[i]) for i in range(size)]


def merge(trees: Sequence[Any]) -> Any:
    """One tree of R results: leaves that are the same everywhere once, others as `PerReplica` (RUN-6).

    Raises:
        AssertionError: the replicas returned different structures.

    Example:
        >>> from stratagem._core.values import merge
        >>> merge([{"n": 5, "id": 0}, {"n": 5, "id": 1}])
        {'n': 5, 'id': PerReplica:{
          0: 0,
          1: 1
        }}
    """
    first = trees[0]
    if len(trees) == 1:
        return first
    if type(first) is torch.Tensor:
        return _merge_leaf(trees)
    node = open_node(first)
    if node is None:
        for tree in trees[1:]:
            if open_node(tree) is not None:
                raise _different(trees)
        return _merge_leaf(trees)
    children, rebuild, keys = node
    if all(tree is first for tree in trees) and not children:
        return first
    columns = [children]
    for tree in trees[1:]:
        other = open_node(tree) if type(tree) is type(first) else None
        if other is None or not _same_keys(keys, other[2]) or len(other[0]) != len(children):
            raise _different(trees)
        columns.append(_in_order(other[0], other[2], keys))
    return rebuild([merge(column) for column in zip(*columns, strict=True)])


def _same_keys(keys: Any, others: Any) -> bool:
    if isinstance(keys, list):
        return len(keys) == len(others) and set(keys) == set(others)
    return bool(keys == others)


def _in_order(children: list[Any], keys: Any, wanted: Any) -> list[Any]:
    if not isinstance(keys, list) or keys == wanted:
        return children
    by_key = dict(zip(keys, children, strict=True))
    return [by_key[key] for key in wanted]


def _merge_leaf(values: Sequence[Any]) -> Any:
    first = values[0]
    if all(value is first for value in values):
        return first
    kind = type(first)
    if kind in _BY_VALUE and all(type(v) is kind and v == first for v in values):
        return first
    return PerReplica(values)


def _different(trees: Sequence[Any]) -> AssertionError:
    shapes = "; ".join(f"replica {i}: {_outline(tree)}" for i, tree in enumerate(trees))
    return AssertionError(
        f"the replicas returned different structures ({shapes}). Every replica must return the "
        "same containers with the same lengths and keys."
    )


def _outline(tree: Any) -> str:
    node = open_node(tree)
    if node is None:
        return type(tree).__name__
    keys = node[2]
    inside = f"keys {keys!r}" if isinstance(keys, list | tuple) else f"length {keys}"
    return f"{type(tree).__name__} with {inside}"


def wrap(trees: Sequence[Any]) -> Any:
    """One tree of R trees with every leaf a `PerReplica`, the same everywhere or not (VFF-1)."""
    node = open_node(trees[0])
    if node is None:
        return PerReplica(trees)
    children, rebuild, keys = node
    columns = [children]
    for tree in trees[1:]:
        other = open_node(tree) if type(tree) is type(trees[0]) else None
        if other is None or not _same_keys(keys, other[2]) or len(other[0]) != len(children):
            raise _different(trees)
        columns.append(_in_order(other[0], other[2], keys))
    return rebuild([wrap(column) for column in zip(*columns, strict=True)])
