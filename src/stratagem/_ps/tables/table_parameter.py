"""`TableParameter`: a layer's ``weight`` on a worker, whose rows are on parameter servers.

`TableParameter` is a tensor by type and shape, but holds no rows. Operators that look rows up (`F.embedding`,
`F.embedding_bag`, ``weight[ids]``, `index_select`) fetch only the rows they need into a small leaf
tensor, which takes the gradient. Any other operator gets the whole table, as tf.distribute specifies for sharded
variables.

``table.grad`` is a `TableGradient`: the gradient of the whole table, which holds only the rows that were looked up since the
last `zero_grad` (duplicates summed). ``table.grad_ids`` are the ids of these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from stratagem._core.torch_patches import private_api
from stratagem._core.torch_patches.autograd_engine import own_leaf
from stratagem._core.torch_patches.compiling import eagerly
from stratagem._ps.row_kernels import kernels
from stratagem._ps.rows import in_range, sort_ids
from stratagem._ps.tables.row_gradient import (
    ID_TYPES,
    RowGradient,
    RowLookup,
    RowSource,
    count_lookup,
    handed_over,
    position_of,
    replica_device,
    row_ids,
)
from stratagem._ps.tables.table_gradient import ABOUT_THE_TENSOR, writes_first
from stratagem._ps.tables.worker_rows import WorkerRows, refusal

_MOST_AS_ASKED = 1 << 17 if kernels is None else 1 << 24
"""Numbers of a lookup that is copied with its duplicates; in larger ones removing them first costs less time or memory."""


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
        del memo
        return self.__reduce_ex__(2)

    @override
    def __reduce_ex__(self, proto: Any) -> Any:
        raise TypeError(
            f"{self!r} cannot be copied or pickled: its rows are on parameter servers. Use "
            "state_dict() on the coordinator, or table.detach() for a copy of all rows."
        )

    def whole_leaf(self) -> Tensor:
        """Return the whole table on the replica's device; its gradient comes back to the host."""
        leaf = self.gradient.whole_leaf() if self._wants_gradient() else self.plain()
        device = replica_device()
        return leaf if device is None else leaf.to(device)

    def plain(self) -> Tensor:
        """Return all rows without a gradient, on a worker a view of the function's copy."""
        source = self.source
        return source.copy() if isinstance(source, WorkerRows) else source.whole().detach()

    def lookup(self, ids: Tensor, *, sparse: bool = False, skip: int | None = None) -> RowLookup:
        """Fetch the rows of `ids`; `skip` is the position of a row without a gradient (padding)."""
        if ids.dtype not in ID_TYPES:
            raise RuntimeError(
                f"ids of {ids.dtype} cannot name rows of table {self.source.name!r}: expected "
                "torch.int64 or torch.int32, as in plain PyTorch. Convert them with ids.long()."
            )
        device = ids.device if ids.device.type != "cpu" else replica_device()
        found = sort_ids(ids if ids.device.type == "cpu" else ids.cpu())
        unique = found.unique
        if unique.numel() and (int(unique[0]) < 0 or int(unique[-1]) >= self.source.shape[0]):
            bad = int(unique[0]) if int(unique[0]) < 0 else int(unique[-1])
            raise IndexError(
                f"row {bad!r} is out of range for table {self.source.name!r}: expected 0 <= id < "
                f"{self.source.shape[0]}."
            )
        leaf = self.source.rows(unique)
        count_lookup(self.source.name, ids=ids.numel(), rows=unique.numel())
        if self._wants_gradient():
            leaf.requires_grad_()
            self.gradient.watch(unique, leaf, sparse=sparse, skip=skip)
        return RowLookup(found, leaf, device)

    def lookup_as_asked(self, ids: Tensor, *, sparse: bool) -> Tensor | None:
        """Fetch one row for each id, in their order, as part of a graph; None if `lookup` is to be used.

        Duplicates are removed when the gradient is used: in a step, in all tables at once.
        """
        source = self.source
        size = ids.numel() * source.shape[-1]
        if ids.dtype is not torch.int64 or ids.device.type != "cpu" or not size > 0:
            return None
        if size > _MOST_AS_ASKED or len(source.shape) != 2 or replica_device() is not None:
            return None
        if not self._wants_gradient():
            return None
        flat = ids.detach().reshape(-1).clone()  # the caller may use the memory of its ids again
        if not in_range(flat, source.shape[0]):
            return None  # `lookup` raises the error
        rows = source.rows_as_asked(flat)
        if rows is None:
            return None
        count_lookup(source.name, ids=flat.numel(), rows=0)  # a step counts distinct rows
        leaf, result = handed_over(rows)
        self.gradient.watch(flat, leaf, sparse=sparse, skip=None, repeats=True)
        return result

    def _wants_gradient(self) -> bool:
        with private_api.WithoutSubclasses():
            return self.requires_grad and torch.is_grad_enabled()

    def _to_write(self) -> Tensor:
        """Return the rows for an operator that writes them."""
        if self._wants_gradient():
            raise RuntimeError(  # in torch's own words
                "a leaf Variable that requires grad is being used in an in-place operation."
            )
        if isinstance(self.source, WorkerRows):
            return self.source.to_write()
        raise refusal(self.source.name)


@eagerly
def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function on tables; not traced by compilers."""
    own = _OWN.get(func)
    if own is not None:
        return own(*args, **kwargs)
    if func in ABOUT_THE_TENSOR:
        with private_api.WithoutSubclasses():
            return func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    if name == "backward" and func is not Tensor.backward:
        return _backward_to(*args, **kwargs)  # torch.autograd's, wrapped or not
    target = args[0] if args else next(iter(kwargs.values()), None)
    writes = writes_first(func)
    if writes:
        kwargs = kwargs if args else dict([*kwargs.items()][1:])  # nn.init.zeros_(tensor=table)
        args = (_to_write(target), *args[1:])
    if "out" in kwargs:
        kwargs = {**kwargs, "out": _to_write(kwargs["out"])}
    given = {name: _materialise(one) for name, one in kwargs.items()}
    result = func(*map(_materialise, args), **given)
    return target if writes and isinstance(target, TableParameter) else result


# ------------------------------------------------------------------ operators that look rows up


def _embedding(
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if not isinstance(weight, TableParameter):
        return F.embedding(
            _materialise(input),
            weight,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
        )
    if padding_idx is None and max_norm is None and not scale_grad_by_freq:
        rows = weight.lookup_as_asked(input, sparse=sparse)
        if rows is not None:
            return rows.view(*input.shape, *rows.shape[1:])
    found, padding = _look_up(weight, input, padding_idx, sparse)
    if max_norm is not None:
        found.shorten(weight.source, max_norm, norm_type)
    if padding is None and not scale_grad_by_freq and found.leaf.dim() == 2:
        return found.spread()
    return F.embedding(
        found.places, found.rows, padding_idx=padding, scale_grad_by_freq=scale_grad_by_freq
    )


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
) -> Tensor:
    if not isinstance(weight, TableParameter):
        raise TypeError("F.embedding_bag expects the table as `weight`, not as another argument.")
    if padding_idx is None and max_norm is None and not scale_grad_by_freq:
        rows = weight.lookup_as_asked(input, sparse=sparse)
        if rows is not None and input.dim() == 2 and per_sample_weights is None and mode != "max":
            bags = rows.view(*input.shape, rows.shape[1])  # a third of the time of F.embedding_bag
            return bags.sum(1) if mode == "sum" else bags.mean(1)
        if rows is not None:
            return F.embedding_bag(
                torch.arange(rows.shape[0]).view(input.shape),
                rows,
                offsets,
                mode=mode,
                per_sample_weights=per_sample_weights,
                include_last_offset=include_last_offset,
            )
    found, padding = _look_up(weight, input, padding_idx, sparse)
    if max_norm is not None:
        found.shorten(weight.source, max_norm, norm_type)
    return F.embedding_bag(
        found.places,
        found.rows,
        offsets,
        scale_grad_by_freq=scale_grad_by_freq,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding,
    )


def _look_up(
    table: TableParameter, ids: Tensor, padding_idx: int | None, sparse: bool
) -> tuple[RowLookup, int | None]:
    rows = table.source.shape[0]
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise AssertionError("Padding_idx must be within num_embeddings")
    skip = None
    if padding_idx is not None and sparse:
        skip = position_of(sort_ids(ids.cpu()).unique, padding_idx, rows)
    found = table.lookup(ids, sparse=sparse, skip=skip)
    return found, position_of(found.unique, padding_idx, rows)


def _torch_embedding(
    weight: Any,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    padding = None if padding_idx < 0 else padding_idx
    return _embedding(
        indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse
    )


def _index_select(input: Any, dim: int, index: Tensor, **kwargs: Any) -> Tensor:
    if not isinstance(input, TableParameter) or dim not in (0, -len(input.source.shape)) or kwargs:
        return torch.index_select(_materialise(input), dim, _materialise(index), **kwargs)
    return input.lookup(index).spread()


def _getitem(table: TableParameter, key: Any) -> Tensor:
    source, parts = table.source, key if isinstance(key, tuple) else (key,)
    # In plain PyTorch, such an index gives a view, through which code may write the table.
    is_view = isinstance(source, WorkerRows) and not table._wants_gradient()
    is_view = is_view and not any(_copies(part) for part in parts)
    first, rest = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, ())
    ids = row_ids(first, source.shape[0])
    if ids is None or any(isinstance(part, (Tensor, list)) for part in rest):
        return table.whole_leaf()[key]
    if is_view and not cast("WorkerRows", source).copies_parts():
        return table.plain()[key]
    found = table.lookup(ids)
    # A table looked up in order, without repetition, needs no second gather.
    in_order = ids.dim() == 1 and found.unique.numel() == ids.numel()
    is_leaf = in_order and torch.equal(found.unique, ids.cpu())
    rows = found.rows if is_leaf else found.spread()
    if is_view:
        cast("WorkerRows", source).keep_part(ids, rows)
    if not rest:
        return rows
    return rows[(slice(None),) * ids.dim() + tuple(rest)]


def _copies(part: Any) -> bool:
    """Return whether a part of an index makes torch return a copy."""
    return isinstance(part, bool) or not (
        part is None or part is Ellipsis or isinstance(part, (int, slice))
    )


def _differentiate(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """Run ``torch.autograd.grad`` with tables among the inputs; each gets a gradient of its whole shape."""
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    tables = {
        place: own_leaf(one)[0].gradient.leaves()
        for place, one in enumerate(given)
        if isinstance(one, TableParameter)
    }
    for place in tables:
        if not given[place].requires_grad:
            raise RuntimeError("One of the differentiated Tensors does not require grad")
    plain = [one for place, one in enumerate(given) if place not in tables]
    asked = [*plain, *(one.leaf for leaves in tables.values() for one in leaves)]
    found: list[Tensor | None] = []
    if asked:
        found = list(
            torch.autograd.grad(
                _materialise(outputs),
                asked,
                grad_outputs,
                retain_graph=retain_graph,
                create_graph=create_graph,
                only_inputs=only_inputs,
                allow_unused=True,
                is_grads_batched=is_grads_batched,
            )
        )
    rest, pieces = iter(found[: len(plain)]), iter(found[len(plain) :])
    results = [
        _gathered(one, [(leaf.ids, next(pieces)) for leaf in tables[place]], int(is_grads_batched))
        if place in tables
        else next(rest)
        for place, one in enumerate(given)
    ]
    for place, (one, result) in enumerate(zip(given, results, strict=True)):
        if result is None and materialize_grads:
            results[place] = torch.zeros(one.shape, dtype=one.dtype, device=one.device)
        elif result is None and not allow_unused:
            raise RuntimeError(  # in torch's own words
                f"The differentiated Tensor at index {place} appears to not have been used in the "
                "graph. Set allow_unused=True if this is the desired behavior."
            )
    return tuple(results)


def _backward_to(tensors: Any, *, inputs: Any = None, **kwargs: Any) -> None:
    """Run ``backward(inputs=…)`` with tables among the inputs: to all their leaves in graphs."""
    if inputs is not None:
        reached: list[Any] = []
        for one in inputs:
            if isinstance(one, TableParameter):
                reached += (live.leaf for live in own_leaf(one)[0].gradient.leaves())
            else:
                reached.append(one)
        if not reached:  # none of the tables was used; to torch, no inputs would mean every leaf
            return
        kwargs["inputs"] = reached
    torch.autograd.backward(_materialise(tensors), **kwargs)


def _gathered(
    table: TableParameter, pieces: Sequence[tuple[Tensor | None, Tensor | None]], dim: int
) -> Tensor | None:
    """Join the gradients of a table's leaves to one of its shape; rows are along `dim`."""
    total: Tensor | None = None
    for ids, piece in pieces:
        if piece is None:
            continue
        if total is None:
            total = piece.new_zeros(*piece.shape[:dim], *table.source.shape)
        total = total + piece if ids is None else total.index_add(dim, ids, piece)
    return total


def _get_grad(table: TableParameter) -> Tensor | None:
    return table.gradient.shown()


def _set_grad(table: TableParameter, value: Tensor | None) -> None:
    table.gradient.replace(value)


def _set_data(table: TableParameter, value: Tensor) -> None:
    if isinstance(table.source, WorkerRows):
        table.source.replace(_materialise(value))
    else:
        raise refusal(table.source.name)


def _to_write(value: Any) -> Any:
    """Return what an operator writes in place of a table, or of the tables of a list (``torch._foreach_mul_``)."""
    if isinstance(value, TableParameter):
        return value._to_write()
    return type(value)(map(_to_write, value)) if isinstance(value, (list, tuple)) else value


def _materialise(value: Any) -> Any:
    """Return a value with plain tensors in place of tables."""
    if isinstance(value, TableParameter):
        return value.whole_leaf()
    if isinstance(value, (list, tuple)) and any(isinstance(one, TableParameter) for one in value):
        return type(value)(map(_materialise, value))
    return value


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
    _GRAD.__get__: _get_grad,
    _GRAD.__set__: _set_grad,
    _GRAD.__delete__: lambda table: _set_grad(table, None),
}
