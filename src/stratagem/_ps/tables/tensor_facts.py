"""torch functions that need only the metadata of a tensor, which a table answers without its rows."""

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
