"""Values of variables in replies: whole, ranges of rows, or rows by id.

Knows the store and messages, but no socket. `session.py` calls it for reads, and for writes that ask for values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from torch import Tensor
from typing_extensions import override

from stratagem._ps.server.client_memory import ClientMemory
from stratagem._ps.server.store import VariableStore
from stratagem._wire import codec, messages
from stratagem._wire.codec import Outgoing
from stratagem._wire.frames import Buffer
from stratagem._wire.messages import Frame, TensorRef

REPLY_LIMIT_BYTES: Final = 1 << 28
"""Largest reply; clients ask for larger values in pieces."""


@final
class ValueReplies:
    """Replies with values of one session's variables."""

    def __init__(self, store: VariableStore) -> None:
        self.store = store
        self._whole_values: dict[int, tuple[Tensor, str, tuple[int, ...], Buffer]] = {}

    def forget(self, variable: int) -> None:
        """Forget the memory of a deleted variable."""
        self._whole_values.pop(variable, None)

    def clear(self) -> None:
        """Forget all memory."""
        self._whole_values.clear()

    def values(
        self, items: Sequence[messages.ReadItem], frame: Frame, memory: ClientMemory
    ) -> tuple[messages.Values, Sequence[Buffer]]:
        """Return what a client asks for: values that it does not have, and versions."""
        outgoing = Outgoing()
        found = []
        versions = []
        size = 0
        for item in items:
            stored = self.store.find(item.variable)
            value = stored.tensor
            versions.append(stored.version)
            if item.known >= 0 and item.known == stored.version:
                found.append(TensorRef(codec.dtype_name(value.dtype), tuple(value.shape)))
                continue
            if item.ids is not None:
                ids = memory.tensor(item.ids, frame)
                _check_reply(size + ids.numel() * (value[:1].nbytes if value.dim() else 1))
                value = self.store.read_rows(item.variable, ids)
                if item.dtype and value.is_floating_point():
                    value = value.to(codec.dtype_from(item.dtype))
            elif item.count >= 0 and value.dim():
                end = item.start + item.count
                if item.start < 0 or end > value.shape[0]:
                    raise ValueError(
                        f"rows {item.start!r} to {end!r} of variable {item.variable!r} do not "
                        f"exist: it has {value.shape[0]} rows"
                    )
                value = value[item.start : end]
            size += value.nbytes
            _check_reply(size)
            whole = item.ids is None and item.count < 0
            found.append(
                self._whole(item.variable, value, outgoing) if whole else outgoing.add(value)
            )
        return messages.Values(tuple(found), tuple(versions)), outgoing.buffers

    def _whole(self, variable: int, value: Tensor, outgoing: Outgoing) -> TensorRef:
        """Put the value of a variable beside the reply; its memory is looked up once."""
        known = self._whole_values.get(variable)
        if known is None or known[0] is not value:
            dtype, shape = codec.dtype_name(value.dtype), tuple(value.shape)
            known = self._whole_values[variable] = (value, dtype, shape, codec.bytes_of(value))
        _, dtype, shape, memory = known
        return TensorRef(dtype, shape, outgoing.add_bytes(memory))

    @override
    def __repr__(self) -> str:
        return f"<ValueReplies, memory of {len(self._whole_values)} variables known>"


def _check_reply(size: int) -> None:
    if size > REPLY_LIMIT_BYTES:
        raise ValueError(
            f"a read of {size} bytes at once, expected at most {REPLY_LIMIT_BYTES}: ask for fewer "
            f"rows or variables at a time"
        )
