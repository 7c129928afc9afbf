"""`WorkerStrategy`: the strategy object of scheduled functions on a worker.

`_ps/worker/worker_objects.py` rebuilds the coordinator's modules, optimizers and variables on a worker; this
class is the rebuilt `ParameterServerStrategy`. It runs replicas on the worker's own devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from stratagem import config
from stratagem._core import context, devices, reduction, values
from stratagem._core.user_contexts import InputContext
from stratagem._core.variables import VariableRequest
from stratagem._ps.client.remote_storage import ReadCache
from stratagem._ps.placement import device_name
from stratagem._ps.worker.worker_objects import OptimizerStepper, PsWorkerSetup
from stratagem._ps.worker.worker_variables import WorkerVariables
from stratagem._strategies.base import Strategy

_HAND_IT_ON: Final = (
    "Give it to coordinator.create_per_worker_dataset(), which builds it on every worker."
)


class UnbuiltDataset:
    """A distributed dataset that only workers can build.

    Give it to ``coordinator.create_per_worker_dataset``. On a worker, calling it builds that worker's share: of a
    dataset by its auto-shard policy, of a dataset function by its `InputContext`.
    """

    def __init__(
        self, build: Callable[..., Any], source: Any, options: config.InputOptions | None
    ) -> None:
        self._build = build
        self.source = source
        self._options = options

    def with_source(self, source: Any) -> UnbuiltDataset:
        """Return the same over another source."""
        return UnbuiltDataset(self._build, source, self._options)

    def __call__(self, worker: InputContext) -> Any:
        """Build the share of one worker, for the devices of its strategy."""
        return self._build(
            self.source,
            [device.torch_device for device in context.get_strategy()._compute_devices],
            self._options,
            num_input_pipelines=worker.num_input_pipelines,
            input_pipeline_id=worker.input_pipeline_id,
        )

    def __iter__(self) -> Iterator[Any]:
        raise ValueError(f"{self._what()} cannot be iterated here. {_HAND_IT_ON}")

    @property
    def cardinality(self) -> int:
        """Raise: the size is known when a worker has built the dataset."""
        raise ValueError(f"{self._what()} has no known size here. {_HAND_IT_ON}")

    def _what(self) -> str:
        return f"a dataset made by strategy.{self._build.__name__}() under parameter servers"

    @override
    def __repr__(self) -> str:
        return f"<UnbuiltDataset of {self.source!r}>"


@final
class WorkerStrategy(Strategy):
    """Strategy of one worker, with one replica on each of the worker's devices.

    Attributes:
        steppers: for each rebuilt optimizer, by its id, the object that sends its steps to the servers.
    """

    _steps_here = False

    def __init__(self, setup: PsWorkerSetup, variables: WorkerVariables, cache: ReadCache) -> None:
        self._setup = setup
        self._variables = variables
        self._cache = cache
        self._devices = devices.resolve_devices(setup.compute_devices, argument="worker_devices")
        self.steppers: dict[int, OptimizerStepper] = {}
        super().__init__(gradient_aggregation=setup.gradient_aggregation)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a strategy cannot leave the worker it is on: it holds the worker's connections to the "
            "parameter servers. The program that scheduled the function has its own strategy; return "
            "values, or None."
        )

    @property
    @override
    def _parameter_names(self) -> tuple[str, ...]:
        return tuple(device_name(task) for task, _ in self._setup.servers)

    @override
    def _arguments(self) -> dict[str, Any]:
        return {"worker_devices": list(self._setup.compute_devices)}

    @contextmanager
    def cache_variable_reads(self) -> Iterator[None]:
        """Keep the first value read of each variable and return it for later reads (PSS-14)."""
        with caching(self._cache):
            yield

    @override
    def _reduce(self, op: reduction.ReduceOp, value: Any, axis: Any) -> Any:
        return reduce_nest(self, op, value, axis)

    @override
    def _gather(self, value: Any, axis: int) -> Any:
        return reduction.gather(value, axis, negative=True)

    @override
    def _create_variable(self, request: VariableRequest) -> Any:
        raise ValueError(
            f"variable {request.name!r} is being created inside a scheduled function: it would belong "
            "to one run on one worker. Create it on the coordinator, inside `with strategy.scope():`."
        )

    @override
    def _adopt_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
        return None  # a module that a function creates belongs to that function

    @override
    def _adopt_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor) -> Any:
        self._variables.new_buffers.note(module, name, buffer)
        return None

    @override
    def _step_optimizer(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        stepper = self.steppers.get(id(optimizer))
        return step() if stepper is None else stepper.step(optimizer)


def reduce_nest(strategy: Strategy, op: reduction.ReduceOp, value: Any, axis: Any) -> Any:
    """Reduce every distributed leaf of a nest; leave plain leaves as they are (PSS-32)."""

    def one(leaf: Any) -> Any:
        if axis is None and not isinstance(leaf, values.DistributedValues):
            return leaf
        return reduction.reduce(op, leaf, axis, size=strategy.num_replicas_in_sync, nests=False)

    return values.map_leaves(one, value)


@contextmanager
def caching(cache: ReadCache) -> Iterator[None]:
    """Keep variable reads in `cache` until the end of the block; blocks do not nest (PSS-14)."""
    if cache.values is not None:
        raise ValueError("cache_variable_reads() is already active: its blocks do not nest.")
    cache.values = {}
    try:
        yield
    finally:
        cache.values = None
