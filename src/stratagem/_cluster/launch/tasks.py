"""Create and run the task of a job: a parameter server, a worker or an evaluator.

Used by `Server` and by every launcher, so that all of them run the same code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, final

import torch
from typing_extensions import override

from stratagem import _faults, config
from stratagem._cluster.launch.launcher import TaskOrder
from stratagem._cluster.launch.task_process import name_process
from stratagem._cluster.worker.worker import Worker
from stratagem._owner import Owner
from stratagem._ps.malloc import keep_freed_memory
from stratagem._ps.server.checkpoint_parts import CheckpointAccess
from stratagem._ps.server.loop import ParameterServer
from stratagem._ps.server.server_options import ServerOptions
from stratagem._ps.server.shard_optimizer import ANY_MODULE
from stratagem._wire import object_bytes
from stratagem._wire.cluster_key import cluster_key
from stratagem._wire.connecting import split_address
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.listener import is_loopback
from stratagem._wire.task_notices import NoticeHolder, TaskNotice
from stratagem._wire.tls import TlsFiles, files_from_environment

if TYPE_CHECKING:
    from stratagem._checkpoint.evaluator import Evaluator


def write_evaluator(evaluator: Evaluator, path: Path) -> None:
    """Write an evaluator for another process.

    Raises:
        TypeError: it cannot be pickled.
    """
    try:
        path.write_bytes(object_bytes.dump(evaluator))
    except Exception as error:
        raise TypeError(
            f"{evaluator!r} cannot be sent to the process of the evaluator: {error}. Create what cannot be "
            "pickled inside build() or evaluate()."
        ) from error


@final
class EvaluatorTask(Owner):
    """An evaluator that runs until its last checkpoint. It listens on no address.

    Args:
        path: the file that `write_evaluator` made.
    """

    def __init__(self, path: str) -> None:
        self._evaluator: Evaluator = object_bytes.load(Path(path).read_bytes())
        self.address = ""

    def serve(self) -> None:
        """Evaluate checkpoints in the calling thread."""
        self._evaluator.run()

    @override
    def close(self) -> None:
        """Stop after the current evaluation, from any thread. May be called again."""
        self._evaluator.close()

    @override
    def __repr__(self) -> str:
        return f"<EvaluatorTask of {self._evaluator!r}>"


class Task(Protocol):
    """A task: listens from its construction on, works in `serve`, ends by `close`."""

    @property
    def address(self) -> str:
        """Address on which it listens."""

    def serve(self) -> None:
        """Work in the calling thread until closed."""

    def close(self) -> None:
        """End the task, from any thread."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *failure: object) -> None: ...


def make_task(
    job: str,
    index: int,
    address: str,
    *,
    key: str | None = None,
    forward_output: bool = True,
    any_optimizer: bool = False,
    checkpoint_directories: Sequence[str] = (),
    tls: TlsFiles | None = None,
    evaluator: str = "",
) -> Task:
    """Make a task that listens on `address`; with `any_optimizer` a server imports any module for one.

    A parameter server writes and reads checkpoints only below `checkpoint_directories`. An evaluator does not
    listen; it is read from the file `evaluator`.

    Raises:
        ValueError: a job that is no task of a server.
        PermissionError: other machines can reach the address, and no key is set.
    """
    if job == "worker":
        proof = _task_key(key, address, tls)
        return Worker(address, index=index, key=proof, forward_output=forward_output)
    if job == "ps":
        options = ServerOptions(
            optimizer_modules=(ANY_MODULE,) if any_optimizer else None,
            checkpoints=CheckpointAccess(tuple(checkpoint_directories)),
        )
        proof = _task_key(key, address, tls)
        return ParameterServer(address, task=f"/job:ps/task:{index}", key=proof, options=options)
    if job == "evaluator" and evaluator:
        return EvaluatorTask(evaluator)
    raise ValueError(
        f"job {job!r} needs no server: expected 'worker' or 'ps'. The chief runs your program, an "
        f"evaluator runs sg.Evaluator(...).run()."
    )


def task_of(order: TaskOrder, *, forward_output: bool) -> Task:
    """Make the task of an order."""
    return make_task(
        order.job,
        order.index,
        order.address,
        key=order.key or None,
        forward_output=forward_output,
        any_optimizer=order.any_optimizer,
        checkpoint_directories=order.checkpoint_directories,
        evaluator=order.evaluator,
    )


def announce(
    job: str,
    index: int,
    task: Task,
    *,
    key: str | None = None,
    tls: TlsFiles | None = None,
    owner: int = 0,
    cluster: Mapping[str, Any] | None = None,
) -> NoticeHolder:
    """Let ``stratagem top`` find a task of this process, until the result is closed.

    Args:
        job: of the task.
        index: of the task.
        task: it listens already. An evaluator does not, and is not announced.
        key: of the cluster; by default that of the environment or of the user.
        tls: by default the files of the environment.
        owner: the process that started the task and supervises it, if one does.
        cluster: the addresses of all tasks, if known.
    """
    if job not in ("worker", "ps"):
        return NoticeHolder(None)
    files = tls or files_from_environment()
    return NoticeHolder(
        TaskNotice(
            pid=os.getpid(),
            job=job,
            index=index,
            address=task.address,
            key=cluster_key(key, tls).text(),
            tls=()
            if files is None
            else tuple(str(Path(path).resolve()) for path in astuple(files)),
            owner=owner,
            cluster=cluster or {},
        )
    )


def run_task(order: TaskOrder, ready: Callable[[str], None]) -> None:
    """Run one task in this process until it ends; call `ready` with its address when it listens."""
    name_process(f"sg-{order.job}-{order.index}", forked=True)
    _faults.activate_from_environment(f"/job:{order.job}/task:{order.index}")
    torch.set_num_threads(order.threads)
    if order.job == "worker":
        keep_freed_memory()
    task = task_of(order, forward_output=True)
    with task, announce(order.job, order.index, task, key=order.key or None, owner=order.owner):
        ready(task.address)
        task.serve()


def _task_key(text: str | None, address: str, tls: TlsFiles | None) -> ClusterKey:
    """Return the key of a task that listens on `address`.

    Raises:
        PermissionError: other machines can reach the address, and no key is set.
    """
    text = text or config.cluster_key_text()
    if not text and not is_loopback(split_address(address)[0]):
        raise PermissionError(
            f"refusing to listen on {address!r} without a cluster key: any process that can reach "
            f"the port could read and change the model. Set STRATAGEM_CLUSTER_KEY or "
            f"STRATAGEM_CLUSTER_KEY_FILE for every task, or listen on 127.0.0.1"
        )
    return cluster_key(text, tls)
