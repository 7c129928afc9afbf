"""The implementation of `Strategy.run_steps`.

`run_here` runs each batch on the replicas of this process. `run_on_workers` schedules each batch on a
worker of a parameter-server cluster. Both yield the results in batch order.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sized
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import torch

from stratagem._core import context, values
from stratagem.config import InputOptions
from stratagem.errors import ClosureCancelled, EndOfData

if TYPE_CHECKING:
    from stratagem._strategies.base import Strategy

_log = logging.getLogger("stratagem.strategies")

Step = Callable[[Any], Any]

# Batches in flight for each worker, and beyond that for all of them: a worker must never wait for
# the program that consumes the results, and every batch in flight is held in memory.
_AHEAD_PER_WORKER = 4
_AHEAD = 16
# Batches that workers read themselves take no memory here, and a longer queue lets workers read different files.
_AHEAD_SHARED = 128


class Scheduler(Protocol):
    """The part of `ClusterCoordinator` that the loop needs."""

    def schedule(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Queue a call; return a value with a ``get()``."""

    def join(self) -> None:
        """Wait for every scheduled call."""

    @property
    def workers(self) -> Sized:
        """The workers at present."""


@runtime_checkable
class SharedInput(Protocol):
    """A dataset whose batches the workers read themselves: `SharedDataset`."""

    @property
    def ledger(self) -> Any:
        """Account of its elements."""

    def state_dict_when_finished(self) -> dict[str, Any]:
        """Return its position."""


def check_arguments(step: object, steps: object) -> None:
    """Raise if the step is not callable, or the number of steps is no number."""
    if not callable(step):
        raise TypeError(
            f"step={step!r:.200} has type {type(step).__name__}, which is not callable: expected a function of one "
            "batch, such as strategy.run_steps(step, dataset)."
        )
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 0):
        raise ValueError(
            f"steps={steps!r} is not a number of steps: expected 0 or more, or None for all batches."
        )


def reminding(results: Iterator[Any]) -> Iterator[Any]:
    """Return the results; log a warning if the program never asks for the first one: no step has run then."""

    def loop() -> Iterator[Any]:
        reminder.detach()
        yield from results

    found = loop()
    reminder = weakref.finalize(found, _log.warning, _UNUSED)
    return found


_UNUSED: Final = (
    "run_steps() was called, but no step has run: the program did not ask for its results. Write "
    "`for result in strategy.run_steps(step, dataset): ...` or `list(strategy.run_steps(step, dataset))`."
)


def run_here(strategy: Strategy, step: Step, dataset: Any, steps: int | None) -> Iterator[Any]:
    """Run every batch on the strategy's own replicas; yield one result per batch."""
    iterator = iter(strategy.distribute_dataset(dataset))
    try:
        for batch in itertools.islice(iterator, steps):
            yield _run_batch(strategy, step, batch)
    finally:
        close = getattr(iterator, "close", None)  # a plain iterator has nothing to close
        if close is not None:
            close()


def run_on_workers(
    coordinator: Scheduler, step: Step, dataset: Any, steps: int | None
) -> Iterator[Any]:
    """Schedule every batch on some worker; yield the results in batch order.

    A few batches are scheduled ahead of the result that is yielded. When the consumer stops early, the
    loop waits for these batches, so that no update is under way after it.
    """
    waiting: deque[Any] = deque()
    scheduled = _scheduled(coordinator, step, dataset)
    ahead = _AHEAD_SHARED if isinstance(dataset, SharedInput) else _AHEAD
    try:
        with closing(scheduled):
            for value in itertools.islice(scheduled, steps):
                waiting.append(value)
                if len(waiting) >= ahead + _AHEAD_PER_WORKER * len(coordinator.workers):
                    yield from waiting.popleft().get()
        while waiting:
            yield from waiting.popleft().get()
    except GeneratorExit:
        coordinator.join()
        raise
    except ClosureCancelled:
        coordinator.join()  # raises the error of a later batch, for which this one was cancelled
        raise
    except Exception:
        # The failed closure is the error that counts; join() waits for the rest and repeats it.
        with suppress(Exception):
            coordinator.join()
        raise


def _scheduled(coordinator: Scheduler, step: Step, dataset: Any) -> Generator[Any]:
    """Schedule every batch; yield values, each with a list of results."""

    def run_batch(batch: Any) -> list[Any]:  # runs on a worker
        return [_run_batch_on_worker(step, batch)]

    def run_shared(batches: Any) -> list[Any]:  # runs on a worker, which reads the batches itself
        return [_run_batch_on_worker(step, batch) for batch in batches]

    for function in (run_batch, run_shared):  # the coordinator keeps the counters of the step
        vars(function)["__wrapped__"] = step

    if isinstance(dataset, SharedInput):
        while True:
            try:
                value = coordinator.schedule(run_shared, args=(dataset,))
            except EndOfData:
                return
            yield value
    from stratagem._data.dataset import as_dataset  # strategies load the input pipeline on use

    with closing(iter(as_dataset(dataset))) as batches:
        for batch in batches:
            yield coordinator.schedule(run_batch, args=(batch,))


def _run_batch_on_worker(step: Step, batch: Any) -> Any:
    """Run one batch on the replicas of the current worker."""
    strategy = context.get_strategy()
    devices = strategy._compute_devices
    if len(devices) > 1 or devices[0].torch_device.type != "cpu":
        options = InputOptions(per_replica_buffer_size=0)
        with closing(iter(strategy.distribute_dataset([batch], options))) as parts:
            batch = next(parts)
    return _run_batch(strategy, step, batch)


def _run_batch(strategy: Strategy, step: Step, batch: Any) -> Any:
    """Run one distributed batch, and average numbers over its rows as one device would."""
    result = strategy.run(step, args=(batch,))
    if strategy.num_replicas_in_sync == 1:
        return result
    parts = (leaf for leaf in values.leaves(batch) if isinstance(leaf, values.PerReplica))
    rows = next((part.rows for part in parts if part.rows is not None), None)
    return values.map_leaves(lambda leaf: _mean_over_rows(leaf, rows), result)


def _mean_over_rows(leaf: Any, rows: tuple[int, ...] | None) -> Any:
    """Average numbers and tensors without dimensions; return anything else unchanged."""
    if not isinstance(leaf, values.PerReplica):
        return leaf
    weights = rows or (1,) * len(leaf.values)
    if not any(weights):
        return leaf
    # A replica without rows returns NaN or None, and has no weight.
    present = [(part, n) for part, n in zip(leaf.values, weights, strict=True) if n]
    if all(isinstance(part, int | float) for part, _ in present):
        return sum(part * n for part, n in present) / sum(weights)
    if all(isinstance(part, torch.Tensor) and part.ndim == 0 for part, _ in present):
        here = present[0][0].device
        return sum(part.to(here) * n for part, n in present) / sum(weights)
    return leaf
