"""What a parameter server does with each message of a session: requests in, replies out.

Knows stores, shared memory and messages; knows no socket, thread or clock. `server.py` receives the frames, calls
`Session.handle` for each in order, and sends what it returns. Nothing here unpickles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._ps import types
from stratagem._ps.server.ledger import Admission
from stratagem._ps.server.store import VariableStore
from stratagem._ps.types import Gradient, StateEntry
from stratagem._wire import codec, messages, shm
from stratagem._wire.arenas import Arena, Budget
from stratagem._wire.codec import Outgoing
from stratagem._wire.frames import Buffer
from stratagem._wire.messages import Frame, Message, SegmentRef, TensorRef
from stratagem.errors import NotFoundError, ProtocolError, WriteFenced

Reply = tuple[Message, Sequence[Buffer]]

REPLY_LIMIT_BYTES = 1 << 28
"""Largest reply; clients ask for larger values in pieces."""

_CACHE_LIMIT = 8192

_PREPARED_LIMIT = 64
_PREPARED_VARIABLES = 4096
_PREPARED_BYTES = 1 << 18
"""Writes remembered per client, how many variables they may write in all, how long one may be."""


class _Prepared(NamedTuple):
    """The operations of a write, decoded, with their tensors and places found."""

    epoch: object  # the session's: with another one variables may be elsewhere
    calls: Sequence[Callable[[], object]]
    touched: Sequence[int]  # variables, each once
    places: Sequence[tuple[shm.Segment, int]]


@final
class SlotMaps:
    """The gradient slots of one client, mapped here.

    A client places its gradients at the same offsets step after step, so tensors over them are kept.
    """

    def __init__(self, *, allowed: bool) -> None:
        self._allowed = allowed
        self._segments: dict[int, shm.MappedSegment] = {}
        self._tensors: dict[TensorRef, Tensor] = {}
        self._prepared: dict[bytes, _Prepared] = {}  # writes that came before, by their bytes
        self._prepared_variables = 0

    def open(self, refs: Sequence[SegmentRef]) -> None:
        """Maps slots a client announced.

        Raises:
            NotFoundError: one cannot be mapped: the client must send bytes.
        """
        for ref in refs:
            known = self._segments.pop(ref.number, None)
            if known is not None:
                self._forget_tensors()
                known.close()
            mapped = shm.open_segment(ref, shared=True) if self._allowed else None
            if mapped is None:
                raise NotFoundError(
                    f"the slot {ref.number!r} of process {ref.pid!r} cannot be mapped by this "
                    f"server: send bytes over the connection"
                )
            self._segments[ref.number] = mapped

    def keep_only(self, numbers: Iterable[int]) -> None:
        """Gives up every slot but these."""
        kept = set(numbers)
        for number in [number for number in self._segments if number not in kept]:
            self._forget_tensors()
            self._segments.pop(number).close()

    def tensor(self, ref: TensorRef, frame: Frame) -> Tensor:
        """The tensor a message refers to: in a slot, or beside the message."""
        if ref.segment == 0:
            return codec.tensor_from(ref, frame)
        tensor = self._tensors.get(ref)
        if tensor is None:
            segment = self._segments.get(ref.segment)
            if segment is None:
                raise ProtocolError(f"the message refers to slot {ref.segment!r}, never announced")
            tensor = segment.tensor(ref.offset, ref.shape, codec.dtype_from(ref.dtype))
            if len(self._tensors) >= _CACHE_LIMIT:
                self._tensors.clear()
            self._tensors[ref] = tensor
        return tensor

    def rest(self) -> None:
        """Nothing has come for a while: the slots' pages are their owner's alone until they are used."""
        self._forget_prepared()
        for segment in self._segments.values():
            segment.rest()

    def close(self) -> None:
        """Unmaps everything. Repeatable."""
        self._forget_tensors()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def prepared(self, key: bytes, epoch: object) -> _Prepared | None:
        """What was prepared for the same bytes in the same epoch."""
        known = self._prepared.get(key)
        return known if known is not None and known.epoch is epoch else None

    def remember(self, key: bytes, prepared: _Prepared) -> None:
        """Keeps what was prepared, if it is not too much; rows move, and with them a write's bytes."""
        if len(key) > _PREPARED_BYTES:
            return
        self._prepared_variables += len(prepared.touched)
        if len(self._prepared) >= _PREPARED_LIMIT or self._prepared_variables > _PREPARED_VARIABLES:
            self._forget_prepared()
            self._prepared_variables = len(prepared.touched)
        self._prepared[key] = prepared

    def _forget_prepared(self) -> None:
        self._prepared.clear()
        self._prepared_variables = 0

    def _forget_tensors(self) -> None:
        self._tensors.clear()
        self._forget_prepared()


@final
class Session:
    """The variables of one strategy on this server, in shared memory.

    Example:
        >>> from stratagem._ps.server.session import Session
        >>> from stratagem._wire.arenas import Budget
        >>> session = Session("s1", budget=Budget(1 << 20))
        >>> session
        <Session 's1': 0 variables, 0 bytes, 0 writes>
        >>> session.close()
    """

    def __init__(
        self,
        name: str,
        *,
        budget: Budget,
        optimizer_modules: Sequence[str] = (),
        shared_memory: bool = True,
    ) -> None:
        self.name = name
        self._shared_memory = shared_memory
        self._arena = Arena(budget, writable_by_peers=False)
        self._placed: tuple[shm.Segment, int, int] | None = None
        self._places: dict[int, tuple[shm.Segment, int, int]] = {}  # segment, offset, bytes
        self._epoch = object()  # another one whenever variables or optimizers come or go
        self.store = VariableStore(self._allocate, optimizer_modules=optimizer_modules)
        # Messages that bring tensors, and those that are complete in themselves.
        self._with_tensors: dict[type[Message], Callable[[Any, Frame, SlotMaps], Reply]] = {
            messages.Write: self._write,
            messages.Read: self._read,
            messages.WriteState: self._write_state,
        }
        self._plain: dict[type[Message], Callable[[Any], Reply]] = {
            messages.CreateVariables: self._create,
            messages.DeleteVariables: self._delete,
            messages.Locate: self._locate,
            messages.AskVersions: self._versions,
            messages.Fence: self._fence,
            messages.FinishedClosures: self._finish_closures,
            messages.CreateOptimizer: self._create_optimizer,
            messages.ReadState: self._read_state,
        }

    @property
    def used_bytes(self) -> int:
        """Bytes of the variables."""
        return self._arena.used_bytes

    def handle(self, frame: Frame, slots: SlotMaps) -> Reply:
        """Carries out one message.

        Raises:
            ProtocolError: a message no session understands, or one that contradicts its frame.
            Exception: what went wrong, to be sent back as a failure.
        """
        message = frame.message
        kind = type(message)
        if kind in self._with_tensors:
            return self._with_tensors[kind](message, frame, slots)
        if kind in self._plain:
            return self._plain[kind](message)
        if isinstance(message, messages.OpenSegments):
            slots.open(message.segments)
            slots.keep_only(ref.number for ref in message.segments)
            return messages.Ok(), ()
        raise ProtocolError(f"a {kind.__name__} is no message for a parameter server's session")

    def close(self) -> None:
        """Frees everything. Repeatable."""
        self._places.clear()
        self.store = VariableStore()
        self._arena.close()

    @override
    def __repr__(self) -> str:
        stats = self.store.stats()
        return (
            f"<Session {self.name!r}: {stats.variables} variables, {self.used_bytes} bytes, "
            f"{stats.applied} writes>"
        )

    # -- variables ----------------------------------------------------------------------------

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = shm.bytes_for(shape, dtype)
        segment, offset = self._arena.place(size)
        self._placed = (segment, offset, size)
        return segment.tensor(offset, shape, dtype)

    def _create(self, message: messages.CreateVariables) -> Reply:
        self._epoch = object()
        for spec in message.variables:
            known = spec.variable in self._places
            dtype = codec.dtype_from(spec.dtype)
            self.store.create(spec.variable, spec.name, spec.shape, dtype)
            if known:
                continue  # the message came twice: the variable exists and is initialised
            assert self._placed is not None
            self._places[spec.variable] = self._placed
            if spec.initialise:
                version = self.store.initialise(spec.variable, spec.initialise)
                self._publish({spec.variable: version})
        return messages.Ok(), ()

    def _delete(self, message: messages.DeleteVariables) -> Reply:
        self._epoch = object()
        for variable in message.variables:
            self.store.delete(variable)
            place = self._places.pop(variable, None)
            if place is not None:
                self._arena.free(place[0], place[2])
        return messages.Ok(), ()

    def _locate(self, message: messages.Locate) -> Reply:
        if not self._shared_memory:
            raise NotFoundError("this server does not share memory: read over the connection")
        places = []
        segments: dict[int, SegmentRef] = {}
        for variable in message.variables:
            tensor = self.store.read(variable)
            segment, offset, _ = self._places[variable]
            segments[segment.number] = segment.ref()
            places.append(
                TensorRef(
                    codec.dtype_name(tensor.dtype),
                    tuple(tensor.shape),
                    segment=segment.number,
                    offset=offset,
                )
            )
        return messages.Located(places=tuple(places), segments=tuple(segments.values())), ()

    def _read(self, message: messages.Read, frame: Frame, slots: SlotMaps) -> Reply:
        outgoing = Outgoing()
        found = []
        size = 0
        for item in message.items:
            if item.ids is not None:
                value = self.store.read_rows(item.variable, slots.tensor(item.ids, frame))
            else:
                value = self.store.read(item.variable)
                if item.count >= 0 and value.dim():
                    end = item.start + item.count
                    if item.start < 0 or end > value.shape[0]:
                        raise ValueError(
                            f"rows {item.start!r} to {end!r} of variable {item.variable!r} do not "
                            f"exist: it has {value.shape[0]} rows"
                        )
                    value = value[item.start : end]
            size += value.nbytes
            if size > REPLY_LIMIT_BYTES:
                raise ValueError(
                    f"a read of more than {REPLY_LIMIT_BYTES} bytes at once: ask for fewer rows or "
                    f"variables at a time"
                )
            found.append(outgoing.add(value))
        versions = tuple(self.store.version(item.variable) for item in message.items)
        return messages.Values(values=tuple(found), versions=versions), outgoing.buffers

    def _versions(self, message: messages.AskVersions) -> Reply:
        return messages.Versions(versions=self.store.versions(message.variables or None)), ()

    # -- writes -------------------------------------------------------------------------------

    def _write(self, message: messages.Write, frame: Frame, slots: SlotMaps) -> Reply:
        # Everything that can be wrong with the message is found before the write is admitted.
        prepared = self._prepared(message, frame, slots)
        touched = prepared.touched
        origin = message.origin
        admission = self.store.admit(origin)
        if admission is Admission.FENCED:
            raise WriteFenced(
                f"a write of {origin.worker!r}, life {origin.incarnation}, was refused: that life "
                f"was declared lost, and its work may have been given to another worker"
            )
        if admission is Admission.DUPLICATE:
            return messages.Written(versions=self.store.versions(touched), duplicate=True), ()
        for segment, offset in prepared.places:
            segment.begin_write(offset)
        try:
            for call in prepared.calls:
                call()
        finally:
            versions = self.store.versions(touched)
            for (segment, offset), version in zip(prepared.places, versions.values(), strict=True):
                segment.publish(offset, version)
        return messages.Written(versions=versions), ()

    def _prepared(self, message: messages.Write, frame: Frame, slots: SlotMaps) -> _Prepared:
        """What the write is to do: as the last time, if its bytes are the same and so is the rest."""
        key = None if frame.raw.spans else bytes(message.operations)
        if key is not None:
            known = slots.prepared(key, self._epoch)
            if known is not None:
                return known
        operations = messages.decode_operations(message.operations)
        calls = [self._prepare(one, frame, slots) for one in operations]
        touched = list(dict.fromkeys(n for one in operations for n in _variables_of(one)))
        self.store.versions(touched)  # raises if one is unknown
        places = [self._places[variable][:2] for variable in touched]
        prepared = _Prepared(self._epoch, calls, touched, places)
        if key is not None:
            slots.remember(key, prepared)
        return prepared

    def _prepare(
        self, operation: messages.Operation, frame: Frame, slots: SlotMaps
    ) -> Callable[[], object]:
        """The call of the store an operation stands for, its tensors found."""
        store = self.store
        if isinstance(operation, messages.Push):
            gradients = [
                Gradient(
                    variable=one.variable,
                    values=slots.tensor(one.values, frame),
                    ids=slots.tensor(one.ids, frame) if one.ids is not None else None,
                    sparse=one.sparse,
                )
                for one in operation.gradients
            ]
            number, settings = operation.optimizer, operation.settings
            return lambda: store.push(number, gradients, settings or None)
        variable = operation.variable
        if isinstance(operation, messages.Scatter):
            how = operation.operation
            ids = slots.tensor(operation.ids, frame)
            values = slots.tensor(operation.values, frame)
            return lambda: store.scatter(variable, how, ids, values)
        value = slots.tensor(operation.value, frame)
        if isinstance(operation, messages.Assign):
            what = operation.operation
            return lambda: store.assign(variable, what, value)
        start = operation.start
        return lambda: store.write_rows(variable, start, value)

    def _publish(self, versions: dict[int, int]) -> None:
        for variable, version in versions.items():
            segment, offset, _ = self._places[variable]
            segment.publish(offset, version)

    def _fence(self, message: messages.Fence) -> Reply:
        self.store.fence(message.worker, message.incarnation)
        return messages.Ok(), ()

    def _finish_closures(self, message: messages.FinishedClosures) -> Reply:
        self.store.finish_closures(message.ranges)
        return messages.Ok(), ()

    # -- optimizers ---------------------------------------------------------------------------

    def _create_optimizer(self, message: messages.CreateOptimizer) -> Reply:
        self._epoch = object()
        self.store.create_optimizer(
            message.optimizer,
            message.class_name,
            message.groups,
            defaults=message.defaults,
            attributes=message.attributes,
        )
        return messages.Ok(), ()

    def _read_state(self, message: messages.ReadState) -> Reply:
        wanted = set(message.variables)
        outgoing = Outgoing()
        items = []
        size = 0
        for entry in self.store.optimizer_state(message.optimizer):
            if wanted and entry.variable not in wanted:
                continue
            value = entry.value
            if isinstance(value, Tensor) and value.is_sparse:
                value = value.to_dense()  # SGD's momentum of sparse gradients
            if message.key:
                if entry.key != message.key or not isinstance(value, Tensor) or not value.dim():
                    continue
                value = value[max(0, message.start) : message.start + max(0, message.count)]
            if not isinstance(value, Tensor):
                items.append(messages.StateItem(entry.variable, entry.key, value=value))
                continue
            size += value.nbytes
            if size > types.TRANSFER_BYTES and value.dim() and not message.key:
                ref = TensorRef(codec.dtype_name(value.dtype), tuple(value.shape))
            else:
                ref = outgoing.add(value)
            items.append(messages.StateItem(entry.variable, entry.key, tensor=ref))
        return messages.State(items=tuple(items)), outgoing.buffers

    def _write_state(self, message: messages.WriteState, frame: Frame, slots: SlotMaps) -> Reply:
        entries = [
            StateEntry(
                variable=item.variable,
                key=item.key,
                value=item.value if item.tensor is None else self._state(item, frame, slots),
            )
            for item in message.items
        ]
        if message.start >= 0:
            self.store.write_optimizer_rows(message.optimizer, entries, message.start)
        else:
            self.store.load_optimizer_state(message.optimizer, entries)
        return messages.Ok(), ()

    def _state(self, item: messages.StateItem, frame: Frame, slots: SlotMaps) -> Tensor:
        """A tensor of optimizer state: as it came, or room for one whose rows follow."""
        ref = item.tensor
        assert ref is not None
        if ref.buffer >= 0 or ref.segment:
            return slots.tensor(ref, frame)
        if ref.shape != tuple(self.store.read(item.variable).shape):
            raise ProtocolError(
                f"{item.key!r} of variable {item.variable!r} is to come in pieces, but its shape "
                f"{ref.shape!r} is not the variable's"
            )
        return torch.empty(ref.shape, dtype=codec.dtype_from(ref.dtype))


def _variables_of(operation: messages.Operation) -> list[int]:
    if isinstance(operation, messages.Push):
        return [gradient.variable for gradient in operation.gradients]
    return [operation.variable]
