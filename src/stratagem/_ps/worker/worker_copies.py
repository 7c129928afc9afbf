"""Copies of variables on a worker, and their updates.

Parameters on other hosts, parameters in shards, and buffers are copies. One request per server asks for all of them, and the
server sends only values that have changed. An optimizer's step asks in the same message as its write.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Final, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.client.value_reads import Newer, newer_items
from stratagem._ps.types import TRANSFER_BYTES
from stratagem._wire import codec
from stratagem._wire.messages import ReadItem
from stratagem.errors import NotFoundError

FRESH_S: Final = 0.005
"""How old copies may be that a closure uses without asking the servers; as long as a few steps of a small model."""


class LocalValue:
    """A variable's value in this process: the memory of a parameter or buffer that functions see.

    Attributes:
        remote: the variable on the servers.
        data: a tensor over the memory.
        parts: the bytes of each shard, where its new value may be received; None before the first one.
    """

    __slots__ = ("_ordered", "data", "parts", "remote")

    def __init__(self, remote: RemoteVariable, data: Tensor) -> None:
        self.remote = remote
        self.replace_memory(data)

    def replace_memory(self, data: Tensor) -> None:
        """Use other memory."""
        self.data = data
        self.parts: list[memoryview] | None = None

    @property
    def is_refreshable(self) -> bool:
        """True if `take` may replace the value now."""
        return True

    def note(self) -> None:
        """Note that the value is the servers'."""

    def take(self, values: Sequence[memoryview | None]) -> None:
        """Take over the bytes of new values, one for each shard that has changed.

        This counts no version: a layer may have saved the tensor for its backward pass, and new values of other workers are no mistake of
        the function.
        """
        if self.parts is None:  # servers keep the dimensions in order
            data = self.data
            self._ordered = (
                data if data.is_contiguous() else torch.empty(data.shape, dtype=data.dtype)
            )
            self.parts = [codec.bytes_of(one) for one in self.remote.cut(self._ordered)]
        for target, value in zip(self.parts, values, strict=True):
            if value is not None and value is not target:  # else it was received there
                target[:] = value
        if self._ordered is not self.data:
            self.data.data.copy_(self._ordered)
        self.note()


@final
class WorkerCopies:
    """All copies of one worker."""

    def __init__(self, client: PsClient) -> None:
        self._client = client
        self._copies: list[LocalValue] = []
        self._by_place: dict[tuple[int, int], tuple[LocalValue, int]] = {}  # with the shard
        self.is_receiving = False
        """True if copies may hold parts of new values, until `refresh` has all of them."""
        self._asked_at = -math.inf  # no later than the last read of all copies
        self._received_at = -math.inf
        self._sent = 0  # writes sent before it

    def __bool__(self) -> bool:
        return bool(self._copies)

    def add(self, copy: LocalValue) -> None:
        """Keep a copy up to date from now on."""
        self._copies.append(copy)  # its value has just been read
        for shard, place in enumerate(copy.remote.places):
            self._by_place[place.server, place.variable] = copy, shard

    def remove(self, copy: LocalValue) -> None:
        self._copies = [one for one in self._copies if one is not copy]
        for place in copy.remote.places:
            self._by_place.pop((place.server, place.variable), None)

    def clear(self) -> None:
        self._copies.clear()
        self._by_place.clear()

    def are_fresh(self, arrived: float) -> bool:
        """Return whether the last refresh serves a closure that arrived at this time.

        The refresh was later, so it has all writes that had finished when the closure was scheduled. Writes of this worker and
        values that a function changed are reasons to read again, and so is age: other workers go on.
        """
        return (
            arrived <= self._asked_at
            and time.perf_counter() - self._received_at < FRESH_S
            and self._client.outbox.sent == self._sent
            and all(one.remote.seen[0] >= 0 for one in self._copies)
        )

    def refresh(
        self,
        known: Mapping[tuple[int, int], Newer] | None = None,
        asked: float | None = None,
    ) -> None:
        """Update all copies.

        Args:
            known: values that came with the acknowledgement of a write.
            asked: when that write was sent (`time.perf_counter`).
        """
        asked = time.perf_counter() if asked is None else asked
        self._update(dict(known or {}))
        self.is_receiving = False
        self._asked_at, self._sent = asked, self._client.outbox.sent
        self._received_at = time.perf_counter()

    def _update(self, found: dict[tuple[int, int], Newer]) -> None:
        """Take over known values, and ask for the others; shared memory is read."""
        copies = [(one, one.remote.mapped) for one in self._copies if one.is_refreshable]
        missing = [one for one, mapped in copies if mapped is None and not _is_known(one, found)]
        try:
            if missing:
                found.update(self._client.read_newer(_places(missing)))
        except NotFoundError:
            found.update(self._client.read_newer(_places(self._without_deleted(missing))))
            copies = [pair for pair in copies if pair[0] in self._copies]
        for copy, mapped in copies:
            newer: Sequence[Newer] = (
                [found[place.server, place.variable] for place in copy.remote.places]
                if mapped is None
                else [(one.memory, one.version) for one in mapped]
            )
            versions = tuple([version for _, version in newer])
            if versions != copy.remote.seen:
                copy.remote.seen = versions
                copy.take([value for value, _ in newer])

    def reads(self) -> dict[int, list[ReadItem]]:
        """Return what to read, by server, together with a write; without very large values."""
        wanted: list[tuple[ShardLocation, int]] = []
        size = 0
        for copy in self._copies:
            if copy.remote.mapped is None and copy.is_refreshable:
                size += copy.remote.nbytes
                if size > TRANSFER_BYTES:
                    break
                wanted += zip(copy.remote.places, copy.remote.seen, strict=True)
        return newer_items(wanted)

    def place(self, server: int, variable: int) -> memoryview | None:
        """Return where the new value of a variable is received; None: `refresh` copies it.

        Until `refresh` has got the whole value, the copy counts as one that has no value of any version.
        """
        copy, shard = self._by_place.get((server, variable), (None, 0))
        if copy is None or copy.parts is None or not copy.is_refreshable:
            return None
        copy.remote.forget_seen()
        self.is_receiving = True
        return copy.parts[shard]

    def _without_deleted(self, copies: Sequence[LocalValue]) -> list[LocalValue]:
        """Forget the copies whose variables the coordinator has deleted; return the others.

        Raises:
            NotFoundError: the session is over.
        """
        kept = []
        for copy in copies:
            try:
                copy.remote.versions()
                kept.append(copy)
            except NotFoundError:
                self._client.versions(copy.remote.places[0].server)  # raises if the session is over
                self.remove(copy)
        return kept

    @override
    def __repr__(self) -> str:
        return f"<WorkerCopies {len(self._copies)} copies>"


def _places(copies: Sequence[LocalValue]) -> list[tuple[ShardLocation, int]]:
    return [
        pair for copy in copies for pair in zip(copy.remote.places, copy.remote.seen, strict=True)
    ]


def _is_known(copy: LocalValue, found: Mapping[tuple[int, int], Newer]) -> bool:
    """Return whether the answers hold the copy's newest value, or the copy has it."""
    for place, seen in zip(copy.remote.places, copy.remote.seen, strict=True):
        newer = found.get((place.server, place.variable))
        if newer is None or (newer[0] is None and seen < 0):
            return False
    return True
