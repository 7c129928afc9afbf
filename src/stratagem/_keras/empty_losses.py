"""Keras losses in a replica without rows: a scalar, so that ``backward()`` works (KER-3).

Keras does not reduce an empty tensor. The scalar is 0, and the replica's gradients count for nothing in the mean over rows.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from stratagem._core.context import current_replica
from stratagem._keras.keras_names import names


def apply_patch() -> None:
    """Replace ``Loss.__call__``."""
    loss_class = names().keras.losses.Loss
    call = loss_class.__call__

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        value = call(self, *args, **kwargs)
        if (
            isinstance(value, Tensor)
            and value.shape == (0,)
            and self.reduction is not None
            and current_replica() is not None
        ):
            return value.sum()
        return value

    loss_class.__call__ = __call__
