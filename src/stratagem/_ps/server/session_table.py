"""The sessions of a parameter server, and which connections keep each of them alive.

A session is kept while a connection of its coordinator is open, and `lease_s` seconds longer. This module has no clock
and no socket: `loop.py` reports connections that open and close, and the time.
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


class _Lease:
    """A session and the connections that keep it alive."""

    def __init__(self, session: Session, lease_s: float) -> None:
        self.session = session
        self.lease_s = lease_s
        self.owners: set[Hashable] = set()
        self.orphaned_at: float | None = None


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
        ([], [('s', 5.0)])
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
        self._leases: dict[str, _Lease] = {}

    def open(self, message: messages.OpenSession, *, owner: Hashable) -> Session:
        """Return a new session, or one that exists, with one more owner.

        Raises:
            MemoryError: there are too many.
        """
        lease = self._leases.get(message.session)
        if lease is None:
            if len(self._leases) >= SESSION_LIMIT:
                raise MemoryError(
                    f"{self._task} already serves {len(self._leases)} sessions, which is its limit: "
                    f"close strategies that are not used any more"
                )
            session = Session(
                message.session,
                budget=self._budget,
                optimizer_modules=self._optimizer_modules,
                shared_memory=self._shared_memory,
                access=self._access,
            )
            lease = self._leases[message.session] = _Lease(session, message.lease_s)
        lease.owners.add(owner)
        lease.orphaned_at = None
        return lease.session

    def add_owner(self, name: str, owner: Hashable) -> None:
        """Let one more connection keep a session alive."""
        lease = self._leases[name]
        lease.owners.add(owner)
        lease.orphaned_at = None

    def own_alone(self, name: str, owner: Hashable, lease_s: float) -> None:
        """Let only this connection keep a session alive from now on."""
        lease = self._leases[name]
        lease.owners, lease.lease_s = {owner}, lease_s

    def find(self, name: str) -> Session:
        """Return a session that exists; NotFoundError otherwise."""
        if name not in self._leases:
            raise NotFoundError(
                f"session {name!r} is not open on {self._task}: its coordinator closed it, or the "
                f"server was restarted"
            )
        return self._leases[name].session

    def leave(self, owner: Hashable, now: float) -> None:
        """Note that a connection is gone; sessions without an owner start to expire."""
        for lease in self._leases.values():
            if owner in lease.owners:
                lease.owners.discard(owner)
                if not lease.owners:
                    lease.orphaned_at = now

    def expired(self, now: float) -> list[tuple[str, float]]:
        """Return names and leases of sessions whose coordinator has been gone for too long."""
        return [
            (name, lease.lease_s)
            for name, lease in self._leases.items()
            if lease.orphaned_at is not None and now - lease.orphaned_at > lease.lease_s
        ]

    def close(self, name: str) -> Session | None:
        """Close a session and free its variables; None if there is none of that name."""
        lease = self._leases.pop(name, None)
        if lease is None:
            return None
        lease.session.close()
        return lease.session

    def close_all(self) -> None:
        """Close every session."""
        for name in list(self._leases):
            self.close(name)

    def sessions(self) -> list[Session]:
        """Return all sessions."""
        return [lease.session for lease in self._leases.values()]

    def __len__(self) -> int:
        return len(self._leases)

    @override
    def __repr__(self) -> str:
        return f"<SessionTable of {self._task}: {len(self._leases)} sessions>"
