"""`TableParameter`: a layer's ``weight`` on a worker, whose rows are on parameter servers.

`TableParameter` is a tensor by type and shape, but holds no rows. Operators that look rows up (`F.embedding`,
`F.embedding_bag`, ``weight[ids]``, `index_select`) fetch only the rows they need. Any other operator gets the whole table, as
tf.distribute specifies for sharded variables.

``table.grad`` is a `TableGradient`: the gradient of the whole table, which holds only the rows that were looked up since the
last `zero_grad` (duplicates summed). ``table.grad_ids`` are the ids of these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from stratagem._core.context import current_replica
from stratagem._core.torch_patches import private_api
from stratagem._core.torch_patches.autograd_engine import own_leaf
from stratagem._core.torch_patches.compiling import eagerly
from stratagem._ps.rows import in_range, sort_ids, take_rows
from stratagem._ps.tables.row_gradient import RowGradient, RowSource, count_lookup
from stratagem._ps.tables.table_gradient import ABOUT_THE_TENSOR
from stratagem._ps.tables.worker_rows import WorkerRows, refusal

_ID_TYPES: Final = (torch.int64, torch.int32)


class TableParameter(nn.Parameter):
    """A parameter whose rows are in a `RowSource`; see the module's docstring."""

    source: RowSource
    gradient: RowGradient

    @classmethod
    def over(cls, source: RowSource, *, requires_grad: bool = True) -> TableParameter:
        """Return a table over rows of a source."""
        # Shape and dtype without memory: torch raises an error in code that bypasses `__torch_function__`
        # (torch.func wraps the tensor in C++).
        stand_in = torch.empty(source.shape, dtype=source.dtype, device="meta")
        with private_api.WithoutSubclasses():
            table: TableParameter = torch.Tensor._make_subclass(cls, stand_in, requires_grad)
        table.source = source
        table.gradient = RowGradient(source)
        return table

    @property
    def grad_ids(self) -> Tensor | None:
        """Ids of the rows that `grad` holds; None if `grad` is None or holds all rows."""
        return self.gradient.ids()

    @override
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _answer(func, args, {} if kwargs is None else kwargs)

    @override
    # Tensor takes this argument and nn.Parameter does not: no signature suits both.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        with private_api.WithoutSubclasses():
            return f"<TableParameter {self.source.name!r} {tuple(self.shape)} {self.dtype}>"

    @override
    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(2)

    @override
    def __reduce_ex__(self, proto: Any) -> Any:
        raise TypeError(
            f"{self!r} cannot be copied or pickled: its rows are on parameter servers. Use "
            "state_dict() on the coordinator, or table.detach() for a copy of all rows."
        )

    def all_rows(self) -> Tensor:
        """Return the whole table, part of a graph if it takes a gradient, on the replica's device."""
        rows = self.gradient.whole_leaf() if self._wants_gradient() else self.plain()
        device = _replica_device()
        return rows if device is None else rows.to(device)

    def plain(self) -> Tensor:
        """Return all rows without a gradient, on a worker a view of the function's copy."""
        source = self.source
        return source.copy() if isinstance(source, WorkerRows) else source.whole().detach()

    def look_up(self, ids: Tensor, *, sparse: bool = False, skip: int | None = None) -> Tensor:
        """Return a row for each id, part of a graph if the table takes a gradient, on the device of the ids or the replica.

        Shared memory gives rows as they are asked. Duplicates are then removed when the gradient is used: in a step, in all tables at
        once. Other servers are asked for each row once.

        Args:
            ids: the rows.
            sparse: whether the gradient is sparse in plain PyTorch.
            skip: row that takes no gradient (padding).
        """
        source = self.source
        flat = self._checked(ids)
        rows, found = source.rows_as_asked(flat), None
        if rows is None:
            found = sort_ids(flat)
            rows = take_rows(source.rows(found.unique), found.places)
        if self._wants_gradient():
            # Of ids that may repeat, distinct rows are counted when the gradient is used.
            count = 0 if found is None else found.unique.numel()
            rows = self.gradient.rows_leaf(rows, flat, found, sparse=sparse, skip=skip)
        else:
            count = (flat if found is None else found.unique).numel()
        count_lookup(source.name, ids=flat.numel(), rows=count)
        rows = rows.view(*ids.shape, *source.shape[1:])
        device = ids.device if ids.device.type != "cpu" else _replica_device()
        return rows if device is None else rows.to(device)

    def shorten(self, ids: Tensor, max_norm: float, norm_type: float) -> None:
        """Shorten stored rows longer than `max_norm`, as F.embedding does in place."""
        unique = sort_ids(self._checked(ids)).unique
        with torch.no_grad():
            before = self.source.rows(unique)
            rows = torch.embedding_renorm_(
                before.clone(), torch.arange(unique.numel()), max_norm, norm_type
            )
            changed = (before != rows).flatten(1).any(1).nonzero().flatten()
            if changed.numel():
                self.source.update_rows(unique[changed], rows[changed])

    def _checked(self, ids: Tensor) -> Tensor:
        """Return a flat copy of ids in host memory; the caller may use the memory of its ids again."""
        name, size = self.source.name, self.source.shape[0]
        if ids.dtype not in _ID_TYPES:
            raise RuntimeError(
                f"ids of {ids.dtype} cannot name rows of table {name!r}: expected "
                "torch.int64 or torch.int32, as in plain PyTorch. Convert them with ids.long()."
            )
        flat = ids.detach().reshape(-1).to("cpu", torch.int64, copy=True)
        if not in_range(flat, size):
            bad = int(flat[(flat < 0) | (flat >= size)][0])
            raise IndexError(
                f"row {bad!r} is out of range for table {name!r}: expected 0 <= id < {size}."
            )
        return flat

    def _wants_gradient(self) -> bool:
        with private_api.WithoutSubclasses():
            return self.requires_grad and torch.is_grad_enabled()


def _replica_device() -> torch.device | None:
    """Return the device of the current replica; None for host memory, where rows are already."""
    replica = current_replica()
    return None if replica is None or replica.device.type == "cpu" else replica.device


@eagerly
def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function on tables; not traced by compilers."""
    own = _OWN.get(func)
    if own is not None:
        result = own(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func in ABOUT_THE_TENSOR:
        with private_api.WithoutSubclasses():
            return func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    if name == "backward" and func is not Tensor.backward:
        return _backward_to(*args, **kwargs)  # torch.autograd's, wrapped or not
    tables: list[tuple[TableParameter, Tensor, int]] = []
    given = [_materialise(one, tables) for one in (*args, *kwargs.values())]
    result = func(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
    for table, rows, version in tables:
        if private_api.version_of(rows) != version and not isinstance(table.source, WorkerRows):
            raise refusal(table.source.name)
        if result is rows:  # of an operator in place
            return table
    return result


def _materialise(value: Any, tables: list[tuple[TableParameter, Tensor, int]]) -> Any:
    """Return a value with plain tensors in place of tables; note each, its tensor and the tensor's version."""
    if isinstance(value, TableParameter):
        rows = value.all_rows()
        tables.append((value, rows, private_api.version_of(rows)))
        return rows
    if isinstance(value, (list, tuple)) and any(isinstance(one, TableParameter) for one in value):
        return type(value)([_materialise(one, tables) for one in value])
    return value


# ------------------------------------------------------------------ operators that look rows up


def _embedding(
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not isinstance(weight, TableParameter):
        return NotImplemented
    if max_norm is not None:
        weight.shorten(input, max_norm, norm_type)
    rows = weight.look_up(input, sparse=sparse, skip=_row(weight, padding_idx))
    if scale_grad_by_freq and rows.requires_grad:
        _, places, counts = torch.unique(input, return_inverse=True, return_counts=True)
        frequency = counts[places].unsqueeze(-1)
        rows.register_hook(lambda gradient: gradient / frequency)
    return rows


def _embedding_bag(
    input: Tensor,
    weight: Any,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    if not isinstance(weight, TableParameter):
        return NotImplemented
    rows = _embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    is_plain = padding_idx is None and per_sample_weights is None and offsets is None
    if is_plain and input.dim() == 2 and mode in ("sum", "mean"):
        return rows.sum(1) if mode == "sum" else rows.mean(1)  # a third of the time
    places = torch.arange(input.numel()).view(input.shape).to(rows.device)
    skip = _row(weight, padding_idx)
    if skip is not None:  # all paddings get the place of the first one
        padding = (input == skip).to(rows.device)
        skip = int(padding.flatten().int().argmax()) if padding.any() else None
        places = places.masked_fill(padding, skip or 0)
    return F.embedding_bag(
        places,
        rows.view(input.numel(), -1),
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=skip,
    )


def _row(table: TableParameter, padding_idx: int | None) -> int | None:
    rows = table.source.shape[0]
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise AssertionError("Padding_idx must be within num_embeddings")
    return padding_idx if padding_idx is None else padding_idx % rows


def _torch_embedding(
    weight: Any,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    padding = None if padding_idx < 0 else padding_idx
    return _embedding(
        indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse
    )


def _index_select(input: Any, dim: int, index: Tensor, **kwargs: Any) -> Any:
    if not isinstance(input, TableParameter) or dim not in (0, -len(input.source.shape)) or kwargs:
        return NotImplemented
    return input.look_up(index)


def _getitem(table: Any, key: Any) -> Any:
    if not isinstance(table, TableParameter):
        return NotImplemented
    source, parts = table.source, key if isinstance(key, tuple) else (key,)
    first, rest = (parts or (...,))[0], parts[1:]
    ids = _row_ids(first, source.shape[0])
    if ids is None or any(isinstance(part, (Tensor, list)) for part in rest):
        return table.all_rows()[key]
    # In plain PyTorch, a row or slice without a gradient is a view, through which code may write the table.
    is_view = isinstance(first, (int, slice)) and not table._wants_gradient()
    if is_view and isinstance(source, WorkerRows) and not source.copies_parts():
        return table.plain()[key]
    rows = table.look_up(ids)
    if is_view and isinstance(source, WorkerRows):
        source.keep_part(ids, rows)
    return rows[(slice(None),) * ids.dim() + rest] if rest else rows


def _row_ids(first: Any, rows: int) -> Tensor | None:
    """Return the row ids that a first index selects; None if it needs the whole table."""
    if isinstance(first, bool) or first is None or first is Ellipsis:
        return None
    if isinstance(first, int):
        if not -rows <= first < rows:
            raise IndexError(f"row {first!r} is out of range: the table has {rows} rows.")
        return torch.tensor(first % rows)
    if isinstance(first, slice):
        wanted = first.indices(rows)
        return None if wanted == (0, rows, 1) else torch.arange(*wanted)
    ids = torch.as_tensor(first)
    if ids.dtype == torch.bool:
        return ids.nonzero().flatten() if ids.dim() == 1 and ids.numel() == rows else None
    if ids.dtype not in _ID_TYPES:
        return None  # as torch's own indexing treats them (bytes are a mask)
    return torch.where(ids < 0, ids + rows, ids)


# ------------------------------------------------------------------ gradients


def _differentiate(
    outputs: Any,
    inputs: Any,
    *,
    allow_unused: bool | None,
    is_grads_batched: bool,
    materialize_grads: bool,
    **kwargs: Any,
) -> tuple[Tensor | None, ...]:
    """Run ``torch.autograd.grad`` with tables among the inputs; each gets a gradient of its whole shape."""
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if not all(one.requires_grad for one in given):
        raise RuntimeError("One of the differentiated Tensors does not require grad")
    reached = [_leaves(one) for one in given]
    asked, found = [*chain(*reached)], cast("Iterator[Tensor | None]", iter(()))
    if asked:
        kwargs.update(allow_unused=True, is_grads_batched=is_grads_batched)
        found = iter(torch.autograd.grad(_materialise(outputs, []), asked, **kwargs))
    results = []
    for place, (one, leaves) in enumerate(zip(given, reached, strict=True)):
        gradients = [next(found) for _ in leaves]
        is_table = isinstance(one, TableParameter)
        result = (
            _gathered(one, leaves, gradients, int(is_grads_batched)) if is_table else gradients[0]
        )
        if result is None and materialize_grads:
            result = torch.zeros(one.shape, dtype=one.dtype, device=one.device)
        elif result is None and not allow_unused:
            raise RuntimeError(  # in torch's own words
                f"The differentiated Tensor at index {place} appears to not have been used in the "
                "graph. Set allow_unused=True if this is the desired behavior."
            )
        results.append(result)
    return tuple(results)


def _backward_to(tensors: Any, *, inputs: Any = None, **kwargs: Any) -> None:
    """Run ``backward(inputs=…)`` with tables among the inputs: to all their leaves in graphs."""
    if inputs is not None:
        kwargs["inputs"] = [*chain(*map(_leaves, inputs))]
        if not kwargs[
            "inputs"
        ]:  # none of the tables was used; to torch, no inputs would mean every leaf
            return
    torch.autograd.backward(_materialise(tensors, []), **kwargs)


def _leaves(given: Any) -> list[Any]:
    """Return the leaves in graphs that take the gradient of a tensor."""
    return own_leaf(given)[0].gradient.leaves() if isinstance(given, TableParameter) else [given]


def _gathered(
    table: TableParameter, leaves: Sequence[Any], gradients: Sequence[Tensor | None], dim: int
) -> Tensor | None:
    """Join the gradients of a table's leaves to one of its shape; rows are along `dim`."""
    total: Tensor | None = None
    for leaf, given in zip(leaves, gradients, strict=True):
        if given is not None:
            ids, values = leaf.kept(given, dim)
            if total is None:
                total = values.new_zeros(*values.shape[:dim], *table.source.shape)
            total = total + values if ids is None else total.index_add(dim, ids, values)
    return total


def _set_data(table: TableParameter, value: Tensor) -> None:
    if not isinstance(table.source, WorkerRows):
        raise refusal(table.source.name)
    table.source.replace(value.detach())


# The descriptors of the class; type checkers see the types of an instance's attributes.
_DATA = cast("Any", Tensor.data)
_GRAD = cast("Any", Tensor.grad)

_OWN: dict[Any, Callable[..., Any]] = {
    F.embedding: _embedding,
    torch.embedding: _torch_embedding,
    F.embedding_bag: _embedding_bag,
    torch.index_select: _index_select,
    Tensor.index_select: _index_select,
    Tensor.__getitem__: _getitem,
    torch.autograd.grad: _differentiate,
    # The tensor has no memory; rows come from the host.
    cast("Any", Tensor.device).__get__: lambda table: torch.device("cpu"),
    cast("Any", Tensor.is_meta).__get__: lambda table: False,
    Tensor.get_device: lambda table: -1,
    **dict.fromkeys((Tensor.detach, torch.detach, _DATA.__get__), TableParameter.plain),
    _DATA.__set__: _set_data,
    _GRAD.__get__: lambda table: table.gradient.shown(),
    _GRAD.__set__: lambda table, value: table.gradient.replace(value),
    _GRAD.__delete__: lambda table: table.gradient.replace(None),
}
