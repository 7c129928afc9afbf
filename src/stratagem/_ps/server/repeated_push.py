"""Repeated optimizer steps of a client: the same gradients in the same memory, with new values.

Variables, groups and the method of applying gradients are looked up once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stratagem._ps.server.store import VariableStore
from stratagem._ps.types import Gradient, Hyperparameters


def repeated_push(
    store: VariableStore,
    optimizer: int,
    gradients: Sequence[Gradient],
    settings: Mapping[int, Hyperparameters] | None,
) -> Callable[[], object]:
    """Return a function that does `VariableStore.push` with the present values of these gradients.

    It may be called while the store has the same variables and optimizers.

    Raises:
        NotFoundError: there is no such optimizer or variable.
    """

    def push() -> object:
        return store.push(optimizer, gradients, settings)

    stepper = store.optimizer(optimizer)
    plan = None if settings else stepper.plan(gradients)
    if plan is None:
        return push
    variables = [store.find(gradient.variable) for gradient in gradients]

    def push_again() -> object:
        if store.is_watched or stepper.unstepped(gradients):
            return push()
        stepper.step_plan(plan)
        for variable in variables:
            variable.version += 1
        return None

    return push_again
