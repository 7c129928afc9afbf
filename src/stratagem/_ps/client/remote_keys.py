"""Client-side lookup of the rows of a dynamic table's keys on parameter servers.

A key belongs to a bucket, and a shard holds consecutive buckets. All servers are asked at once. If rows stay with their keys, the
client remembers them, so that servers are asked about new keys only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

from stratagem._core.key_index import KeyRule
from stratagem._core.key_map import Ints, KeyMap
from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.partition import ShardLayout
from stratagem._wire import codec, messages
from stratagem._wire.codec import Outgoing

REMEMBERED: Final = 1 << 22
"""Keys that a client remembers, in about 130 MB; beyond that it begins again."""

_PAGE: Final = 1 << 16


@final
class RemoteKeys:
    """Keys of one table."""

    def __init__(
        self, places: Sequence[ShardLocation], layout: ShardLayout, client: PsClient
    ) -> None:
        self._places = places
        self._layout = layout
        self._client = client
        self._known = KeyMap()
        self._epoch = 0
        self.clocks: dict[int, int] = {}
        """Of each shard since the last step: the table's clock at the first lookup."""

    def forget(self) -> None:
        """Forget all rows: a server was replaced."""
        self._known = KeyMap()
        self.clocks.clear()

    def rows(self, rule: KeyRule, keys: Ints, *, create: bool, epoch: int = 0) -> Ints:
        """Return the row of each key, -1 for keys without one; with `create` servers make rows for new keys.

        Discard rows that were cached in an earlier epoch, because the table was restored since.
        """
        with self._client.lock:
            if epoch != self._epoch:
                self.forget()
                self._epoch = epoch
            if rule.tracks_use:
                unique, places, counts = np.unique(keys, return_inverse=True, return_counts=True)
                return self._ask(rule, unique, counts if create else None, create=create)[places]
            found = self._known.find(keys)
            new = np.flatnonzero(found < 0)
            if new.size:
                unique, places = np.unique(keys[new], return_inverse=True)
                rows = self._ask(rule, unique, None, create=create)
                found[new] = rows[places]
                if len(self._known) + unique.size > REMEMBERED:
                    self._known = KeyMap()
                has_row = rows >= 0
                self._known.insert(unique[has_row], rows[has_row])
            return found

    def take_clocks(self) -> dict[int, int]:
        """Return the clocks of the lookups since the last call, by shard."""
        found, self.clocks = self.clocks, {}
        return found

    def __len__(self) -> int:
        return sum(self._page(place, 0, 0)[2] for place in self._places)

    def pages(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and their rows, some at a time; rows ascend within one answer."""
        for place, offset in zip(self._places, self._layout.offsets, strict=True):
            start = 0
            while True:
                keys, rows, _ = self._page(place, start, _PAGE)
                if not len(keys):
                    break
                yield keys, rows + offset
                start += len(keys)

    def _page(self, place: ShardLocation, start: int, count: int) -> tuple[Tensor, Tensor, int]:
        message = messages.ListKeys(variable=place.variable, start=start, count=count)
        frame = self._client.ask(place.server, message)
        found = frame.message
        assert isinstance(found, messages.ListedKeys)
        keys, rows = (codec.tensor_from(one, frame) for one in (found.keys, found.rows))
        return keys, rows, found.total

    def _ask(self, rule: KeyRule, keys: Ints, counts: Ints | None, *, create: bool) -> Ints:
        starts = np.array(self._layout.offsets) // rule.bucket_rows
        shards = np.searchsorted(starts, rule.bucket_of(keys), side="right") - 1
        asked = []
        for index, place in enumerate(self._places):
            mine = np.flatnonzero(shards == index)
            if mine.size or (create and rule.tracks_use):  # every shard counts the lookup
                outgoing = Outgoing()
                ref = outgoing.add(torch.from_numpy(keys[mine]))
                often = None
                if counts is not None:
                    often = outgoing.add(torch.from_numpy(counts[mine].astype(np.int64)))
                message = messages.ResolveKeys(place.variable, ref, often, create)
                asked.append((index, mine, place.server, message, outgoing.buffers))
        replies = self._client.ask_each([one[2:] for one in asked])
        rows = np.full(keys.size, -1, np.int64)
        for (index, mine, *_), frame in zip(asked, replies, strict=True):
            found = frame.message
            assert isinstance(found, messages.ResolvedKeys)
            local = codec.tensor_from(found.rows, frame).numpy()
            rows[mine] = np.where(local < 0, -1, local + self._layout.offsets[index])
            if create and (rule.max_age or rule.evict):
                self.clocks.setdefault(index, found.clock)
        return rows
