"""Option objects, and access to environment variables.

Every option object is frozen, takes keyword arguments only and checks its values. An explicit argument
wins over the environment, and the environment wins over the default.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from stratagem._private_files import check_private


def environment(name: str, default: str | None = None) -> str | None:
    """Return the value of an environment variable, read at every call."""
    return os.environ.get(name, default)


def seconds_from_environment(name: str, default: float) -> float:
    """Return a duration in seconds from the environment; raise unless it is a positive number."""
    what = "a duration: expected a positive number of seconds"
    return _number_from_environment((name,), default, what, lambda value: value > 0)


def _bytes_from_environment(name: str, default: int, *, least: int) -> int:
    """Return a size in bytes from the environment; raise if it is below `least`."""
    what = f"a usable size: expected a number of bytes of at least {least}"
    return int(
        _number_from_environment(
            (name,), default, what, lambda value: value >= least and value.is_integer()
        )
    )


def _number_from_environment(
    names: Sequence[str], default: float, what: str, is_valid: Callable[[float], bool]
) -> float:
    """Return the first of several variables that is set; raise unless it is a valid number."""
    for name in names:
        text = environment(name)
        if not text:
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not is_valid(value):
            raise ValueError(
                f"{name}={text!r} is not {what}, such as {default:.12g}. Unset it to use the default."
            )
        return value
    return default


class InputReplicationMode(enum.Enum):
    """Number of input pipelines of one worker.

    Example:
        >>> from stratagem.config import InputReplicationMode
        >>> InputReplicationMode("PER_WORKER") is InputReplicationMode.PER_WORKER
        True
    """

    PER_WORKER = "PER_WORKER"
    """One pipeline feeds all replicas of a worker."""

    PER_REPLICA = "PER_REPLICA"
    """Each replica has its own pipeline."""


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Options of `distribute_dataset` and `distribute_datasets_from_function`.

    Example:
        >>> import stratagem as sg
        >>> sg.InputOptions(per_replica_buffer_size=2).fetch_to_device
        True
    """

    fetch_to_device: bool | None = True
    """Copy each part to its replica's device in the background; False leaves it on the host. None
    means True, as in tf.distribute."""

    replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    """PER_REPLICA: `dataset_fn` is called once per replica (from-function input only)."""

    place_dataset_on_device: bool = False
    """Accepted for tf.distribute; requires PER_REPLICA and fetch_to_device=False."""

    per_replica_buffer_size: int = 1
    """Steps that a thread prepares ahead; 0 prepares each step on demand. One step hides a pipeline
    that is as slow as the training step; more steps help only when its speed varies."""

    def __post_init__(self) -> None:
        if self.fetch_to_device is None:
            object.__setattr__(self, "fetch_to_device", True)
        object.__setattr__(self, "replication_mode", InputReplicationMode(self.replication_mode))
        size: object = self.per_replica_buffer_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(
                f"per_replica_buffer_size={size!r} is not a number of steps: expected 0 or more"
            )


def input_timeout_s() -> float:
    """Return the time limit for the next element of a dataset (``STRATAGEM_INPUT_TIMEOUT_S``).

    Ten minutes by default: longer than opening a large remote file takes.
    """
    return seconds_from_environment("STRATAGEM_INPUT_TIMEOUT_S", 600.0)


def replica_timeout_s() -> float:
    """Return the time limit of a collective among replicas (``STRATAGEM_REPLICA_TIMEOUT_S``).

    Ten minutes by default: longer than a first step takes, compilation included.
    """
    return seconds_from_environment("STRATAGEM_REPLICA_TIMEOUT_S", 600.0)


def log_as_environment_says() -> None:
    """Print log records to stderr if ``STRATAGEM_LOG`` names a level (debug, info, warning, error).

    Strategies, clusters and servers call this when they are created.
    """
    level = environment("STRATAGEM_LOG")
    if level:
        set_up_logging(level)


class _ToStandardError(logging.Handler):
    """Handler that looks up ``sys.stderr`` for each record, since notebooks and test runners replace it."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 - logging must not end the program
            self.handleError(record)


def set_up_logging(level: str) -> None:
    """Print the records of the ``stratagem`` logger to stderr.

    Without this call, Stratagem leaves logging to the program.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(
            f"unknown log level {level!r} (STRATAGEM_LOG): expected debug, info, warning or error."
        )
    logger = logging.getLogger("stratagem")
    logger.setLevel(number)
    if not logger.handlers:
        handler = _ToStandardError()
        handler.setFormatter(logging.Formatter("%(levelname).1s %(name)s: %(message)s"))
        logger.addHandler(handler)


def session_lease_s() -> float:
    """Return how long servers keep variables without their coordinator (``STRATAGEM_SESSION_LEASE_S``).

    One minute by default: enough for a short network failure.
    """
    return seconds_from_environment("STRATAGEM_SESSION_LEASE_S", 60.0)


def job_lease_s() -> float:
    """Return how long servers keep a named job without its coordinator (``STRATAGEM_JOB_LEASE_S``).

    Ten minutes by default: enough for a scheduler to start the script again on another machine.
    """
    return seconds_from_environment("STRATAGEM_JOB_LEASE_S", 600.0)


def job_limit_s() -> float:
    """Return after how much silence another coordinator may take over a named job (``STRATAGEM_JOB_LIMIT_S``).

    Ten seconds by default. A coordinator whose process has ended needs no wait: its connections are closed.
    """
    return seconds_from_environment("STRATAGEM_JOB_LIMIT_S", 10.0)


def server_wait_s() -> float:
    """Return how long a new strategy waits for its parameter servers (``STRATAGEM_SERVER_WAIT_S``).

    One minute by default, for all servers together: a cluster may still be starting.
    """
    return seconds_from_environment("STRATAGEM_SERVER_WAIT_S", 60.0)


def partition_limit_s() -> float:
    """Return how long a connection may be silent before it counts as lost (``STRATAGEM_PARTITION_LIMIT_S``).

    Also the limit of the handshake of a new connection, and of its first message.
    """
    return seconds_from_environment("STRATAGEM_PARTITION_LIMIT_S", 30.0)


def wire_timeout_s() -> float:
    """Return the time limit of one request to another task (``STRATAGEM_WIRE_TIMEOUT_S``).

    One minute by default: a request moves at most a gigabyte and runs one optimizer step.
    """
    return seconds_from_environment("STRATAGEM_WIRE_TIMEOUT_S", 60.0)


def frame_bytes() -> int:
    """Return how many bytes of tensors a server accepts in one message (``STRATAGEM_FRAME_BYTES``).

    1 GiB by default: the memory that one peer can make a server allocate. A step that writes more is
    sent in several messages. Raise the limit only for a single variable or shard that is larger.
    """
    return _bytes_from_environment("STRATAGEM_FRAME_BYTES", 1 << 30, least=1 << 16)


def server_memory_bytes() -> int | None:
    """Return how many bytes variables and optimizer state may hold on a server (``STRATAGEM_SERVER_MEMORY_BYTES``).

    By default None: 90 % of the memory available to the server's process when it starts. A cgroup limit (of a
    container, for example) counts.
    """
    limit = _bytes_from_environment("STRATAGEM_SERVER_MEMORY_BYTES", 0, least=0)
    return limit or None


def remote_table_bytes() -> int:
    """Return the size from which servers initialise a parameter (``STRATAGEM_REMOTE_TABLE_BYTES``).

    1 GiB by default. The coordinator never holds a larger parameter; each server initialises its shard.
    """
    return _bytes_from_environment("STRATAGEM_REMOTE_TABLE_BYTES", 1 << 30, least=1)


def shared_memory_allowed() -> bool:
    """Return whether tasks on one host may share memory; ``STRATAGEM_SHARED_MEMORY=0`` forbids it."""
    return _switch("STRATAGEM_SHARED_MEMORY", "share memory wherever tasks run on one host")


def wire_dtype() -> str:
    """Return the dtype of gradients and table rows on sockets (``STRATAGEM_WIRE_DTYPE``); empty: as they are."""
    text = environment("STRATAGEM_WIRE_DTYPE", "") or ""
    if text not in ("", "bfloat16", "float16"):
        raise ValueError(
            f"STRATAGEM_WIRE_DTYPE={text!r} is not known: expected bfloat16, float16, or nothing."
        )
    return text


def _switch(name: str, purpose: str) -> bool:
    """Return whether a switch of the environment is on, which is the default."""
    text = environment(name, "1")
    if text not in ("0", "1"):
        raise ValueError(
            f"{name}={text!r} is not a switch: expected 0 or 1. Unset it to {purpose}."
        )
    return text == "1"


def cluster_key_text() -> str | None:
    """Return the cluster key from ``STRATAGEM_CLUSTER_KEY`` or the file ``STRATAGEM_CLUSTER_KEY_FILE``.

    None when neither is set. There is no command-line option, because every user can read command lines.

    Raises:
        ValueError: both are set, or the file cannot be read or is empty.
        PermissionError: other users can read the file.
    """
    text = environment("STRATAGEM_CLUSTER_KEY")
    path = environment("STRATAGEM_CLUSTER_KEY_FILE")
    if text and path:
        raise ValueError(
            "STRATAGEM_CLUSTER_KEY and STRATAGEM_CLUSTER_KEY_FILE are both set: expected one of "
            "them. Unset the other."
        )
    if text:
        return text.strip()
    return read_key_file(Path(path)) if path else None


def read_key_file(path: Path) -> str:
    """Return the cluster key in a file.

    Raises:
        ValueError: the file cannot be read or is empty.
        PermissionError: other users can read the file.
    """
    try:
        found = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(
            f"the key file {str(path)!r} cannot be read: {error}. Name a file that holds the key and "
            f"that this user may read (STRATAGEM_CLUSTER_KEY_FILE)."
        ) from error
    check_private(path, "the key file")
    if not found:
        raise ValueError(f"the key file {str(path)!r} is empty: expected the cluster key.")
    return found


def user_directory() -> Path:
    """Return the user's configuration directory for Stratagem: ``~/.config/stratagem`` (``XDG_CONFIG_HOME``)."""
    base = environment("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "stratagem"


def table_directory() -> Path:
    """Return where tables on disk have their files (``STRATAGEM_TABLE_DIRECTORY``)."""
    # /var/tmp is on a disk by convention, /tmp is often in memory.
    return Path(environment("STRATAGEM_TABLE_DIRECTORY") or "/var/tmp")


def set_environment(name: str, value: str | None) -> None:
    """Set an environment variable of this process (CUDA_VISIBLE_DEVICES from Slurm's ranks); None removes it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Limits of a coordinator and its tasks.

    `ClusterOptions.from_environment()` reads each field from ``STRATAGEM_<FIELD>``, and from
    tf.distribute's variable where there is one.

    Example:
        >>> from stratagem.config import ClusterOptions
        >>> ClusterOptions(heartbeat_limit_s=2.0).heartbeat_limit_s
        2.0
    """

    heartbeat_s: float = 0.5
    """Seconds between heartbeats of a task; a small fraction of the limit."""

    heartbeat_limit_s: float = 4.0
    """Seconds without a heartbeat after which a task counts as lost; detection takes under 5 s."""

    partition_limit_s: float = 30.0
    """Seconds to wait for a parameter server that cannot be reached, and for any silent task whose process on
    this host runs. Such a server may still have its variables; native code that holds the GIL blocks
    heartbeats. The coordinator does not wait for a process that has ended or is stopped. The default is longer than
    a switch or a router takes to restart, and below the session's lease. Limits of TCP and of the handshake are set
    only by ``STRATAGEM_PARTITION_LIMIT_S``, in each process."""

    connect_timeout_s: float = 30.0
    """Seconds that the coordinator waits for all workers at the start, and later for the answer of one worker."""

    worker_wait_s: float = 3600.0
    """Seconds that closures wait while no worker is connected."""

    restart_pause_s: float = 0.25
    """Seconds between attempts to reconnect to a lost worker; a fork server needs about 0.1 s."""

    membership_s: float = 1.0
    """Seconds between calls of the resolver to find workers that joined or left; 0: never look for them."""

    queue_limit: int = 262_144
    """Queued closures at which `schedule` waits; 0 means no limit."""

    queue_bytes: int = 1 << 30
    """Bytes of arguments of unfinished closures at which `schedule` waits; 0 means no limit. The coordinator
    keeps arguments until their closure is done, because it may have to send them again."""

    poison_limit: int = 3
    """Number of workers lost in a row while they ran a closure, after which it is not retried."""

    transient_ps_failures: int = 3
    """Failure reports about one server at which the failure is raised instead of retried."""

    transient_timeouts: int = -1
    """Functions with a missed deadline (`DeadlineExceeded`) at which the error is raised; -1 means a tenth of the workers."""

    watchdog_s: float = 0.0
    """Seconds without a finished closure after which all stacks are logged; 0 disables this."""

    start_delay_s: float = 0.0
    """Worker i starts to take closures after i times this many seconds."""

    start_delay_max_s: float = 0.0
    """Upper limit of that delay; 0 means none."""

    trust_workers: bool = False
    """True if workers may run code in the coordinator: results and exceptions may then be objects of any
    class. By default they are data: tensors, arrays, built-in types, dataclasses, named tuples, enums."""

    close_timeout_s: float = 10.0
    """Seconds that `close` waits for threads and tasks."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "heartbeat_limit_s", "connect_timeout_s", "worker_wait_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name}={value!r}: expected a positive number of seconds.")
        if self.heartbeat_limit_s <= self.heartbeat_s:
            raise ValueError(
                f"heartbeat_limit_s={self.heartbeat_limit_s!r} must be larger than "
                f"heartbeat_s={self.heartbeat_s!r}, or every task would count as lost."
            )

    @classmethod
    def from_environment(cls) -> ClusterOptions:
        """Return the options that the environment sets."""
        found: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            names = (f"STRATAGEM_{field.name.upper()}", *_TF_NAMES.get(field.name, ()))
            default = getattr(cls, field.name)
            value = _number_from_environment(names, default, _AT_LEAST_0, lambda value: value >= 0)
            found[field.name] = type(default)(value)
        return cls(**found)


_AT_LEAST_0 = "usable: expected a number >= 0"

# Variables of tf.distribute that set a field of `ClusterOptions`.
_TF_NAMES = {
    "transient_ps_failures": ("TF_COORDINATOR_IGNORE_TRANSIENT_PS_FAILURES",),
    "transient_timeouts": ("TF_COORDINATOR_IGNORE_TRANSIENT_TIMEOUTS",),
    "watchdog_s": ("TF_CLUSTER_COORDINATOR_WATCH_DOG_TIMEOUT",),
    "start_delay_s": ("TF_COORDINATOR_SCHEDULE_START_DELAY",),
    "start_delay_max_s": ("TF_COORDINATOR_SCHEDULE_START_DELAY_MAX",),
}


def optimizer_modules() -> tuple[str, ...]:
    """Return the modules from which servers may import optimizers (``STRATAGEM_OPTIMIZER_MODULES``).

    Names separated by commas, in addition to ``torch.optim``. None by default, because importing a module
    runs its code.
    """
    text = environment("STRATAGEM_OPTIMIZER_MODULES", "") or ""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(
                f"STRATAGEM_OPTIMIZER_MODULES={text!r} names {name!r}, which is not a module name: expected "
                f"dotted names separated by commas, such as 'mylab.optimizers'."
            )
    return names
