"""Restore one lost parameter server from the last checkpoint.

The coordinator's thread that restores uses a connection of its own. It takes no lock of `PsClient`: another thread may
hold that lock while it waits for the server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Final

from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.server_connection import ServerConnection
from stratagem._ps.client.transfers import follow, read_stall_s
from stratagem._ps.recovery_point import RecoveryPoint, ServerRecovery
from stratagem._ps.types import InitOp
from stratagem._wire import codec, messages
from stratagem._wire.codec import Outgoing
from stratagem._wire.round_trip import answer_limit_s
from stratagem.errors import (
    CheckpointError,
    ConnectionLost,
    DeadlineExceeded,
    NotFoundError,
    ParameterServerLost,
    WireError,
)

if TYPE_CHECKING:
    from stratagem._ps.coordinator.coordinator_variables import CoordinatorVariables

_log = logging.getLogger("stratagem.ps")

_PAUSE_S: Final = 0.05


def restore_server(
    variables: CoordinatorVariables,
    server: int,
    *,
    lost_at: float,
    wait_s: float,
    stopped: Callable[[], bool],
    progress: Callable[[], None] = lambda: None,
) -> ServerRecovery:
    """Wait until a lost server has been started again, restore its part, and let the client use it.

    `lost_at`: when it was lost, in seconds of `time.monotonic`. `progress` is called now and then while rows are read.

    Raises:
        ParameterServerLost: it did not come back in time, or not everything it held is in the checkpoint.
    """
    deadline = time.monotonic() + wait_s
    point = variables.client.replacement.point
    assert point is not None
    places = places_on(variables, server)
    names = {number: name for number, (_, name) in places.items()}
    while True:
        connection, is_same = _await_server(variables, server, deadline, stopped, wait_s)
        lost = {} if is_same else _updates_lost(variables, point, server, places)
        try:
            with closing(connection):
                _set_up(variables, point, server, connection, places, progress, is_same=is_same)
            break
        except (ConnectionLost, DeadlineExceeded, ParameterServerLost) as error:
            _log.warning("%s was lost again while it was restored: %s", connection.task, error)
        except (CheckpointError, WireError) as error:
            raise lost_error(connection.task, f"could not be restored: {error}", names) from error
    for remote in list(variables._remotes):
        if any(place.server == server for place in remote.places):
            remote.forget_memory()
    return ServerRecovery(
        task=connection.task,
        step=-1 if is_same else point.step,
        path=point.path,
        lost_s=0.0
        if is_same
        else max(0.0, lost_at - point.facts_of(server).get("since", point.cut_at)),
        variables=tuple(sorted(names.values())),
        updates=lost,
        seconds=time.monotonic() - lost_at,
    )


def _set_up(
    variables: CoordinatorVariables,
    point: RecoveryPoint,
    server: int,
    connection: ServerConnection,
    places: dict[int, tuple[ShardLocation, str]],
    progress: Callable[[], None],
    *,
    is_same: bool,
) -> None:
    """Bring a server up to date, and let the client use it."""
    replacement = variables.client.replacement
    if not is_same:
        _fill(variables, point, server, connection, places, progress)
    for message in replacement.standing_orders():
        connection.request(message)
    assert connection.welcome is not None
    if is_same:
        replacement.accept(server, connection.welcome)
        return
    numbers = tuple(places)
    versions = connection.request(messages.AskVersions(variables=numbers)).message
    assert isinstance(versions, messages.Versions)
    located = locate(connection, numbers)
    replacement.note_restored(point, server, dict(versions.versions))
    shards = [place for place, _ in places.values()]
    replacement.accept(server, connection.welcome, shards, located)


def locate(connection: ServerConnection, numbers: tuple[int, ...]) -> messages.Located | None:
    """Return where variables are in the server's memory; None if one is about to be created there."""
    try:
        located = connection.request(messages.Locate(variables=numbers)).message
    except NotFoundError:
        return None
    assert isinstance(located, messages.Located)
    return located


def places_on(variables: CoordinatorVariables, server: int) -> dict[int, tuple[ShardLocation, str]]:
    """Return the shards that a server holds: number → place and name."""
    names = variables.client.replacement.names_on(server)  # as errors show them
    return {
        place.variable: (place, names.get(place.variable, remote.name))
        for remote in list(variables._remotes)
        for place in remote.places
        if place.server == server
    }


def _await_server(
    variables: CoordinatorVariables,
    server: int,
    deadline: float,
    stopped: Callable[[], bool],
    wait_s: float,
) -> tuple[ServerConnection, bool]:
    """Return a connection to the server, and whether it still has its variables."""
    client = variables.client
    last: Exception | None = None
    while time.monotonic() < deadline and not stopped():
        try:
            connection = client.replacement.connect_beside(server, timeout_s=answer_limit_s())
            if client.replacement.is_current(server, connection):
                return connection, True
            with closing(connection):  # it was replaced before, and has old values
                client.replacement.end_old_session(connection)
        except NotFoundError:
            # A new process: the session does not exist there.
            try:
                return client.replacement.connect_beside(
                    server, timeout_s=answer_limit_s(), as_owner=True
                ), False
            except WireError as error:
                last = error
        except (ConnectionLost, DeadlineExceeded, ParameterServerLost) as error:
            last = error
        time.sleep(_PAUSE_S)
    why = f"did not come back within {wait_s:g} s (STRATAGEM_SERVER_WAIT_S): {last}"
    raise lost_error(client.tasks[server], why, client.replacement.names_on(server))


def _fill(
    variables: CoordinatorVariables,
    point: RecoveryPoint,
    server: int,
    connection: ServerConnection,
    places: dict[int, tuple[ShardLocation, str]],
    progress: Callable[[], None],
) -> None:
    """Create everything that the server held, and have it read its rows."""
    order = point.orders.get(server, messages.ReadParts(chain=(), parts=()))
    parts = tuple(part for part in order.parts if part.variable in places)
    saved = {part.variable for part in parts if not part.key}
    copies = {
        place.variable: kept.tensor
        for kept in (one.kept for one in list(variables._buffers.values()))
        if kept.remote is not None
        for place in kept.remote.places
    }
    missing = {n: name for n, (_, name) in places.items() if n not in saved and n not in copies}
    if missing:
        raise CheckpointError(
            f"{', '.join(sorted(missing.values()))} are not in the checkpoint {point.path}. Add them to "
            "the Checkpoint"
        )
    _create_variables(variables, connection, places)
    numbers = _create_optimizers(variables, server, connection, places)
    if parts:
        read = messages.ReadParts(
            chain=order.chain,
            parts=tuple(part for part in parts if not part.key or part.optimizer in numbers),
            state=tuple(
                item
                for item in order.state
                if item.variable in places and item.optimizer in numbers
            ),
        )
        connection.request(read)
        follow(connection, lambda moved: progress() if moved else None, read_stall_s())
    ledger = point.facts_of(server).get("ledger")
    if ledger:
        record = messages.LedgerRecord.from_text(ledger)
        connection.request(messages.RestoreLedger(ledger=record))
    for sequence, number in enumerate(sorted(copies.keys() & places.keys() - saved), 1):
        outgoing = Outgoing()
        ref = outgoing.add(copies[number].detach())
        writer = messages.WriteId("recovery", 0, sequence)
        operations = messages.encode_operations([messages.Assign(number, "set", ref)])
        connection.request(messages.Write(origin=writer, operations=operations), outgoing.buffers)


def _create_variables(
    variables: CoordinatorVariables,
    connection: ServerConnection,
    places: dict[int, tuple[ShardLocation, str]],
) -> None:
    bindings: dict[int, tuple[InitOp, ...]] = {}
    names: dict[int, str] = {}
    for remote in list(variables._remotes):
        names.update((place.variable, name) for place, name, _ in remote.wanted())
        for place, binding in zip(remote.places, remote.bindings, strict=False):
            bindings[place.variable] = tuple(binding)
    specs = [
        messages.VariableSpec(
            number,
            names[number],
            codec.dtype_name(place.dtype),
            place.shape,
            bindings.get(number, ()),
        )
        for number, (place, _) in sorted(places.items())
    ]
    connection.request(messages.CreateVariables(variables=tuple(specs)))


def _create_optimizers(
    variables: CoordinatorVariables,
    server: int,
    connection: ServerConnection,
    places: dict[int, tuple[ShardLocation, str]],
) -> set[int]:
    """Create the optimizers of variables that still exist; return their numbers."""
    numbers: set[int] = set()
    for message in variables.client.replacement.optimizers_on(server):
        groups = tuple(
            messages.GroupSpec(tuple(n for n in group.variables if n in places), group.settings)
            for group in message.groups
        )
        if any(group.variables for group in groups):
            connection.request(
                messages.CreateOptimizer(
                    optimizer=message.optimizer,
                    class_name=message.class_name,
                    groups=groups,
                    defaults=message.defaults,
                    attributes=message.attributes,
                )
            )
            numbers.add(message.optimizer)
    return numbers


def _updates_lost(
    variables: CoordinatorVariables,
    point: RecoveryPoint,
    server: int,
    places: dict[int, tuple[ShardLocation, str]],
) -> dict[str, int]:
    """Return how many updates each variable lost, as far as its memory is still mapped here."""
    before = point.facts_of(server).get("versions", {})
    found: dict[str, int] = {}
    last = variables.client.replacement.last_versions(server)
    for number, (_, name) in places.items():
        if number in last and str(number) in before:
            found[name] = found.get(name, 0) + max(0, last[number] - before[str(number)])
    return found


def lost_error(task: str, reason: str, names: dict[int, str]) -> ParameterServerLost:
    """Return the error about a server that cannot be restored."""
    held = sorted(names.values())
    return ParameterServerLost(
        f"parameter server {task} {reason.removesuffix('.')}. Start it again, create a new strategy and restore the "
        "last checkpoint.",
        task=task,
        variables=held,
    )
