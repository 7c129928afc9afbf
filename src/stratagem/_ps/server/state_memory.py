"""Memory of optimizer state: its size, the check of loaded state, and its allocation.

Used by `shard_optimizer.py`; knows torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from stratagem._core.row_optimizers import ROW_OPTIMIZERS, LazyAdam, RowWiseAdagrad
from stratagem._wire.shm import LARGE_PAGE_BYTES, zeros_apart

_ZEROS = (torch.zeros_like, torch.full_like)

_SCALARS: Final = frozenset({"step", "mu_product", "eta", "mu"})
"""State of torch's classes that is one number for the whole parameter."""


def bytes_held(value: object) -> int:
    """Return the bytes of one value of optimizer state."""
    if not isinstance(value, Tensor):
        return 0
    if value.is_sparse:
        return value._indices().nbytes + value._values().nbytes
    return value.nbytes


def expected_tensors(kind: type, group: Mapping[str, Any]) -> int:
    """Return how many tensors of a parameter's size the first step makes; one for unknown classes."""
    optim = torch.optim
    if kind is optim.SGD:
        return int(bool(group["momentum"]))
    if kind in (optim.Adam, optim.AdamW):
        return 3 if group.get("amsgrad") else 2
    if kind in (optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam, optim.Rprop):
        return 2
    if kind is optim.RMSprop:
        return 1 + bool(group["momentum"]) + bool(group["centered"])
    if kind is RowWiseAdagrad:
        return 0  # one number for each row
    return 2 if kind in (optim.SparseAdam, LazyAdam) else 1


def check_state(kind: type, key: str, value: Tensor, parameter: Tensor, name: str) -> None:
    """Refuse state that a step of a torch class would use beyond its bounds: fused steps do not check.

    Raises:
        ValueError: the shape, dtype, device or layout is not that of the class's own state.
    """
    if not kind.__module__.startswith("torch.optim") and kind not in ROW_OPTIMIZERS:
        return
    expected, dtype = tuple(parameter.shape), parameter.dtype
    shape = tuple(value.shape)
    if key in _SCALARS:
        expected, dtype = (), value.dtype if not value.is_complex() else torch.float32
    elif kind is RowWiseAdagrad and len(expected) > 1:
        expected = expected[:1]
    elif kind is torch.optim.Adafactor and len(shape) == len(expected):
        # Rows and columns of the parameter: an axis may have one number for all.
        expected = tuple(1 if mine == 1 else own for mine, own in zip(shape, expected, strict=True))
    plain = value.layout is torch.strided and value.device.type in ("cpu", "meta")
    if shape != expected or value.dtype != dtype or not plain:
        raise ValueError(
            f"cannot load the state {key!r} of {name}: it has shape {shape!r}, {value.dtype} and "
            f"{value.layout} on {value.device}, expected shape {expected!r}, {dtype} and "
            f"{torch.strided} on cpu. Load the state of an optimizer of the same class over the "
            f"same parameters."
        )


@final
class StateApart(TorchFunctionMode):
    """Context in which large tensors "like another one" come from `zeros_apart`.

    Some classes make their state when they are constructed (Adagrad's sums). Zeros cost memory only where
    something is written later: table rows that are never trained have no sums.
    """

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = {} if kwargs is None else dict(kwargs)
        if func in _ZEROS and args and _is_plain(args[0], options):
            like = args[0]
            value = 0.0 if func is torch.zeros_like else options.get("fill_value", args[-1])
            made = zeros_apart(tuple(like.shape), like.dtype, beside=like)
            return made.fill_(value) if value else made
        return func(*args, **options)


def _is_plain(like: Any, options: Mapping[str, Any]) -> bool:
    return (
        isinstance(like, Tensor)
        and like.device.type == "cpu"
        and like.layout is torch.strided
        and like.nbytes >= LARGE_PAGE_BYTES
        and like.is_contiguous()
        and set(options) <= {"fill_value", "memory_format"}
    )
