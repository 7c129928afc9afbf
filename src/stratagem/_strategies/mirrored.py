"""`MirroredStrategy`: a copy of every variable on each device, kept equal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, final

from typing_extensions import override

from stratagem._core import devices, reduction, variable_storage, variables
from stratagem._strategies.base import GradientAggregation, Strategy
from stratagem.errors import WrongArgumentType


@final
class MirroredStrategy(Strategy):
    """One replica per device, each with its own copy of every variable; updates reach all copies.

    Args:
        devices: their names; None: all accelerators of this machine, else the CPU. The same device
            may be named more than once.
        gradient_aggregation: ``"mean"`` over the rows of the global batch, or ``"sum"``.
        parallel_replicas: let the replicas run at the same time. By default they take turns between
            collectives, because they share Python objects: a step that keeps a value in an attribute
            then reads its own value. Turns cost little on accelerators. On CPU devices, a step that
            writes no shared attribute may run faster in parallel.

    Raises:
        ValueError: no device, a malformed name, or a device that does not exist here.

    Example:
        >>> import torch, stratagem as sg
        >>> with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        ...     batch = sg.PerReplica([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
        ...     strategy.gather(strategy.run(lambda x: x * 10, args=(batch,)), axis=0)
        tensor([10., 20., 30.])
    """

    _spread: ClassVar[bool] = True

    def __init__(
        self,
        devices: Iterable[Any] | None = None,
        *,
        gradient_aggregation: GradientAggregation = "mean",
        parallel_replicas: bool = False,
    ) -> None:
        self._devices = _resolve(devices)
        self._parallel_replicas = parallel_replicas
        super().__init__(gradient_aggregation=gradient_aggregation)

    @property
    @override
    def _parameter_names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self._devices)

    @override
    def _create_variable(self, request: variables.VariableRequest) -> Any:
        return variable_storage.mirrored(request, self._devices, self)

    @override
    def _local_results(self, value: Any) -> tuple[Any, ...]:
        # The local results of a mirrored variable are its copies (LOC-2).
        if isinstance(value, variables.Variable):
            return value.values
        return super()._local_results(value)

    @override
    def _check_updated(self, variable: Any) -> None:
        if not isinstance(variable, variables.Variable):
            raise WrongArgumentType(
                f"update({variable!r}, …): expected a variable, got a {type(variable).__name__}."
            )

    @override
    def _reduce(self, op: reduction.ReduceOp, value: Any, axis: Any) -> Any:
        return reduction.reduce(op, value, axis, size=len(self._devices), nests=True)

    @override
    def _gather(self, value: Any, axis: int) -> Any:
        return reduction.gather(value, axis, negative=False)


def _resolve(given: Iterable[Any] | None) -> tuple[devices.Device, ...]:
    if given is None:
        return devices.accelerators() or (devices.Device(),)
    found = devices.resolve_devices(given, argument="devices")
    if not found:
        raise ValueError(
            'devices=[] names no device: expected at least one, such as ["cpu:0", "cpu:1"], or '
            "None for all accelerators."
        )
    return found
