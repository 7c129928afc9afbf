"""Values with one component per replica, and functions over nested structures of them.

`PerReplica` and `Mirrored` are arguments and results of ``run``. `split` makes one tree of arguments per replica,
`merge` combines the trees of results. Both run in every ``run``, so they handle the usual containers directly and
others through torch's pytree registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast, final

import numpy as np
import torch
from typing_extensions import override

from stratagem._core import devices
from stratagem._core.context import current_replica
from stratagem._core.torch_patches.private_api import pytree
from stratagem.errors import UnequalStructures

# Leaves compared by value when results are merged (spec 13.5).
_BY_VALUE = frozenset({type(None), bool, int, float, str, bytes})


class Convertible(ABC):
    """An object of ours that can be converted to a tensor."""

    __slots__ = ()

    @abstractmethod
    def _to_tensor(self) -> Any:
        """Return the tensor (or plain value) for the context of the caller."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        value = to_numpy(convert_to_tensor(self))
        return np.array(value, dtype=dtype) if copy else np.asarray(value, dtype=dtype)

    # torch.tensor, as_tensor and asarray use these, not __torch_function__.
    def __dlpack__(self, **options: Any) -> Any:
        return convert_to_tensor(self).detach().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return convert_to_tensor(self).__dlpack_device__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function with tensors in place of objects like this one."""
        args = tuple(map_leaves(_as_torch, args))
        return func(*args, **map_leaves(_as_torch, kwargs or {}))


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Convert a tensor to an array; raise with a remedy where NumPy has no such type."""
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
        """Return the component of one replica."""
        if replica_id >= len(self._values):
            raise IndexError(
                f"replica {replica_id} has no component in a {type(self).__name__} of "
                f"{len(self._values)}: expected at least one component per replica."
            )
        return self._values[replica_id]

    @override
    def __repr__(self) -> str:
        lines = [f"  {i}: {value!r}" for i, value in enumerate(self._values)]
        return f"{type(self).__name__}:{{\n" + ",\n".join(lines) + "\n}"


@final
class PerReplica(DistributedValues):
    """Components that may differ from replica to replica; ``run`` passes each replica its own component.

    Args:
        values: one component per replica.
        rows: number of rows of the global batch in each replica; None if unknown.

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
        """Rows of the global batch per replica, or None if unknown."""
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


_OPERATORS = (  # noqa: SIM905 - shorter than a list
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul "
    "and rand or ror xor rxor lt le gt ge eq ne neg pos abs invert getitem"
).split()


def delegate_operators(cls: type[Any]) -> type[Any]:
    """Class decorator: apply Python's operators to the result of ``_to_tensor()``."""

    def operator_method(name: str) -> Callable[..., Any]:
        def method(self: Any, *others: Any) -> Any:
            value = self._to_tensor()
            result = getattr(value, name)(*[_as_torch(each) for each in others])
            if result is NotImplemented and others:
                # A Python number and a tensor: torch decides.
                result = getattr(torch.as_tensor(value), name)(*[_as_torch(o) for o in others])
            return result

        method.__name__ = name
        method.__qualname__ = f"{cls.__qualname__}.{name}"
        return method

    for each in _OPERATORS:
        if f"__{each}__" not in vars(cls):  # a class may define its own indexing
            setattr(cls, f"__{each}__", operator_method(f"__{each}__"))
    return cls


@final
@delegate_operators
class Mirrored(DistributedValues):
    """Components that are equal on all replicas. Operators act on the common value, in any context.

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
    """Convert a number, array, variable, sharded variable or distributed value to a tensor.

    Inside a replica, a `PerReplica` is converted to this replica's component; elsewhere it raises an
    error.

    Args:
        value: the value to convert.
        dtype: the type to convert to; a variable of another type raises an error.

    Raises:
        ValueError: a `PerReplica` outside a replica, or a variable of another dtype.
        TypeError: neither a tensor nor a number.

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
            raise  # torch's own error says what is wrong
        raise TypeError(
            f"{value!r:.200}, a {type(value).__name__}, cannot be made a tensor ({error}): expected a "
            "tensor, an array, a number, a variable, or lists of numbers."
        ) from error


# ------------------------------------------------------------------ nested structures


# Cache of the role of each type in a structure: the isinstance checks are slow.
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
    """Return children, rebuilding function and keys of a container; None for a leaf."""
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
    """Return the same structure with ``fn`` applied to every leaf; a distributed value is a leaf."""
    node = open_node(tree)
    if node is None:
        return fn(tree)
    children, rebuild, _ = node
    return rebuild([map_leaves(fn, child) for child in children])


def leaves(tree: Any) -> list[Any]:
    """Return all leaves, in order."""
    node = open_node(tree)
    if node is None:
        return [tree]
    return [leaf for child in node[0] for leaf in leaves(child)]


def row_counts(arguments: Sequence[PerReplica], size: int) -> tuple[int, ...] | None:
    """Return how many rows each replica gets, from the distributed arguments of a call; None if unknown.

    The row counts of a distributed dataset win; else the first tensors of rank ≥ 1 decide.
    """
    for value in arguments:
        if value._rows is not None:
            return value._rows
    for value in arguments:
        rows = tuple(map(_count_rows, value.values[:size]))
        if len(rows) == size and None not in rows:
            return cast("tuple[int, ...]", rows)
    return None


def _count_rows(component: Any) -> int | None:
    tensors = (component,) if type(component) is torch.Tensor else leaves(component)
    for leaf in tensors:
        if isinstance(leaf, torch.Tensor) and (shape := leaf.shape):
            return shape[0]
    return None


def split(tree: Any, size: int, seen: list[PerReplica] | None = None) -> list[Any] | None:
    """Return one tree per replica with components for distributed values; None if there are none.

    Parts without distributed values are passed on as the same objects. `PerReplica` values are appended to ``seen``.
    """
    kind: Any = type(tree)
    if kind is torch.Tensor:
        return None
    if kind is PerReplica or kind is Mirrored:
        if seen is not None and kind is PerReplica:
            seen.append(tree)
        if len(tree.values) == size:
            return list(tree.values)
        return [tree.component(i) for i in range(size)]
    node = open_node(tree)
    if node is None:
        return None
    children, rebuild, _ = node
    parts = [split(child, size, seen) for child in children]
    if all(part is None for part in parts):
        return None
    return [
        rebuild([c if p is None else p[i] for c, p in zip(children, parts, strict=True)])
        for i in range(size)
    ]


def split_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], size: int, seen: list[PerReplica]
) -> list[tuple[Sequence[Any], Mapping[str, Any]]] | None:
    """Return the arguments of one call for each replica; None if they hold no distributed value."""
    columns, found = [], False
    for each in args:
        parts = split(each, size, seen)
        found = found or parts is not None
        columns.append([each] * size if parts is None else parts)
    named = split(kwargs, size, seen) if kwargs else None
    if not found and named is None:
        return None
    rows = list(zip(*columns, strict=True)) or [()] * size
    return [(rows[i], kwargs if named is None else named[i]) for i in range(size)]


def merge(trees: Sequence[Any]) -> Any:
    """Merge R results: equal leaves become one, others a `PerReplica`.

    Raises:
        UnequalStructures: (an AssertionError) the replicas returned different structures.
    """
    return trees[0] if len(trees) == 1 else _combine(trees, _merge_leaf)


def wrap(trees: Sequence[Any]) -> Any:
    """Merge R trees so that every leaf becomes a `PerReplica`, equal or not."""
    return _combine(trees, PerReplica)


def _combine(trees: Sequence[Any], leaf: Callable[[Sequence[Any]], Any]) -> Any:
    first = trees[0]
    if type(first) is torch.Tensor or all(tree is None for tree in trees):
        return leaf(trees)
    node = open_node(first)
    if node is None:
        if any(open_node(tree) is not None for tree in trees[1:]):
            raise _different(trees)
        return leaf(trees)
    children, rebuild, keys = node
    if not children and all(tree is first for tree in trees):
        return first
    columns = [children]
    for tree in trees[1:]:
        other = open_node(tree) if type(tree) is type(first) else None
        if other is None or not _same_keys(keys, other[2]) or len(other[0]) != len(children):
            raise _different(trees)
        columns.append(_in_order(other[0], other[2], keys))
    return rebuild([_combine(column, leaf) for column in zip(*columns, strict=True)])


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


def _different(trees: Sequence[Any]) -> UnequalStructures:
    shapes = "; ".join(f"replica {i}: {_outline(tree)}" for i, tree in enumerate(trees))
    return UnequalStructures(
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
