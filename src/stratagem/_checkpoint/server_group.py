"""The parameter servers of a strategy: the location of rows, and connections for checkpoints.

A checkpoint uses separate connections, so that a save and training do not wait for each other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from stratagem import _faults as faults
from stratagem._checkpoint.encoding import StoredElsewhere
from stratagem._core.managed import find_managed
from stratagem._core.variables import Variable
from stratagem._owner import Owner
from stratagem._ps.blocks.block_file import Progress
from stratagem._ps.client.remote_storage import RemoteStorage
from stratagem._ps.client.server_connection import ServerConnection
from stratagem._ps.client.transfers import TransferTurn, Urgent, always, follow
from stratagem._ps.coordinator.coordinator_variables import CoordinatorParameter
from stratagem._ps.coordinator.kept_tensor import Kept
from stratagem._ps.placement import Description
from stratagem._ps.tables.sharded_variable import ShardedVariable
from stratagem._wire import messages
from stratagem._wire.messages import Message, PartRef
from stratagem.errors import CheckpointError, NotFoundError, ParameterServerLost, WireError

if TYPE_CHECKING:
    from stratagem._strategies.parameter_server import ParameterServerStrategy

_log = logging.getLogger("stratagem.checkpoint")

LOSSES: Final = (WireError, ParameterServerLost, NotFoundError)
"""Errors of a lost server; one that has restarted answers that it has no such session."""


@dataclass(frozen=True)
class Piece:
    """Rows of a tensor on one server."""

    server: int
    variable: int
    start: int
    rows: int
    optimizer: int = 0
    key: str = ""


@dataclass(frozen=True, eq=False)
class RemoteTensor(StoredElsewhere):
    """A tensor on parameter servers; stands in a state dict in place of the tensor.

    `has_rows_of_variable`: optimizer state in which a row belongs to the same row of the variable. `has_holes`: of a
    dynamic table, whose servers write the rows in use.
    """

    servers: ServerGroup
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    per_shard: bool = False
    has_rows_of_variable: bool = False
    has_holes: bool = False

    def parts_on(self, server: int, name: str) -> Iterator[PartRef]:
        """Yield the parts that one server has."""
        for one in self.pieces:
            if one.server == server:
                yield PartRef(
                    name,
                    self.shape,
                    one.start,
                    one.rows,
                    one.variable,
                    one.optimizer,
                    one.key,
                    self.per_shard,
                )


def is_plain_module(module: nn.Module) -> bool:
    """Return whether a module saves and loads its state as torch's modules do, without hooks."""
    for one in module.modules():
        hooks = (
            one._state_dict_hooks,
            one._state_dict_pre_hooks,
            one._load_state_dict_pre_hooks,
            one._load_state_dict_post_hooks,
        )
        kind = type(one)
        if any(hooks) or (
            not kind.__module__.startswith("torch.nn.")
            and any(getattr(kind, name) is not getattr(nn.Module, name) for name in _OVERRIDABLE)
        ):
            return False
    return True


_OVERRIDABLE: Final = (
    "state_dict",
    "load_state_dict",
    "_save_to_state_dict",
    "_load_from_state_dict",
)


class ServerLostInSave(CheckpointError):
    """A parameter server did not take part in a save or restore to its end."""


@final
class ServerGroup(Owner):
    """The parameter servers of one strategy during a save or restore."""

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self.variables = strategy._variables
        self._strategy = strategy
        self.connections: dict[int, ServerConnection] = {}
        self._turn: TransferTurn | None = None

    @property
    def is_wanted(self) -> bool:
        """True if another save or restore waits for this one."""
        return self._turn is not None and self._turn.is_wanted

    @property
    def optimizers(self) -> Any:
        """The optimizers of the strategy on the servers."""
        return self._strategy._cluster_views().optimizers

    def number_of(self, optimizer: Optimizer) -> int | None:
        """Return the number of an optimizer on the servers, or None."""
        return None if self._strategy._views is None else self.optimizers.number_of(optimizer)

    def find(self, value: Any) -> Description | None:
        """Return where a parameter, buffer or variable is, if it is on these servers."""
        if isinstance(value, Variable):
            storage = value._storage
            return storage.remote.description if isinstance(storage, RemoteStorage) else None
        kept = self.kept(value)
        return None if kept is None else kept.description

    def kept(self, value: Any) -> Kept | None:
        """Return the local tensor of a parameter or buffer, if it is on these servers."""
        kept: Kept | None = None
        managed = find_managed(value) if isinstance(value, nn.Parameter) else None
        if isinstance(managed, CoordinatorParameter):
            kept = managed.kept
        elif isinstance(value, Tensor):
            buffer = self.variables.managed_buffer(value)
            kept = buffer.kept if buffer is not None else None
        if kept is None or kept.owner is not self.variables or kept.remote is None:
            return None
        return kept

    def is_dynamic(self, value: Any) -> bool:
        """Return whether a parameter belongs to a dynamic table."""
        kept = self.kept(value)
        return kept is not None and kept.plan is not None and kept.plan.keyed is not None

    def prepare(self, *, restoring: bool = False) -> None:
        """Wait for other saves; send what was changed here, unless it is restored; connect."""
        client, replacement = self.variables.client, self.variables.client.replacement
        replacement.turn.take()
        self._turn = replacement.turn
        try:
            client.await_each_server()
            self.variables.flush(restoring=restoring)
            client.wait_for_writes()
            for server in range(len(client.tasks)):
                self.connections[server] = replacement.beside(server)
        except LOSSES as error:
            raise self.lost(error) from error

    def make_cut(
        self, directory: Path, probe: str, variables: Mapping[int, Sequence[int]], **more: Any
    ) -> tuple[dict[int, messages.CutMade], str]:
        """Have all servers make a cut; return their answers, and why one cannot use the directory, or "".

        Args:
            directory: of the checkpoints.
            probe: a file in it, by which servers recognise it.
            variables: by server.
            more: by name of a field of the message, its value by server.
        """
        made = self.ask(
            {
                server: messages.MakeCut(
                    variables=tuple(variables.get(server, ())),
                    directory=str(directory),
                    probe=probe,
                    **{name: values[server] for name, values in more.items()},
                )
                for server in self.connections
            }
        )
        tasks = self.variables.client.tasks
        refused = (f"{tasks[n]}: {one.refused}" for n, one in made.items() if one.refused)
        return made, next(refused, "")

    def lost(self, error: Exception, what: str = "") -> ServerLostInSave:
        """Drop the connections; return the error of a save or restore that failed because of one of `LOSSES`."""
        for server in self.connections:
            self.variables.client.replacement.drop_beside(server)
        if isinstance(error, ParameterServerLost):  # its text is advice for a run that has ended
            return ServerLostInSave(f"parameter server {error.task} does not answer")
        return ServerLostInSave(f"{what or 'a parameter server does not answer'}: {error}")

    def map_everything(self) -> None:
        """Map the memory of all variables: it outlives its server, and says what a lost one had done.

        Raises:
            ServerLostInSave: a server did not answer.
        """
        try:
            for remote in list(self.variables._remotes):
                self.variables.client.map(remote.places)
        except LOSSES as error:
            raise self.lost(error) from error

    def ask(self, wanted: Mapping[int, Message]) -> dict[int, Any]:
        """Send one request to each server, all at once; return the answers.

        Raises:
            ServerLostInSave: a server did not answer.
        """
        calls = {}
        try:
            for server, one in wanted.items():
                calls[server] = self.connections[server].begin(one)
                is_cut = isinstance(one, messages.MakeCut) and one.variables
                if faults.active is not None and is_cut:
                    faults.active.at("coordinator.between_cuts")
            return {
                server: self.connections[server].collect(call).message
                for server, call in calls.items()
            }
        except LOSSES as error:
            raise self.lost(error) from error

    def follow(
        self,
        server: int,
        progress: Progress | None = None,
        urgent: Urgent = always,
    ) -> messages.Transfer:
        """Wait until a server has written or read its rows; return its report (see `follow`)."""
        return follow(self.connections[server], progress, urgent=lambda: urgent() or self.is_wanted)

    @override
    def close(self) -> None:
        """Let the next save or restore begin. May be called again."""
        self.connections.clear()
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.give_back()


@contextmanager
def frozen(groups: Iterable[ServerGroup]) -> Iterator[None]:
    """Fetch nothing from the servers while state dicts are made."""
    variables = [group.variables for group in groups]
    for one in variables:
        one.is_frozen = True
    try:
        yield
    finally:
        for one in variables:
            one.is_frozen = False


def strategies_of(values: Sequence[Any]) -> list[Any]:
    """Return the open parameter-server strategies whose servers hold some of the objects."""
    found: dict[int, Any] = {}
    for value in values:
        for strategy in _strategies_of(value):
            if strategy is not None and not strategy._variables.closed:
                found[id(strategy)] = strategy
    return list(found.values())


@contextmanager
def between_rounds(values: Sequence[Any]) -> Iterator[None]:
    """Wait for the end of synchronous rounds (``staleness=0``) on the servers of these objects, and hold up the next."""
    with ExitStack() as stack:
        for strategy in strategies_of(values):
            coordinator = strategy._cluster_coordinator
            engine = None if coordinator is None else coordinator._running
            if engine is not None and engine.rounds is not None:
                stack.enter_context(engine.rounds.between())
        yield


def _strategies_of(value: Any) -> Iterator[Any]:
    if isinstance(value, nn.Module):
        for module in value.modules():
            # Past the lookup by name, which fetches the newest values.
            for parameter in dict.values(module._parameters):
                yield from _strategies_of(parameter)
    elif isinstance(value, Optimizer):
        for group in value.param_groups:
            for parameter in group["params"]:
                yield from _strategies_of(parameter)
    elif isinstance(value, ShardedVariable):
        for shard in value.variables:
            yield from _strategies_of(shard)
    elif isinstance(value, Variable):
        if isinstance(value._storage, RemoteStorage):
            yield value._storage._strategy
    elif isinstance(value, nn.Parameter):
        managed = find_managed(value)
        if isinstance(managed, CoordinatorParameter):
            yield managed.strategy


def layout_of(group: ServerGroup, value: Any) -> RemoteTensor | None:
    """Return a parameter, buffer or variable as a tensor on servers; None if it is none."""
    if isinstance(value, ShardedVariable):
        pieces: list[Piece] = []
        start = 0
        for shard in value.variables:
            where = group.find(shard)
            if where is None:
                return None
            pieces.append(
                Piece(where.shards[0].server, where.shards[0].number, start, shard.shape[0])
            )
            start += shard.shape[0]
        return RemoteTensor(group, value.dtype, tuple(value.shape), tuple(pieces))
    where = group.find(value)
    if where is None:
        return None
    holes = group.is_dynamic(value)
    return RemoteTensor(group, where.dtype, where.shape, tuple(pieces_of(where)), has_holes=holes)


def pieces_of(where: Description, optimizer: int = 0, key: str = "") -> Iterator[Piece]:
    """Yield the pieces of a variable, or of optimizer state with its shape."""
    for shard, start in zip(where.shards, where.layout.offsets, strict=True):
        yield Piece(shard.server, shard.number, int(start), shard.rows, optimizer, key)


def say_once(strategy: ParameterServerStrategy, what: str, refused: str) -> None:
    """Log, once per strategy, that rows pass through the coordinator."""
    if not vars(strategy).get("_said_checkpoints_pass"):
        vars(strategy)["_said_checkpoints_pass"] = True
        _log.warning(
            "checkpoints are %s through the coordinator, and lost parameter servers cannot be restored from them: %s. "
            "Start the servers with --checkpoint-dir, on a file system that they share with the coordinator",
            what,
            refused,
        )
