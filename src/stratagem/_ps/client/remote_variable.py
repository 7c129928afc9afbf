"""`RemoteVariable`: one variable on parameter servers, undivided or in shards.

`RemoteVariable` combines a `Placement` with a `PsClient`: it divides ids and values among the shards and joins
rows again. It is the `RowSource` of tables and the storage of variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from stratagem import metrics
from stratagem._ps.client.mapping import MappedVariable, ShardLocation
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.remote_keys import RemoteKeys
from stratagem._ps.client.write_batch import WriteBatch
from stratagem._ps.partition import ShardLayout
from stratagem._ps.placement import Description, device_name
from stratagem._ps.row_kernels import TableShards, kernels
from stratagem._ps.rows import take_rows, touch_rows
from stratagem._ps.types import InitOp
from stratagem._wire import codec
from stratagem.errors import ConnectionLost

_read_time = metrics.timer("ps.read")


class _MappedLife(NamedTuple):
    life: object
    shards: tuple[MappedVariable, ...] | None


class RemoteVariable:
    """A variable whose rows are on parameter servers.

    Attributes:
        places: its shards.
        nbytes: bytes of all of them.
        seen: versions of the shards at the last read, by which staleness is measured.
        bindings: of a dynamic table, the initialisation of each shard; also of one that is restored.
        keys: of a dynamic table, the rows of keys.
    """

    def __init__(self, description: Description, client: PsClient) -> None:
        self.description = description
        self.name = description.name  # in errors and metrics; servers keep that of the description
        self.shape = description.shape
        self.dtype = description.dtype
        self.layout: ShardLayout = description.layout
        self.places = tuple(
            ShardLocation(
                shard.server,
                shard.number,
                (shard.rows, *description.shape[1:]) if description.shape else (),
                description.dtype,
            )
            for shard in description.shards
        )
        self.nbytes = sum(place.nbytes for place in self.places)
        self._connections = client
        self._is_released = False
        self.seen: tuple[int, ...] = (0,) * len(self.places)
        self.bindings: list[list[InitOp]] = []
        self.keys = RemoteKeys(self.places, self.layout, client)
        self._life = object()  # replaced with every server
        self._mapping: _MappedLife | None = None
        self._addresses: tuple[tuple[MappedVariable, ...], TableShards] | None = None
        self._assembled: Tensor | None = None
        self._assembled_from: tuple[int, ...] = ()
        self.rename(description.name)

    def rename(self, name: str) -> None:
        """Use another name in errors and metrics of this process."""
        self.name = name
        shown = replace(self.description, name=name)
        for place, part in zip(self.places, shown.shard_names(), strict=True):
            self._connections.name_variables(place.server, {place.variable: part})

    @property
    def device(self) -> str:
        """Device name of the first shard."""
        return device_name(self._connections.tasks[self.places[0].server])

    @property
    def is_released(self) -> bool:
        """True if the session has ended."""
        return self._is_released

    @property
    def client(self) -> PsClient:
        """The connections to the servers."""
        return self._connections

    @property
    def _client(self) -> PsClient:
        if self._is_released:
            raise ConnectionLost(
                f"variable {self.name!r} is gone: parameter servers freed it when its strategy or "
                "coordinator was closed. Read what you need before closing (variable.numpy(), "
                "model.state_dict()) or save it (sg.Checkpoint), and create it again under a new strategy."
            )
        return self._connections

    @property
    def mapped(self) -> tuple[MappedVariable, ...] | None:
        """The shards in shared memory; None if any of them cannot be mapped."""
        known = self._mapping
        if known is None or known.life is not self._life:
            # Another thread may replace a server meanwhile; what was mapped then is not used again.
            life = self._life
            found = self._client.map(self.places)
            shared = tuple(one for one in found if one is not None)
            known = _MappedLife(life, shared if len(shared) == len(found) else None)
            self._mapping = known
        return known.shards

    def _shards(self, mapped: tuple[MappedVariable, ...]) -> TableShards:
        if self._addresses is None or self._addresses[0] is not mapped:
            tensors = [one.tensor for one in mapped]
            self._addresses = mapped, TableShards(tensors, self.layout.offsets)
        return self._addresses[1]

    def _let_go(self) -> None:
        """Let go of the servers' memory."""
        self._life = object()
        self._mapping = self._addresses = None
        self._assembled = None

    def forget_seen(self) -> None:
        """Forget the versions that were read: the next comparison of versions differs."""
        self.seen = (-1,) * len(self.places)

    def forget_memory(self) -> None:
        """Let go of the memory of a server that was replaced; the next read asks the new one."""
        self._let_go()
        self.keys.forget()
        self.forget_seen()

    def release(self) -> None:
        """Release the servers' memory at the end of the session."""
        self._is_released = True
        self._let_go()

    # -------------------------------------------------------------- reading

    def versions(self) -> tuple[int, ...]:
        """Return the shards' versions now; a memory read on the same host, else a request per server."""
        mapped = self.mapped
        if mapped is not None:
            return (mapped[0].version,) if len(mapped) == 1 else tuple(m.version for m in mapped)
        return tuple(
            self._client.versions(place.server, (place.variable,))[place.variable]
            for place in self.places
        )

    def read(self) -> Tensor:
        """Return a copy of all rows, each shard consistent in itself."""
        found = self._client.read(self.places)
        self.seen = tuple(version for _, version in found)
        if len(found) == 1:
            return found[0][0]
        return torch.cat([value for value, _ in found])

    def whole(self) -> Tensor:
        """Return all rows, current; on the same host an undivided variable is not copied.

        The caller must not write to them. The next call may use the memory again.
        """
        while True:
            if self.mapped is not None:
                self._client.wait_for_writes()
            mapped = self.mapped  # a shard may have moved meanwhile
            if mapped is not None and len(mapped) == 1:
                mapped[0].undo_writes()
                self.seen = (mapped[0].version,)
                return mapped[0].tensor
            life = self._life
            found = self._put_together(mapped) if mapped is not None else self._received()
            if self._life is life:
                self._assembled = found
                self.seen = self._assembled_from
                return found
            # A server was replaced meanwhile, and its values and versions are outdated.

    def undo_writes(self) -> None:
        """Drop what this process wrote to the memory that `whole` returned."""
        self._assembled = None
        for one in self.mapped or ():
            one.undo_writes()

    def _put_together(self, mapped: tuple[MappedVariable, ...]) -> Tensor:
        """Return the mapped shards in one tensor, whose memory is used again.

        Through `.data`: writes of other workers between two uses of the table are no mistake of the function that
        autograd should report.
        """
        room = self._assembled
        if room is None:
            room, self._assembled_from = torch.empty(self.shape, dtype=self.dtype), ()
        versions = tuple(one.version for one in mapped)
        if versions != self._assembled_from:
            torch.cat([one.tensor for one in mapped], out=room.data)
            self._assembled_from = versions
        return room

    def _received(self) -> Tensor:
        """Return the rows, of which shards that have changed are read over the connections."""
        room = self._assembled
        known = (-1,) * len(self.places) if room is None else self._assembled_from
        newer = self._client.read_newer(list(zip(self.places, known, strict=True)))
        found = [newer[place.server, place.variable] for place in self.places]
        if len(found) == 1 and found[0][0] is not None and len(found[0][0]):
            # The memory that it was received into, without a copy. Tensors over the memory before keep theirs.
            room = torch.frombuffer(found[0][0], dtype=self.dtype).view(self.shape)
        else:
            if room is None:
                room = torch.empty(self.shape, dtype=self.dtype)
            for (value, _), part in zip(found, self.cut(room.data), strict=True):
                if value is not None and len(value):
                    codec.bytes_of(part)[:] = value
        self._assembled_from = tuple(version for _, version in found)
        return room

    def rows(self, ids: Tensor) -> Tensor:
        """Return a new tensor with these rows; `ids` are sorted, unique and in range."""
        taken = self.rows_as_asked(ids)
        if taken is not None:
            return taken
        cuts = self.layout.cut_sorted(ids)
        wanted = [
            (place, ids[begin:end] - offset if offset else ids[begin:end])
            for place, offset, (begin, end) in zip(
                self.places, self.layout.offsets, cuts, strict=True
            )
            if end > begin
        ]
        if not wanted:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        with _read_time.measure():
            found = self._client.read_rows(wanted)
        newest = {
            place.variable: version for (place, _), (_, version) in zip(wanted, found, strict=True)
        }
        self.seen = tuple(
            newest.get(place.variable, before)
            for place, before in zip(self.places, self.seen, strict=True)
        )
        return found[0][0] if len(found) == 1 else torch.cat([rows for rows, _ in found])

    def rows_as_asked(self, ids: Tensor) -> Tensor | None:
        """Return a new tensor with these rows, in any order and repeated; None without shared memory.

        `ids` are in range.
        """
        is_shared, client = self.mapped is not None, self._client
        if not is_shared or not ids.numel():
            return None
        with _read_time.measure(), client.lock:
            if not client.outbox.is_idle:
                client.wait_for_writes()
            mapped = self.mapped  # a shard may have moved meanwhile
            if mapped is None:
                return None
            self.seen = tuple([one.version for one in mapped])
            if len(mapped) == 1:
                return take_rows(mapped[0].tensor, ids)
            for one, offset in zip(mapped, self.layout.offsets, strict=True):
                touch_rows(one.tensor, ids, offset)
            if kernels is not None:
                return kernels.take(self._shards(mapped), ids)
            rows = torch.empty((ids.numel(), *self.shape[1:]), dtype=self.dtype)
            for one, offset, size in zip(
                mapped, self.layout.offsets, self.layout.sizes, strict=True
            ):
                places = ((ids >= offset) & (ids < offset + size)).nonzero().flatten()
                rows[places] = one.tensor[ids[places] - offset]
            return rows

    # -------------------------------------------------------------- writing

    def wanted(
        self, recipes: Sequence[Sequence[InitOp]] | None = None
    ) -> list[tuple[ShardLocation, str, Sequence[InitOp]]]:
        """Return the arguments of `PsClient.create_all`: the shards, each with its recipe."""
        names = self.description.shard_names()
        return list(zip(self.places, names, recipes or [()] * len(self.places), strict=True))

    def put(self, value: Tensor) -> None:
        """Overwrite all rows, large shards in pieces; returns when it is done.

        `seen` then has the versions of this value. Versions asked for later could belong to other writes.
        """
        self.seen = tuple(
            self._client.assign(place, part.detach())
            for place, part in zip(self.places, self.cut(value), strict=True)
        )

    def cut(self, value: Tensor) -> Sequence[Tensor]:
        """Return a value of the variable's shape, divided among the shards."""
        if len(self.places) == 1:
            return (value,)
        return torch.split_with_sizes(value, self.layout.sizes)

    def assign(self, operation: str, value: Tensor) -> None:
        """``set``, ``add`` or ``sub`` all rows; in a scheduled function waited for only if it is large."""
        with self._client.lock:
            batch = self._client.batch()
            self.add_assign(batch, operation, value)
            self._send(batch)

    def add_assign(self, batch: WriteBatch, operation: str, value: Tensor) -> None:
        """Add an assignment of all rows to a batch."""
        for place, part in zip(self.places, self.cut(value), strict=True):
            batch.assign(place.server, place.variable, operation, part)

    def scatter(self, operation: str, ids: Tensor, values: Tensor) -> None:
        """Combine rows (``add sub mul div min max update``), duplicates and all."""
        with self._client.lock:
            batch = self._client.batch()
            self._add_scatter(batch, operation, ids, values)
            if not batch.is_empty:
                self._send(batch)

    def _send(self, batch: WriteBatch) -> None:
        self._client.send(batch)
        if not self._client.outbox.is_deferring:
            self._client.wait_for_writes()

    def _add_scatter(self, batch: WriteBatch, operation: str, ids: Tensor, values: Tensor) -> None:
        if len(self.places) == 1:
            batch.scatter(self.places[0].server, self.places[0].variable, operation, ids, values)
        else:
            ids, order = ids.sort(stable=True)
            values = values.index_select(0, order)
            cuts = self.layout.cut_sorted(ids)
            for place, offset, (begin, end) in zip(
                self.places, self.layout.offsets, cuts, strict=True
            ):
                if end > begin:
                    batch.scatter(
                        place.server,
                        place.variable,
                        operation,
                        ids[begin:end] - offset,
                        values[begin:end],
                    )

    def update_rows(self, ids: Tensor, values: Tensor) -> None:
        self.scatter("update", ids, values)

    @override
    def __repr__(self) -> str:
        where = ", ".join(f"ps:{shard.server}" for shard in self.description.shards[:4])
        return f"<RemoteVariable {self.name!r} {self.shape} on {where}>"
