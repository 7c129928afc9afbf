"""Cuts the writes of one step that are too large for one message into several.

Pure. A push is cut between its variables: each of them is stepped by itself, whatever message its gradient
comes in. Where a write is cut depends on sizes alone, not on how its tensors travel, so that a closure
which runs again, on whichever worker, makes the same writes in the same order, and each of them is
recognised by its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stratagem._wire import codec, messages
from stratagem._wire.frames import Buffer, padded
from stratagem._wire.messages import GradientRef, Operation, Push, TensorRef
from stratagem._wire.shm import bytes_for


class TooLargeError(Exception):
    """One variable's part of a write is too large by itself.

    Attributes:
        variable: its number.
        size: its bytes.
    """

    def __init__(self, variable: int, size: int) -> None:
        super().__init__(variable, size)
        self.variable = variable
        self.size = size


class Piece(NamedTuple):
    """What one message carries."""

    operations: Sequence[Operation]
    buffers: Sequence[Buffer]

    def encoded(self) -> messages.Operations:
        """The operations as they travel."""
        return messages.encode_operations(self.operations)


def size_of(buffers: Sequence[Buffer]) -> int:
    """Bytes these take in a frame.

    Example:
        >>> size_of([b"12345678"]) >= 8
        True
    """
    return sum(padded(memoryview(buffer).nbytes) for buffer in buffers)


def size_of_operations(operations: Sequence[Operation]) -> int:
    """Bytes their tensors take in a frame, or would take if they travelled in one.

    Example:
        >>> from stratagem._wire.messages import Assign, TensorRef
        >>> size_of_operations([Assign(1, "set", TensorRef("float32", (3,), segment=7))])
        64
    """
    return sum(_size(ref) for unit in _units(operations) for ref in _refs(unit))


def split(operations: Sequence[Operation], buffers: Sequence[Buffer], limit: int) -> list[Piece]:
    """The same operations in messages of at most `limit` bytes of tensors.

    Tensors in slots are counted as if they travelled; one of them may be larger than the limit.

    Raises:
        TooLargeError: that cannot be.

    Example:
        >>> from stratagem._wire.messages import Assign, TensorRef
        >>> refs = [TensorRef("uint8", (64,), buffer=n) for n in range(3)]
        >>> writes = [Assign(n, "set", ref) for n, ref in enumerate(refs)]
        >>> [len(piece.operations) for piece in split(writes, [bytes(64)] * 3, 128)]
        [2, 1]
    """
    pieces: list[_Growing] = [_Growing()]
    for unit in _units(operations):
        refs = _refs(unit)
        size = sum(_size(ref) for ref in refs)
        if size > limit and not refs[0].segment:
            variable = unit.gradients[0].variable if isinstance(unit, Push) else unit.variable
            raise TooLargeError(variable, size)
        if pieces[-1].operations and pieces[-1].size + size > limit:
            pieces.append(_Growing())
        pieces[-1].add(unit, buffers, size)
    return [Piece(piece.operations, piece.buffers) for piece in pieces]


def _size(ref: TensorRef) -> int:
    return padded(bytes_for(ref.shape, codec.dtype_from(ref.dtype)))


def _units(operations: Sequence[Operation]) -> Iterator[Operation]:
    """The operations, pushes one variable at a time."""
    for operation in operations:
        if isinstance(operation, Push) and operation.gradients:
            for gradient in operation.gradients:
                yield Push(operation.optimizer, (gradient,), operation.settings)
        else:
            yield operation


def _refs(unit: Operation) -> list[TensorRef]:
    if isinstance(unit, Push):
        found = [(one.values, one.ids) for one in unit.gradients]
        return [ref for pair in found for ref in pair if ref is not None]
    if isinstance(unit, messages.Scatter):
        return [unit.ids, unit.values]
    return [unit.value]


@dataclass(slots=True)
class _Growing:
    operations: list[Operation] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    size: int = 0

    def add(self, unit: Operation, buffers: Sequence[Buffer], size: int) -> None:
        def moved(ref: TensorRef) -> TensorRef:
            if ref.segment:
                return ref
            self.buffers.append(buffers[ref.buffer])
            return TensorRef(ref.dtype, ref.shape, len(self.buffers) - 1)

        self.size += size
        if isinstance(unit, messages.Scatter):
            ids, values = moved(unit.ids), moved(unit.values)
            self.operations.append(messages.Scatter(unit.variable, unit.operation, ids, values))
        elif isinstance(unit, messages.AssignRows):
            value = moved(unit.value)
            self.operations.append(messages.AssignRows(unit.variable, unit.start, value))
        elif isinstance(unit, messages.Assign):
            value = moved(unit.value)
            self.operations.append(messages.Assign(unit.variable, unit.operation, value))
        else:
            self._push(
                unit,
                [
                    GradientRef(
                        one.variable,
                        moved(one.values),
                        moved(one.ids) if one.ids is not None else None,
                        one.sparse,
                    )
                    for one in unit.gradients
                ],
            )

    def _push(self, unit: Push, gradients: Sequence[GradientRef]) -> None:
        last = self.operations[-1] if self.operations else None
        if (
            isinstance(last, Push)
            and last.optimizer == unit.optimizer
            and last.settings == unit.settings
            and not {one.variable for one in last.gradients} & {one.variable for one in gradients}
        ):
            together = (*last.gradients, *gradients)
            self.operations[-1] = Push(unit.optimizer, together, unit.settings)
        else:
            self.operations.append(Push(unit.optimizer, tuple(gradients), unit.settings))
