"""Advances of schedulers, gradient scalers and settings that workers report with their closures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stratagem._cluster.coordinator.closure_actions import Action, DeliverResults, Sending
from stratagem._cluster.coordinator.closure_table import Cause
from stratagem._wire import messages
from stratagem._wire.codec import unpack
from stratagem._wire.messages import Frame

if TYPE_CHECKING:
    from stratagem._cluster.coordinator.engine import Engine
    from stratagem._cluster.coordinator.worker_link import WorkerLink


def locked_advance(
    engine: Engine,
    link: WorkerLink,
    frames: Sequence[Frame],
    done: Sequence[Action],
    incarnation: int | None = None,
) -> list[Sending]:
    """Make what closures did to schedulers and settings, before their results are known.

    `incarnation`: that of the reports; by default the present one.
    """
    pending: list[Sending] = []
    number = link.incarnation if incarnation is None else incarnation
    for report, made in reported_advances(frames, done):
        try:
            engine.views.advance(link.number, number, report, made)
        except Exception as error:  # noqa: BLE001 - schedulers are users' classes
            pending += engine.locked_execute(engine.queue.stop(), Cause(error, link.task))
    return pending


def reported_advances(
    frames: Sequence[Frame], done: Sequence[Action]
) -> Iterator[tuple[int, Sequence[Any]]]:
    """Yield number and advances of each report that has advances; no advances if its closure does not count.

    Args:
        frames: messages of one worker, in order.
        done: actions of the queue about them. A closure counts if its result is delivered.
    """
    counted: set[int] = set()
    for action in done:
        if isinstance(action, DeliverResults):
            counted.update(action.closures)
    for frame in frames:
        message = frame.message
        if isinstance(message, messages.Finished) and message.advances is not None:
            counts = message.closure in counted
            yield message.report, unpack(message.advances, frame) if counts else ()
        elif isinstance(message, messages.Failed) and message.report:
            yield message.report, ()
