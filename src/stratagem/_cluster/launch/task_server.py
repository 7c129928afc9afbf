"""The public `Server`: one task of a cluster, started by a user or a scheduler.

It creates the same task as a `LocalCluster` (`tasks.py`) and serves it from a thread. ``stratagem server`` uses it, and
so do scripts that run as every task.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self, final

import torch
from typing_extensions import override

from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._cluster.launch.launcher import TaskOrder, check_open_files, import_all
from stratagem._cluster.launch.task_process import name_process, threads_of_task
from stratagem._cluster.launch.tasks import Task, announce, make_task
from stratagem._cluster.worker.worker import Worker
from stratagem._owner import Owner
from stratagem._ps.malloc import keep_freed_memory
from stratagem._wire.connecting import join_address, split_address
from stratagem._wire.listener import is_local
from stratagem._wire.task_notices import NoticeHolder
from stratagem._wire.tls import TlsFiles
from stratagem.config import ClusterOptions, log_as_environment_says
from stratagem.errors import NotFoundError

_log = logging.getLogger("stratagem.cluster")

PROTOCOLS: Final = ("grpc", "stratagem")
"""Names accepted for the only protocol; the first is the one of tf.distribute."""

_SLICE_S: Final = 1.0
"""How long `join` waits at a time, so that Ctrl-C is handled everywhere."""


@final
class Server(Owner):
    """One task of a cluster: a parameter server or a worker.

    Args:
        server_or_cluster_def: the cluster, as a `ClusterSpec` or a dictionary.
        job_name: job of this task; optional if there is only one.
        task_index: index of this task; optional if the job has only one task.
        protocol: accepted for tf.distribute; the default ``"grpc"`` selects Stratagem's own protocol.
        config: `ClusterOptions`, or None.
        start: whether to start serving at once.
        key: the cluster key; by default from the environment (``STRATAGEM_CLUSTER_KEY``).
        advertised_address: host, or ``host:port``, at which others reach this task, if that is not the
            address in the cluster specification (behind NAT, in a container).
        checkpoint_directories: directories below which a parameter server may write and read its part of a
            checkpoint. Without any, its rows pass through the coordinator.
        tls: certificate files that encrypt the connections of this task; by default those of the environment
            (``STRATAGEM_TLS_CERT``, ``STRATAGEM_TLS_KEY``, ``STRATAGEM_TLS_CA``), else no encryption.
        threads: torch threads of this process, set by `join`. By default the cores of this machine divided
            by the number of the cluster's tasks on it, unless ``OMP_NUM_THREADS`` is set.

    Raises:
        TypeError: not a cluster.
        ValueError: the job or the index is missing or not in the cluster, or the key is too short.
        NotFoundError: an unknown protocol.
        PermissionError: an address that other machines reach, without a cluster key.

    Example:
        >>> import stratagem as sg
        >>> with sg.Server({"ps": ["127.0.0.1:0"]}) as server:
        ...     server.job_name, server.task_index, server.target.startswith("grpc://127.0.0.1:")
        ('ps', 0, True)
    """

    def __init__(
        self,
        server_or_cluster_def: ClusterSpec | Mapping[str, Any],
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: ClusterOptions | None = None,
        start: bool = True,
        *,
        key: str | None = None,
        advertised_address: str | None = None,
        checkpoint_directories: Sequence[str] = (),
        tls: TlsFiles | None = None,
        threads: int | None = None,
    ) -> None:
        log_as_environment_says()
        spec = ClusterSpec(server_or_cluster_def)
        self.job_name, self.task_index = _own_place(spec, job_name, task_index)
        self.protocol = protocol if protocol is not None else PROTOCOLS[0]
        if self.protocol not in PROTOCOLS:
            raise NotFoundError(
                f"protocol={protocol!r} is not known: expected one of {list(PROTOCOLS)}."
            )
        if config is not None and not isinstance(config, ClusterOptions):
            raise TypeError(f"config={config!r}: expected ClusterOptions or None.")
        if threads is not None and threads < 1:
            raise ValueError(f"threads={threads!r}: expected a number >= 1, or None.")
        self.cluster_spec = spec
        self._tls = tls
        self._threads = threads or threads_of_task(spec, self.job_name, self.task_index)
        address = spec.task_address(self.job_name, self.task_index)
        self._advertised = _split(advertised_address or address)
        self._order = TaskOrder(
            job="ps" if self.job_name == "ps" else "worker",
            index=self.task_index,
            address=_bind_address(address),
            key=key or "",
            checkpoint_directories=tuple(checkpoint_directories),
        )
        self._task: Task | None = None
        self._notice: NoticeHolder | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        if start:
            self.start()

    def start(self) -> None:
        """Listen and serve. Does nothing if the task is already started."""
        if self._task is not None or self._closed.is_set():
            return
        check_open_files(1)
        import_all()
        self._task = make_task(self._order, forward_output=False, tls=self._tls)
        spec = self.cluster_spec.as_dict()
        self._notice = announce(self._order, self._task, tls=self._tls, cluster=spec)
        self._thread = threading.Thread(
            target=self._serve,
            args=(self._task,),
            name=f"stratagem-{self.job_name}-{self.task_index}",
            daemon=True,
        )
        self._thread.start()
        _log.info("/job:%s/task:%d serves at %s", self.job_name, self.task_index, self.address)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the server is closed; by default without limit. It serves one coordinator after another.

        From this call on, the process belongs to the task. It sets the number of torch threads and the name of
        the process. A worker also sends printed lines and log records to its coordinator, and derives the random
        numbers of closures from the coordinator's seed.
        """
        self.start()
        name_process(f"sg-{self.job_name}-{self.task_index}")
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        if isinstance(self._task, Worker):
            keep_freed_memory()
            self._task.own_process(echo=True)
        if timeout_s is not None:
            self._closed.wait(timeout_s)
            return
        while not self._closed.wait(_SLICE_S):
            pass

    @property
    def address(self) -> str:
        """The address by which others reach this task, ``host:port``."""
        host, port = self._advertised
        if port == 0 and self._task is not None:
            port = split_address(self._task.address)[1]
        return join_address(host, port)

    @property
    def target(self) -> str:
        """The address with the protocol in front."""
        return f"{self.protocol}://{self.address}"

    @property
    def server_def(self) -> dict[str, Any]:
        """Cluster, job and index of this server, as plain data."""
        return {
            "cluster": self.cluster_spec.as_dict(),
            "job_name": self.job_name,
            "task_index": self.task_index,
            "protocol": self.protocol,
        }

    @override
    def close(self) -> None:
        """Stop serving and free the address. May be called again."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._notice is not None:
            self._notice.close()
        if self._task is not None:
            self._task.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(10.0)

    @classmethod
    def create_local_server(cls, config: ClusterOptions | None = None, start: bool = True) -> Self:
        """Start a worker on a free port of this machine, in a cluster of its own."""
        return cls({"localhost": ["127.0.0.1:0"]}, config=config, start=start)

    def _serve(self, task: Task) -> None:
        try:
            task.serve()
        except Exception:
            _log.exception("%r ended by an error", self)
            raise
        finally:
            self._closed.set()

    @override
    def __repr__(self) -> str:
        state = "closed" if self._closed.is_set() else "serving" if self._task else "not started"
        return f"<Server /job:{self.job_name}/task:{self.task_index} at {self.address} [{state}]>"


def _own_place(spec: ClusterSpec, job: str | None, index: int | None) -> tuple[str, int]:
    if job is None:
        if len(spec.jobs) != 1:
            raise ValueError(
                f"job_name is missing: the cluster has the jobs {spec.jobs}, pass job_name."
            )
        job = spec.jobs[0]
    indices = spec.task_indices(job)
    if index is None:
        if len(indices) != 1:
            raise ValueError(
                f"task_index is missing: job {job!r} has the tasks {indices}, pass task_index."
            )
        index = indices[0]
    spec.task_address(job, index)  # raises if there is none
    return job, index


def _bind_address(address: str) -> str:
    """Return the address to listen on: the one given, or every interface if that is elsewhere.

    The address may belong to a service or a router in front of this machine.
    """
    host, port = split_address(address)
    if is_local(host):
        return address
    _log.warning(
        "%r is not an address of this machine: listening on port %d of every interface", host, port
    )
    return join_address("0.0.0.0", port)


def _split(advertised: str) -> tuple[str, int]:
    """Split a host with or without port; replace "every interface" by this machine's name."""
    bare = ":" not in advertised or (advertised.count(":") > 1 and not advertised.startswith("["))
    host, port = (advertised, 0) if bare else split_address(advertised)
    return (os.uname().nodename if host in ("", "0.0.0.0", "::") else host), port
