"""``optimizer.step(closure)`` in replicas (LBFGS, SAM): the closure runs in every replica.

The optimizer's own step runs once, on the central parameters, on a thread of its own. Whenever it calls its closure, the
thread pauses and every replica calls its closure on its rows; the optimizer gets the aggregated gradients and the loss
over all rows. Between two closures all replicas wait for the optimizer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stratagem._core import context
from stratagem._core.context import Replica
from stratagem._core.replicas import once_for_all

_EVALUATE = object()
_CANCEL = object()


class _OptimizerThread:
    """One ``step(closure)`` that pauses at each call of its closure.

    Args:
        step: calls the optimizer's own step with the closure that it gets.
        replica: a replica of the run.
    """

    def __init__(self, step: Callable[[Callable[[], Any]], Any], replica: Replica) -> None:
        self._step = step
        self._strategy = replica.strategy
        self._losses: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="optimizer-step", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with context.entered(self._strategy, None):
                result = self._step(self._closure)
        except BaseException as error:  # noqa: BLE001 - raised again in every replica
            self._events.put((None, error))
        else:
            self._events.put(((result,), None))

    def _closure(self) -> Any:
        self._events.put((_EVALUATE, None))
        # Without a limit: `advance` or `cancel` of every run ends the wait.
        loss = self._losses.get()
        if loss is _CANCEL:
            raise RuntimeError("the run of this optimizer step has failed")
        return loss

    def advance(self, loss: Any) -> Any:
        """Continue with the loss of the last closure, if any; return _EVALUATE or the result in a tuple."""
        if loss is not None:
            self._losses.put(loss)
        event, error = self._events.get()
        if event is not _EVALUATE:
            self._thread.join()
        if error is not None:
            raise error
        return event

    def cancel(self) -> None:
        """End the thread."""
        self._losses.put(_CANCEL)
        self._thread.join()


def run(
    replica: Replica,
    label: str,
    step: Callable[..., Any],
    closure: Callable[[], Any],
    *,
    adds_up: bool,
) -> Any:
    """Run ``step(closure)`` once for all replicas; called in every replica with its own closure."""
    group = replica.group
    key = (label, "thread")

    def advance(brought: list[Any]) -> list[Any]:
        thread: _OptimizerThread | None = group.shared.get(key)
        if thread is None:
            thread = group.shared[key] = _OptimizerThread(step, replica)
        return [thread.advance(_total(brought, group.row_weights, adds_up=adds_up))] * len(brought)

    loss: Any = (None,)
    finished = False
    try:
        while True:
            event = once_for_all(replica, label, loss, advance)
            if event is not _EVALUATE:
                finished = True
                group.shared.pop(key, None)
                return event[0]
            with torch.enable_grad():
                loss = (closure(),)
    finally:
        if not finished and (thread := group.shared.pop(key, None)) is not None:
            thread.cancel()


def _total(brought: list[Any], weights: Sequence[float], *, adds_up: bool) -> Any:
    """Return the loss over the rows of all replicas; None before the first closure."""
    present = [(each[0], weights[i]) for i, each in enumerate(brought) if each is not None]
    if present[0][0] is None:
        return None
    live = [(loss, weight) for loss, weight in present if weight > 0] or present
    terms = [torch.as_tensor(loss).detach() * (1.0 if adds_up else weight) for loss, weight in live]
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()
