"""Return value of a write inside a scheduled function, read at its first use.

Most functions never use the value, and waiting for the server's reply would cost more than the write.
Other code can use a `LazyReadTensor` like any tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._core.torch_patches.private_api import pytree
from stratagem._wire.data_values import make_value


@final
class LazyReadTensor(Tensor):
    """Tensor whose value is read at its first use and does not change afterwards.

    Example:
        >>> import torch
        >>> from stratagem._ps.client.lazy_value import LazyReadTensor
        >>> late = LazyReadTensor(torch.Size([2]), torch.float32, lambda: torch.ones(2))
        >>> late + 1, late.tolist()
        (tensor([2., 2.]), [1.0, 1.0])
    """

    _read: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, shape: torch.Size, dtype: torch.dtype, read: Callable[[], Tensor]
    ) -> LazyReadTensor:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made._read = read
        return made

    def __init__(self, shape: torch.Size, dtype: torch.dtype, read: Callable[[], Tensor]) -> None:
        """Takes what `__new__` takes; a tensor is complete by then."""

    def now(self) -> Tensor:
        """Return the value; read it if that has not happened yet."""
        found: Tensor | None = self.__dict__.get("_value")
        if found is None:
            # Replicas may look at the same time: all get what the first of them has found.
            found = self.__dict__.setdefault("_value", self._read())
        return found

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(
            LazyReadTensor, LazyReadTensor.now, (tuple(args), kwargs or {})
        )
        return func(*args, **kwargs)

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The same below Python's surface, where torch itself meets one."""
        return cls.__torch_function__(func, types, args, kwargs)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return make_value, (self.now(),)
