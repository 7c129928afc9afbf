"""`SingleReplica`: base class of strategies with one replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from typing_extensions import override

from stratagem._core import reduction
from stratagem._core.user_contexts import ValueContext
from stratagem._strategies.base import Strategy


class SingleReplica(Strategy):
    """One replica: values are never wrapped. Abstract."""

    _slices: ClassVar[bool] = False

    @override
    def _check_updated(self, variable: Any) -> None:
        """Accept anything, as tf.distribute does."""

    @override
    def _reduce(self, op: reduction.ReduceOp, value: Any, axis: Any) -> Any:
        return reduction.reduce_alone(op, value, axis)

    @override
    def _gather(self, value: Any, axis: int) -> Any:
        return value

    @override
    def _local_results(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    @override
    def _values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        return value_fn(ValueContext())
