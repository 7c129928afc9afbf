"""Advances of schedulers, gradient scalers and settings, in the reports of a worker about its closures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stratagem._cluster.coordinator.closure_actions import Action, DeliverResults
from stratagem._wire import messages
from stratagem._wire.codec import unpack
from stratagem._wire.messages import Frame


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
