"""Create and run the task of a job: a parameter server, a worker or an evaluator.

Used by `Server` and by every launcher, so that all of them run the same code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

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


Task = ParameterServer | Worker | EvaluatorTask
"""A task listens from its construction on, works in `serve`, and is ended by `close`, from any thread."""


def make_task(order: TaskOrder, *, forward_output: bool, tls: TlsFiles | None = None) -> Task:
    """Make the task of an order, which listens from now on.

    Raises:
        ValueError: a job that is no task of a server.
        PermissionError: other machines can reach the address, and no key is set.
    """
    if order.job == "worker":
        key = _task_key(order, tls)
        return Worker(order.address, index=order.index, key=key, forward_output=forward_output)
    if order.job == "ps":
        options = ServerOptions(
            optimizer_modules=(ANY_MODULE,) if order.any_optimizer else None,
            checkpoints=CheckpointAccess(tuple(order.checkpoint_directories)),
        )
        name, key = f"/job:ps/task:{order.index}", _task_key(order, tls)
        return ParameterServer(order.address, task=name, key=key, options=options)
    if order.job == "evaluator" and order.evaluator:
        return EvaluatorTask(order.evaluator)
    raise ValueError(
        f"job {order.job!r} needs no server: expected 'worker' or 'ps'. The chief runs your program, an "
        f"evaluator runs sg.Evaluator(...).run()."
    )


def announce(
    order: TaskOrder,
    task: Task,
    *,
    tls: TlsFiles | None = None,
    cluster: Mapping[str, Any] | None = None,
) -> NoticeHolder:
    """Let ``stratagem top`` find a task of this process, until the result is closed.

    Args:
        order: its order.
        task: it listens already. An evaluator does not, and is not announced.
        tls: by default the files of the environment.
        cluster: the addresses of all tasks, if known.
    """
    if order.job not in ("worker", "ps"):
        return NoticeHolder(None)
    files = tls or files_from_environment()
    paths = () if files is None else tuple(str(Path(one).resolve()) for one in astuple(files))
    return NoticeHolder(
        TaskNotice(
            pid=os.getpid(),
            job=order.job,
            index=order.index,
            address=task.address,
            key=cluster_key(order.key or None, tls).text(),
            tls=paths,
            owner=order.owner,
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
    with make_task(order, forward_output=True) as task, announce(order, task):
        ready(task.address)
        task.serve()


def _task_key(order: TaskOrder, tls: TlsFiles | None) -> ClusterKey:
    """Return the key of a task.

    Raises:
        PermissionError: other machines can reach its address, and no key is set.
    """
    text = order.key or config.cluster_key_text()
    if not text and not is_loopback(split_address(order.address)[0]):
        raise PermissionError(
            f"refusing to listen on {order.address!r} without a cluster key: any process that can reach "
            f"the port could read and change the model. Set STRATAGEM_CLUSTER_KEY or "
            f"STRATAGEM_CLUSTER_KEY_FILE for every task, or listen on 127.0.0.1"
        )
    return cluster_key(text, tls)
