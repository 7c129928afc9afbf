"""One session on a parameter server: handles requests and makes replies.

Knows the store, shared memory and messages, but no socket, thread or clock. `loop.py` receives the frames, calls
`Session.handle` for each of them in order, and sends the replies. This module never unpickles.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem import _faults as faults
from stratagem._core.key_map import Ints
from stratagem._ps import types
from stratagem._ps.init_ops import MemoryKind, memory_kind
from stratagem._ps.number_ranges import NumberRanges
from stratagem._ps.server.checkpoint_parts import (
    CheckpointAccess,
    SessionCheckpoints,
)
from stratagem._ps.server.client_memory import ClientMemory, PreparedWrite, Touched
from stratagem._ps.server.ledger import Admission
from stratagem._ps.server.repeated_push import repeated_push
from stratagem._ps.server.state_messages import read_state, sent_state
from stratagem._ps.server.store import VariableStore
from stratagem._ps.server.value_replies import ValueReplies
from stratagem._ps.types import Gradient
from stratagem._wire import codec, messages, shm
from stratagem._wire.arenas import Arena, Budget
from stratagem._wire.codec import Outgoing
from stratagem._wire.frames import Buffer
from stratagem._wire.messages import Frame, Message, SegmentRef, TensorRef
from stratagem.errors import NotFoundError, ProtocolError, WriteFenced

if TYPE_CHECKING:
    from stratagem._ps.server.backup_link import BackupLink

Reply: TypeAlias = tuple[Message, Sequence[Buffer]]

_OK: Final[Reply] = (messages.Ok(), ())

_NARROW: Final = frozenset(("bfloat16", "float16"))

_FORWARDED: Final = frozenset(
    (
        messages.CreateVariables,
        messages.DeleteVariables,
        messages.OpenSegments,
        messages.Fence,
        messages.FinishedClosures,
        messages.CreateOptimizer,
        messages.WriteState,
        messages.RestoreLedger,
    )
)
"""Messages that change the session; a Write or ResolveKeys is forwarded when it was checked. Checkpoints read into memory are streamed."""


@final
class Session:
    """The variables of one strategy on this server, in shared memory."""

    def __init__(
        self,
        name: str,
        *,
        shard: int = -1,
        lease_s: float = 60.0,
        budget: Budget,
        optimizer_modules: Sequence[str] = (),
        shared_memory: bool = True,
        access: CheckpointAccess | None = None,
    ) -> None:
        self.name = name
        self.shard = shard
        """Which server's part of a session with backups; -1 without backups."""
        self.lease_s = lease_s
        self.owners: set[Hashable] = set()
        """Connections that keep the session alive (`session_table.py`)."""
        self.orphaned_at: float | None = None
        self._shared_memory = shared_memory
        self._arena = Arena(budget)
        self._places: dict[int, tuple[shm.Segment, int, int]] = {}  # segment, offset, bytes
        self._epoch = object()  # replaced whenever variables or optimizers come or go
        self.store = VariableStore(
            self._allocate, budget=budget, optimizer_modules=optimizer_modules
        )
        self._replies = ValueReplies(self.store)
        self.deleted = NumberRanges()
        """Numbers of the variables that were freed."""
        self.view = 0
        """Number of the coordinator's last decision about primary and backup (docs/design/0010)."""
        self.is_backup = False
        self.is_complete = True
        """False for a backup that has not received its whole state."""
        self.link: BackupLink | None = None
        """To the backup."""
        self.key_pieces: dict[int, dict[str, list[Ints]]] = {}
        """Of a backup that receives its state: records of dynamic tables, see `write_state_keys`."""
        self.was_read = False
        """True if rows were read from a checkpoint that the backup does not have."""
        self._checkpoints = SessionCheckpoints(self.store, access or CheckpointAccess())
        self._handlers: dict[type[Message], Callable[[Any, Frame, ClientMemory], Reply]] = {
            messages.Write: self._write,
            messages.Read: self._read,
            messages.CreateVariables: self._create,
            messages.DeleteVariables: self._delete,
            messages.Locate: self._locate,
            messages.AskVersions: self._versions,
            messages.ResolveKeys: self._resolve_keys,
            messages.ListKeys: self._list_keys,
            messages.OpenSegments: self._open_segments,
            messages.Fence: self._fence,
            messages.ApplyRound: self._apply_round,
            messages.FinishedClosures: self._finish_closures,
            messages.CreateOptimizer: self._create_optimizer,
            messages.ReadState: self._read_state,
            messages.WriteState: self._write_state,
            messages.MakeCut: self._make_cut,
            messages.WriteCut: self._write_cut,
            messages.EndCut: self._end_cut,
            messages.ReadParts: self._read_parts,
            messages.AskTransfer: self._ask_transfer,
            messages.RestoreLedger: self._restore_ledger,
        }

    @property
    def used_bytes(self) -> int:
        return self._arena.used_bytes

    @property
    def is_linked(self) -> bool:
        """True if there is a backup that answers."""
        return self.link is not None and not self.link.failure

    @property
    def is_checkpointing(self) -> bool:
        """True if rows are being written to a checkpoint, or read from one."""
        return self._checkpoints.is_active

    def handle(self, frame: Frame, memory: ClientMemory) -> Reply:
        """Carry out one message.

        Raises:
            ProtocolError: the message is not for a session, or contradicts its frame.
            Exception: what went wrong, to be sent back as a failure.
        """
        kind = type(frame.message)
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError(
                f"a {kind.__name__} is not a message for a parameter server's session"
            )
        if self.link is not None and kind in _FORWARDED:
            self.link.forward(frame, memory)
        return handler(frame.message, frame, memory)

    def restore(self, manifest: messages.StoreManifest) -> None:
        """Create the contents of a store in a new session: of a backup, whose rows follow."""
        self.store.restore(manifest)
        self._epoch = object()
        self.is_complete = False

    def complete(self) -> None:
        """Note that the state of a backup is complete."""
        self.is_complete = True
        self._publish(self.store.versions())

    def end_transfers(self) -> None:
        """Give up a checkpoint that a replaced coordinator was saving."""
        self._checkpoints.end_cut()

    def close(self) -> None:
        """Free everything. May be called again."""
        self._checkpoints.close()
        self._places.clear()
        self._replies.clear()
        self.store.close()
        self._arena.close()

    @override
    def __repr__(self) -> str:
        stats = self.store.stats()
        return (
            f"<Session {self.name!r}: {stats.variables} variables, {self.used_bytes} bytes, "
            f"{stats.applied} writes>"
        )

    # -- variables ----------------------------------------------------------------------------

    def _allocate(
        self, number: int, shape: tuple[int, ...], dtype: torch.dtype, kind: MemoryKind
    ) -> Tensor:
        size = shm.bytes_for(shape, dtype)
        segment, offset = self._arena.place(
            size, reserve=kind == "reserved", on_disk=kind == "disk"
        )
        self._places[number] = (segment, offset, size)
        return segment.tensor(offset, shape, dtype)

    def _create(self, message: messages.CreateVariables, _: Frame, __: ClientMemory) -> Reply:
        self._epoch = object()
        for spec in message.variables:
            is_new = spec.variable not in self._places  # else the message came twice
            dtype = codec.dtype_from(spec.dtype)
            kind = memory_kind(spec.initialise)
            self.store.create(spec.variable, spec.name, spec.shape, dtype, kind=kind)
            if is_new and spec.initialise:
                version = self.store.initialise(spec.variable, spec.initialise)
                self._publish({spec.variable: version})
        return _OK

    def _delete(self, message: messages.DeleteVariables, _: Frame, __: ClientMemory) -> Reply:
        self._epoch = object()
        self.deleted.add(message.variables)
        for variable in message.variables:
            self._replies.forget(variable)
            self.store.delete(variable)
            place = self._places.pop(variable, None)
            if place is not None:
                self._arena.free(*place)
        return _OK

    def _locate(self, message: messages.Locate, _: Frame, __: ClientMemory) -> Reply:
        if not self._shared_memory:
            return messages.Located(places=(), segments=()), ()
        places = []
        segments: dict[int, SegmentRef] = {}
        for variable in message.variables:
            tensor = self.store.read(variable)
            segment, offset, _bytes = self._places[variable]
            segments[segment.number] = segment.ref()
            name, shape = codec.dtype_name(tensor.dtype), tuple(tensor.shape)
            places.append(TensorRef(name, shape, segment=segment.number, offset=offset))
        return messages.Located(places=tuple(places), segments=tuple(segments.values())), ()

    def _read(self, message: messages.Read, frame: Frame, memory: ClientMemory) -> Reply:
        return self._replies.values(message.items, frame, memory)

    def _resolve_keys(
        self, message: messages.ResolveKeys, frame: Frame, memory: ClientMemory
    ) -> Reply:
        keys = memory.tensor(message.keys, frame)
        counts = None if message.counts is None else memory.tensor(message.counts, frame)
        if self.link is not None and message.create:  # which makes rows, and counts use
            self.link.forward(frame, memory)
        found = self.store.keyed.resolve(message.variable, keys, counts, create=message.create)
        outgoing = Outgoing()
        return messages.ResolvedKeys(outgoing.add(found[0]), found[1]), outgoing.buffers

    def _list_keys(self, message: messages.ListKeys, _: Frame, __: ClientMemory) -> Reply:
        keys, rows, total = self.store.keyed.page(message.variable, message.start, message.count)
        outgoing = Outgoing()
        found = messages.ListedKeys(outgoing.add(keys), outgoing.add(rows), total)
        return found, outgoing.buffers

    def _versions(self, message: messages.AskVersions, _: Frame, __: ClientMemory) -> Reply:
        return messages.Versions(versions=self.store.versions(message.variables or None)), ()

    def _publish(self, versions: Mapping[int, int]) -> None:
        for variable, version in versions.items():
            segment, offset, _ = self._places[variable]
            segment.publish(offset, version)

    # -- writes -------------------------------------------------------------------------------

    def _open_segments(
        self, message: messages.OpenSegments, _: Frame, memory: ClientMemory
    ) -> Reply:
        memory.open(message.segments)
        return _OK

    def _write(self, message: messages.Write, frame: Frame, memory: ClientMemory) -> Reply:
        # Find every error in the message before the write is admitted.
        prepared = self._prepared(message, frame, memory)
        touched = prepared.touched
        if faults.active is not None:
            faults.active.at("server.before_apply")
        if self.link is not None:
            self.link.forward(frame, memory)
        origin = message.origin
        admission = self.store.admit(origin)
        if admission is Admission.FENCED:
            raise WriteFenced(
                f"a write of {origin.worker!r}, incarnation {origin.incarnation}, was refused: that "
                f"incarnation was declared lost, and its work may have been given to another worker"
            )
        if admission is Admission.DUPLICATE:
            versions = self.store.versions(touched)
            return self._written(versions, frame, memory, prepared, duplicate=True)
        # As `Segment.begin_write` and `publish` do, for all variables of the write.
        for _, counters, counter in touched.values():
            counters[counter] |= 1
        try:
            for call in prepared.calls:
                call(origin)
        finally:
            versions = {}
            for number, (variable, counters, counter) in touched.items():
                versions[number] = version = variable.version
                counters[counter] = 2 * version
        if faults.active is not None:
            faults.active.at("server.after_apply")
        return self._written(versions, frame, memory, prepared)

    def _written(
        self,
        versions: Mapping[int, int],
        frame: Frame,
        memory: ClientMemory,
        prepared: PreparedWrite,
        *,
        duplicate: bool = False,
    ) -> Reply:
        """Answer a write; a reply that waits for the backup gets its values when it is sent."""
        reply = messages.Written(versions=versions, duplicate=duplicate)
        if self.link is not None:
            return reply, ()
        answer = self.with_values(reply, frame, memory)
        frame.is_done = prepared.may_repeat
        return answer

    def with_values(self, reply: Message, frame: Frame, memory: ClientMemory) -> Reply:
        """Return a reply, with the values that its write asks for; without them if that is not possible.

        The write was applied, so the answer is not an error. The client asks for the values again, and gets the error.
        """
        message = frame.message
        reads = message.read if isinstance(message, messages.Write) else ()
        if not reads or not isinstance(reply, messages.Written):
            return reply, ()
        try:
            values, buffers = self._replies.values(reads, frame, memory)
        except (NotFoundError, ProtocolError, ValueError):
            return reply, ()
        return messages.Written(reply.versions, reply.duplicate, values), buffers

    def _prepared(
        self, message: messages.Write, frame: Frame, memory: ClientMemory
    ) -> PreparedWrite:
        """Return what the write is to do: as the last time, if its bytes are the same."""
        key = bytes(message.operations)
        known = memory.known_write(key, self._epoch, frame)
        if known is not None:
            return known
        operations = messages.decode_operations(message.operations)
        calls = [self._prepare(one, frame, memory) for one in operations]
        touched: dict[int, Touched] = {}
        for number in [number for one in operations for number in _variables_of(one)]:
            if number not in touched:
                variable = self.store.find(number)  # raises if it is unknown
                segment, offset, _ = self._places[number]
                touched[number] = Touched(variable, segment.counters, shm.counter_index(offset))
        may_repeat = not any(_keeps_values(one) for one in operations)
        prepared = PreparedWrite(self._epoch, calls, touched, frame, may_repeat)
        memory.keep_write(key, prepared)
        return prepared

    def _prepare(
        self, operation: messages.Operation, frame: Frame, memory: ClientMemory
    ) -> Callable[[types.WriteId], object]:
        """Return the call of the store that an operation stands for, its tensors found."""
        store = self.store
        if isinstance(operation, messages.Push):
            gradients = [
                Gradient(
                    variable=one.variable,
                    values=self._widened(one.variable, memory.tensor(one.values, frame)),
                    ids=memory.tensor(one.ids, frame) if one.ids is not None else None,
                    sparse=one.sparse,
                    clock=one.clock,
                )
                for one in operation.gradients
            ]
            for each in operation.joined:
                gradients += memory.joined(each, frame)
            number, settings = operation.optimizer, operation.settings
            if operation.held:
                hold = store.held.hold
                return lambda write: hold(write.closure, number, gradients, settings or None)
            push = repeated_push(store, number, gradients, settings or None)
            return lambda _: push()
        variable = operation.variable
        if isinstance(operation, messages.Scatter):
            how = operation.operation
            ids = memory.tensor(operation.ids, frame)
            values = memory.tensor(operation.values, frame)
            return lambda _: store.scatter(variable, how, ids, values)
        value = memory.tensor(operation.value, frame)
        if isinstance(operation, messages.Assign):
            what = operation.operation
            return lambda _: store.assign(variable, what, value)
        start = operation.start
        return lambda _: store.write_rows(variable, start, value)

    def _widened(self, variable: int, values: Tensor) -> Tensor:
        """Return a gradient in its variable's type; clients may send it in a narrower one."""
        is_narrow = values.element_size() == 2 and values.is_floating_point()
        return values.to(self.store.read(variable).dtype) if is_narrow else values

    def _fence(self, message: messages.Fence, _: Frame, __: ClientMemory) -> Reply:
        self.store.fence(message.worker, message.incarnation)
        return _OK

    def _apply_round(self, message: messages.ApplyRound, _: Frame, __: ClientMemory) -> Reply:
        touched = self.store.held.variables(message.closures)
        places = [self._places[variable][:2] for variable in touched]
        for segment, offset in places:
            segment.begin_write(offset)
        try:
            self.store.held.apply(message.closures, mean=message.mean)
        finally:
            self._publish(self.store.versions(touched))
        return _OK

    def _finish_closures(
        self, message: messages.FinishedClosures, _: Frame, __: ClientMemory
    ) -> Reply:
        self.store.finish_closures(message.ranges)
        return _OK

    # -- checkpoints --------------------------------------------------------------------------

    def _make_cut(self, message: messages.MakeCut, _: Frame, __: ClientMemory) -> Reply:
        return self._checkpoints.make_cut(message), ()

    def _write_cut(self, message: messages.WriteCut, _: Frame, __: ClientMemory) -> Reply:
        self._checkpoints.write_cut(message)
        return _OK

    def _end_cut(self, _: messages.EndCut, __: Frame, ___: ClientMemory) -> Reply:
        self._checkpoints.end_cut()
        return _OK

    def _read_parts(self, message: messages.ReadParts, _: Frame, __: ClientMemory) -> Reply:
        self._checkpoints.begin_read(message)
        self.was_read |= not message.verify
        return _OK

    def _restore_ledger(self, message: messages.RestoreLedger, _: Frame, __: ClientMemory) -> Reply:
        self.store.restore_ledger(message.ledger)
        return _OK

    def _ask_transfer(self, message: messages.AskTransfer, _: Frame, __: ClientMemory) -> Reply:
        if message.undo:
            self._checkpoints.undo_read()
        transfer, touched = self._checkpoints.progress(hurry=message.hurry)
        self._publish({variable: self.store.touch(variable) for variable in touched})
        return transfer, ()

    # -- optimizers ---------------------------------------------------------------------------

    def _create_optimizer(
        self, message: messages.CreateOptimizer, _: Frame, __: ClientMemory
    ) -> Reply:
        self._epoch = object()
        self.store.create_optimizer(
            message.optimizer,
            message.class_name,
            message.groups,
            defaults=message.defaults,
            attributes=message.attributes,
        )
        return _OK

    def _read_state(self, message: messages.ReadState, _: Frame, __: ClientMemory) -> Reply:
        return read_state(self.store, message)

    def _write_state(
        self, message: messages.WriteState, frame: Frame, memory: ClientMemory
    ) -> Reply:
        entries = sent_state(self.store, message, frame, memory)
        if message.start < 0:
            self.store.load_optimizer_state(message.optimizer, entries)
        else:
            for entry in entries:
                self.store.write_optimizer_rows(message.optimizer, entry, message.start)
        return _OK


def _variables_of(operation: messages.Operation) -> list[int]:
    if isinstance(operation, messages.Push):
        alone = [gradient.variable for gradient in operation.gradients]
        return [*alone, *(number for one in operation.joined for number in one.variables)]
    return [operation.variable]


def _keeps_values(operation: messages.Operation) -> bool:
    """Return whether what `Session._prepare` makes of an operation keeps values: of a held step, or converted ones."""
    if not isinstance(operation, messages.Push):
        return False
    return operation.held or any(one.values.dtype in _NARROW for one in operation.gradients)
