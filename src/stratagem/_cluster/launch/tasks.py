"""Makes the task a job name stands for: a parameter server or a worker.

Used by `Server`, by the fork server of a `LocalCluster` and by its in-process form, so that all of
them run the same code.
"""

from __future__ import annotations

from typing import Protocol, Self

from stratagem import config
from stratagem._cluster.worker.worker import Worker
from stratagem._ps.server.loop import ParameterServer
from stratagem._wire.handshake import ClusterKey


class Task(Protocol):
    """A task: listens from its making on, works in `serve`, ends by `close`."""

    @property
    def address(self) -> str:
        """Where it listens."""

    def serve(self) -> None:
        """Works in the calling thread until closed."""

    def close(self) -> None:
        """Ends it, from any thread."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *failure: object) -> None: ...


def make_task(
    job: str,
    index: int,
    address: str,
    *,
    key: str | None = None,
    forward_output: bool = True,
    echo: bool = False,
) -> Task:
    """Makes a task that listens on `address`.

    Raises:
        ValueError: a job that is neither ``worker`` nor ``ps``.
    """
    if job == "worker":
        return Worker(
            address,
            index=index,
            key=cluster_key(key),
            forward_output=forward_output,
            echo=echo,
        )
    if job == "ps":
        return ParameterServer(address, task=f"/job:ps/task:{index}", key=cluster_key(key))
    raise ValueError(
        f"job {job!r} needs no server: expected 'worker' or 'ps'. The chief runs your program, an "
        f"evaluator reads checkpoints."
    )


def cluster_key(text: str | None = None) -> ClusterKey | None:
    """The key given, or else the one the environment names; None if there is none."""
    text = text or config.cluster_key_text()
    return ClusterKey.from_text(text) if text else None
