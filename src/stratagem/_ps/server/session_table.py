"""The sessions of a parameter server, and which connections keep each of them alive.

A session is kept while a connection of its coordinator is open, and `lease_s` seconds longer. With backups, a session has
several shards on one server, each with a lease of its own; a backup is kept while its primary is connected. This module has
no clock and no socket: `loop.py` reports connections that open and close, and the time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, final

from typing_extensions import override

from stratagem._ps.server.checkpoint_parts import CheckpointAccess
from stratagem._ps.server.session import Session
from stratagem._wire import messages
from stratagem._wire.arenas import Budget
from stratagem.errors import NotFoundError

SESSION_LIMIT: Final = 256
"""Strategies at one time; a cluster is shared by a handful."""


@final
class SessionTable:
    """The sessions of one server by name.

    Example:
        >>> from stratagem._wire.messages import OpenSession
        >>> sessions = SessionTable("/job:ps/task:0", Budget(1 << 20))
        >>> sessions.open(OpenSession(session="s", lease_s=5.0), owner="chief")
        <Session 's': 0 variables, 0 bytes, 0 writes>
        >>> sessions.leave("chief", 100.0)
        >>> sessions.expired(104.0), sessions.expired(106.0)
        ([], [<Session 's': 0 variables, 0 bytes, 0 writes>])
        >>> sessions.close_all()
    """

    def __init__(
        self,
        task: str,
        budget: Budget,
        optimizer_modules: Sequence[str] = (),
        *,
        shared_memory: bool = True,
        access: CheckpointAccess | None = None,
    ) -> None:
        self._task = task
        self._budget = budget
        self._optimizer_modules = optimizer_modules
        self._shared_memory = shared_memory
        self._access = access
        self._sessions: dict[tuple[str, int], Session] = {}  # by name and shard

    def open(self, message: messages.OpenSession, *, owner: Hashable) -> Session:
        """Return a new session, or one that exists, with one more owner.

        Raises:
            MemoryError: there are too many.
            NotFoundError: it is a backup.
        """
        session = self.get(message.session, message.shard)
        if session is None:
            session = self._new(message)
        elif session.is_backup:
            raise self._absent(message.session, message.shard, "is a backup there")
        session.owners.add(owner)
        session.orphaned_at = None
        return session

    def open_backup(self, message: messages.OpenReplica, *, link: Hashable) -> Session:
        """Return a new backup of a shard; the caller has closed what was here before."""
        session = self._new(message)
        session.is_backup, session.is_complete, session.view = True, False, message.view
        session.owners.add(link)
        return session

    def _new(self, message: messages.OpenSession | messages.OpenReplica) -> Session:
        if len(self._sessions) >= SESSION_LIMIT:
            raise MemoryError(
                f"{self._task} already serves {len(self._sessions)} sessions, which is its limit: "
                f"close strategies that are not used any more"
            )
        session = Session(
            message.session,
            shard=message.shard,
            lease_s=message.lease_s,
            budget=self._budget,
            optimizer_modules=self._optimizer_modules,
            shared_memory=self._shared_memory,
            access=self._access,
        )
        self._sessions[message.session, message.shard] = session
        return session

    def add_owner(self, name: str, owner: Hashable) -> None:
        """Let one more connection keep a session alive."""
        for session in self._owned(name):
            session.owners.add(owner)
            session.orphaned_at = None

    def own_alone(self, name: str, owner: Hashable, lease_s: float) -> None:
        """Let only this connection keep a session alive from now on."""
        for session in self._owned(name):
            session.owners, session.lease_s, session.orphaned_at = {owner}, lease_s, None

    def _owned(self, name: str) -> list[Session]:
        """Return the sessions that a coordinator keeps alive; primaries keep those of backups."""
        return [one for one in self.shards(name).values() if not one.is_backup]

    def find(self, name: str, shard: int = -1) -> Session:
        """Return a session that exists and is no backup; NotFoundError otherwise."""
        session = self.get(name, shard)
        if session is None or session.is_backup:
            raise self._absent(name, shard, "is not open" if session is None else "is a backup")
        return session

    def get(self, name: str, shard: int) -> Session | None:
        """Return a session, also if it is a backup, or None."""
        return self._sessions.get((name, shard))

    def shards(self, name: str) -> dict[int, Session]:
        """Return all shards of a session that are here, backups included."""
        return {one.shard: one for one in self._sessions.values() if one.name == name}

    def _absent(self, name: str, shard: int, why: str) -> NotFoundError:
        what = f"session {name!r}" if shard < 0 else f"shard {shard} of session {name!r}"
        return NotFoundError(
            f"{what} {why} on {self._task}: its coordinator closed it, or the server was restarted "
            f"or replaced"
        )

    def leave(self, owner: Hashable, now: float) -> None:
        """Note that a connection is gone; sessions without an owner start to expire."""
        for session in self._sessions.values():
            if owner in session.owners:
                session.owners.discard(owner)
                if not session.owners:
                    session.orphaned_at = now

    def expired(self, now: float) -> list[Session]:
        """Return the sessions whose owner has been gone for too long."""
        return [
            one
            for one in self._sessions.values()
            if one.orphaned_at is not None and now - one.orphaned_at > one.lease_s
        ]

    def close(self, name: str, shard: int | None = None) -> list[Session]:
        """Close a session, or one shard of it, and free its variables; return what was closed."""
        keys = [key for key in self._sessions if key[0] == name and shard in (None, key[1])]
        closed = [self._sessions.pop(key) for key in keys]
        for session in closed:
            session.close()
        return closed

    def close_all(self) -> None:
        for name, _ in list(self._sessions):
            self.close(name)

    def sessions(self) -> list[Session]:
        return [*self._sessions.values()]

    def __len__(self) -> int:
        return len(self._sessions)

    @override
    def __repr__(self) -> str:
        return f"<SessionTable of {self._task}: {len(self._sessions)} sessions>"
