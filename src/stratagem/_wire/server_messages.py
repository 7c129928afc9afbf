"""Messages between a parameter server and its clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from stratagem._wire.message_base import Message, Record, SegmentRef, TensorRef

# -- connections and sessions ------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message to a parameter server.

    `purpose`: ``data`` for a connection that reads and writes, ``control`` for one that only sends pings and asks
    for statistics. The server answers control connections even while a long step runs.
    """

    purpose: str = "data"
    task: str = ""


class Welcome(Message, frozen=True):
    """Answer to Hello. `life` identifies the server's process: a restarted server has lost all variables.

    `frame_bytes`: the largest sum of buffers in one message; the server closes the connection on more.
    `process`: identifies the process to tasks on the same host (`process_probe.py`).
    """

    life: str
    shares_memory: bool = True
    frame_bytes: int = 1 << 30
    process: str = ""


class OpenSession(Message, frozen=True):
    """Open a session, or join it again: the variables of one strategy.

    The server closes it when its coordinator has had no connection for `lease_s` seconds. `instance` and `epoch`: of a
    named job, see ClaimJob. `shard`: which server's part of the session, if there are backups (`backup_messages.py`).
    """

    session: str
    lease_s: float
    instance: str = ""
    epoch: int = 0
    shard: int = -1


class JoinSession(Message, frozen=True):
    """Join a session that exists, as a worker."""

    session: str
    instance: str = ""
    epoch: int = 0
    shard: int = -1


class CloseSession(Message, frozen=True):
    """Close a session and free its variables."""

    session: str


# -- variables ---------------------------------------------------------------------------------


class InitOp(Record, frozen=True):
    """One in-place initialisation; see `_ps/init_ops.py`."""

    name: str
    args: tuple[float, ...] = ()
    seed: int = 0


class VariableSpec(Record, frozen=True):
    """A variable, or one shard of one, to be created."""

    variable: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    initialise: tuple[InitOp, ...] = ()


class CreateVariables(Message, frozen=True):
    """Create variables, and initialise those that have initialisations."""

    variables: tuple[VariableSpec, ...]


class DeleteVariables(Message, frozen=True):
    """Free variables."""

    variables: tuple[int, ...]


class Locate(Message, frozen=True):
    """Ask for the places of variables in shared memory."""

    variables: tuple[int, ...]


class Located(Message, frozen=True):
    """Answer to Locate: one TensorRef per variable, none if the server does not share memory; the version counter is 64 bytes before it."""

    places: tuple[TensorRef, ...]
    segments: tuple[SegmentRef, ...]


class ReadItem(Record, frozen=True):
    """Read one variable: whole, `count` rows from `start`, or the rows `ids` in their order.

    `known`: the version that the client has. If it is the current one, the value is left out: its TensorRef names no buffer.
    `dtype`: a narrower type in which rows are sent.
    """

    variable: int
    start: int = 0
    count: int = -1
    ids: TensorRef | None = None
    known: int = -1
    dtype: str = ""


class Read(Message, frozen=True):
    """Read several variables at once."""

    items: tuple[ReadItem, ...]


class Values(Message, frozen=True):
    """Answer to Read: values and versions in the order asked."""

    values: tuple[TensorRef, ...]
    versions: tuple[int, ...]


class AskVersions(Message, frozen=True):
    """Ask for the versions of these variables; of all in the session if none is named."""

    variables: tuple[int, ...] = ()


class Versions(Message, frozen=True):
    """Answer to AskVersions."""

    versions: Mapping[int, int]


# -- writes ------------------------------------------------------------------------------------


class WriteId(Record, frozen=True):
    """Identity of a write, so that no write is applied twice; see `_ps/server/ledger.py`."""

    worker: str
    incarnation: int
    sequence: int
    closure: int | None = None
    nth: int = 0


class Assign(Record, frozen=True):
    """``set``, ``add`` or ``sub`` a whole value."""

    variable: int
    operation: str
    value: TensorRef


class AssignRows(Record, frozen=True):
    """Overwrite consecutive rows from `start`; large values are sent in pieces."""

    variable: int
    start: int
    value: TensorRef


class Scatter(Record, frozen=True):
    """Combine rows: ``add sub mul div min max update``."""

    variable: int
    operation: str
    ids: TensorRef
    values: TensorRef


Plain: TypeAlias = bool | int | float | str | None
Setting: TypeAlias = bool | int | float | str | tuple[float | None, ...] | None


class GradientRef(Record, frozen=True):
    """The gradient of one variable: dense, or rows (unique ids)."""

    variable: int
    values: TensorRef
    ids: TensorRef | None = None
    sparse: bool = False
    clock: int = -1


class JoinedRef(Record, frozen=True):
    """Gradients of rows of several variables, one after the other; `counts`: how many rows each has."""

    variables: tuple[int, ...]
    counts: tuple[int, ...]
    values: TensorRef
    ids: TensorRef
    sparse: bool = False


class Push(Record, frozen=True):
    """One optimizer step; `settings` (group number → values) replace the groups' for this step.

    `held`: the step is made at the end of the closure's round, see ApplyRound.
    """

    optimizer: int
    gradients: tuple[GradientRef, ...]
    settings: dict[int, dict[str, Setting]] = msgspec.field(default_factory=dict)
    joined: tuple[JoinedRef, ...] = ()
    held: bool = False


Operation: TypeAlias = Assign | AssignRows | Scatter | Push

Operations: TypeAlias = msgspec.Raw
"""Operations, encoded by `encode_operations`."""


class Write(Message, frozen=True):
    """All writes of one step to this server, applied in order and at most once.

    `operations` are encoded by `encode_operations`: steps of one model repeat the same bytes, so that both sides can
    cache them. `read`: what to read after the write.
    """

    origin: WriteId
    operations: Operations
    read: tuple[ReadItem, ...] = ()


class Written(Message, frozen=True):
    """Answer to Write: new versions of the variables. `duplicate`: the write had been applied before.

    `values`: answer to the write's `read`.
    """

    versions: Mapping[int, int]
    duplicate: bool = False
    values: Values | None = None


class OpenSegments(Message, frozen=True):
    """Map these segments of the sender; a failure if the server cannot."""

    segments: tuple[SegmentRef, ...]


class Fence(Message, frozen=True):
    """Refuse writes of this and older incarnations of the worker from now on."""

    worker: str
    incarnation: int


class ApplyRound(Message, frozen=True):
    """Make the held steps of these closures: one step of each optimizer, with the mean of their gradients or the sum."""

    closures: tuple[int, ...]
    mean: bool = True


class FinishedClosures(Message, frozen=True):
    """Refuse late writes of finished closures, given as ranges (first, behind the last)."""

    ranges: tuple[tuple[int, int], ...]


# -- optimizers --------------------------------------------------------------------------------


class GroupSpec(Record, frozen=True):
    """One parameter group: its variables on this server, and its settings."""

    variables: tuple[int, ...]
    settings: dict[str, Setting]


class CreateOptimizer(Message, frozen=True):
    """Create an optimizer, given the dotted name of its class.

    `defaults`: arguments of its constructor. `attributes`: other attributes of the object.
    """

    optimizer: int
    class_name: str
    groups: tuple[GroupSpec, ...]
    defaults: dict[str, Setting] = msgspec.field(default_factory=dict)
    attributes: dict[str, Setting] = msgspec.field(default_factory=dict)


class StateItem(Record, frozen=True):
    """One value of optimizer state: a tensor, or a plain value."""

    variable: int
    key: str
    tensor: TensorRef | None = None
    value: bool | int | float | None = None


class ReadState(Message, frozen=True):
    """Ask for optimizer state of these variables (of all, if none is named).

    Tensors that would make the answer too large are sent without bytes. Ask for these with `key`: the answer has
    `count` rows from `start` of that state of the one variable.
    """

    optimizer: int
    variables: tuple[int, ...] = ()
    key: str = ""
    start: int = 0
    count: int = 0


class WriteState(Message, frozen=True):
    """Replace the optimizer state of the variables named in the items.

    Tensors without bytes are allocated; their rows follow in messages with `start` (not -1).
    """

    optimizer: int
    items: tuple[StateItem, ...]
    start: int = -1


class State(Message, frozen=True):
    """Answer to ReadState."""

    items: tuple[StateItem, ...]
