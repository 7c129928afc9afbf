"""Fast steps of SGD without momentum and of Adagrad on dense gradients.

This is the whole of these classes' steps; their own loops cost several times the arithmetic for small parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from stratagem._core.torch_patches import private_api
from stratagem._ps.server.row_step import step_adagrad


class PlannedGroup(NamedTuple):
    """Dense gradients of one parameter group, and what they are applied to."""

    group: dict[str, Any]
    parameters: list[Tensor]
    gradients: list[Tensor]
    keys: list[nn.Parameter]
    """Under which the optimizer has its state."""


Plan: TypeAlias = Sequence[PlannedGroup]


def step_plan(optimizer: Any, plan: Plan) -> None:
    """Step SGD or Adagrad: all variables of a group in one call."""
    for group, parameters, gradients, keys in plan:
        if type(optimizer) is torch.optim.SGD:
            rate = float(group["lr"]) * (1 if group["maximize"] else -1)
            private_api.foreach_add_(parameters, gradients, alpha=rate)
            continue
        states = [optimizer.state[key] for key in keys]
        sums, steps = ([state[key] for state in states] for key in ("sum", "step"))
        step_adagrad(parameters, gradients, sums, steps, group)
