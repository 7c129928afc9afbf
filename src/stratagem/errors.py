"""Every exception Stratagem raises of its own.

The tree (a class in brackets is the builtin it also is, so that code written against
tf.distribute's or Python's own types keeps working)::

    StratagemError
    ├── ContextError                [RuntimeError]   called in the wrong context, scopes mixed
    │   └── StrategyMismatch        [RuntimeError]   an object of one strategy used under another
    ├── MisuseError                 [RuntimeError]   something an object does not support, such as copying a strategy
    ├── WrongArgumentType           [TypeError, AssertionError]  an argument of a type that is not accepted
    ├── ReplicaError                                 something about the replicas of one run
    │   ├── ReplicaMismatch         [RuntimeError]   replicas met in different places, or not at all
    │   │   └── UnequalStructures   [AssertionError] replicas returned different structures
    │   └── ReplicaTimeout          [TimeoutError]   a replica did not arrive within the limit
    ├── DeviceNotFound              [ValueError]     a device that does not exist here
    ├── ForeignParameterError       [RuntimeError]   a parameter no strategy looks after, trained in a replica
    ├── UnsupportedOptimizer        [NotImplementedError]  the optimizer cannot run under this strategy
    ├── DataError                                    input that cannot be read or cut
    │   ├── CorruptRecord           [ValueError]     names the file and the record
    │   ├── MissingFile             [FileNotFoundError]  a file, or a pattern that matches none
    │   ├── ColumnError             [ValueError]     names the file and the column
    │   ├── UnequalRows             [ValueError]     a batch that cannot be cut into rows
    │   ├── ShardingError           [ValueError]     a dataset that cannot be shared as asked
    │   ├── EndOfData               [StopIteration]  get_next() after the last element
    │   └── InputTimeout            [TimeoutError]   the next element did not come within the limit
    ├── CheckpointError                              saving or restoring a checkpoint failed
    │   ├── CheckpointCorrupt       [ValueError]     a file is missing or damaged
    │   ├── CheckpointMismatch      [ValueError]     the checkpoint does not fit the objects
    │   ├── CheckpointBusy                           another manager uses the directory
    │   └── CheckpointTimeout       [TimeoutError]   a save did not end within the limit
    ├── WireError                                    between processes
    │   ├── ProtocolError                            bytes that are not our protocol, or another version
    │   ├── AuthenticationError     [PermissionError]  the other side did not prove the cluster key
    │   ├── ConnectionLost          [ConnectionError]  the other side is gone
    │   └── DeadlineExceeded        [TimeoutError]   no reply within the limit
    ├── ClusterError                                 about the tasks of a cluster
    │   ├── UnavailableError                         a task cannot be reached
    │   │   ├── WorkerLost                           a worker died or stopped answering
    │   │   ├── WorkerBusy                           a worker serves another coordinator
    │   │   └── ParameterServerLost                  a parameter server died or stopped answering
    │   ├── StartupError                             a task did not become ready
    │   ├── WriteFenced                              a write of a worker that was declared lost
    │   └── NotFoundError           [LookupError]    a name the other side does not know
    └── ClosureError                                 about one scheduled closure
        ├── ClosureCancelled                         cancelled because another closure failed
        │   └── ClosureAborted                       its worker was lost (resources)
        ├── ClosureInputError                        an input of the closure failed to build
        ├── ClosurePoisonous                         lost with several workers in a row
        └── RemoteError                              an exception of a type we cannot rebuild here

Errors are data first: each class that knows facts carries them as attributes, and its text is made
from them. Build the exception where the fact is known; nobody looks inside a message string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override


class StratagemError(Exception):
    """Base of every exception of Stratagem's own.

    Example:
        >>> import stratagem as sg
        >>> issubclass(sg.errors.ReplicaMismatch, sg.StratagemError)
        True
    """

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # Facts are keyword arguments of the constructors; pickle would call them without.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(
    kind: type[StratagemError], args: tuple[Any, ...], facts: dict[str, Any]
) -> StratagemError:
    """The exception again, on the other side of a process border."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


class ContextError(StratagemError, RuntimeError):
    """A call that does not fit the context (scope, replica, cross-replica) it was made in."""


class StrategyMismatch(ContextError):
    """An object that belongs to one strategy was used under another."""


class MisuseError(StratagemError, RuntimeError):
    """An operation that an object does not support, such as copying a strategy."""


class WrongArgumentType(StratagemError, TypeError, AssertionError):
    """An argument of a type that the function does not accept; tf.distribute asserts here."""


class ReplicaError(StratagemError):
    """Something went wrong among the replicas of one run."""


class ReplicaMismatch(ReplicaError, RuntimeError):
    """Replicas took different ways: they met in different places, or one never came."""


class UnequalStructures(ReplicaMismatch, AssertionError):
    """The replicas returned values of different structures, which cannot be merged."""


class ReplicaTimeout(ReplicaError, TimeoutError):
    """A replica did not arrive where the others wait.

    Attributes:
        waiting: replica numbers that wait.
        missing: replica numbers that have not arrived.
        limit_s: how long they waited, in seconds.
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
    """A parameter that no strategy looks after is being trained in a replica."""


class UnsupportedOptimizer(StratagemError, NotImplementedError):
    """This optimizer cannot run under this strategy, or on a sharded variable."""


class DataError(StratagemError):
    """Input that cannot be read or cut."""


class CorruptRecord(DataError, ValueError):
    """A record that cannot be read.

    Attributes:
        path: the file.
        record: number of the record in it, from 0.
    """

    def __init__(self, message: str, *, path: str, record: int) -> None:
        super().__init__(message)
        self.path = path
        self.record = record


class MissingFile(DataError, FileNotFoundError):
    """A file that does not exist, or a pattern that matches none.

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
    """A batch that cannot be cut into rows: its tensors disagree in length, or have no rows."""


class ShardingError(DataError, ValueError):
    """A dataset that cannot be shared among the workers in the way that was asked for."""


class EndOfData(DataError, StopIteration):
    """`get_next()` was called after the last element."""


class InputTimeout(DataError, TimeoutError):
    """The next element did not come within the limit."""


class CheckpointError(StratagemError):
    """Saving or restoring a checkpoint failed; checkpoints saved before are untouched."""


class CheckpointCorrupt(CheckpointError, ValueError):
    """A file of a checkpoint is missing, damaged, or of a newer format.

    Attributes:
        path: the file.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint does not fit the objects it should be restored into.

    Attributes:
        missing: names that the objects have and the checkpoint lacks.
        unexpected: names that the checkpoint has and the objects lack.
        different: what both have, but not alike, such as tensors of another shape.
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
        holder: who, as far as is known.
    """

    def __init__(self, message: str, *, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


class CheckpointTimeout(CheckpointError, TimeoutError):
    """A save did not end within the limit; it goes on."""


class WireError(StratagemError):
    """Something went wrong between two processes."""


class ProtocolError(WireError):
    """Bytes that are not our protocol, or another version of it."""


class AuthenticationError(WireError, PermissionError):
    """The other side did not prove that it has the cluster's key."""


class ConnectionLost(WireError, ConnectionError):
    """The other side is gone."""


class DeadlineExceeded(WireError, TimeoutError):
    """No reply came within the limit."""


class ClusterError(StratagemError):
    """About the tasks of a cluster."""


class UnavailableError(ClusterError):
    """A task cannot be reached.

    Attributes:
        task: its name, such as ``/job:worker/task:1``.
    """

    def __init__(self, message: str, *, task: str) -> None:
        super().__init__(message)
        self.task = task


class WorkerLost(UnavailableError):
    """A worker died or stopped answering."""


class WorkerBusy(UnavailableError):
    """A worker serves another coordinator.

    Attributes:
        coordinator: the name of that one.
        heard_s: how long ago the worker last heard of it, in seconds.
    """

    def __init__(self, message: str, *, task: str, coordinator: str, heard_s: float) -> None:
        super().__init__(message, task=task)
        self.coordinator = coordinator
        self.heard_s = heard_s


class ParameterServerLost(UnavailableError):
    """A parameter server died or stopped answering.

    Attributes:
        variables: names of the variables (or shards) it held.
    """

    def __init__(self, message: str, *, task: str, variables: Sequence[str] = ()) -> None:
        super().__init__(message, task=task)
        self.variables = tuple(variables)


class StartupError(ClusterError):
    """A task did not become ready."""


class WriteFenced(ClusterError):
    """A write was refused: its worker was declared lost, and its work may have been given to another."""


class NotFoundError(ClusterError, LookupError):
    """The other side does not know this name."""


class ClosureError(StratagemError):
    """About one scheduled closure."""


class ClosureCancelled(ClosureError):
    """The closure was cancelled because another one failed; schedule it again if it still matters."""


class ClosureAborted(ClosureCancelled):
    """The worker holding this resource was lost.

    Attributes:
        original_exception: what was seen of the loss.
    """

    def __init__(self, message: str, *, original_exception: BaseException | None = None) -> None:
        super().__init__(message)
        self.original_exception = original_exception


class ClosureInputError(ClosureError):
    """An input of the closure (a per-worker resource) failed to build on its worker.

    Attributes:
        original_exception: why it failed; never itself a ClosureInputError.
    """

    def __init__(self, message: str, *, original_exception: BaseException) -> None:
        super().__init__(message)
        while isinstance(original_exception, ClosureInputError):
            original_exception = original_exception.original_exception
        self.original_exception: BaseException = original_exception


class ClosurePoisonous(ClosureError):
    """The closure was lost together with several workers in a row and is not tried again.

    Attributes:
        closure: its description.
        workers: the workers lost with it, in order.
    """

    def __init__(self, message: str, *, closure: str, workers: Sequence[str]) -> None:
        super().__init__(message)
        self.closure = closure
        self.workers = tuple(workers)


class RemoteError(ClosureError):
    """An exception raised in another process whose type cannot be rebuilt here.

    Attributes:
        type_name: qualified name of the remote type.
        task: where it was raised.
        remote_traceback: its traceback as text.
    """

    def __init__(
        self, message: str, *, type_name: str, task: str, remote_traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.type_name = type_name
        self.task = task
        self.remote_traceback = remote_traceback
