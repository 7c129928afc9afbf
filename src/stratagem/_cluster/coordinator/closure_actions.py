"""Actions that `ClosureQueue` returns and the engine executes."""

from typing import Final, Literal, NamedTuple

Fate = Literal["failed", "cancelled", "withdrawn", "aborted", "poisoned", "given up"]
"""How a closure ended without a result. Withdrawn: cancelled by the user."""


class DeliverResults(NamedTuple):
    """Store the results that the worker reported for these closures."""

    closures: tuple[int, ...]


class ResolveClosure(NamedTuple):
    """Resolve a closure that ended without a result. `workers`: those it was lost with, in order."""

    closure: int
    fate: Fate
    workers: tuple[int, ...] = ()


class RequeueClosure(NamedTuple):
    """Note that the closure will run again. `lost`: because its worker was lost."""

    closure: int
    lost: bool


class RaiseError(NamedTuple):
    """Keep the error of this closure (None: of this event) and raise it at the user's next call."""

    closure: int | None


class SendClosures(NamedTuple):
    """Send the worker what `take` returns."""

    worker: int


class RecallClosures(NamedTuple):
    """Ask the worker to give back the closures it has not started; it answers with `returned`."""

    worker: int
    closures: tuple[int, ...]


class FenceWorker(NamedTuple):
    """Make every server refuse this incarnation of the worker, then report `worker_fenced`."""

    worker: int
    incarnation: int


class SetAsideWorker(NamedTuple):
    """End the worker's session; the link connects again. `why`: for the log.

    It does not reach a server that others reach: a session opens only if the worker reaches every server. Or it lacks an
    object, which the next session gets.
    """

    worker: int
    why: str


class ReleaseWorker(NamedTuple):
    """Disconnect the worker: it is drained, and the queue has forgotten it."""

    worker: int


class EndRound(NamedTuple):
    """Let the servers make the steps of these closures, then report that: `SynchronousRounds.applied`."""

    closures: tuple[int, ...]


Sending = SendClosures | RecallClosures | FenceWorker | SetAsideWorker | EndRound
"""Actions that may wait for another process."""

SENDING: Final = (SendClosures, RecallClosures, FenceWorker, SetAsideWorker, EndRound)
"""The same as a tuple, which `isinstance` checks faster."""

Action = DeliverResults | ResolveClosure | RequeueClosure | RaiseError | ReleaseWorker | Sending
