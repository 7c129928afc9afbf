"""`OneDeviceStrategy`: variables and computation on one device."""

from __future__ import annotations

from typing import Any, final

from typing_extensions import override

from stratagem._core import devices
from stratagem._strategies.base import GradientAggregation
from stratagem._strategies.single_replica import SingleReplica


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
    def _arguments(self) -> dict[str, Any]:
        return {
            "device": self._device.name,
            "gradient_aggregation": self._gradient_aggregation,
        }

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
