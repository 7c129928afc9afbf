"""Limits and permissions of one parameter server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stratagem import config
from stratagem._ps.server.checkpoint_parts import CheckpointAccess
from stratagem._wire.frames import Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """Limits and permissions of one parameter server.

    Example:
        >>> ServerOptions(memory_limit_bytes=1 << 30).memory_limit_bytes
        1073741824
    """

    memory_limit_bytes: int | None = None
    """Limit of variables and optimizer state of all sessions; by default `config.server_memory_bytes()`."""

    optimizer_modules: Sequence[str] | None = None
    """Modules beside ``torch.optim`` whose optimizer classes may be imported here; by default
    `config.optimizer_modules()`."""

    shared_memory: bool | None = None
    """False sends bytes even to tasks on this host; by default `config.shared_memory_allowed()`."""

    checkpoints: CheckpointAccess | None = None
    """Directories below which checkpoints may be written and read; by default none."""

    limits: Limits = field(default_factory=lambda: Limits(frame_bytes=config.frame_bytes()))
    """Of what one connection sends; by default `config.frame_bytes()` in one message."""
