"""Convert the state of a shard to messages for its backup, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
import torch

from stratagem._core.key_index import IndexRecord
from stratagem._ps.server.session import Session
from stratagem._ps.server.store_state import Block, exported
from stratagem._wire import codec, messages
from stratagem._wire.codec import Outgoing
from stratagem._wire.frames import Buffer
from stratagem._wire.messages import Frame, Message
from stratagem.errors import ProtocolError

BLOCK_BYTES: Final = 1 << 22
"""Rows in one message: small enough for the processor's caches."""

_OF_KEYS: Final = ("free", "given", "seen_keys", "seen")
"""Arrays of an `IndexRecord`."""

Sent: TypeAlias = tuple[Message, Sequence[Buffer]]


def state_messages(session: Session) -> Iterator[Sent]:
    """Yield the messages that give a backup the state of a session, which must not change meanwhile."""
    store = session.store
    yield messages.ReplicaState(store.describe(), session.deleted.ranges), ()
    for block in exported(store, BLOCK_BYTES):
        outgoing = Outgoing()
        rows = outgoing.add(block.rows)
        message: Message = messages.ReplicaRows(
            block.variable, block.start, rows, block.optimizer, block.key
        )
        yield message, outgoing.buffers
    for variable, record in store.keyed.records():
        for name in _OF_KEYS:
            for piece in torch.from_numpy(getattr(record, name)).split(BLOCK_BYTES // 8):
                outgoing = Outgoing()
                message = messages.ReplicaKeys(variable, name, outgoing.add(piece))
                yield message, outgoing.buffers
        yield messages.ReplicaKeys(variable, clock=record.clock), ()
    yield messages.ReplicaReady(), ()


def begin_state(session: Session, message: messages.ReplicaState) -> None:
    """Create everything in an empty backup; its rows follow."""
    session.deleted.merge(message.deleted)
    session.restore(message.manifest)


def write_state_rows(session: Session, message: messages.ReplicaRows, frame: Frame) -> None:
    """Write rows of a backup's state."""
    rows = codec.tensor_from(message.rows, frame)
    block = Block(message.variable, message.start, rows, message.optimizer, message.key)
    session.store.write_block(block)


def write_state_keys(session: Session, message: messages.ReplicaKeys, frame: Frame) -> None:
    """Keep a piece of a dynamic table's record; with the last one, restore the table."""
    pieces = session.key_pieces.setdefault(message.variable, {})
    if message.values is not None:
        if message.name not in _OF_KEYS:
            raise ProtocolError(f"{message.name!r} is no array of a dynamic table's record")
        # A copy: the frame's memory is used again.
        piece = codec.tensor_from(message.values, frame).numpy().copy()
        pieces.setdefault(message.name, []).append(piece)
        return
    arrays = {name: np.concatenate(some) for name, some in pieces.items()}
    del session.key_pieces[message.variable]
    session.store.keyed.restore(message.variable, IndexRecord(message.clock, **arrays))
