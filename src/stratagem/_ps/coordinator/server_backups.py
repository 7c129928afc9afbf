"""The coordinator's decisions about backups: placement, promotion, and new backups after a loss (docs/design/0010).

Only the coordinator decides. `_cluster/coordinator/server_recoveries.py` calls from its thread, which takes no lock of
`PsClient`: another thread may hold that lock while it waits for a lost server.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing
from typing import TYPE_CHECKING, Final, final

from typing_extensions import override

from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.shard_holders import ShardHolders
from stratagem._ps.coordinator.server_restore import locate, places_on
from stratagem._ps.recovery_point import ServerRecovery
from stratagem._wire import messages
from stratagem._wire.connecting import split_address
from stratagem._wire.round_trip import answer_limit_s
from stratagem.errors import (
    NotFoundError,
    ParameterServerLost,
    ProtocolError,
    StartupError,
    WireError,
)

if TYPE_CHECKING:
    from stratagem._ps.coordinator.coordinator_variables import CoordinatorVariables

_log = logging.getLogger("stratagem.ps")

GRACE_S: Final = 5.0
"""How long a lost server is waited for before another one keeps its backup: starting one takes less."""

_FAILURES: Final = (WireError, NotFoundError, ParameterServerLost, ProtocolError)


class NoBackup(Exception):
    """There is no complete backup to promote."""


@final
class ServerBackups:
    """Primary and backup of every shard.

    Attributes:
        views: by shard, the number of the last decision.
        backups: by shard, the process that has a complete backup, or None.
    """

    def __init__(self, holders: ShardHolders) -> None:
        count = len(holders.processes)
        self.holders = holders
        self.views = [0] * count
        self.backups: list[int | None] = [None] * count
        self._alone_since = [time.monotonic()] * count

    @property
    def are_complete(self) -> bool:
        """True if every shard has a backup."""
        return None not in self.backups

    def set_up(self, variables: CoordinatorVariables) -> None:
        """Give every shard a backup that has none.

        Raises:
            StartupError: no server can keep one. Shards of a live job continue alone instead, until one can.
        """
        for shard, known in enumerate(self.backups):
            if known is not None:
                continue
            is_live = self.views[shard] > 0
            last: Exception | None = None
            for process in self._candidates(shard):
                try:
                    self._link(variables, shard, process)
                    break
                except _FAILURES as error:
                    last = error
            else:
                if is_live:
                    self._decide(variables, shard, "")
                    continue
                raise StartupError(
                    f"no parameter server can keep a backup of {self._name(shard)}: {last}. Parameter "
                    "servers must reach each other at the addresses of the cluster specification."
                ) from last

    def promote(self, variables: CoordinatorVariables, shard: int) -> tuple[ServerRecovery, bool]:
        """Let the backup of a lost primary take over.

        Returns:
            A report; and whether clients of the lost primary notice its end by themselves.

        Raises:
            NoBackup: there is none that is complete.
        """
        began = time.monotonic()
        process, lost = self.backups[shard], self.holders.holders[shard]
        life = variables.client.replacement.life_of(shard)
        if process is None:
            alone_s = began - self._alone_since[shard]
            raise NoBackup(
                f"was lost {alone_s:.1f} s after its backup, before another server had a copy"
            )
        self._left_alone(shard)
        self.views[shard] += 1
        replacement = variables.client.replacement
        try:
            with closing(
                replacement.connect_process(process, timeout_s=answer_limit_s())
            ) as connection:
                # The memory of a process stays mapped after its end. A read of it after the promotion would miss
                # writes that the backup has acknowledged.
                replacement.leave(shard)
                _forget_memory(variables, shard)
                connection.request(replacement.promotion(shard, self.views[shard]))
            self.holders.move(shard, process)
            places = places_on(variables, shard)
            with closing(replacement.connect_beside(shard)) as connection:
                located = locate(connection, tuple(places))
                welcome = connection.welcome
        except _FAILURES as error:
            self.holders.move(shard, lost)
            raise NoBackup(f"was lost, and its backup too: {error}") from error
        assert welcome is not None
        shards: list[ShardLocation] = [place for place, _ in places.values()]
        replacement.accept(shard, welcome, shards, located)
        _forget_memory(variables, shard)
        self._release_others(variables, lost)
        names = tuple(sorted({name for _, name in places.values()}))
        seconds = time.monotonic() - began
        report = ServerRecovery(
            self._name(lost), -1, "", 0.0, names, {}, seconds, self._name(process)
        )
        return report, self._has_ended(variables, lost, life)

    def left_alone(self, variables: CoordinatorVariables) -> list[int]:
        """Return the shards whose backup does not answer their primary. Never waits."""
        told = variables.client.replacement.unlinked()  # a ping may be older than the last decision
        return [shard for shard, view in told.items() if view == self.views[shard]]

    def release(self, variables: CoordinatorVariables) -> None:
        """Let primaries continue alone whose backup does not answer: they hold their replies."""
        for shard in self.left_alone(variables):
            if self.backups[shard] is not None:
                self._left_alone(shard)
            try:
                self._decide(variables, shard, "")
            except _FAILURES as error:
                _log.debug("%s cannot continue alone yet: %s", self._name(shard), error)

    def _release_others(self, variables: CoordinatorVariables, lost: int) -> None:
        """Let the primaries continue alone whose backup was on a lost process: it may hang, and never answer."""
        for shard, process in enumerate(self.backups):
            if process == lost and self.holders.holders[shard] != lost:
                self._left_alone(shard)
                try:
                    self._decide(variables, shard, "")
                except _FAILURES as error:
                    _log.debug("%s cannot continue alone yet: %s", self._name(shard), error)

    def repair(self, variables: CoordinatorVariables) -> list[int]:
        """Give shards without a backup a new one, as far as that is possible now; return the processes."""
        found = []
        for shard, known in enumerate(self.backups):
            if known is not None:
                continue
            waited_s = time.monotonic() - self._alone_since[shard]
            candidates = self._candidates(shard)
            for process in candidates if waited_s > GRACE_S else candidates[:1]:
                try:
                    self._link(variables, shard, process)
                except _FAILURES as error:
                    _log.debug("%s has no new backup yet: %s", self._name(shard), error)
                    continue
                of, on = self._name(shard), self._name(process)
                _log.warning("the variables of %s have a backup again, on %s", of, on)
                found.append(process)
                break
        return found

    def _candidates(self, shard: int) -> list[int]:
        """Return the processes that may keep a backup, the best one first.

        Those on other hosts first, then those with the fewest shards, then in order after the primary.
        """
        count, holder = len(self.views), self.holders.holders[shard]
        load = [*self.holders.holders, *(one for one in self.backups if one is not None)]

        def rank(process: int) -> tuple[bool, int, int]:
            is_near = self._host(process) == self._host(holder)
            return is_near, load.count(process), (process - holder) % count

        return sorted((one for one in range(count) if one != holder), key=rank)

    def _host(self, process: int) -> str:
        try:
            return split_address(self.holders.address(process))[0]
        except Exception:  # noqa: BLE001 - resolvers are users' classes
            return ""

    def _link(self, variables: CoordinatorVariables, shard: int, process: int) -> None:
        # The primary would wait for a process that hangs, and its clients with it.
        variables.client.replacement.connect_process(process, timeout_s=answer_limit_s()).close()
        self._decide(variables, shard, self.holders.address(process))
        self.backups[shard] = process

    def _decide(self, variables: CoordinatorVariables, shard: int, address: str) -> None:
        self.views[shard] += 1
        with closing(variables.client.replacement.connect_beside(shard)) as connection:
            connection.request(messages.SetBackup(view=self.views[shard], address=address))

    def _left_alone(self, shard: int) -> None:
        self.backups[shard] = None
        self._alone_since[shard] = time.monotonic()

    @staticmethod
    def _has_ended(variables: CoordinatorVariables, process: int, life: str) -> bool:
        """Return whether a process has ended on a host that runs: connections to it are reset."""
        try:
            with closing(
                variables.client.replacement.connect_process(process, timeout_s=0.5)
            ) as connection:
                return connection.server != life
        except WireError as error:
            return isinstance(error.__cause__, ConnectionRefusedError)

    def _name(self, shard: int) -> str:
        return self.holders.processes[shard][0]

    @override
    def __repr__(self) -> str:
        return f"<ServerBackups primaries {self.holders.holders}, backups {self.backups}>"


def _forget_memory(variables: CoordinatorVariables, shard: int) -> None:
    """Let reads of a shard's variables map the memory of the process that has them, or wait for it."""
    for remote in list(variables._remotes):
        if any(place.server == shard for place in remote.places):
            remote.forget_memory()
