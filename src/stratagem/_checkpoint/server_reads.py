"""Restore rows on parameter servers: each server verifies the rows that it needs, then reads them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from stratagem._checkpoint.server_group import (
    LOSSES,
    RemoteTensor,
    ServerGroup,
    frozen,
    layout_of,
    pieces_of,
    say_once,
    strategies_of,
)
from stratagem._owner import Owner
from stratagem._ps.blocks.manifest import NAME, Manifest, StoredTensor
from stratagem._ps.client.transfers import follow, read_stall_s
from stratagem._ps.coordinator.coordinator_variables import CoordinatorVariables
from stratagem._ps.coordinator.kept_tensor import Kept
from stratagem._ps.placement import Description
from stratagem._ps.recovery_point import RecoveryPoint
from stratagem._wire import messages
from stratagem._wire.messages import PartRef, StateRecord
from stratagem.errors import CheckpointCorrupt, CheckpointError


@final
class ServerReads(Owner):
    """Tensors of a checkpoint that servers read by themselves."""

    takes_all: Final = False

    def __init__(self, values: Sequence[Any], path: Path) -> None:
        self._groups: list[ServerGroup] = []
        self._wanted: list[tuple[RemoteTensor, str]] = []
        self._states: list[_StateWanted] = []
        self._replaced: list[Kept] = []  # local values
        self._is_all_new = False  # nothing was written where the servers read into
        self.points: list[tuple[CoordinatorVariables, RecoveryPoint]] = []
        try:
            for strategy in strategies_of(values):
                group = ServerGroup(strategy)
                self._groups.append(group)
                group.prepare(restoring=True)
                _, refused = group.make_cut(path.resolve(), NAME, {})
                if refused:
                    say_once(strategy, "restored", refused)
                    self._groups.remove(group)
                    group.close()
        except BaseException:
            self.close()
            raise

    def frozen(self) -> AbstractContextManager[None]:
        """Fetch nothing from the servers while state dicts are made."""
        return frozen(self._groups)

    def take(self, value: Any, name: str, stored: StoredTensor) -> bool:
        """Note that servers are to read a tensor into `value`; False if they cannot."""
        for group in self._groups:
            tensor = layout_of(group, value)
            if tensor is not None and (tensor.shape, tensor.dtype) == (
                stored.shape,
                stored.torch_dtype,
            ):
                self._wanted.append((tensor, name))
                kept = group.kept(value)
                if kept is not None:
                    self._replaced.append(kept)
                return True
        return False

    def take_state(
        self,
        optimizer: Optimizer,
        parameter: Tensor,
        name: str,
        state: Mapping[str, tuple[str, StoredTensor]],
        plain: Mapping[str, Any],
    ) -> set[str]:
        """Note that servers are to read the tensors of an optimizer's state of one parameter.

        Args:
            optimizer: the optimizer; `read` sets it up on the servers if it is not there yet.
            parameter: the parameter.
            name: its name in the checkpoint.
            state: key → name and description of the tensor in the checkpoint.
            plain: the values of the state that are no tensors.

        Returns:
            The name; nothing if servers cannot read it because the state does not fit the shards.
        """
        for group in self._groups:
            where = group.find(parameter)
            if where is None:
                continue
            fits = all(
                one.per_shard
                or not one.shape
                or one.shape[:1] == where.shape[:1]
                or not where.is_sharded
                for _, one in state.values()
            )
            if fits:
                self._states.append(_StateWanted(group, optimizer, where, state, plain))
                return {name}
        return set()

    @property
    def names(self) -> set[str]:
        """Names of the tensors that servers read."""
        found = {name for _, name in self._wanted}
        return found.union(*(one.names() for one in self._states))

    def verify(self, chain: Sequence[tuple[Path, Manifest]]) -> None:
        """Have every server check the rows it needs, unless nothing was written there: `read` checks them, too.

        Raises:
            CheckpointCorrupt: a file is missing or damaged.
        """
        self._is_all_new = not self._run(chain, verify=True)

    def read(self, chain: Sequence[tuple[Path, Manifest]]) -> None:
        """Have every server read its rows; `points` are set then.

        Raises:
            CheckpointCorrupt: a file is missing or damaged. Local values that were not sent yet will be.
        """
        local = [kept for kept in self._replaced if kept.is_changed()]
        for kept in self._replaced:
            kept.note_pushed()
        try:
            for one in self._states:
                if one.group.number_of(one.optimizer) is None:
                    one.group.optimizers.create(one.optimizer)
            self._run(chain, verify=False)
        except BaseException as error:
            for kept in local:
                kept.forget_pushed()
            if isinstance(error, CheckpointCorrupt):
                error.objects_changed = not self._is_all_new
            raise

    def points_of_job(
        self, chain: Sequence[tuple[Path, Manifest]], instance: str
    ) -> list[tuple[CoordinatorVariables, RecoveryPoint]]:
        """Return what lost servers of a live job can be restored from; nothing is read now.

        Args:
            chain: a checkpoint that this start of the job has made, or that it began with.
            instance: identity of this start of the job.
        """
        path, manifest = chain[0]
        found = []
        for group in self._groups:
            group.map_everything()
            facts: dict[int, Mapping[str, Any]] = {}
            created = manifest.created
            for saved in (file.facts for file in manifest.files.values()):
                if saved.get("instance") == instance:
                    server, created = saved["shard"], saved["cut_at"]
                    is_same = saved["process"] == group.connections[server].server
                    facts[server] = saved if is_same else {"ledger": saved["ledger"]}
            cut_at = time.monotonic() - max(0.0, time.time() - created)
            orders = self._orders(group, chain, verify=False)
            point = RecoveryPoint(manifest.step, str(path), cut_at, orders, facts)
            found.append((group.variables, point))
        return found

    def _orders(
        self, group: ServerGroup, chain: Sequence[tuple[Path, Manifest]], *, verify: bool
    ) -> dict[int, messages.ReadParts]:
        places = tuple((str(path.resolve()), manifest.identity) for path, manifest in chain)
        orders: dict[int, messages.ReadParts] = {}
        for server in group.connections:
            parts = [
                part
                for tensor, name in self._wanted
                if tensor.servers is group
                for part in tensor.parts_on(server, name)
            ]
            items: list[StateRecord] = []
            for one in self._states:
                if one.group is group:
                    more, made = one.on(server)
                    parts += more
                    items += made
            if parts or items:
                orders[server] = messages.ReadParts(
                    chain=places, parts=tuple(parts), state=tuple(items), verify=verify
                )
        return orders

    def _run(self, chain: Sequence[tuple[Path, Manifest]], *, verify: bool) -> int:
        """Have every server read or verify its rows; return how many bytes they have read."""
        moved = 0
        for group in self._groups:
            orders = self._orders(group, chain, verify=verify)
            failures: list[Exception] = []
            try:
                group.ask(orders)
                for server in orders:
                    try:
                        moved += follow(group.connections[server], stall_s=read_stall_s()).moved
                    except (
                        CheckpointError,
                        *LOSSES,
                    ) as error:  # the others end, too: none reads afterwards
                        failures.append(error)
                if failures:
                    with suppress(CheckpointError):  # of a server that is lost
                        group.ask(dict.fromkeys(orders, messages.AskTransfer(undo=True)))
                    raise failures[0]
                if not verify:
                    self.points.append((group.variables, _point(group, *chain[0], orders)))
            except LOSSES as error:
                raise group.lost(error, "a parameter server did not read its rows") from error
        return moved

    @override
    def close(self) -> None:
        """Let the next save or restore begin. May be called again."""
        for group in self._groups:
            group.close()


def _point(
    group: ServerGroup, path: Path, manifest: Manifest, orders: Mapping[int, messages.ReadParts]
) -> RecoveryPoint:
    """Return what lost servers can be restored from, now that all of them have read the checkpoint."""
    group.map_everything()
    variables = {
        server: [part.variable for part in order.parts] for server, order in orders.items()
    }
    made, _ = group.make_cut(path.resolve(), NAME, variables)
    group.ask({server: messages.EndCut(cut=one.cut) for server, one in made.items()})
    facts = {server: one.facts for server, one in made.items()}
    return RecoveryPoint(manifest.step, str(path), time.monotonic(), orders, facts)


@dataclass
class _StateWanted:
    """State of one parameter that servers are to read."""

    group: ServerGroup
    optimizer: Optimizer
    where: Description
    tensors: Mapping[str, tuple[str, StoredTensor]]
    plain: Mapping[str, Any]

    def names(self) -> set[str]:
        return {name for name, _ in self.tensors.values()}

    def on(self, server: int) -> tuple[list[PartRef], list[StateRecord]]:
        """Return the tensors to read on one server, and the state to make there."""
        number = self.group.number_of(self.optimizer) or 0
        parts, items = [], []
        for piece in pieces_of(self.where):
            if piece.server != server:
                continue
            for key, value in self.plain.items():
                items.append(StateRecord(number, piece.variable, key, value=value))
            for key, (name, stored) in self.tensors.items():
                per_shard = not stored.shape
                of_rows = self.where.is_sharded and not per_shard
                rows = stored.rows if not (of_rows or per_shard) else piece.rows
                shape = (piece.rows, *stored.shape[1:]) if of_rows else stored.shape
                start = piece.start if of_rows or per_shard else 0
                parts.append(
                    PartRef(name, stored.shape, start, rows, piece.variable, number, key, per_shard)
                )
                items.append(StateRecord(number, piece.variable, key, stored.dtype, shape))
        return parts, items
