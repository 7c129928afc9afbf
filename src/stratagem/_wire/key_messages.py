"""Messages about the keys of dynamic tables."""

from __future__ import annotations

from stratagem._wire.message_base import Message, TensorRef


class ResolveKeys(Message, frozen=True):
    """Ask for the rows of keys of a dynamic table, each key once.

    `create`: count the lookup, and make rows for new keys. `counts`: how often each key was asked for.
    """

    variable: int
    keys: TensorRef
    counts: TensorRef | None = None
    create: bool = False


class ResolvedKeys(Message, frozen=True):
    """Answer to ResolveKeys: rows of the shard, -1 for keys without one; `clock` counts lookups."""

    rows: TensorRef
    clock: int


class ListKeys(Message, frozen=True):
    """Ask for `count` keys of a dynamic table from position `start`, in the order of rows."""

    variable: int
    start: int = 0
    count: int = 0


class ListedKeys(Message, frozen=True):
    """Answer to ListKeys; `total`: how many keys the shard has."""

    keys: TensorRef
    rows: TensorRef
    total: int
