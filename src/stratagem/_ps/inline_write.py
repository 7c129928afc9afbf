"""Writes that carry their values, for servers that cannot map the writer's shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stratagem._wire import messages
from stratagem._wire.frames import Buffer
from stratagem._wire.messages import Operation, TensorRef


def inline_write(
    message: messages.Write, buffers: Sequence[Buffer], bytes_at: Callable[[TensorRef], Buffer]
) -> tuple[messages.Write, list[Buffer]]:
    """Return a write and its buffers, with the tensors that were in shared memory added to the buffers.

    `bytes_at` returns the bytes of a tensor in shared memory.
    """
    inlined = list(buffers)

    def put(ref: TensorRef) -> TensorRef:
        if ref.segment == 0:
            return ref
        inlined.append(bytes_at(ref))
        return TensorRef(ref.dtype, ref.shape, len(inlined) - 1)

    def moved(one: Operation) -> Operation:
        if isinstance(one, messages.Push):
            gradients = tuple(
                messages.GradientRef(
                    gradient.variable,
                    put(gradient.values),
                    None if gradient.ids is None else put(gradient.ids),
                    gradient.sparse,
                    gradient.clock,
                )
                for gradient in one.gradients
            )
            joined = tuple(
                messages.JoinedRef(
                    each.variables, each.counts, put(each.values), put(each.ids), each.sparse
                )
                for each in one.joined
            )
            return messages.Push(one.optimizer, gradients, one.settings, joined, one.held)
        if isinstance(one, messages.Scatter):
            return messages.Scatter(one.variable, one.operation, put(one.ids), put(one.values))
        if isinstance(one, messages.Assign):
            return messages.Assign(one.variable, one.operation, put(one.value))
        return messages.AssignRows(one.variable, one.start, put(one.value))

    operations = [moved(one) for one in messages.decode_operations(message.operations)]
    encoded = messages.encode_operations(operations)
    return messages.Write(origin=message.origin, operations=encoded, read=message.read), inlined
