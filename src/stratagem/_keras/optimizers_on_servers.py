"""A Keras optimizer under parameter servers: the optimizer that the servers run, and the state of both.

| Keras optimizer | servers run | difference from plain Keras |
|---|---|---|
| ``SGD`` without momentum, decay, EMA, accumulation and schedule | ``torch.optim.SGD``, on the rows of a gradient | none |
| ``Adagrad`` likewise, if the model has an embedding | ``torch.optim.Adagrad``, on the rows of a gradient | 1e-6 relative |
| any other that updates each variable by itself | `KerasUpdate`, with Keras' own update | none |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from stratagem._core.managed import find_managed
from stratagem._keras.keras_names import names
from stratagem._keras.replica_variables import SOURCE
from stratagem._keras.server_update import KerasUpdate, slot_of
from stratagem.errors import UnsupportedOptimizer

_ON_WORKERS = ("clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor")
"""Settings that need all gradients, or the loss: workers apply them."""

_WRAPPERS = {
    "LossScaleOptimizer": "Workers would each adapt a scale of their own. Use the dtype policy 'mixed_bfloat16', or the "
    "optimizer inside it with a fixed loss_scale_factor.",
    "MultiOptimizer": "Use one optimizer, or a train_step of your own with several.",
}
"""Keras optimizers around others that are refused, and what to use."""


class OptimizerOnServers:
    """The servers' optimizer of a Keras optimizer.

    Attributes:
        on_servers: the optimizer to step with on workers.
        worker_settings: clipping and loss scale.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        refuse(optimizer)
        self._optimizer = optimizer
        self._variables = list(variables)
        self._is_current = True
        self._by_variable: dict[int, dict[str, Any]] = {}
        self._rate()  # refuses a function, which cannot be serialized
        config = names().keras.saving.serialize_keras_object(optimizer)
        self.worker_settings = {name: config["config"].get(name) for name in _ON_WORKERS}
        config["config"].update(dict.fromkeys(_ON_WORKERS))
        self.on_servers = self._create(config)
        self._seen: dict[int, int] = {}
        if int(optimizer.iterations) > 0:
            self.send()
        self._note_versions()
        for slot in self._slots():
            if slot is not optimizer._iterations:
                object.__setattr__(slot, SOURCE, self)

    def _create(self, config: dict[str, Any]) -> torch.optim.Optimizer:
        parameters = [variable._value for variable in self._variables]
        settings, rate = config["config"], self._rate()
        plain = not any(
            settings.get(name)
            for name in ("momentum", "weight_decay", "use_ema", "gradient_accumulation_steps")
        )
        plain = plain and not any(variable.constraint for variable in self._variables)
        kind = config["class_name"]
        if plain and kind == "SGD" and rate is not None:
            return torch.optim.SGD(parameters, lr=rate)
        start = settings.get("initial_accumulator_value", 0.0)
        exact = kind == "Adagrad" and start >= 1e-3
        if plain and exact and rate is not None and self._has_table():
            return torch.optim.Adagrad(
                parameters, lr=rate, eps=settings["epsilon"], initial_accumulator_value=start
            )
        groups = [
            {
                "params": [variable._value],
                "path": variable.path,
                "constraint": _as_json(variable.constraint),
                "decays": bool(self._optimizer._use_weight_decay(variable)),
            }
            for variable in self._variables
        ]
        return KerasUpdate(groups, lr=rate, config=json.dumps(config))

    def _has_table(self) -> bool:
        found = [find_managed(variable._value) for variable in self._variables]
        return any(getattr(managed, "as_table", False) for managed in found)

    def _rate(self) -> float | None:
        """Return the learning rate now; None if a schedule on the servers computes it."""
        rate = self._optimizer._learning_rate
        if isinstance(rate, names().keras.Variable):
            return float(rate)
        if isinstance(rate, names().keras.optimizers.schedules.LearningRateSchedule):
            return None
        raise UnsupportedOptimizer(
            f"the learning rate of {self._optimizer.name!r} is a function, which parameter servers cannot call. Use a "
            "number, with keras.callbacks.LearningRateScheduler, or a schedule of keras.optimizers.schedules."
        )

    # -------------------------------------------------------------- before and after steps

    def before_step(self) -> None:
        """Let the next step use the learning rate, and the state if the program changed it."""
        self._is_current = False
        rate = self._rate()
        for group in self.on_servers.param_groups:
            if group["lr"] != rate:
                group["lr"] = rate

    def send_changes(self) -> None:
        """Send the state to the servers if the program changed the Keras optimizer's variables."""
        if any(self._seen.get(id(v)) != v._value._version for v in self._slots()):
            self.send()
            self._note_versions()

    def trains(self, variables: Sequence[Any]) -> bool:
        """Return whether these are the variables that it trains."""
        return [id(each) for each in variables] == [id(each) for each in self._variables]

    def count_steps(self, count: int) -> None:
        """Add finished steps to the count of the Keras optimizer."""
        with torch.no_grad():
            iterations = self._optimizer._iterations
            iterations.assign(iterations.value + count)
        self._seen[id(iterations)] = iterations._value._version

    @property
    def iterations(self) -> int:
        """Number of steps that have finished."""
        return int(self._optimizer._iterations)

    def restored(self, iterations: int) -> None:
        """Continue after the servers were restored from a checkpoint of so many steps."""
        with torch.no_grad():
            self._optimizer._iterations.assign(iterations)
        self._is_current = False
        self._note_versions()

    def fetch(self) -> None:
        """Bring the Keras optimizer's variables up to date."""
        if self._is_current:
            return
        self._is_current = True
        self.on_servers.state_dict()  # fetches
        with torch.no_grad():
            for variable in self._variables:
                state = self.on_servers.state.get(variable._value, {})
                if isinstance(self.on_servers, torch.optim.Adagrad):
                    state = {"accumulator": state["sum"]} if "sum" in state else {}
                for name, slot in self._slots_of(variable).items():
                    if isinstance(value := state.get(name), torch.Tensor):
                        slot.assign(value)
        self._note_versions()

    def send(self) -> None:
        """Send the Keras optimizer's variables to the servers."""
        count = self._optimizer._iterations.value.detach().clone()
        on_servers = self.on_servers
        for variable in self._variables:
            own = {n: v._value.detach().clone() for n, v in self._slots_of(variable).items()}
            if isinstance(on_servers, KerasUpdate):
                on_servers.state[variable._value] = {"iteration": count.clone(), **own}
            elif isinstance(on_servers, torch.optim.Adagrad):
                on_servers.state[variable._value] = {
                    "step": count.float(),
                    "sum": own["accumulator"],
                }
        # Servers get it at once, or, if none has this optimizer yet, with the first function.
        for hook in on_servers._optimizer_load_state_dict_post_hooks.values():
            hook(on_servers)

    def _slots_of(self, variable: Any) -> dict[str, Any]:
        """Return the Keras optimizer's variables that belong to a variable, or to all, by their names on the servers."""
        if not self._by_variable:
            paths = {each.path.replace("/", "_") + "_": each for each in self._variables}
            self._by_variable = {id(each): {} for each in self._variables}
            for slot in self._slots():
                if slot is self._optimizer._iterations:
                    continue
                owners = [path for path in paths if slot.name.startswith(path)]
                for each in [paths[max(owners, key=len)]] if owners else self._variables:
                    self._by_variable[id(each)][slot_of(slot, each.path)] = slot
        return self._by_variable[id(variable)]

    def _slots(self) -> list[Any]:
        return [v for v in self._optimizer.variables if v is not self._optimizer._learning_rate]

    def _note_versions(self) -> None:
        self._seen = {id(v): v._value._version for v in self._slots()}


def refuse(optimizer: Any) -> None:
    """Raise for Keras optimizers that parameter servers cannot run, and say what to use."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, names().BaseOptimizer):
        raise UnsupportedOptimizer(f"{optimizer!r} is not an optimizer of Keras.")
    if not type(optimizer).__module__.startswith("keras."):
        raise UnsupportedOptimizer(
            f"{name} is an optimizer of the program, so that parameter servers cannot construct it. Use one of "
            "keras.optimizers, or another strategy."
        )
    if name in _WRAPPERS:
        raise UnsupportedOptimizer(f"{name} cannot run on parameter servers. {_WRAPPERS[name]}")
    clips = [n for n in _ON_WORKERS[:3] if getattr(optimizer, n, None)]
    if optimizer.gradient_accumulation_steps and clips:
        raise UnsupportedOptimizer(
            f"{name}({clips[0]}=…, gradient_accumulation_steps=…): Keras clips the accumulated gradient, which no worker "
            "has under parameter servers. Use one of the two settings."
        )


def _as_json(constraint: Any) -> str:
    if constraint is None:
        return ""
    return json.dumps(names().keras.saving.serialize_keras_object(constraint))
