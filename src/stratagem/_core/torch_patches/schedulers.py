"""``scheduler.step()`` in a replica: once for all replicas.

A scheduler counts its steps in Python, and R replicas that run the same code would move it R times. So the replicas
wait for each other and one of them steps. torch has no hook for this, and an instance attribute would end up in
``scheduler.state_dict()``; so the ``step`` of every scheduler class is wrapped, torch's and users'.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from stratagem._core.context import current_replica
from stratagem._core.torch_patches.compiling import eagerly


def mean_arguments(
    brought: list[Any], weights: Sequence[float]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of one call for all replicas: numbers that differ become their row-weighted mean.

    Args:
        brought: (args, kwargs) of each replica; None for a replica that has ended.
        weights: each replica's share of the rows.
    """
    present = [(each, weights[i]) for i, each in enumerate(brought) if each is not None]
    live = [(each, weight) for each, weight in present if weight > 0] or present
    (args, kwargs), _ = live[0]
    total = sum(weight for _, weight in live)

    def mean(values: list[Any]) -> Any:
        first = values[0]
        number = isinstance(first, float) or (
            isinstance(first, torch.Tensor) and first.numel() == 1
        )
        if not number or total <= 0 or all(value is first for value in values):
            return first
        return sum(float(v) * w for v, (_, w) in zip(values, live, strict=True)) / total

    return (
        [mean([each[0][k] for each, _ in live]) for k in range(len(args))],
        {key: mean([each[1][key] for each, _ in live]) for key in kwargs},
    )


def _once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``step`` that runs once for all replicas; a metric is the mean of theirs."""

    @eagerly
    @functools.wraps(plain)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        replica = current_replica()
        if replica is None or replica.group.size == 1:
            return plain(self, *args, **kwargs)
        weights = replica.group.row_weights

        def combine(brought: list[Any]) -> Sequence[Any]:
            given_args, given_kwargs = mean_arguments(brought, weights)
            return [plain(self, *given_args, **given_kwargs)] * len(brought)

        return replica.group.rendezvous(replica.id, "scheduler.step()", (args, kwargs), combine)

    return step


def _wrap_step(kind: type[LRScheduler]) -> None:
    plain = vars(kind).get("step")
    if isinstance(plain, types.FunctionType):
        kind.step = _once(plain)  # type: ignore[method-assign]  # a patch: design note 0004


def apply_patch() -> None:
    """Wrap ``step`` of ``LRScheduler`` and of all its subclasses, later ones included."""
    base = LRScheduler
    waiting, seen = [base], {base}
    while waiting:
        kind = waiting.pop()
        _wrap_step(kind)
        more = set(kind.__subclasses__()) - seen
        seen |= more
        waiting.extend(more)

    def later(cls: Any, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        _wrap_step(cls)

    base.__init_subclass__ = classmethod(later)  # type: ignore[assignment]  # design note 0004
