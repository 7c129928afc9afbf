"""`TableGradient`: ``table.grad`` of a `TableParameter`, as code of the user sees it.

It has the type, shape and values of the gradient of the whole table, but holds only the rows that were looked up since
the last `zero_grad`; all others are zero. Scaling, clipping and norms compute with these rows. Any other operator
computes with the whole gradient. If its result may share memory with the gradient, the table keeps the whole gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final, cast, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._core.torch_patches import private_api
from stratagem._core.torch_patches.compiling import eagerly
from stratagem._wire.data_values import make_tensor


def _named(names: str, *owners: object) -> list[Any]:
    found = [getattr(owner, name, None) for owner in owners for name in names.split()]
    return [one for one in found if one is not None]


ABOUT_THE_TENSOR: Final = frozenset(
    [
        one.__get__
        for name, one in inspect.getmembers(Tensor, inspect.isgetsetdescriptor)
        if name not in ("data", "device", "_grad", "grad", "is_cpu", "is_meta")
        and name not in ("H", "T", "mH", "mT", "imag", "real")
    ]
    + _named("size dim nelement ndimension element_size is_inference requires_grad_", Tensor)
    + _named("__len__ __hash__", Tensor)
    + _named("numel is_floating_point is_complex", torch, Tensor)
    + [cast("Any", Tensor.requires_grad).__set__]
)
"""Functions that need no values."""


@dataclass(slots=True, eq=False)
class GradientPiece:
    """A part of a gradient.

    Attributes:
        ids: of its rows; None: it has all rows.
        values: the rows.
        repeats: whether ids may repeat and are not sorted.
    """

    ids: Tensor | None
    values: Tensor
    repeats: bool = False


@final
class TableGradient(Tensor):
    """The gradient of a table; see the module. `piece` has its rows; the table's gradient may have the same piece."""

    piece: GradientPiece

    @classmethod
    def over(cls, piece: GradientPiece, shape: Sequence[int]) -> TableGradient:
        """Return the gradient of a table of this shape with these rows."""
        # One element of memory: code that bypasses `__torch_function__` reads NaN, and torch refuses its writes.
        stand_in = torch.full((1,), torch.nan, dtype=piece.values.dtype).expand(tuple(shape))
        with private_api.WithoutSubclasses():
            made: TableGradient = Tensor._make_subclass(cls, stand_in, piece.values.requires_grad)
        made.piece = piece
        return made

    def whole(self) -> Tensor:
        """Return all rows; the caller must not write to them."""
        ids, values = self.piece.ids, self.piece.values
        return (
            values if ids is None else values.new_zeros(_shape_of(self)).index_add(0, ids, values)
        )

    @override
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _answer(func, args, {} if kwargs is None else kwargs)

    @override
    # Tensor's own method has another signature in its stub.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        held = "all" if self.piece.ids is None else self.piece.ids.numel()
        return f"<TableGradient {_shape_of(self)}, {held} rows>"

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return make_tensor, (self.whole().detach(),)


def _shape_of(gradient: TableGradient) -> tuple[int, ...]:
    with private_api.WithoutSubclasses():
        return tuple(gradient.shape)


# ------------------------------------------------------------------ operators that need the rows only


def _alone(*others: object, **named: object) -> bool:
    return not others and not named


def _with_scalars(*others: object, **named: object) -> bool:
    return not named and all(
        isinstance(one, (int, float)) or (isinstance(one, Tensor) and one.dim() == 0)
        for one in others
    )


def _without_tensors(*others: object, **named: object) -> bool:
    return not any(isinstance(one, Tensor) for one in (*others, *named.values()))


def _around_zero(*bounds: Any, **named: Any) -> bool:
    low, high = (*bounds, None, None)[:2]
    low, high = named.get("min", low), named.get("max", high)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return False
    return (low is None or low <= 0) and (high is None or high >= 0)


def _of_all(order: Any = 2.0, /, **named: Any) -> bool:
    order = named.pop("p", named.pop("ord", order))
    return not named and isinstance(order, (int, float)) and order > 0


_ROWS_SUFFICE: dict[Any, Callable[..., bool]] = {
    **dict.fromkeys(
        _named("abs clone neg positive sign square sum isnan isinf", torch, Tensor), _alone
    ),
    **dict.fromkeys(_named("abs_ neg_ sign_ zero_ detach_ __neg__", Tensor), _alone),
    **dict.fromkeys(_named("mul div", torch, Tensor), _with_scalars),
    **dict.fromkeys(
        _named("mul_ div_ __mul__ __rmul__ __imul__ __truediv__ __itruediv__ __idiv__", Tensor),
        _with_scalars,
    ),
    **dict.fromkeys(_named("to type double float half bfloat16", Tensor), _without_tensors),
    **dict.fromkeys(_named("clamp clip", torch, Tensor), _around_zero),
    **dict.fromkeys(_named("clamp_ clip_", Tensor), _around_zero),
    **dict.fromkeys([*_named("norm", torch, Tensor), torch.linalg.vector_norm], _of_all),
    torch._amp_foreach_non_finite_check_and_unscale_: _with_scalars,
}
"""Operators that give zero, or ignore zeros, if these are their other arguments; the first one is the gradient."""


@eagerly
def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function on gradients of tables; not traced by compilers."""
    first = args[0] if args else None
    if func in ABOUT_THE_TENSOR or func in _ABOUT_MEMORY:
        with private_api.WithoutSubclasses():
            return func(*args, **kwargs)
    if func in _SAME_MEMORY and not args[0].piece.values.requires_grad:
        return first
    if _adds_rows(func, args, kwargs):
        alpha = _SIGNS[func.__name__] * kwargs.get("alpha", 1)
        piece = args[1].piece
        return cast("Tensor", first).index_add_(0, piece.ids, piece.values, alpha=alpha)
    rule = _ROWS_SUFFICE.get(func)
    if rule is not None and isinstance(first, _GRADIENTS) and rule(*args[1:], **kwargs):
        return _on_rows(func, first, args[1:], kwargs)
    wholes: list[tuple[TableGradient, Tensor, int]] = []

    def with_all_rows(value: Any) -> Any:
        if isinstance(value, TableGradient):
            whole = value.whole()
            wholes.append((value, whole, private_api.version_of(whole)))
            return whole
        is_list = isinstance(value, (list, tuple))
        if is_list and any(isinstance(one, TableGradient) for one in value):
            return type(value)(map(with_all_rows, value))
        return value

    given = {name: with_all_rows(one) for name, one in kwargs.items()}
    result = func(*map(with_all_rows, args), **given)
    for gradient, whole, version in wholes:
        if private_api.version_of(whole) != version or _may_share(result, whole):
            gradient.piece.ids, gradient.piece.values = None, whole
    return result


def _may_share(result: Any, memory: Tensor) -> bool:
    """Return whether a result may be over the memory of a tensor."""
    if isinstance(result, Tensor):
        address = memory.untyped_storage().data_ptr()
        is_strided = result.layout is torch.strided
        return is_strided and result.untyped_storage().data_ptr() == address
    if isinstance(result, (list, tuple)):
        return any(_may_share(one, memory) for one in result)
    return not isinstance(result, (int, float, complex, str, torch.dtype, NoneType))


_SIGNS = {"add_": 1, "__iadd__": 1, "sub_": -1, "subtract_": -1, "__isub__": -1}


def _adds_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator adds rows to a tensor, or subtracts them: an update by hand."""
    if getattr(func, "__name__", "") not in _SIGNS or len(args) != 2 or set(kwargs) - {"alpha"}:
        return False
    total, change = args
    return (
        isinstance(change, TableGradient)
        and change.piece.ids is not None
        and type(total) is Tensor
        and total.shape == change.shape
        and total.dtype is change.piece.values.dtype
    )


def _on_rows(func: Any, first: Any, others: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if not isinstance(first, TableGradient):
        held = [one.piece.values if isinstance(one, TableGradient) else one for one in first]
        return func(held, *others, **kwargs)
    ids, values = first.piece.ids, first.piece.values
    result = func(values, *others, **kwargs)
    if result is values:
        return first
    if ids is None or not isinstance(result, Tensor) or result.shape != values.shape:
        return result
    return TableGradient.over(GradientPiece(ids, result), _shape_of(first))


_GRADIENTS: Final = (TableGradient, list, tuple)

_ABOUT_MEMORY: frozenset[Any] = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("device", "is_cpu", "is_meta")),
        Tensor.get_device,
    }
)
"""The stand-in answers these, because rows of tables are in host memory."""

_SAME_MEMORY: frozenset[Any] = frozenset({cast("Any", Tensor.data).__get__, Tensor.detach})
