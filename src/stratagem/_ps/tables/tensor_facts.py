"""What torch functions do: those that need only the metadata of a tensor, and those that write it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


ABOUT_THE_TENSOR = _getters(
    "shape", "dtype", "requires_grad", "is_leaf", "layout", "ndim", "is_sparse"
) | _getters(
    "_version",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "is_cuda",
    "is_quantized",
    "is_nested",
    "is_mkldnn",
    "grad_fn",
    "nbytes",
    "itemsize",
)
ABOUT_THE_TENSOR |= {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.ndimension,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.is_inference,
    Tensor.__len__,
    Tensor.__hash__,
    Tensor.requires_grad_,
    cast("Any", Tensor.requires_grad).__set__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}

_IN_PLACE = frozenset(
    {"__setitem__", "__idiv__", "__ipow__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
    | {f"__i{name}__" for name in ("floordiv", "mod", "and", "or", "xor", "lshift", "rshift")}
)
"""Operators that write their first operand and whose names do not end with one underscore."""


def writes_first(func: Any) -> bool:
    """Return whether a torch function writes its first operand.

    Example:
        >>> writes_first(Tensor.add_), writes_first(Tensor.__isub__), writes_first(Tensor.__add__)
        (True, True, False)
    """
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
