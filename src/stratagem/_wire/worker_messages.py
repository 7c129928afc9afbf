"""Messages between the coordinator and a worker."""

from __future__ import annotations

from stratagem._snapshots import Snapshot
from stratagem._wire.message_base import Message, Packed, Record, RemoteFailure

# -- from the coordinator ----------------------------------------------------------------------


class OpenWorker(Message, frozen=True):
    """First message to a worker: begin an incarnation for this coordinator.

    The object in `setup` connects the worker to the strategy's servers. The random numbers of closures are derived
    from the job's `seed`. `instance` and `epoch`: of a named job, see ClaimJob.
    """

    coordinator: str
    worker: int
    incarnation: int
    setup: Packed
    heartbeat_s: float
    heartbeat_limit_s: float
    seed: int = 0
    instance: str = ""
    epoch: int = 0


class WorkerOpened(Message, frozen=True):
    """Answer to OpenWorker. `process`: identifies the process to a coordinator on the same host (`process_probe.py`)."""

    process: str = ""


class Define(Message, frozen=True):
    """Definition that later closures refer to: a function by its digest, or a handle by its packed token.

    A handle is defined in stages, counted from 0; the `last` one completes it.
    """

    value: Packed
    function: bytes = b""
    token: Packed | None = None
    stage: int = 0
    last: bool = True


class Update(Message, frozen=True):
    """Changes on the coordinator (learning rates, flags) that hold for later closures."""

    updates: Packed


class LeasedElements(Record, frozen=True, tag="l"):
    """Elements of a shared dataset for one closure: `count` elements from `first` of a part of `size` elements.

    `resource`: number of the dataset. `seed` and `epoch` determine the random steps of its pipeline.
    """

    resource: int
    seed: int
    epoch: int
    part: int
    first: int
    count: int
    size: int


class Run(Message, frozen=True):
    """Run a closure. `arguments` None: it has none. `resource` not 0: keep its result under that number.

    `dtype`: the coordinator's default dtype, by name.
    `leases`: elements of shared datasets that it may read.
    """

    closure: int
    function: bytes
    arguments: Packed | None = None
    exactly_once: bool = True
    resource: int = 0
    dtype: str = "float32"
    leases: tuple[LeasedElements, ...] = ()


class Recall(Message, frozen=True):
    """Return those of these closures that have not started; the answer is Returned."""

    closures: tuple[int, ...]


class Forget(Message, frozen=True):
    """Free functions and resources that later messages do not refer to."""

    functions: tuple[bytes, ...] = ()
    resources: tuple[int, ...] = ()


class Retire(Message, frozen=True):
    """End the task as soon as it serves no coordinator; the answer is Ok. Sent by the task's cluster."""


class Leave(Message, frozen=True):
    """End this incarnation: the coordinator does not need the worker any more."""


# -- to the coordinator ------------------------------------------------------------------------


class Finished(Message, frozen=True):
    """A closure's result; `value` None: it returned None. `waited_s` before it started, `ran_s` since.

    `advances`: what it did to schedulers, gradient scalers and settings of optimizers; `report` is their number.
    `leased`: elements and rows that it has read, for each lease.
    """

    closure: int
    value: Packed | None = None
    advances: Packed | None = None
    report: int = 0
    leased: tuple[tuple[int, int], ...] = ()
    waited_s: float = 0.0
    ran_s: float = 0.0


class Failed(Message, frozen=True):
    """A closure's exception.

    `blame`: ``user`` for the closure's own, ``input`` for a resource that failed to build, ``path`` for a server that this worker
    does not reach, ``server`` for another unreachable parameter server, ``deadline`` for a late one. `lacks`: the worker could not
    unpack a definition or an update; it needs a new session. `report`: number of its advances, which do not count. `ended`: number of a
    per-worker dataset that was used up when the closure began; the closure has read and written nothing.
    """

    closure: int
    failure: RemoteFailure
    blame: str = "user"
    lacks: bool = False
    report: int = 0
    ended: int = 0


class Returned(Message, frozen=True):
    """Answer to Recall: the closures that had not started, and that the worker will not run."""

    closures: tuple[int, ...]


class Beat(Message, frozen=True):
    """Heartbeat. `metrics`: those of the worker, in some heartbeats."""

    metrics: Snapshot | None = None


class LogLine(Message, frozen=True):
    """One line that a worker printed, or one record that it logged."""

    level: int
    logger: str
    text: str
