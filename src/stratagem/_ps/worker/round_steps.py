"""Checks of optimizer steps in a synchronous round (``staleness=0``).

Servers make the step of a round when all of its closures have ended. Until then the parameters stay as they are, so a
function that goes on to train after a step would use parameters that plain PyTorch would have updated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.tables.table_parameter import TableParameter
from stratagem._ps.worker.dense_parameter import DenseParameter
from stratagem.errors import MisuseError

_REMEDY = (
    "With staleness=0 the step of a round is made when all functions of the round have ended, so that parameters "
    "do not change inside a function. Schedule one function for each step, or use staleness=1 or more."
)


@final
class RoundSteps:
    """The optimizers that the present closure has stepped, and gradients at the first step.

    Args:
        dense: dense parameters by the id of their leaves.
        tables: tables by their ids, each with its variable.
        compares: refuse gradients that change after another optimizer's step.
    """

    def __init__(
        self,
        dense: Mapping[int, DenseParameter],
        tables: Mapping[int, tuple[TableParameter, RemoteVariable]],
        *,
        compares: bool,
    ) -> None:
        self._compares = compares
        self._dense = dense
        self._tables = tables
        self._stepped: set[int] = set()
        self._seen: dict[int, Sequence[tuple[Tensor, int]]] = {}  # gradients at the first step

    def begin_closure(self) -> None:
        """Forget the closure before."""
        self._stepped.clear()
        self._seen.clear()

    def note(self, number: int, optimizer: Optimizer) -> None:
        """Note a step.

        Raises:
            MisuseError: the optimizer was stepped before, or its gradients were computed after another optimizer's step.
        """
        kind = type(optimizer).__name__
        if number in self._stepped:
            raise MisuseError(f"one scheduled function called step() of {kind} twice. {_REMEDY}")
        if self._compares and not self._stepped:
            self._seen = {key: self._mark(one.leaf) for key, one in self._dense.items()}
            self._seen |= {key: self._mark(one) for key, (one, _) in self._tables.items()}
        elif self._compares and any(
            not _is_same(self._mark(parameter), self._seen.get(id(parameter), ()))
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            raise MisuseError(
                f"a scheduled function computed or changed gradients of {kind} after the step of another optimizer. "
                f"{_REMEDY} If both losses use the same parameters as before, call backward() and clip gradients "
                "before the first step()."
            )
        self._stepped.add(number)

    def _mark(self, parameter: Any) -> Sequence[tuple[Tensor, int]]:
        """Return the tensors of a gradient, and their versions."""
        table = self._tables.get(id(parameter))
        if table is not None:
            return table[0].gradient.mark()
        grad = parameter.grad
        return () if grad is None else [(grad, grad._version)]


def _is_same(one: Sequence[tuple[Tensor, int]], other: Sequence[tuple[Tensor, int]]) -> bool:
    return len(one) == len(other) and all(
        a is b and before == after for (a, before), (b, after) in zip(one, other, strict=True)
    )
