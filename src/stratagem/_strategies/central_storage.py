"""`CentralStorageStrategy`: one copy of every variable, computation on many devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, final

import torch
from typing_extensions import override

from stratagem._core import devices, reduction
from stratagem._strategies.base import GradientAggregation, Strategy


@final
class CentralStorageStrategy(Strategy):
    """Variables on one device, computation replicated on several; updates run on the variables' device.

    Args:
        compute_devices: names of the devices that compute, one replica each (a device may be named
            more than once); None: all accelerators of this machine, else the CPU.
        parameter_device: name of the device that holds the variables; None: the compute device if
            there is only one, else the CPU.
        gradient_aggregation: ``"mean"`` over the rows of the global batch, or ``"sum"``.
        parallel_replicas: let the replicas run at the same time. By default they take turns between
            collectives, because they share Python objects: a step that keeps a value in an attribute
            then reads its own value. Turns cost little on accelerators. On CPU devices, a step that
            writes no shared attribute may run faster in parallel.

    Raises:
        ValueError: a malformed name, or a device that does not exist here; a list of parameter
            devices.

    Example:
        >>> import torch, stratagem as sg
        >>> with sg.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0") as strategy:
        ...     batch = sg.PerReplica([torch.arange(4), torch.arange(4, 8)])
        ...     strategy.reduce("sum", strategy.run(lambda x: x, args=(batch,)), axis=None)
        tensor([ 4,  6,  8, 10])
    """

    _between_graph: ClassVar[bool] = True

    def __init__(
        self,
        compute_devices: Iterable[Any] | None = None,
        parameter_device: Any = None,
        *,
        gradient_aggregation: GradientAggregation = "mean",
        parallel_replicas: bool = False,
    ) -> None:
        if compute_devices is None:
            self._devices = devices.accelerators() or (devices.Device(),)
        else:
            self._devices = devices.resolve_devices(compute_devices, argument="compute_devices")
        self._parameter_device = self._name_of(parameter_device)
        self._variables_on = devices.resolve_device(self._parameter_device)
        self._parallel_replicas = parallel_replicas
        super().__init__(gradient_aggregation=gradient_aggregation)

    def _name_of(self, given: Any) -> str:
        if given is None:
            return self._devices[0].name if len(self._devices) == 1 else "/device:CPU:0"
        name: str | None = None
        if isinstance(given, str):
            name = given
        elif isinstance(given, torch.device | devices.Device):
            name = devices.parse_device(given).name
        if name is None:
            raise ValueError(
                f"parameter_device={given!r} has type {type(given).__name__}: expected the name of "
                'one device, such as "cpu:0". Central storage keeps variables on one device.'
            )
        return name

    @property
    @override
    def _parameter_names(self) -> tuple[str, ...]:
        return (self._parameter_device,)

    @property
    @override
    def _variable_device(self) -> devices.Device:
        return self._variables_on

    @override
    def _reduce(self, op: reduction.ReduceOp, value: Any, axis: Any) -> Any:
        return reduction.reduce(op, value, axis, size=len(self._devices), nests=False)

    @override
    def _gather(self, value: Any, axis: int) -> Any:
        return reduction.gather(value, axis, negative=True)
