"""Exceptions that Stratagem defines.

The tree. A class in brackets is a builtin that the exception also inherits from, so that code
written for Python's or tf.distribute's exception types keeps working::

    StratagemError
    ├── ContextError                [RuntimeError]   call in the wrong context, or mixed scopes
    │   └── StrategyMismatch        [RuntimeError]   an object of one strategy used under another
    ├── MisuseError                 [RuntimeError]   an unsupported operation, such as copying a strategy
    ├── WrongArgumentType           [TypeError, AssertionError]  an argument of a type that is not accepted
    ├── ReplicaError                                 failure among the replicas of one run
    │   ├── ReplicaMismatch         [RuntimeError]   replicas called different collectives
    │   │   └── UnequalStructures   [AssertionError] replicas returned different structures
    │   └── ReplicaTimeout          [TimeoutError]   a replica missed a collective's time limit
    ├── DeviceNotFound              [ValueError]     unknown device
    ├── ForeignParameterError       [RuntimeError]   an unmanaged parameter was trained in a replica
    ├── UnsupportedOptimizer        [NotImplementedError]  the optimizer cannot run under this strategy
    ├── DataError                                    unreadable or indivisible input
    │   ├── CorruptRecord           [ValueError]     names the file and the record
    │   ├── MissingFile             [FileNotFoundError]  missing file, or a pattern without matches
    │   ├── ColumnError             [ValueError]     names the file and the column
    │   ├── UnequalRows             [ValueError]     a batch that cannot be split by rows
    │   ├── ShardingError           [ValueError]     the auto-shard policy does not fit the dataset
    │   ├── EndOfData               [StopIteration]  get_next() after the last element
    │   └── InputTimeout            [TimeoutError]   the next element missed its time limit
    ├── CheckpointError                              saving or restoring a checkpoint failed
    │   ├── CheckpointCorrupt       [ValueError]     a file is missing or damaged
    │   ├── CheckpointMismatch      [ValueError]     the checkpoint does not fit the objects
    │   ├── CheckpointBusy                           another manager uses the directory
    │   └── CheckpointTimeout       [TimeoutError]   a save, or a wait for a checkpoint, missed its time limit
    ├── WireError                                    failure between processes
    │   ├── ProtocolError                            unknown bytes, or another protocol version
    │   ├── AuthenticationError     [PermissionError]  the peer did not prove the cluster key
    │   ├── ConnectionLost          [ConnectionError]  the peer closed the connection
    │   └── DeadlineExceeded        [TimeoutError]   no reply within the time limit
    ├── ClusterError                                 failure of a task of the cluster
    │   ├── UnavailableError                         a task cannot be reached
    │   │   ├── WorkerLost                           a worker ended or stopped responding
    │   │   ├── WorkerBusy                           a worker serves another coordinator
    │   │   └── ParameterServerLost                  a parameter server ended or stopped responding
    │   ├── StartupError                             a task did not become ready
    │   ├── WriteFenced                              a write from a worker that was declared lost
    │   ├── JobInUse                                 a live coordinator has the named job
    │   ├── JobMismatch             [ValueError]     the script's variables are not those of the live job
    │   ├── CoordinatorReplaced                      a newer coordinator has taken over the named job
    │   └── NotFoundError           [LookupError]    a name that the peer does not know
    └── ClosureError                                 failure of one scheduled closure
        ├── ClosureCancelled                         another closure failed, or cancel() or close() was called
        │   └── ClosureAborted                       the worker that held the resource was lost
        ├── ClosureInputError                        an input of the closure failed to build
        ├── ClosureLostTooOften                      several workers in a row were lost with it
        └── RemoteError                              a remote exception of an unknown type

An exception carries its facts as attributes. Code reads the attributes, never the message text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override


class StratagemError(Exception):
    """Base class of all exceptions that Stratagem defines.

    Example:
        >>> import stratagem as sg
        >>> issubclass(sg.errors.ReplicaMismatch, sg.StratagemError)
        True
    """

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # Constructors take facts as keyword arguments; the default pickling would leave them out.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(
    kind: type[StratagemError], args: tuple[Any, ...], facts: dict[str, Any]
) -> StratagemError:
    """Rebuild an exception that was pickled in another process."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


class ContextError(StratagemError, RuntimeError):
    """A call made in the wrong context: scope, replica or cross-replica."""


class StrategyMismatch(ContextError):
    """An object of one strategy was used under another strategy."""


class MisuseError(StratagemError, RuntimeError):
    """An operation that an object does not support, such as copying a strategy."""


class WrongArgumentType(StratagemError, TypeError, AssertionError):
    """An argument of a type that the function does not accept; tf.distribute raises AssertionError here."""


class ReplicaError(StratagemError):
    """Failure among the replicas of one run."""


class ReplicaMismatch(ReplicaError, RuntimeError):
    """Replicas called different collectives, or one replica skipped a collective."""


class UnequalStructures(ReplicaMismatch, AssertionError):
    """The replicas returned values of different structures, which cannot be merged."""


class ReplicaTimeout(ReplicaError, TimeoutError):
    """A replica did not reach a collective within the time limit.

    Attributes:
        waiting: replica ids that wait in the collective.
        missing: replica ids that have not reached it.
        limit_s: the time limit, in seconds.
    """

    def __init__(
        self, message: str, *, waiting: Sequence[int], missing: Sequence[int], limit_s: float
    ) -> None:
        super().__init__(message)
        self.waiting = tuple(waiting)
        self.missing = tuple(missing)
        self.limit_s = limit_s


class DeviceNotFound(StratagemError, ValueError):
    """A device that does not exist on this machine."""


class ForeignParameterError(StratagemError, RuntimeError):
    """A replica trains a parameter that was created outside the strategy's scope."""


class UnsupportedOptimizer(StratagemError, NotImplementedError):
    """The optimizer cannot run under this strategy, or on a sharded variable."""


class DataError(StratagemError):
    """Input that cannot be read or divided among replicas."""


class CorruptRecord(DataError, ValueError):
    """A record that cannot be read.

    Attributes:
        path: the file.
        record: the record's number in the file, from 0.
    """

    def __init__(self, message: str, *, path: str, record: int) -> None:
        super().__init__(message)
        self.path = path
        self.record = record


class MissingFile(DataError, FileNotFoundError):
    """A file that does not exist, or a pattern that matches no file.

    Attributes:
        path: the file or pattern.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class ColumnError(DataError, ValueError):
    """A column that is missing in a file, or whose values cannot become a tensor.

    Attributes:
        path: the file.
        column: name of the column.
    """

    def __init__(self, message: str, *, path: str, column: str) -> None:
        super().__init__(message)
        self.path = path
        self.column = column


class UnequalRows(DataError, ValueError):
    """A batch that cannot be split by rows: its tensors have different lengths, or no rows."""


class ShardingError(DataError, ValueError):
    """A dataset that cannot be divided among workers with the requested policy."""


class EndOfData(DataError, StopIteration):
    """`get_next()` was called after the last element."""


class InputTimeout(DataError, TimeoutError):
    """The next element did not arrive within the time limit."""


class CheckpointError(StratagemError):
    """Saving or restoring a checkpoint failed; earlier checkpoints are unchanged."""


class CheckpointCorrupt(CheckpointError, ValueError):
    """A file of a checkpoint is missing, damaged, or of a newer format.

    Attributes:
        path: the file.
        objects_changed: whether a restore had begun to change objects; they are partly restored then.
    """

    def __init__(self, message: str, *, path: str, objects_changed: bool = False) -> None:
        super().__init__(message)
        self.path = path
        self.objects_changed = objects_changed


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint does not fit the objects it should be restored into.

    Attributes:
        missing: names that the objects have and the checkpoint lacks.
        unexpected: names that the checkpoint has and the objects lack.
        different: names that both have with different content, such as tensors of another shape.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        different: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.different = tuple(different)


class CheckpointBusy(CheckpointError):
    """Another `CheckpointManager` uses the directory.

    Attributes:
        holder: description of the other manager, as far as it is known.
    """

    def __init__(self, message: str, *, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


class CheckpointTimeout(CheckpointError, TimeoutError):
    """A save, or the wait for a new checkpoint, did not end within the limit. A save continues in the background."""


class WireError(StratagemError):
    """Failure of the communication between two processes."""


class ProtocolError(WireError):
    """The peer sent bytes that are not Stratagem's protocol, or uses another protocol version."""


class AuthenticationError(WireError, PermissionError):
    """The peer did not prove that it has the cluster key."""


class ConnectionLost(WireError, ConnectionError):
    """The peer or the network closed the connection."""


class DeadlineExceeded(WireError, TimeoutError):
    """No reply arrived within the time limit."""


class ClusterError(StratagemError):
    """Failure of a task of the cluster."""


class UnavailableError(ClusterError):
    """A task cannot be reached.

    Attributes:
        task: the task's name, such as ``/job:worker/task:1``.
    """

    def __init__(self, message: str, *, task: str) -> None:
        super().__init__(message)
        self.task = task


class WorkerLost(UnavailableError):
    """A worker ended or stopped responding."""


class WorkerBusy(UnavailableError):
    """A worker serves another coordinator.

    Attributes:
        coordinator: the name of that coordinator.
        heard_s: seconds since the worker last received a message from it.
    """

    def __init__(self, message: str, *, task: str, coordinator: str, heard_s: float) -> None:
        super().__init__(message, task=task)
        self.coordinator = coordinator
        self.heard_s = heard_s


class ParameterServerLost(UnavailableError):
    """A parameter server ended or stopped responding.

    Attributes:
        variables: names of the variables (or shards) that the server held.
        identity: identity of the process that was lost; empty if it is not known.
    """

    def __init__(
        self, message: str, *, task: str, variables: Sequence[str] = (), identity: str = ""
    ) -> None:
        super().__init__(message, task=task)
        self.variables = tuple(variables)
        self.identity = identity


class StartupError(ClusterError):
    """A task did not become ready."""


class WriteFenced(ClusterError):
    """A server refused a write because its worker was declared lost.

    Another worker may already have repeated the work.
    """


class JobInUse(ClusterError):
    """A live coordinator has the named job.

    Attributes:
        job: name of the job.
        coordinator: host and process of its coordinator, and since when it has the job.
    """

    def __init__(self, message: str, *, job: str = "", coordinator: str = "") -> None:
        super().__init__(message)
        self.job = job
        self.coordinator = coordinator


class JobMismatch(ClusterError, ValueError):
    """The variables and optimizers of the script are not those of the live job.

    Attributes:
        differences: one line for each difference.
    """

    def __init__(self, message: str, *, differences: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class CoordinatorReplaced(ClusterError):
    """A newer coordinator has taken over the named job; this one can neither write nor schedule any more."""


class NotFoundError(ClusterError, LookupError):
    """The peer does not know this name."""


class ClosureError(StratagemError):
    """Failure of one scheduled closure."""


class ClosureCancelled(ClosureError):
    """The closure was cancelled: another one failed, or `cancel` or `close` was called. Schedule it again if needed."""


class ClosureAborted(ClosureCancelled):
    """The worker that held this resource was lost.

    Attributes:
        original_exception: the error that revealed the loss.
    """

    def __init__(self, message: str, *, original_exception: BaseException | None = None) -> None:
        super().__init__(message)
        self.original_exception = original_exception


class ClosureInputError(ClosureError):
    """An input of the closure (a per-worker resource) failed to build on its worker.

    Attributes:
        original_exception: the reason; never itself a ClosureInputError.
    """

    def __init__(self, message: str, *, original_exception: BaseException) -> None:
        super().__init__(message)
        while isinstance(original_exception, ClosureInputError):
            original_exception = original_exception.original_exception
        self.original_exception: BaseException = original_exception


class ClosureLostTooOften(ClosureError):
    """Several workers in a row were lost while they ran the closure; it is not retried.

    Attributes:
        closure: the closure's description.
        workers: the lost workers, in order.
    """

    def __init__(self, message: str, *, closure: str, workers: Sequence[str]) -> None:
        super().__init__(message)
        self.closure = closure
        self.workers = tuple(workers)


class RemoteError(ClosureError):
    """An exception from another process whose type cannot be rebuilt in this one.

    Attributes:
        type_name: qualified name of the remote type.
        task: the task that raised it.
        remote_traceback: the remote traceback as text.
    """

    def __init__(
        self, message: str, *, type_name: str, task: str, remote_traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.type_name = type_name
        self.task = task
        self.remote_traceback = remote_traceback


def __getattr__(name: str) -> type[StratagemError]:
    if name == "ClosurePoisonous":  # the name in earlier versions
        return ClosureLostTooOften
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
