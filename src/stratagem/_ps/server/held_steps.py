"""Hold the optimizer steps of a synchronous round, and combine them into one step.

With ``staleness=0`` servers do not apply the gradients of a closure when they arrive: other closures of the round still
read the parameters. They are held here by closure. At the end of the round the coordinator names the closures that count
(`ApplyRound`), and each optimizer makes one step with the sum or mean of their gradients. Gradients are added in the order
of the closures' numbers, so that the result does not depend on which worker was faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._ps.number_ranges import NumberRanges
from stratagem._ps.rows import sort_ids, sum_rows
from stratagem._ps.server.row_operations import check_ids
from stratagem._ps.types import Gradient, Hyperparameters
from stratagem._wire.arenas import Budget

if TYPE_CHECKING:
    from stratagem._ps.server.store import VariableStore

Settings: TypeAlias = Mapping[int, Hyperparameters] | None


class CombinedStep(NamedTuple):
    """One step of an optimizer for all closures of a round; `settings` are those of the first closure."""

    optimizer: int
    gradients: list[Gradient]
    settings: Settings


@final
class HeldSteps:
    """Steps of closures whose round has not ended."""

    def __init__(self, store: VariableStore, budget: Budget) -> None:
        self._store = store
        self._budget = budget
        # closure → optimizer → its gradients and settings
        self._steps: dict[int, dict[int, tuple[list[Gradient], Settings]]] = {}
        self._bytes: dict[int, int] = {}  # by closure

    def hold(
        self, closure: int | None, optimizer: int, gradients: Iterable[Gradient], settings: Settings
    ) -> None:
        """Copy the gradients of a step; raise now what the step would raise.

        A step that comes in several messages is held in several parts.
        """
        if closure is None:
            raise ValueError(
                "a step that waits for the end of its round came without a closure's number: schedule "
                "the function with exactly_once=True."
            )
        gradients, stepper = list(gradients), self._store.optimizer(optimizer)
        for one in gradients:
            stepper.check(one)
            if one.ids is not None:
                check_ids(one.ids, self._store.read(one.variable), f"number {one.variable}")
        size = sum(one.values.nbytes for one in gradients)
        size += sum(one.ids.nbytes for one in gradients if one.ids is not None)
        self._budget.take(size)
        self._bytes[closure] = self._bytes.get(closure, 0) + size
        steps = self._steps.setdefault(closure, {})
        held, _ = steps.setdefault(optimizer, ([], settings))
        for one in gradients:
            ids = None if one.ids is None else one.ids.clone()
            held.append(replace(one, values=one.values.clone(), ids=ids))

    def apply(self, closures: Sequence[int], *, mean: bool) -> None:
        """Make the steps of these closures, one for each optimizer. The first error is raised at the end."""
        errors = []
        for step in self._take(closures, mean=mean):
            try:
                self._store.push(*step)
            except Exception as error:  # noqa: BLE001 - raised below, after the other optimizers' steps
                errors.append(error)
        if errors:
            raise errors[0]

    def variables(self, closures: Iterable[int]) -> list[int]:
        """Return the variables that `apply` would write, each once."""
        steps = [step for closure in closures for step in self._steps.get(closure, {}).values()]
        return list(dict.fromkeys(one.variable for gradients, _ in steps for one in gradients))

    def _take(self, closures: Iterable[int], *, mean: bool) -> list[CombinedStep]:
        """Return one step for each optimizer that these closures stepped, and forget their steps."""
        closures = list(closures)
        by_optimizer: dict[int, list[tuple[list[Gradient], Settings]]] = {}
        for closure in sorted(set(closures) & self._steps.keys()):
            for optimizer, step in self._steps[closure].items():
                by_optimizer.setdefault(optimizer, []).append(step)
        found = []
        for optimizer, steps in by_optimizer.items():
            gradients = self._combined([one for one, _ in steps], len(steps) if mean else 1)
            found.append(CombinedStep(optimizer, gradients, steps[0][1]))
        self._forget(closures)
        return found

    def drop(self, finished: NumberRanges) -> None:
        """Forget the steps of closures that are finished and were not in a round."""
        if self._steps:
            self._forget([closure for closure in self._steps if closure in finished])

    def close(self) -> None:
        """Forget everything."""
        self._forget(list(self._steps))

    def _forget(self, closures: Iterable[int]) -> None:
        for closure in closures:
            self._steps.pop(closure, None)
            self._budget.change(-self._bytes.pop(closure, 0))

    def _combined(self, steps: Sequence[Sequence[Gradient]], divisor: int) -> list[Gradient]:
        by_variable: dict[int, list[Gradient]] = {}
        for gradients in steps:
            for one in gradients:
                # Rows may have gone to other keys since the gradient came.
                one = self._store.keyed.without_evicted(one)
                by_variable.setdefault(one.variable, []).append(one)
        found = [self._sum(some) for some in by_variable.values()]
        for one in found if divisor > 1 else ():
            one.values.div_(divisor)
        return found

    def _sum(self, gradients: Sequence[Gradient]) -> Gradient:
        """Add the gradients of one variable, in order. Their memory is not used again."""
        first = gradients[0]
        if len(gradients) == 1:
            return first
        rows = [(one.ids, one.values) for one in gradients if one.ids is not None]
        if len(rows) == len(gradients):
            found = sort_ids(torch.cat([ids for ids, _ in rows]))
            values = sum_rows(torch.cat([values for _, values in rows]), found)
            is_sparse = all(one.sparse for one in gradients)
            return Gradient(
                variable=first.variable, values=values, ids=found.unique, sparse=is_sparse
            )
        total: Tensor | None = None
        for one in gradients:
            values = one.values
            if one.ids is not None:
                spread = values.new_zeros(tuple(self._store.read(one.variable).shape))
                values = spread.index_add_(0, one.ids, values)
            total = values if total is None else total.add_(values)
        assert total is not None
        return Gradient(variable=first.variable, values=total)

    @override
    def __repr__(self) -> str:
        return f"<HeldSteps of {len(self._steps)} closures, {sum(self._bytes.values())} bytes>"
