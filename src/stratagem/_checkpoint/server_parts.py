"""Save the rows of a checkpoint that are on parameter servers: each server writes its own file.

The coordinator only knows which rows are where. A save begins with a cut on all servers (`ServerCut`); each server
then writes its own file, and the coordinator writes the manifest when all have reported. For restoring, see
`server_reads.py`.

Servers that may not use the directory, or do not see it, cannot do that: then the rows pass through the coordinator.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

import torch
from typing_extensions import override

from stratagem._checkpoint.checkpoint_writer import FileReport
from stratagem._checkpoint.delta_base import DeltaBase
from stratagem._checkpoint.directory import PROBE, SavedCheckpoint, chain_of
from stratagem._checkpoint.server_group import (
    LOSSES,
    Piece,
    RemoteTensor,
    ServerGroup,
    pieces_of,
    say_once,
    strategies_of,
)
from stratagem._owner import Owner
from stratagem._ps.blocks.block_file import Progress, TensorPart
from stratagem._ps.blocks.manifest import StoredFile, StoredTensor
from stratagem._ps.client.transfers import Urgent
from stratagem._ps.placement import Description
from stratagem._ps.recovery_point import RecoveryPoint
from stratagem._wire import messages
from stratagem._wire.codec import dtype_from
from stratagem._wire.messages import PartRef, StateRecord
from stratagem.errors import CheckpointError

_log = logging.getLogger("stratagem.checkpoint")

_ID_BYTES: Final = 8
"""Of the number of a changed row."""


@final
class ServerCut(Owner):
    """The rows on the servers of one strategy at one moment, to be written by the servers.

    Args:
        group: the servers, prepared.
        variables: numbers of the variables, by server.
        directory: directory of the checkpoints.
        probe: a file in it.
        deltas: the checkpoint that a delta may be built on.
    """

    takes_all: Final = False

    def __init__(
        self,
        group: ServerGroup,
        variables: Mapping[int, Sequence[int]],
        directory: Path,
        probe: str,
        deltas: DeltaBase | None = None,
    ) -> None:
        self.group = group
        more: dict[str, Any] = {}
        if deltas is not None:
            bases = {one: deltas.cut_of(group.variables, one) for one in group.connections}
            more = {"track": dict.fromkeys(bases, True), "base": bases}
        self._made, self.refused = group.make_cut(directory, probe, variables, **more)
        self._items: dict[tuple[int, int], list[StateRecord]] = {}
        for made in self._made.values():
            for item in made.items:
                self._items.setdefault((item.optimizer, item.variable), []).append(item)
        self._cut_at = time.monotonic()
        self.zeros: list[tuple[RemoteTensor, int, int]] = []

    def optimizer_state(self, where: Description, optimizer: int) -> dict[str, Any]:
        """Return the state of a variable: tensors on servers, and plain values."""
        by_shard = [
            {item.key: item for item in self._items.get((optimizer, shard.number), ())}
            for shard in where.shards
        ]
        keys = dict.fromkeys(key for items in by_shard for key in items)
        return {key: self._state(where, optimizer, key, by_shard) for key in keys}

    def _state(
        self,
        where: Description,
        optimizer: int,
        key: str,
        by_shard: Sequence[Mapping[str, StateRecord]],
    ) -> Any:
        rows, first = next(
            (shard.rows, items[key])
            for shard, items in zip(where.shards, by_shard, strict=True)
            if key in items
        )
        if not first.dtype:
            values = [items[key].value for items in by_shard if key in items]
            numbers = [one for one in values if type(one) in (int, float)]
            return max(numbers) if numbers else first.value  # type: ignore[type-var]
        has = [key in items for items in by_shard]
        pieces = list(pieces_of(where, optimizer, key))
        of_rows = bool(where.shape) and first.shape[:1] == (rows,)
        present = tuple(one for one, here in zip(pieces, has, strict=True) if here)
        dtype = dtype_from(first.dtype)
        if where.is_sharded and of_rows:
            shape = (*where.shape[:1], *first.shape[1:])
            made = RemoteTensor(
                self.group,
                dtype,
                shape,
                present,
                has_rows_of_variable=True,
                has_holes=self._is_dynamic(pieces[0]),
            )
        elif where.is_sharded:
            made = RemoteTensor(self.group, dtype, (), present, per_shard=True)
        else:
            rows = first.shape[0] if first.shape else 1
            whole = Piece(pieces[0].server, pieces[0].variable, 0, rows, optimizer, key)
            return RemoteTensor(
                self.group,
                dtype,
                first.shape,
                (whole,),
                has_rows_of_variable=of_rows,
                has_holes=of_rows and self._is_dynamic(whole),
            )
        for one, here in zip(pieces, has, strict=True):
            # No gradient has reached this shard yet: its state would be zeros.
            if not here and not made.has_holes:
                self.zeros.append((made, one.start, one.rows))
        return made

    def _is_dynamic(self, piece: Piece) -> bool:
        return piece.variable in self._made[piece.server].used

    def local_parts(self, remote: Mapping[str, RemoteTensor]) -> list[TensorPart]:
        """Return rows that no server has: state of shards without any."""
        name_of = {id(tensor): name for name, tensor in remote.items()}
        return [
            _zeros(name_of[id(tensor)], tensor, start, rows)
            for tensor, start, rows in self.zeros
            if id(tensor) in name_of
        ]

    @property
    def numbers(self) -> dict[int, int]:
        """Numbers of the cut on each server."""
        return {server: made.cut for server, made in self._made.items()}

    def writers(
        self,
        remote: Mapping[str, RemoteTensor],
        urgent: Urgent,
        *,
        changed_only: bool = False,
    ) -> list[ServerWriter]:
        """Return one writer for every server that has rows of these tensors.

        Args:
            remote: the tensors.
            urgent: whether a caller waits for the save.
            changed_only: leave out rows that were not changed.
        """
        own = {name: one for name, one in remote.items() if one.servers is self.group}
        first: dict[Any, str] = {}
        aliases = {}
        for name, tensor in own.items():
            other = first.setdefault(tensor.pieces, name)
            if other != name:
                aliases[name] = other
        writers = []
        for server, made in self._made.items():
            parts = [
                part
                for name, tensor in own.items()
                if name not in aliases
                for part in tensor.parts_on(server, name)
            ]
            if changed_only:
                parts = [_only_changed(part, made, own[part.tensor]) for part in parts]
            if parts:
                writer = ServerWriter(self.group, server, made, parts, own, aliases, urgent)
                writers.append(writer)
        return writers

    def recovery_point(
        self, saved: SavedCheckpoint, remote: Mapping[str, RemoteTensor]
    ) -> RecoveryPoint:
        """Return the orders by which a lost server is restored from the checkpoint of this cut."""
        chain = tuple(
            (str(path.resolve()), manifest.identity) for path, manifest in chain_of(saved)
        )
        orders = {}
        for server in self._made:
            parts = [
                part
                for name, tensor in remote.items()
                if tensor.servers is self.group
                for part in tensor.parts_on(server, name)
            ]
            orders[server] = messages.ReadParts(
                chain=chain, parts=tuple(parts), state=self._made[server].items
            )
        facts = {server: made.facts for server, made in self._made.items()}
        return RecoveryPoint(saved.step, str(saved.path), self._cut_at, orders, facts)

    @override
    def close(self) -> None:
        """End the cut on all servers. May be called again."""
        for server, connection in list(self.group.connections.items()):
            try:
                connection.request(messages.EndCut(cut=self._made[server].cut))
            except LOSSES as error:
                _log.debug("%s did not end its cut: %s", connection.task, error)
                self.group.lost(error)
        self.group.close()


def _only_changed(part: PartRef, made: messages.CutMade, tensor: RemoteTensor) -> PartRef:
    """Return a part restricted to changed rows, if it consists of rows of a variable and few were changed."""
    of_rows = not part.per_shard and bool(tensor.shape)
    if of_rows and (not part.key or tensor.has_rows_of_variable) and part.variable in made.changed:
        return part.of_changed_rows()
    return part


def _zeros(name: str, tensor: RemoteTensor, start: int, rows: int) -> TensorPart:
    shape = tensor.shape[1:]
    return TensorPart(
        tensor=name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        start=start,
        rows=rows,
        read=lambda first, last: torch.zeros((last - first, *shape), dtype=tensor.dtype),
        per_shard=tensor.per_shard,
    )


@final
class ServerWriter:
    """Writer of the rows that one server has (a `PartWriter`)."""

    def __init__(
        self,
        group: ServerGroup,
        server: int,
        made: messages.CutMade,
        parts: Sequence[PartRef],
        tensors: Mapping[str, RemoteTensor],
        aliases: Mapping[str, str],
        urgent: Urgent,
    ) -> None:
        self._group = group
        self._urgent = urgent
        self._server = server
        self._made = made
        self._made_at = time.time()
        self._parts = tuple(parts)
        self._tensors = {name: _described(tensors[name]) for name in {one.tensor for one in parts}}
        for name, other in aliases.items():
            twin = _described(tensors[other])
            self._tensors[name] = StoredTensor(twin.dtype, twin.shape, same_as=other)

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors it has rows of."""
        return self._tensors

    @property
    def bytes(self) -> int:
        """About how much it will write."""
        total = 0
        for part in self._parts:
            size = self._tensors[part.tensor].row_bytes
            if part.changed_only:
                total += (size + _ID_BYTES) * self._made.changed[part.variable]
            elif part.variable in self._made.used:
                total += size * self._made.used[part.variable]
            else:
                total += size * (1 if part.per_shard else part.rows)
        return total

    def write(self, path: Path, progress: Progress | None) -> FileReport:
        """Have the server write a block file and flush it to disk."""
        connection = self._group.connections[self._server]
        try:
            order = messages.WriteCut(
                cut=self._made.cut, path=str(path.resolve()), parts=self._parts
            )
            connection.request(order)
            report = self._group.follow(self._server, progress, self._urgent)
        except LOSSES as error:
            raise self._group.lost(error, f"{connection.task} did not write its rows") from error
        size = path.stat().st_size
        if size != report.size:
            raise CheckpointError(
                f"{connection.task} wrote {report.size} bytes to {path}, but {size} are here: the "
                "directory is not the same file system on both machines."
            )
        job = self._group.variables.job
        facts = {
            **self._made.facts,
            "task": connection.task,
            "shard": self._server,
            "process": connection.server,
            "instance": "" if job is None else job.connection.instance,
            "cut_at": self._made_at,
        }
        return FileReport(
            StoredFile(report.size, report.crc32, facts),
            report.blocks,
        )


def _described(tensor: RemoteTensor) -> StoredTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StoredTensor(dtype, tensor.shape, per_shard=tensor.per_shard, has_holes=tensor.has_holes)


@contextmanager
def probe_in(directory: Path) -> Iterator[str]:
    """Make a file by which servers recognise a directory; remove it in the end.

    Raises:
        CheckpointError: that is not possible.
    """
    name = f"{PROBE}{secrets.token_hex(8)}"
    try:
        (directory / name).touch(exist_ok=False)
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be written: {error}. Checkpoints saved before are untouched. Repair the directory, "
            "or use another one."
        ) from error
    try:
        yield name
    finally:
        (directory / name).unlink(missing_ok=True)


def make_cuts(
    values: Sequence[Any],
    directory: Path,
    wanted: Callable[[ServerGroup], Sequence[RemoteTensor]],
    deltas: DeltaBase | None = None,
) -> list[ServerCut]:
    """Make a cut on the servers of all strategies that hold some of the objects.

    Args:
        values: the live objects of a checkpoint.
        directory: directory of the checkpoints.
        wanted: returns the tensors of a group's servers that are to be saved.
        deltas: the checkpoint that a delta may be built on.
    """
    directory = directory.resolve()
    cuts: list[ServerCut] = []
    for strategy in strategies_of(values):
        group = ServerGroup(strategy)
        try:
            with probe_in(directory) as probe:
                group.prepare()
                variables: dict[int, list[int]] = {}
                group.map_everything()
                for tensor in wanted(group):
                    for piece in tensor.pieces:
                        variables.setdefault(piece.server, []).append(piece.variable)
                cut = ServerCut(group, variables, directory, probe, deltas)
            if cut.refused:
                say_once(strategy, "saved", cut.refused)
                cut.close()
            else:
                cuts.append(cut)
        except BaseException:
            group.close()
            for cut in cuts:
                cut.close()
            raise
    return cuts
