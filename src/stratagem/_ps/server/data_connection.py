"""A data connection of a parameter server, for its working thread."""

from __future__ import annotations

import selectors
from collections import deque
from typing import final

from stratagem._ps.server.client_memory import ClientMemory
from stratagem._ps.server.session import Session
from stratagem._wire import messages
from stratagem._wire.channel import Channel
from stratagem._wire.messages import Frame


@final
class DataConnection:
    """One client, or the primary of a backup that is here."""

    def __init__(self, channel: Channel, task: str, *, shared_memory: bool) -> None:
        self.channel = channel
        self.task = task
        self.session: Session | None = None
        self.joined = ""  # name of the session
        self.refusal = ""  # after a newer coordinator of the job has cut this connection off
        self.instance = ""  # of a named job
        self.epoch = 0
        self.memory = ClientMemory(allowed=shared_memory)
        self.inbox: deque[Frame] = deque()
        self.events = selectors.EVENT_READ
        self.is_parked = False
        """Not in the selector: its session is being copied to a backup."""
        self.memories: dict[int, ClientMemory] | None = None
        """On a link: the memory of the primary's clients, by number."""
        self.client = 0
        """On a link: whose messages follow."""

    def join(self, message: messages.OpenSession | messages.JoinSession, session: Session) -> None:
        """Use a session from now on."""
        self.session, self.joined, self.refusal = session, message.session, ""
        self.instance, self.epoch = message.instance, message.epoch

    def sender_memory(self) -> ClientMemory:
        """Return the memory that messages on this connection refer to."""
        if self.memories is None:
            return self.memory
        known = self.memories.get(self.client)
        if known is None:
            known = self.memories[self.client] = ClientMemory(allowed=self.memory.is_allowed)
        return known

    def close(self) -> None:
        """Release the memory, and close the connection."""
        self.memory.close()
        for memory in (self.memories or {}).values():
            memory.close()
        self.channel.close()
