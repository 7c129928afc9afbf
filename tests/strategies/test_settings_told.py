"""A worker tells servers what moved on the coordinator, even back to its first value."""

from __future__ import annotations

from typing import Any, cast

import torch

from stratagem._ps.settings import changed_settings
from stratagem._strategies.worker_view import _Stepper


def test_a_setting_that_moved_and_came_back_is_told_with_every_step() -> None:
    # A cyclic learning rate: this worker ran nothing while it was 0.05, but another one did, and told
    # the servers so.
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    stepper = _Stepper(cast("Any", None), 1, {0: dict(optimizer.param_groups[0])})
    assert changed_settings(optimizer, stepper.settings) == {}
    stepper.tell(0, {"lr": 0.1})
    for _ in range(2):
        assert changed_settings(optimizer, stepper.settings) == {0: {"lr": 0.1}}
