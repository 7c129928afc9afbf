"""`ShardedVariable`: a container of variables that are shards of one along the first axis.

Shards are ordinary `Variable` s, on parameter servers if a strategy made them. Operators act on the concatenation;
lookups use only the shards that hold the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from stratagem._core.values import Convertible, convert_to_tensor, delegate_operators, to_numpy
from stratagem._core.variables import Variable
from stratagem._ps.partition import ShardLayout
from stratagem._ps.rows import sort_ids


@delegate_operators
class ShardedVariable(Convertible):
    """A variable whose rows are divided among several variables.

    Args:
        variables: the shards, in the order of their rows; same type, same shape beyond the first
            axis.
        name: name of the container.

    Raises:
        TypeError: no shards, or something that is not a variable.
        ValueError: the shards do not fit together.

    Example:
        >>> import torch, stratagem as sg
        >>> whole = sg.ShardedVariable([sg.Variable([0.0, 1.0]), sg.Variable([2.0])])
        >>> whole + 1
        tensor([1., 2., 3.])
        >>> whole[-1], whole.sparse_read(torch.tensor([2, 0]))
        (tensor(2.), tensor([2., 0.]))
    """

    is_sharded_variable: ClassVar[bool] = True
    __hash__: ClassVar[Any] = object.__hash__

    def __init__(self, variables: Sequence[Variable], name: str = "ShardedVariable") -> None:
        given: Any = variables
        if not isinstance(given, Sequence) or not given:
            raise TypeError(
                f"variables={variables!r}: expected a list of at least one sg.Variable, the shards."
            )
        for index, shard in enumerate(variables):
            if not isinstance(shard, Variable):
                raise TypeError(
                    f"shard {index} is {shard!r}, a {type(shard).__name__}: expected a sg.Variable."
                )
        first = variables[0]
        for index, shard in enumerate(variables):
            if len(shard.shape) == 0:
                raise IndexError(f"shard {index} has no axis, so it cannot hold rows.")
            if shard.dtype != first.dtype:
                raise ValueError(f"shard {index} has {shard.dtype}: expected {first.dtype} as all.")
            if tuple(shard.shape[1:]) != tuple(first.shape[1:]):
                raise ValueError(
                    f"shard {index} has shape {tuple(shard.shape)!r}: expected "
                    f"(any, {', '.join(map(str, first.shape[1:]))}) as shard 0."
                )
        self._variables = list(variables)
        self._name = name
        self._layout = ShardLayout([shard.shape[0] for shard in variables])

    # -------------------------------------------------------------- properties

    @property
    def variables(self) -> list[Variable]:
        """The shards, in the order of their rows."""
        return list(self._variables)

    @property
    def name(self) -> str:
        """Name of the container."""
        return self._name

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        return self._variables[0].dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole."""
        return torch.Size((self._layout.rows, *self._variables[0].shape[1:]))

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return all rows as an array."""
        return to_numpy(self._to_tensor())

    def __iter__(self) -> Iterator[Variable]:
        return iter(self._variables)

    @override
    def _to_tensor(self) -> Tensor:
        return torch.cat([convert_to_tensor(shard) for shard in self._variables])

    @override
    def __repr__(self) -> str:
        parts = "\n".join(f"  {index}: {shard!r}" for index, shard in enumerate(self._variables))
        return f"ShardedVariable:{{\n{parts}\n}}"

    # -------------------------------------------------------------- writing

    def assign(self, value: Any) -> ShardedVariable:
        """Replace all rows; not atomic across shards. Returns the container."""
        return self._assign("assign", value)

    def assign_add(self, delta: Any) -> ShardedVariable:
        """Add to all rows."""
        return self._assign("assign_add", delta)

    def assign_sub(self, delta: Any) -> ShardedVariable:
        """Subtract from all rows."""
        return self._assign("assign_sub", delta)

    def _assign(self, method: str, value: Any) -> ShardedVariable:
        tensor = convert_to_tensor(value)
        if tensor.dtype != self.dtype and not isinstance(value, int | float | list | tuple):
            raise ValueError(
                f"{method} of {self._called()} got {tensor.dtype}: expected {self.dtype}."
            )
        tensor = tensor.to(self.dtype)
        if tensor.shape != self.shape:
            raise ValueError(
                f"{method} of {self._called()} got a value of shape {tuple(tensor.shape)!r}: "
                f"expected {tuple(self.shape)!r}."
            )
        parts = torch.split_with_sizes(tensor, self._layout.sizes)
        for shard, part in zip(self._variables, parts, strict=True):
            getattr(shard, method)(part)
        return self

    def scatter_add(self, sparse_delta: Tensor) -> ShardedVariable:
        """Add rows: a sparse tensor of row numbers and values; duplicates accumulate."""
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: Tensor) -> ShardedVariable:
        """Subtract rows."""
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_mul(self, sparse_delta: Tensor) -> ShardedVariable:
        """Multiply rows."""
        return self._scatter("scatter_mul", sparse_delta)

    def scatter_div(self, sparse_delta: Tensor) -> ShardedVariable:
        """Divide rows."""
        return self._scatter("scatter_div", sparse_delta)

    def scatter_min(self, sparse_delta: Tensor) -> ShardedVariable:
        """Keep the smaller one of each element and the given element, in the given rows."""
        return self._scatter("scatter_min", sparse_delta)

    def scatter_max(self, sparse_delta: Tensor) -> ShardedVariable:
        """Keep the larger one of each element and the given element, in the given rows."""
        return self._scatter("scatter_max", sparse_delta)

    def scatter_update(self, sparse_delta: Tensor) -> ShardedVariable:
        """Replace rows."""
        return self._scatter("scatter_update", sparse_delta)

    def batch_scatter_update(self, sparse_delta: Tensor) -> ShardedVariable:
        """Replace rows: the same as `scatter_update` for one axis of row numbers."""
        return self._scatter("scatter_update", sparse_delta)

    def _scatter(self, method: str, sparse: Any) -> ShardedVariable:
        self._need_div_rule(method)
        if not isinstance(sparse, Tensor) or sparse.layout != torch.sparse_coo:
            raise AttributeError(
                f"{method} of {self._called()} got a {type(sparse).__name__} that is not a sparse "
                "tensor: expected row numbers and rows, as torch.sparse_coo_tensor([ids], rows, size) "
                "makes."
            )
        if sparse.sparse_dim() != 1:
            raise ValueError(
                f"{method} of {self._called()} got {sparse.sparse_dim()} axes of indices: expected "
                "one, row numbers."
            )
        # Not coalesced: that would add up values which may have to be multiplied.
        ids, values = sparse._indices()[0], sparse._values()
        self._layout.check(ids, self._called())
        for index, (offset, size) in enumerate(
            zip(self._layout.offsets, self._layout.sizes, strict=True)
        ):
            mine = (ids >= offset) & (ids < offset + size)
            if not bool(mine.any()):
                continue
            piece = torch.sparse_coo_tensor(
                (ids[mine] - offset).unsqueeze(0),
                values[mine],
                (size, *values.shape[1:]),
                check_invariants=False,
            )
            getattr(self._variables[index], method)(piece)
        return self

    # -------------------------------------------------------------- reading rows

    def sparse_read(self, indices: Any) -> Tensor:
        """Return the requested rows, in the requested order; transfer no others.

        Raises:
            ValueError: an id is out of range.
        """
        self._need_div_rule("sparse_read")
        ids = torch.as_tensor(indices)
        self._layout.check(ids, self._called())
        return self._rows(ids)

    def __getitem__(self, key: Any) -> Tensor:
        first, rest = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, ())
        for part in (first, *rest):
            _check_index(part)
        if isinstance(first, np.ndarray | Tensor):
            return _taken(self._to_tensor(), (torch.as_tensor(first), *rest))
        if isinstance(first, bool) or first is None or first is Ellipsis or key == ():
            return _taken(self._to_tensor(), key if isinstance(key, tuple) else (key,))
        if isinstance(first, int):
            row = first + self._layout.rows if first < 0 else first
            if not 0 <= row < self._layout.rows:
                raise IndexError(
                    f"row {first!r} of {self._called()} is out of range: there are "
                    f"{self._layout.rows}."
                )
            return _taken(self._rows(torch.tensor([row]))[0], rest)
        # torch has no negative steps: Python counts the rows, and they are gathered in that order.
        rows = self._rows(torch.tensor(range(self._layout.rows)[first], dtype=torch.int64))
        return _taken(rows, (slice(None), *rest)) if rest else rows

    def _rows(self, ids: Tensor) -> Tensor:
        found = sort_ids(ids)
        unique, places = found.unique, found.places
        cuts = self._layout.cut_sorted(unique)
        pieces = [
            shard.sparse_read(unique[begin:end] - offset)
            for shard, offset, (begin, end) in zip(
                self._variables, self._layout.offsets, cuts, strict=True
            )
            if end > begin
        ]
        if not pieces:
            return torch.zeros(*ids.shape, *self.shape[1:], dtype=self.dtype)
        return torch.cat(pieces)[places]

    def _need_div_rule(self, what: str) -> None:
        if not self._layout.follows_div_rule:
            raise NotImplementedError(
                f"{what} of {self._called()} needs shards of equal size, larger ones first (the div "
                f"rule); these have {', '.join(map(str, self._layout.sizes))} rows."
            )

    def _called(self) -> str:
        """The name its maker gave it: shards have it, the container has its own."""
        first = self._variables[0].name
        given = first.removesuffix("/part_0")
        return f"sharded variable {(given if given != first else self._name)!r}"


def _taken(tensor: Tensor, key: tuple[Any, ...]) -> Tensor:
    """Return ``tensor[key]``, also with negative steps, which torch does not have."""
    if not any(isinstance(part, slice) and part.step is not None and part.step < 0 for part in key):
        return tensor[key or ...]
    widths = [_width(part) for part in key]
    dim, simple = 0, list(key)
    for place, (part, width) in enumerate(zip(key, widths, strict=True)):
        if isinstance(part, slice) and part.step is not None and part.step < 0:
            rows = torch.tensor(range(tensor.shape[dim])[part], dtype=torch.int64)
            tensor, simple[place] = tensor.index_select(dim, rows), slice(None)
        dim += tensor.dim() - sum(widths) if part is Ellipsis else width
    return tensor[tuple(simple)]


def _width(part: Any) -> int:
    """Return how many dimensions a part of an index takes, without Ellipsis."""
    if isinstance(part, np.ndarray | Tensor):
        return part.ndim
    return int(isinstance(part, slice) or (isinstance(part, int) and not isinstance(part, bool)))


def _check_index(part: Any) -> None:
    """Check one part of an index: an index of a Python list, Ellipsis, None or a mask."""
    if isinstance(part, slice):
        if part.step == 0:
            raise ValueError("slice step cannot be zero")
        for border in (part.start, part.stop, part.step):
            if isinstance(border, Tensor) or not (border is None or isinstance(border, int)):
                raise TypeError(f"slices take integers, not {border!r}.")
    elif isinstance(part, np.ndarray | Tensor):
        if part.dtype not in (torch.bool, np.bool_):
            raise TypeError(
                "a sharded variable is not indexed by a tensor of numbers: use sparse_read(ids) or "
                "sg.nn.embedding_lookup(variable, ids), which move only these rows."
            )
    elif not (part is None or part is Ellipsis or isinstance(part, int)):
        raise TypeError(
            f"index {part!r} has type {type(part).__name__}: expected integers, slices, Ellipsis, None "
            "or a mask of bools; for several rows use sparse_read(ids)."
        )
