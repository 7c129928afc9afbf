"""The coordinator's hooks on a worker's parameters, modules and optimizers: put there, changed, taken away.

A function may put hooks of its own on the same objects: those stay, behind the coordinator's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, final

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from stratagem._ps import definitions
from stratagem._ps.coordinator.module_definitions import MODULE_HOOKS

_Numbers = dict[str, dict[int, int]]
"""By a module's dict and the number a hook has on the coordinator: the one it has here."""


@final
class WorkerHooks:
    """Which hooks on a worker's objects are the coordinator's."""

    def __init__(self) -> None:
        self._handles: dict[Hashable, list[RemovableHandle]] = {}
        self._numbers: dict[Hashable, _Numbers] = {}

    def came_with(self, token: Hashable, module: nn.Module) -> None:
        """The hooks a module has are those it was defined with.

        They keep their numbers, since handles that came with them name them; so the next numbers given
        here must be higher.
        """
        numbers = {name: {one: one for one in vars(module)[name]} for name in MODULE_HOOKS}
        self._numbers[token] = numbers
        highest = max((one for some in numbers.values() for one in some), default=-1)
        RemovableHandle.next_id = max(RemovableHandle.next_id, highest + 1)

    def put(
        self,
        token: Hashable,
        obj: Any,
        hooks: definitions.GradientHooks | definitions.StepHooks | definitions.ModuleHooks,
    ) -> None:
        """Let an object have these hooks of the coordinator's, and no others of its."""
        if isinstance(hooks, definitions.ModuleHooks):
            self._put_on_module(self._numbers.setdefault(token, {}), obj, hooks)
            return
        for handle in self._handles.pop(token, ()):
            handle.remove()
        if isinstance(hooks, definitions.StepHooks):
            self._handles[token] = _hook_steps(obj, hooks)
        else:
            self._handles[token] = _hook_gradient(obj, hooks)

    def forget(self, token: Hashable) -> None:
        """The object is gone."""
        self._handles.pop(token, None)
        self._numbers.pop(token, None)

    def clear(self) -> None:
        """All of them are."""
        self._handles.clear()
        self._numbers.clear()

    @staticmethod
    def _put_on_module(
        numbers: _Numbers, module: nn.Module, hooks: definitions.ModuleHooks
    ) -> None:
        held = vars(module)
        for name, marks in MODULE_HOOKS.items():
            wanted, known = hooks.by_dict[name], numbers.get(name, {})
            for number in known.keys() - wanted.keys():
                for kept in (name, *marks):
                    held[kept].pop(known[number], None)
            numbers[name] = {
                number: known[number] if number in known else _add(held, name, hook, marked)
                for number, (hook, marked) in wanted.items()
            }
            _put_first(held[name], numbers[name])
        held["_is_full_backward_hook"] = hooks.is_full_backward

    @override
    def __repr__(self) -> str:
        return f"<WorkerHooks on {len(self._handles) + len(self._numbers)} objects>"


def _add(held: Mapping[str, Any], name: str, hook: Any, marks: tuple[str, ...]) -> int:
    number = RemovableHandle(held[name]).id
    held[name][number] = hook
    for mark in marks:
        held[mark][number] = True
    return number


def _put_first(hooks: OrderedDict[int, Any], numbers: dict[int, int]) -> None:
    """In the coordinator's order; a hook that a function took away stays away."""
    for number in reversed(numbers.values()):
        if number in hooks:
            hooks.move_to_end(number, last=False)


def _hook_steps(optimizer: Optimizer, hooks: definitions.StepHooks) -> list[RemovableHandle]:
    return [
        *(optimizer.register_step_pre_hook(hook) for hook in hooks.before),
        *(optimizer.register_step_post_hook(hook) for hook in hooks.after),
    ]


def _hook_gradient(
    parameter: nn.Parameter, hooks: definitions.GradientHooks
) -> list[RemovableHandle]:
    needed = parameter.requires_grad
    parameter.requires_grad_()  # torch takes hooks for no other; it may be thawed later
    handles = [
        *(parameter.register_hook(hook) for hook in hooks.on_gradient),
        *(parameter.register_post_accumulate_grad_hook(hook) for hook in hooks.accumulated),
    ]
    parameter.requires_grad_(needed)
    return handles
