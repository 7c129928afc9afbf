"""Waiting for the workers when a coordinator starts: for as long as it is of use, and saying for whom.

The links' threads make the attempts (`link.py`) and go on with them for ever; here it is only decided when the
coordinator may begin. A worker that does not answer may just be starting. One that answered and refused will refuse again,
and an address that is none stays none: nobody waits for those.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

from stratagem._cluster.coordinator.engine import Engine
from stratagem._cluster.coordinator.worker_link import WorkerLink
from stratagem._wire.connecting import check_destination
from stratagem.errors import UnavailableError

_log = logging.getLogger("stratagem.coordinator")

TELL_AFTER_S: Final = 2.0
"""Silence that a person at a terminal begins to wonder about; workers of a script are up by then."""

_SETTING: Final = "STRATAGEM_CONNECT_TIMEOUT_S"


def check_addresses(links: Sequence[WorkerLink]) -> None:
    """Finds addresses that no waiting will mend.

    Raises:
        ValueError: an address that is none, with its task.
    """
    for link in links:
        try:
            check_destination(link.address)
        except ValueError as error:
            raise ValueError(f"the address of {link.task} is wrong: {error}.") from error


def await_workers(engine: Engine) -> None:
    """Waits until every worker has answered; goes on without some, but not without any.

    Raises:
        UnavailableError: there is no worker to go on with; it names each, its address and why.
        ParameterServerLost: a worker found out that a server is gone.
    """
    limit_s = engine.options.connect_timeout_s
    began = time.monotonic()
    told = False
    if limit_s > TELL_AFTER_S and not _wait(engine, TELL_AFTER_S):
        told = True
        why = engine.why_down()
        _log.warning("waiting for workers: %s, up to %g s (%s)", why, limit_s, _SETTING)
    _wait(engine, began + limit_s - time.monotonic())
    with engine.lock:
        error = engine.queue.error
        up, wanted = engine.queue.workers_up(), len(engine.links)
    if error is not None:
        raise error
    if up == 0:
        raise _nobody(engine)
    if up < wanted:
        _log.warning(
            "%d of %d workers answer, going on without the rest: %s", up, wanted, engine.why_down()
        )
    elif told:
        _log.warning("all %d workers answer after %.1f s", wanted, time.monotonic() - began)


def _wait(engine: Engine, timeout_s: float) -> bool:
    """Whether each has answered, in one way or the other, within the time."""

    def all_answered() -> bool:
        refused = sum(link.taken or link.refused for link in engine.links)
        return engine.queue.error is not None or engine.queue.workers_up() + refused >= len(
            engine.links
        )

    with engine.changed:
        return engine.changed.wait_for(all_answered, timeout=timeout_s)


def _nobody(engine: Engine) -> UnavailableError:
    why, task = engine.why_down(), engine.links[0].task if len(engine.links) == 1 else "/job:worker"
    if any(link.taken for link in engine.links):
        return UnavailableError(
            f"no worker is free ({why}). A worker serves one coordinator at a time: wait until the "
            "other one is done, or start workers of your own.",
            task=task,
        )
    if all(link.refused for link in engine.links):
        return UnavailableError(
            f"no worker takes part: {why}. That is not mended by waiting: correct the workers' "
            "addresses in the cluster specification, or what the workers were started with.",
            task=task,
        )
    return UnavailableError(
        f"no worker answered within {engine.options.connect_timeout_s:g} s: {why}. Start the "
        f"workers, or correct their addresses in the cluster specification; {_SETTING} changes how "
        "long they are waited for.",
        task=task,
    )
