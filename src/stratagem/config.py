"""Option objects, and the only place that reads the environment.

Every option object is frozen, keyword-only and checks itself. Precedence everywhere:
an explicit argument, then the environment, then the default stated here.
"""

from __future__ import annotations

import enum
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

ENVIRONMENT_PREFIX = "STRATAGEM_"


def environment(name: str, default: str | None = None) -> str | None:
    """Value of one environment variable, read anew at every call.

    Example:
        >>> from stratagem import config
        >>> config.environment("STRATAGEM_NO_SUCH_SETTING", "fallback")
        'fallback'
    """
    return os.environ.get(name, default)


def seconds_from_environment(name: str, default: float) -> float:
    """A duration in seconds from the environment; refuses what is not a positive number."""
    text = environment(name)
    if text is None or text == "":
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise ValueError(
            f"{name}={text!r} is not a duration: expected a positive number of seconds, "
            f"such as {default:g}. Unset it to use the default."
        )
    return value


class InputReplicationMode(enum.Enum):
    """How many input pipelines one worker has.

    Example:
        >>> from stratagem.config import InputReplicationMode
        >>> InputReplicationMode("PER_WORKER") is InputReplicationMode.PER_WORKER
        True
    """

    PER_WORKER = "PER_WORKER"
    """One pipeline feeds all replicas of a worker."""

    PER_REPLICA = "PER_REPLICA"
    """Each replica has a pipeline of its own."""


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """How `distribute_dataset` and `distribute_datasets_from_function` feed the replicas.

    Example:
        >>> import stratagem as sg
        >>> sg.InputOptions(per_replica_buffer_size=2).fetch_to_device
        True
    """

    fetch_to_device: bool | None = True
    """Move each part to its replica's device in the background; False leaves it on the host.
    None, tf.distribute's way to say "the default", becomes True."""

    replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    """PER_REPLICA: `dataset_fn` is called once per replica (from-function input only)."""

    place_dataset_on_device: bool = False
    """Kept for tf.distribute's contract; needs PER_REPLICA and fetch_to_device=False."""

    per_replica_buffer_size: int = 1
    """Steps prepared ahead in a thread; 0 prepares each step when it is asked for. One hides a
    pipeline as slow as the step; more only helps when its speed varies."""

    def __post_init__(self) -> None:
        if self.fetch_to_device is None:
            object.__setattr__(self, "fetch_to_device", True)
        object.__setattr__(self, "replication_mode", InputReplicationMode(self.replication_mode))
        size: object = self.per_replica_buffer_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(
                f"per_replica_buffer_size={size!r} is no number of steps: expected 0 or more"
            )


def input_timeout_s() -> float:
    """How long the next element of a dataset may take before it is an error.

    Ten minutes: longer than opening a large remote file, shorter than a night. Set
    ``STRATAGEM_INPUT_TIMEOUT_S`` to change it.
    """
    return seconds_from_environment("STRATAGEM_INPUT_TIMEOUT_S", 600.0)


def replica_timeout_s() -> float:
    """How long a replica waits for the others in a collective before it is an error.

    Ten minutes: longer than any sane first step (compilation included), shorter than a night.
    Set ``STRATAGEM_REPLICA_TIMEOUT_S`` to change it.
    """
    return seconds_from_environment("STRATAGEM_REPLICA_TIMEOUT_S", 600.0)


def log_as_environment_says() -> None:
    """With ``STRATAGEM_LOG=debug`` (info, warning, error) set, print our log records to stderr.

    Called when a strategy, cluster or server is made; without the variable nothing happens.
    """
    level = environment("STRATAGEM_LOG")
    if level:
        set_up_logging(level)


class _ToStandardError(logging.Handler):
    """Writes to what ``sys.stderr`` is by then: notebooks and test runners replace it, and close the old one."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 - as every handler: logging must not end the program
            self.handleError(record)


def set_up_logging(level: str) -> None:
    """Print the records of the ``stratagem`` logger (the one documented namespace) to stderr.

    Without being asked to, Stratagem as a library leaves logging to the program.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(
            f"log level {level!r} (STRATAGEM_LOG) is not known; expected debug, info, warning "
            "or error."
        )
    logger = logging.getLogger("stratagem")
    logger.setLevel(number)
    if not logger.handlers:
        handler = _ToStandardError()
        handler.setFormatter(logging.Formatter("%(levelname).1s %(name)s: %(message)s"))
        logger.addHandler(handler)


def session_lease_s() -> float:
    """How long parameter servers keep a strategy's variables after its coordinator is gone.

    One minute: a coordinator whose network failed for a moment finds them again. Set
    ``STRATAGEM_SESSION_LEASE_S`` to change it.
    """
    return seconds_from_environment("STRATAGEM_SESSION_LEASE_S", 60.0)


def server_wait_s() -> float:
    """How long a strategy that is being made waits for parameter servers that do not answer yet.

    One minute, for all of them together: a fleet that is just being started needs a while. Set
    ``STRATAGEM_SERVER_WAIT_S`` to change it.

    Example:
        >>> from stratagem import config
        >>> config.server_wait_s()
        60.0
    """
    return seconds_from_environment("STRATAGEM_SERVER_WAIT_S", 60.0)


def wire_timeout_s() -> float:
    """How long one request to another task may take before it is an error.

    One minute: a request moves at most a gigabyte and runs one optimizer step. Set
    ``STRATAGEM_WIRE_TIMEOUT_S`` to change it.
    """
    return seconds_from_environment("STRATAGEM_WIRE_TIMEOUT_S", 60.0)


def frame_bytes() -> int:
    """How many bytes of tensors a parameter server takes in one message.

    1 GiB: what a peer can make a server set aside. Steps that write more over a connection come in
    several messages; only a single variable (or shard) larger than this needs more. Set
    ``STRATAGEM_FRAME_BYTES`` for the servers to change it.
    """
    text = environment("STRATAGEM_FRAME_BYTES", str(1 << 30))
    if text is None or not text.isdecimal() or int(text) < 1 << 16:
        raise ValueError(
            f"STRATAGEM_FRAME_BYTES={text!r} is not a usable size: expected a number of bytes of at "
            "least 65536, such as 1073741824."
        )
    return int(text)


def remote_table_bytes() -> int:
    """From which size on a tensor made under a parameter-server scope is not built here.

    1 GiB: what any coordinator has; above it a parameter is initialised on the servers, shard by
    shard. Set ``STRATAGEM_REMOTE_TABLE_BYTES`` to change it.
    """
    text = environment("STRATAGEM_REMOTE_TABLE_BYTES", str(1 << 30))
    if text is None or not text.isdecimal() or int(text) == 0:
        raise ValueError(
            f"STRATAGEM_REMOTE_TABLE_BYTES={text!r} is not a size: expected a positive number of "
            "bytes, such as 1073741824."
        )
    return int(text)


def shared_memory_allowed() -> bool:
    """Whether tasks on one host may share memory; ``STRATAGEM_SHARED_MEMORY=0`` forces sockets.

    Example:
        >>> from stratagem import config
        >>> config.shared_memory_allowed()
        True
    """
    return _switch("STRATAGEM_SHARED_MEMORY", "share memory wherever tasks run on one host")


def _switch(name: str, purpose: str) -> bool:
    """A switch of the environment that is on unless it is turned off."""
    text = environment(name, "1")
    if text not in ("0", "1"):
        raise ValueError(
            f"{name}={text!r} is not a switch: expected 0 or 1. Unset it to {purpose}."
        )
    return text == "1"


def cluster_key_text() -> str | None:
    """The cluster's key from ``STRATAGEM_CLUSTER_KEY`` or the file ``STRATAGEM_CLUSTER_KEY_FILE``.

    None when neither is set. A key never stands on a command line, where every user could read it.
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
    if not path:
        return None
    try:
        found = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(
            f"STRATAGEM_CLUSTER_KEY_FILE={path!r} cannot be read: {error}. Name a file that holds "
            f"the key and that this user may read."
        ) from error
    if not found:
        raise ValueError(f"STRATAGEM_CLUSTER_KEY_FILE={path!r} is empty: expected the cluster key.")
    return found


def set_environment(name: str, value: str) -> None:
    """Sets one environment variable of this process (CUDA_VISIBLE_DEVICES from Slurm's ranks)."""
    os.environ[name] = value


def _number_from_environment(names: tuple[str, ...], default: float) -> float:
    """First of several settings that is set, as a number that is not negative."""
    for name in names:
        text = environment(name)
        if text is None or text == "":
            continue
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if value < 0:
            raise ValueError(
                f"{name}={text!r} is not usable: expected a number >= 0, such as {default:g}. "
                f"Unset it to use the default."
            )
        return value
    return default


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Limits and sizes of a coordinator and its tasks.

    `ClusterOptions.from_environment()` reads each field from ``STRATAGEM_<FIELD>`` and, where
    tf.distribute had a setting for it, from that name.

    Example:
        >>> from stratagem.config import ClusterOptions
        >>> ClusterOptions(heartbeat_limit_s=2.0).heartbeat_limit_s
        2.0
    """

    heartbeat_s: float = 0.5
    """How often tasks say that they live: a fraction of the limit, too rare to cost anything."""

    heartbeat_limit_s: float = 4.0
    """Silence after which a task counts as lost; with the checks' own delay it stays under 5 s."""

    busy_limit_s: float = 60.0
    """Silence of a task on this host that is borne while its process computes: native code that
    keeps Python's lock (GIL) for long silences it. 0 bears none."""

    connect_timeout_s: float = 30.0
    """How long a connection attempt to one task may take, its start-up included."""

    worker_wait_s: float = 3600.0
    """How long closures wait when no worker at all is there (FLT-3), before it is an error."""

    restart_pause_s: float = 0.25
    """Pause between attempts to reach a lost worker; a fork server needs about 0.1 s."""

    queue_limit: int = 262_144
    """Closures queued before `schedule` waits; 0 means no limit (CCO-12)."""

    poison_limit: int = 3
    """Losses in a row after which a closure is not tried again."""

    transient_ps_failures: int = 3
    """Reports of one server's failure at which it is raised instead of retried (FLT-10)."""

    transient_timeouts: int = -1
    """Deadlines missed before it is raised (FLT-11); -1 means a tenth of the workers."""

    watchdog_s: float = 0.0
    """Time without a finished closure after which stacks are logged; 0 is off (WDG-1)."""

    start_delay_s: float = 0.0
    """Worker i starts taking closures after i times this (CCO-3)."""

    start_delay_max_s: float = 0.0
    """Upper limit of that delay; 0 means none."""

    close_timeout_s: float = 10.0
    """How long `close` waits for threads and tasks before it stops waiting."""

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
        """Options as the environment sets them."""
        default = cls()

        def number(field: str, *others: str) -> float:
            return _number_from_environment(
                (f"STRATAGEM_{field.upper()}", *others), getattr(default, field)
            )

        return cls(
            heartbeat_s=number("heartbeat_s"),
            heartbeat_limit_s=number("heartbeat_limit_s"),
            busy_limit_s=number("busy_limit_s"),
            connect_timeout_s=number("connect_timeout_s"),
            worker_wait_s=number("worker_wait_s"),
            restart_pause_s=number("restart_pause_s"),
            queue_limit=int(number("queue_limit")),
            poison_limit=int(number("poison_limit")),
            transient_ps_failures=int(
                number("transient_ps_failures", "TF_COORDINATOR_IGNORE_TRANSIENT_PS_FAILURES")
            ),
            transient_timeouts=int(
                number("transient_timeouts", "TF_COORDINATOR_IGNORE_TRANSIENT_TIMEOUTS")
            ),
            watchdog_s=number("watchdog_s", "TF_CLUSTER_COORDINATOR_WATCH_DOG_TIMEOUT"),
            start_delay_s=number("start_delay_s", "TF_COORDINATOR_SCHEDULE_START_DELAY"),
            start_delay_max_s=number(
                "start_delay_max_s", "TF_COORDINATOR_SCHEDULE_START_DELAY_MAX"
            ),
            close_timeout_s=number("close_timeout_s"),
        )


def optimizer_modules() -> tuple[str, ...]:
    """Modules beside ``torch.optim`` from which parameter servers may import optimizer classes.

    From ``STRATAGEM_OPTIMIZER_MODULES``, separated by commas; none by default, because importing a
    module runs its code.

    Example:
        >>> from stratagem import config
        >>> config.optimizer_modules()
        ()
    """
    text = environment("STRATAGEM_OPTIMIZER_MODULES", "") or ""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(
                f"STRATAGEM_OPTIMIZER_MODULES={text!r} names {name!r}, which is no module: expected "
                f"dotted names separated by commas, such as 'mylab.optimizers'."
            )
    return names
