"""`OneDeviceStrategy`: variables and computation on one device; the base class of strategies with one replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, final

from typing_extensions import override

from stratagem._core import devices, reduction
from stratagem._core.user_contexts import ValueContext
from stratagem._strategies.base import GradientAggregation, Strategy


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


class SingleDevice(SingleReplica):
    """Base of `OneDeviceStrategy` and its V1 class, which differ in methods only. Abstract."""

    def __init__(self, device: Any, *, gradient_aggregation: GradientAggregation = "mean") -> None:
        self._device = devices.resolve_device(device)
        self._devices = (self._device,)
        super().__init__(gradient_aggregation=gradient_aggregation)

    @property
    @override
    def _parameter_names(self) -> tuple[str, ...]:
        return (self._device.name,)

    @override
    def _replica_devices(self, replica_id: int) -> Any:
        return (self._device.name,)


@final
class OneDeviceStrategy(SingleDevice):
    """Variables and computation on one device.

    Args:
        device: its name, such as ``"cpu:0"`` or ``"gpu:1"``, or a `torch.device`.
        gradient_aggregation: as in other strategies; without effect, because there is one replica.

    Raises:
        ValueError: a malformed name, or a device that does not exist here.
        TypeError: not a device name at all.

    Example:
        >>> import stratagem as sg
        >>> strategy = sg.OneDeviceStrategy("cpu:0")
        >>> sum(strategy.run(lambda i: 2 * i, args=(i,)) for i in range(10))
        90
    """
