"""The interface through which `_core` uses a strategy.

`_strategies.base.Strategy` implements it. `_core` must not import strategies, so it sees them through this
protocol only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from stratagem._core.devices import Device

if TYPE_CHECKING:
    from stratagem._core.managed import ManagedBuffer, ManagedParameter
    from stratagem._core.variables import VariableRequest


class StrategyHooks(Protocol):
    """Members of a strategy that `_core` reads and calls."""

    _is_default: ClassVar[bool]
    _steps_here: ClassVar[bool]
    """True if optimizers step in this process, not on parameter servers."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas."""

    @property
    def gradient_aggregation(self) -> str:
        """``"mean"`` or ``"sum"``."""

    @property
    def _compute_devices(self) -> tuple[Device, ...]:
        """Devices of the replicas, one entry per replica."""

    def _replica_devices(self, replica_id: int) -> Any:
        """Return the value of ``ReplicaContext.devices``."""

    def _scope_entered(self) -> AbstractContextManager[object]:
        """Return a context manager held while the outermost scope of a thread is open."""

    def _create_variable(self, request: VariableRequest) -> Any:
        """Create a variable; called once for all replicas."""

    def _adopt_parameter(
        self, module: nn.Module, name: str, parameter: nn.Parameter
    ) -> ManagedParameter | None:
        """Take over a parameter that a module registers; None leaves it an ordinary one."""

    def _adopt_buffer(self, module: nn.Module, name: str, buffer: Tensor) -> ManagedBuffer | None:
        """Take over a buffer that a module registers; None leaves it an ordinary one."""

    def _step_optimizer(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
        """Run an optimizer's own step once for all replicas."""
