"""Every message that crosses a process border, one frozen tagged struct each.

Only data: no behaviour, no tensor, no socket. A tensor beside a message is named in it by a `TensorRef`; `codec.py`
turns one into the other. Rooms that need a new message add its struct here, and raise `PROTOCOL_VERSION`
(`handshake.py`) when a released version could meet it.

Messages are msgpack maps with the struct's name as tag, fields at their default left out. The small records that
occur by the hundred in one message (`TensorRef`, `WriteId`, operations) are arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from stratagem._wire import frames
from stratagem._wire.frames import RawFrame
from stratagem.errors import ProtocolError


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of every message."""


class Record(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of the small parts of messages; positional, because there may be thousands in one."""


# -- tensors -----------------------------------------------------------------------------------


class TensorRef(Record, frozen=True, tag="t"):
    """Where the bytes of a tensor are.

    In buffer `buffer` of the same frame; or, if `segment` is not 0, in that shared-memory segment at
    byte `offset`.
    """

    dtype: str
    shape: tuple[int, ...]
    buffer: int = -1
    segment: int = 0
    offset: int = 0


class SparseRef(Record, frozen=True, tag="s"):
    """A sparse (COO) tensor: its indices and values, each somewhere of its own."""

    shape: tuple[int, ...]
    indices: TensorRef
    values: TensorRef
    coalesced: bool = False


AnyTensorRef: TypeAlias = TensorRef | SparseRef


class SegmentRef(Record, frozen=True):
    """How a process on the same host finds a shared-memory segment; `token` proves it is the one."""

    number: int
    pid: int
    fd: int
    size: int
    token: bytes


# -- any peer ----------------------------------------------------------------------------------


class Ok(Message, frozen=True):
    """Done; nothing to say about it."""


class Ping(Message, frozen=True):
    """Are you alive?"""


class Pong(Message, frozen=True):
    """Yes. `busy_s`: how long the current piece of work has been running; 0 when idle."""

    busy_s: float = 0.0
    served: int = 0


class RemoteFailure(Message, frozen=True):
    """An exception, as data. See `failures.py`."""

    type_name: str
    text: str
    task: str = ""
    args: tuple[str | int | float | bool | None, ...] | None = None
    traceback: str = ""
    pickled: bytes = b""


class Packed(Message, frozen=True):
    """Any Python object, pickled; only processes that may run the sender's code open it.

    Tensors inside it and large byte strings are buffers of the frame; so is a large pickle itself
    (`body`, instead of `payload`). See `codec.pack`.
    """

    payload: bytes
    tensors: tuple[PackedTensor, ...] = ()
    raw: tuple[int, ...] = ()
    body: int = -1


class PackedTensor(Record, frozen=True, tag="p"):
    """A tensor inside a packed object: where its bytes are, and what kind of tensor it was."""

    ref: AnyTensorRef
    requires_grad: bool = False
    is_parameter: bool = False


# -- parameter servers: connections and sessions -----------------------------------------------


class Hello(Message, frozen=True):
    """First message to a parameter server.

    `purpose`: ``data`` for a connection that reads and writes, ``control`` for one that only pings and asks for
    statistics and is answered even while a long step runs.
    """

    purpose: str = "data"
    task: str = ""


class Welcome(Message, frozen=True):
    """Answer to Hello. `life` differs for every life of a server: state does not survive it.

    `frame_bytes`: the largest sum of buffers the server takes in one message; it hangs up on more.
    `process`: what tasks on the same host can look at when it is silent (`pulse.py`).
    """

    task: str
    pid: int
    life: str
    shares_memory: bool = True
    frame_bytes: int = 1 << 30
    process: str = ""


class OpenSession(Message, frozen=True):
    """The coordinator opens, or takes up again, a session: the variables of one strategy.

    When no connection of its coordinator is left for `lease_s` seconds, the session is closed.
    """

    session: str
    lease_s: float


class JoinSession(Message, frozen=True):
    """A worker's connection joins a session that exists."""

    session: str


class CloseSession(Message, frozen=True):
    """Ends a session; its variables are freed."""

    session: str


# -- parameter servers: variables --------------------------------------------------------------


class InitOp(Record, frozen=True):
    """One in-place initialisation run on the server; see `_ps/server/store.py`, InitOp."""

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
    """Make room for variables and initialise those that bring a recipe."""

    variables: tuple[VariableSpec, ...]


class DeleteVariables(Message, frozen=True):
    """Forget variables."""

    variables: tuple[int, ...]


class Locate(Message, frozen=True):
    """Where are these variables in shared memory?"""

    variables: tuple[int, ...]


class Located(Message, frozen=True):
    """Answer to Locate: one TensorRef per variable (its version counter is 64 bytes before it)."""

    places: tuple[TensorRef, ...]
    segments: tuple[SegmentRef, ...]


class ReadItem(Record, frozen=True):
    """Read one variable: whole, `count` rows from `start`, or the rows `ids` in their order."""

    variable: int
    start: int = 0
    count: int = -1
    ids: TensorRef | None = None


class Read(Message, frozen=True):
    """Read several variables at once."""

    items: tuple[ReadItem, ...]


class Values(Message, frozen=True):
    """Answer to Read: values and versions in the order asked."""

    values: tuple[TensorRef, ...]
    versions: tuple[int, ...]


class AskVersions(Message, frozen=True):
    """Versions of these variables; of all in the session if none is named."""

    variables: tuple[int, ...] = ()


class Versions(Message, frozen=True):
    """Answer to AskVersions."""

    versions: Mapping[int, int]


# -- parameter servers: writes -----------------------------------------------------------------


class WriteId(Record, frozen=True):
    """Whose write this is, so that no write counts twice; see `_ps/server/ledger.py`, WriteId."""

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
    """Overwrite consecutive rows from `start`: a large value comes in pieces."""

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


class Push(Record, frozen=True):
    """One optimizer step; `settings` (group number → values) are this step's, instead of the groups'."""

    optimizer: int
    gradients: tuple[GradientRef, ...]
    settings: dict[int, dict[str, Setting]] = {}


Operation: TypeAlias = Assign | AssignRows | Scatter | Push

Operations: TypeAlias = msgspec.Raw
"""Encoded operations: see `encode_operations`."""


class Write(Message, frozen=True):
    """Everything one step changes on this server, applied in order, at most once.

    `operations`: as `encode_operations` made them. Steps of one model write the same places again and again,
    so that neither side need look at them more than once.
    """

    origin: WriteId
    operations: Operations


class Written(Message, frozen=True):
    """Answer to Write: the versions of the variables written, after it.

    `duplicate`: it had been applied before.
    """

    versions: Mapping[int, int]
    duplicate: bool = False


class OpenSegments(Message, frozen=True):
    """Can the server map these slots of the sender? Answered by Ok, or by a failure."""

    segments: tuple[SegmentRef, ...]


class Fence(Message, frozen=True):
    """Refuse writes of this incarnation of the worker, and of older ones, from now on."""

    worker: str
    incarnation: int


class FinishedClosures(Message, frozen=True):
    """All closures finished so far, as ranges (first, behind the last): refuse late writes of them."""

    ranges: tuple[tuple[int, int], ...]


# -- parameter servers: optimizers -------------------------------------------------------------


class GroupSpec(Record, frozen=True):
    """One parameter group: the variables of it on this server, and its settings."""

    variables: tuple[int, ...]
    settings: dict[str, Setting]


class CreateOptimizer(Message, frozen=True):
    """Set up an optimizer by the dotted name of its class.

    `defaults` are what it was made with, `attributes` what else its class keeps on the object.
    """

    optimizer: int
    class_name: str
    groups: tuple[GroupSpec, ...]
    defaults: dict[str, Setting] = msgspec.field(default_factory=dict)
    attributes: dict[str, Setting] = msgspec.field(default_factory=dict)


class StateItem(Record, frozen=True):
    """One piece of optimizer state: a tensor, or a plain value."""

    variable: int
    key: str
    tensor: TensorRef | None = None
    value: bool | int | float | None = None


class ReadState(Message, frozen=True):
    """What the optimizer remembers about these variables (about all here, if none is named).

    Tensors that would make the answer too large come without bytes; they are asked for with `key`:
    `count` rows from `start` of what it remembers under that name about the one variable.
    """

    optimizer: int
    variables: tuple[int, ...] = ()
    key: str = ""
    start: int = 0
    count: int = 0


class WriteState(Message, frozen=True):
    """Replace what the optimizer remembers about the variables named in the items.

    For tensors without bytes room is made; their rows follow in messages with `start` (not -1).
    """

    optimizer: int
    items: tuple[StateItem, ...]
    start: int = -1


class State(Message, frozen=True):
    """Answer to ReadState."""

    items: tuple[StateItem, ...]


# -- parameter servers: facts ------------------------------------------------------------------


class AskStats(Message, frozen=True):
    """What do you hold, and what have you done?"""


class Stats(Message, frozen=True):
    """Answer to AskStats: plain numbers and texts by name."""

    facts: Mapping[str, Any]


# -- workers: from the coordinator -------------------------------------------------------------


class OpenWorker(Message, frozen=True):
    """First message to a worker, a request: open a session with this coordinator.

    `setup` is packed; its object connects the worker to the strategy's servers. `seed`: of the job; random numbers
    of closures are derived from it.
    """

    coordinator: str
    worker: int
    incarnation: int
    setup: Packed
    heartbeat_s: float
    heartbeat_limit_s: float
    seed: int = 0


class WorkerOpened(Message, frozen=True):
    """Answer to OpenWorker."""

    task: str
    pid: int
    process: str = ""
    """The process, so named that a coordinator on the same host can look at it."""


class Define(Message, frozen=True):
    """What later closures refer to: a function by its digest, or a handle by its packed token.

    What is to be known of a handle comes in stages, counted from 0; with the `last` it is complete.
    """

    value: Packed
    function: bytes = b""
    token: Packed | None = None
    stage: int = 0
    last: bool = True


class Update(Message, frozen=True):
    """What moved on the coordinator (learning rates, flags); counts for the closures after it.

    `whole`: it is everything that ever moved, and makes up for updates that could not be taken in.
    """

    updates: Packed
    whole: bool = False


class Run(Message, frozen=True):
    """Run a closure. No `arguments`: it has none. `resource` not 0: keep its result under that number."""

    closure: int
    function: bytes
    arguments: Packed | None = None
    exactly_once: bool = True
    resource: int = 0


class Recall(Message, frozen=True):
    """Give back those of these closures that have not started; answered by Returned."""

    closures: tuple[int, ...]


class Forget(Message, frozen=True):
    """Functions and resources nobody will refer to any more."""

    functions: tuple[bytes, ...] = ()
    resources: tuple[int, ...] = ()


class Leave(Message, frozen=True):
    """The coordinator is done with this worker."""


# -- workers: to the coordinator ---------------------------------------------------------------


class Finished(Message, frozen=True):
    """A closure's result; no `value`: it returned None. `waited_s` before it started, `ran_s` since."""

    closure: int
    value: Packed | None = None
    waited_s: float = 0.0
    ran_s: float = 0.0


class Failed(Message, frozen=True):
    """A closure's exception.

    `blame`: ``user`` for the closure's own, ``input`` for a resource that failed to build, ``server``
    for a parameter server that cannot be reached, ``deadline`` for one that was late. `lacks`: something
    the closure needs did not arrive as it should (a definition, an update); to be sent again.
    """

    closure: int
    failure: RemoteFailure
    blame: str = "user"
    lacks: bool = False


class Returned(Message, frozen=True):
    """Answer to Recall: the closures that had not started and now never will."""

    closures: tuple[int, ...]


class Beat(Message, frozen=True):
    """I am alive. `facts`: a worker's metrics, now and then."""

    facts: Mapping[str, Any] = {}


class LogLine(Message, frozen=True):
    """One line a worker printed, or one record it logged."""

    level: int
    logger: str
    text: str


# -- encoding ----------------------------------------------------------------------------------


def _all_messages() -> tuple[type[Message], ...]:
    return tuple(Message.__subclasses__())


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] | None = None


def encode(message: Message) -> bytes:
    """Bytes of a message.

    Example:
        >>> from stratagem._wire.messages import Ping, decode, encode
        >>> decode(encode(Ping()))
        Ping()
    """
    return _encoder.encode(message)


def encode_operations(operations: Sequence[Operation]) -> Operations:
    """The operations of a `Write`.

    Example:
        >>> from stratagem._wire.messages import Assign, TensorRef
        >>> from stratagem._wire.messages import decode_operations, encode_operations
        >>> add = Assign(7, "add", TensorRef("float32", (2,), 0))
        >>> decode_operations(encode_operations([add])) == (add,)
        True
    """
    return msgspec.Raw(_encoder.encode(operations))


_operations_decoder: msgspec.msgpack.Decoder[tuple[Operation, ...]] = msgspec.msgpack.Decoder(
    tuple[Operation, ...]
)


def decode_operations(data: Operations) -> tuple[Operation, ...]:
    """What `encode_operations` was given.

    Raises:
        ProtocolError: the bytes are no operations.
    """
    try:
        return _operations_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a write with operations that are none of ours: {error}") from error


def decode(data: bytes) -> Message:
    """The message behind the bytes.

    Raises:
        ProtocolError: they are none of ours.
    """
    global _decoder
    if _decoder is None:
        # Made at first use, when the structs at the end of this module exist.
        _decoder = msgspec.msgpack.Decoder(_union(_all_messages()))
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a frame holds no message of ours: {error}") from error
    return message


def _union(types: tuple[type[Message], ...]) -> Any:
    joined: Any = types[0]
    for one in types[1:]:
        joined = joined | one
    return joined


@dataclass(slots=True)
class Frame:
    """A received frame: its message, and the buffers beside it."""

    kind: int
    call: int
    message: Message
    raw: RawFrame

    @property
    def is_request(self) -> bool:
        """True if the sender waits for a reply."""
        return self.kind == frames.REQUEST

    def buffer(self, index: int) -> memoryview:
        """Memory of one buffer; writable, alive as long as something refers to it."""
        return self.raw.buffer(index)


def decode_frame(raw: RawFrame) -> Frame:
    """Decodes the message of a received frame; ProtocolError if there is none."""
    return Frame(raw.kind, raw.call, decode(raw.message), raw)
