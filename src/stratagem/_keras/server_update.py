"""`KerasUpdate`: the update of a Keras optimizer as a `torch.optim.Optimizer`, which parameter servers can run.

Each parameter has a Keras optimizer of its own, made from the configuration of the user's. Its variables (moments, averages, the
count of steps) are the parameter's entries in ``state``, so that servers store, send and save them as any other state. Clipping and
loss scaling happen on the worker, which has the gradients of all parameters.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from stratagem.errors import UnsupportedOptimizer


class KerasUpdate(torch.optim.Optimizer):
    """Updates each parameter as a Keras optimizer does.

    Args:
        params: groups of one parameter.
        lr: the learning rate; None: the schedule in the configuration.
        config: the configuration of the Keras optimizer, as JSON.
        path: the path of the Keras variable; some optimizers decide by it.
        constraint: the configuration of its constraint, as JSON; or empty.
        decays: whether weight decay applies to it.
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        config: str = "",
        path: str = "",
        constraint: str = "",
        decays: bool = True,
    ) -> None:
        settings = {
            "lr": lr,
            "config": config,
            "path": path,
            "constraint": constraint,
            "decays": decays,
        }
        super().__init__(params, settings)
        self._updates: dict[nn.Parameter, _OneUpdate] = {}

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = self._updates.get(parameter)
                if update is None:
                    update = self._updates[parameter] = _OneUpdate(parameter, group)
                update.apply(parameter.grad, group["lr"], self.state[parameter])
        return loss


class _OneUpdate:
    """The Keras optimizer of one parameter."""

    def __init__(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        keras = import_keras("a parameter server")
        with keras.device(str(parameter.device)):
            self._variable = keras.Variable(parameter.data, name="variable")
            self._variable._value = parameter
            self._variable._path = group["path"]
            if group["constraint"]:
                self._variable.constraint = keras.saving.deserialize_keras_object(
                    json.loads(group["constraint"])
                )
            config = json.loads(group["config"])
            if not group["decays"]:
                config["config"]["weight_decay"] = None
            self._optimizer = keras.saving.deserialize_keras_object(config)
            self._optimizer.build([self._variable])
        rate = self._optimizer._learning_rate
        self._rate = rate if isinstance(rate, keras.Variable) else None
        self._own = {
            slot_of(each, group["path"]): each
            for each in self._optimizer.variables
            if each is not self._rate
        }

    def apply(self, gradient: Tensor, rate: float | None, state: dict[str, Any]) -> None:
        """Update the parameter; its state is read from and kept in ``state``."""
        for name, variable in self._own.items():
            known = state.get(name)
            if known is None:
                state[name] = variable._value.detach()
            elif known.data_ptr() != variable._value.data_ptr():
                variable._value = nn.Parameter(known, requires_grad=False)  # it was loaded
        if self._rate is not None and rate is not None:
            self._rate._value.fill_(rate)
        self._optimizer.apply([gradient], [self._variable])


def slot_of(variable: Any, path: str) -> str:
    """Return the name of an optimizer's variable in the state of its parameter: without the parameter's path.

    So a checkpoint also fits a model whose layers were numbered differently.
    """
    return str(variable.name).removeprefix(path.replace("/", "_") + "_")


def import_keras(where: str) -> Any:
    """Import Keras on another task of the cluster.

    Raises:
        UnsupportedOptimizer: it is not installed there, or uses another backend.
    """
    try:
        keras: Any = importlib.import_module("keras")
    except ImportError as error:
        raise UnsupportedOptimizer(
            f"{where} cannot import Keras: {error}. Install stratagem[keras] there, and set KERAS_BACKEND=torch."
        ) from error
    if keras.backend.backend() != "torch":
        raise UnsupportedOptimizer(
            f"Keras of {where} uses the {keras.backend.backend()!r} backend. Start the task with KERAS_BACKEND=torch."
        )
    return keras
