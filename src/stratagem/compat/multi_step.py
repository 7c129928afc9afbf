"""``extended.experimental_run_steps_on_iterator``: several steps in one call.

New code writes ``for batch in dataset: strategy.run(step, args=(batch,))``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from stratagem._core import context
from stratagem._strategies.base import Strategy


@final
class MultiStepContext:
    """Outputs of the last step of a multi-step run, by name; tensors are reduced."""

    def __init__(self, initial: Mapping[str, Any]) -> None:
        self.last_step_outputs: dict[str, Any] = dict(initial)
        self.non_tensor_outputs: dict[str, Any] = {}

    def set_last_step_output(self, name: str, output: Any, reduce_op: Any = None) -> None:
        """Set ``last_step_outputs[name]``; in a replica, to the reduction of all replicas' values."""
        if context.current_replica() is None:
            strategy = context.get_strategy()
            self.last_step_outputs[name] = (
                output if reduce_op is None else strategy.reduce(reduce_op, output, axis=None)
            )
            return
        if reduce_op is None:
            raise ValueError(
                f"set_last_step_output({name!r}, …) in {context.describe_context()} needs a reduce_op: "
                'expected "sum" or "mean", to combine the replicas\' values.'
            )

        def keep(strategy: Strategy, value: Any) -> None:
            self.last_step_outputs[name] = strategy.reduce(reduce_op, value, axis=None)

        _merge(keep, output)

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Set ``non_tensor_outputs[name]``; in a replica, to a tuple of all replicas' values."""
        if context.current_replica() is None:
            self.non_tensor_outputs[name] = output
            return

        def keep(strategy: Strategy, value: Any) -> None:
            self.non_tensor_outputs[name] = strategy.local_results(value)

        _merge(keep, output)


def _merge(fn: Callable[..., None], value: Any) -> None:
    replica = context.get_replica_context()
    assert replica is not None
    replica.merge_call(fn, args=(value,))


def run_steps(
    strategy: Strategy,
    fn: Callable[[MultiStepContext, Any], Any],
    iterator: Iterator[Any],
    iterations: int,
    initial_loop_values: Mapping[str, Any] | None,
) -> MultiStepContext:
    """Call ``fn(steps, inputs)`` in cross-replica context for the next ``iterations`` inputs."""
    what = "extended.experimental_run_steps_on_iterator()"
    if iterations < 0:
        raise ValueError(f"iterations={iterations!r}: expected a number of steps, 0 or more.")
    if not callable(fn):
        raise TypeError(f"fn={fn!r} is not callable: expected a function of (steps, inputs).")
    context.require_cross_replica_or_default(strategy, what)
    steps = MultiStepContext(initial_loop_values or {})
    for _ in range(iterations):
        inputs = next(iterator)
        with context.entered(strategy, None):
            fn(steps, inputs)
    return steps
