"""`ReplicaGroup`: the replicas of one ``run``.

A `ReplicaGroup` exists for one run. Replica 0 runs on the thread that called ``run``, the others on the strategy's
replica threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._core import context, gradients, values
from stratagem._core.context import Replica
from stratagem._core.devices import Device
from stratagem._core.kept_search import function_key, with_objects
from stratagem._core.kept_values import WatchedValues, kept_by
from stratagem._core.managed import finish_run
from stratagem._core.rendezvous import (
    STRAGGLER_LIMIT_S,
    Aborted,
    Combine,
    OwnValues,
    Rendezvous,
)
from stratagem._core.replica_threads import (
    CallerSettings,
    ReplicaThread,
    ReplicaThreads,
    compute_on,
)
from stratagem._core.replicated_parameters import join_run
from stratagem._core.strategy_hooks import StrategyHooks
from stratagem._core.torch_patches import private_api
from stratagem._core.torch_patches.private_api import version
from stratagem._core.torch_patches.random_streams import Streams


class LeafWrites(OwnValues):
    """Writes in place to parameters (``average.mul_(0.9)`` under ``no_grad``), in the turns of replicas.

    When a replica's turn ends, its leaf keeps what was written, and the next replica finds the value from before.
    `finish_run` compares the replicas' values and writes them once.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    @override
    def pause(self, replica_id: int) -> None:
        """Keep the writes of a replica apart from the others'."""
        record = self._replicas[replica_id].record
        if record is None:
            return
        for leaf in record.leaves:
            if leaf.has_own_memory or version(leaf.tensor) == leaf.version:
                continue
            if not leaf.shares or leaf.managed.can_undo:
                with torch.inference_mode(False), torch.no_grad():
                    leaf.keep_write()


_ONE_ROW = (
    "(one row has no variance, so BatchNorm in training needs two rows per replica: use batches of at least "
    "{least} rows and drop a smaller last one (batch(n, drop_remainder=True), DataLoader(drop_last=True)), "
    "or nn.SyncBatchNorm.convert_sync_batchnorm(model) under the scope, or GroupNorm or LayerNorm)"
)
"""Hint for a `ValueError` in a replica with one row: torch's own error cannot know the reason."""


class ReplicaGroup:
    """The replicas of one run.

    Attributes:
        size: R.
        replicas: the replicas, in order.
        rows: rows of the global batch that each replica got; None if unknown.
        row_weights: each replica's share of the rows; adds up to 1, 0 for a replica without rows.
        shared: values that modules of this package keep for the run, for all replicas.
        read_central: if set, replicas get the result of ``read_central(replica, central)`` for a parameter, not leaves.
        saves_parameters: of which parameters a copy is kept, so that writes in place can be undone: of none, of those that
            replicas have written before, or of all.
        streams: the replicas' random numbers (two or more replicas).
    """

    __slots__ = (
        "_after_success", "_parallel", "_rendezvous", "_results", "_settings", "_strategy",
        "read_central", "replicas", "row_weights", "rows", "saves_parameters", "shared", "size", "streams",
    )  # fmt: skip

    def __init__(
        self,
        strategy: StrategyHooks,
        devices: Sequence[Device],
        *,
        rows: Sequence[int] | None = None,
        timeout_s: float | None = None,
        parallel: bool = False,
    ) -> None:
        self.size = size = len(devices)
        self._strategy = strategy
        self.rows = rows
        self.row_weights = _weights(size, rows)
        self.replicas: tuple[Replica, ...] = tuple(
            [Replica(i, self, each, strategy) for i, each in enumerate(devices)]
        )
        self.shared: dict[Hashable, Any] = {}
        self.read_central: Callable[[Replica, Tensor], Tensor] | None = None
        self.saves_parameters: Literal["", "written", "always"] = ""
        self._after_success: dict[Hashable, Callable[[], None]] = {}
        if size > 1:
            self._parallel = parallel
            self._rendezvous = Rendezvous(
                self.replicas, self.row_weights, timeout_s, parallel=parallel
            )
            self._results: list[Any] = [None] * size
            self._settings = CallerSettings()
            self.streams = Streams()

    # -------------------------------------------------------------- running

    def run(self, calls: Sequence[Callable[[], Any]], threads: ReplicaThreads) -> list[Any]:
        """Run one callable per replica, in turns or in parallel; return their results in replica order.

        Raises:
            BaseException: the error of the first replica (by number) that failed, with a note that names the
                replica. The other replicas have ended by then.
        """
        threads = threads.for_this_thread()
        meeting = self._rendezvous
        used = threads.acquire(self.size - 1, limit_s=meeting.timeout_s)
        with_rows = [i for i in range(self.size) if self.row_weights[i]]
        own: Sequence[OwnValues] = ()
        succeeded = False
        try:
            own = self._own_values(calls[0])
            meeting.begin(lambda i: used[i - 1].start(_Job(self, i, calls[i], used[i - 1])), own)
            try:
                _Job(self, 0, calls[0], None)()
                if not meeting.wait_for_end():
                    self._give_up(used, limit_s=0.0)
            except BaseException:  # Ctrl-C too: no replica may run on after run() has ended
                self._give_up(used, limit_s=STRAGGLER_LIMIT_S)
                raise
            if meeting.errors:
                raise self._first_error()
            for each in own:
                each.settle(with_rows)
            self._succeed()  # before another thread's run begins, which uses the same tensors
            succeeded = True
            return self._results
        finally:
            for each in own:
                each.finish(with_rows, succeeded=succeeded)
            threads.release()
            self._settings.restore()
            # Replicas refer to their group: without this, every run would leave a cycle.
            self.replicas = ()
            meeting.close()

    def _own_values(self, call: Any) -> Sequence[OwnValues]:
        """Return the values that replicas share in the program, and of which each has its own in its turn."""
        function = with_objects(call)
        key = function_key(function)
        kept = kept_by(self._strategy, key)
        watched = kept.begin(function)
        if self._parallel:
            return [WatchedValues(kept)] if watched else []
        found: list[OwnValues] = [kept] if watched else []
        if kept.writes:
            self.saves_parameters = "always" if kept.is_first_run else "written"
            found.append(LeafWrites(self.replicas))
        return found

    def run_alone(self, fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run the only replica of a group on the calling thread."""
        replica = self.replicas[0]
        with context.entered(self._strategy, replica):
            join_run(replica)
            if replica.device.type == "cpu" and private_api.function_modes() == 0:
                result = fn(*args, **kwargs)
            else:
                with contextlib.ExitStack() as stack:
                    compute_on(replica.device, stack)
                    result = fn(*args, **kwargs)
        self._succeed()
        self.replicas = ()
        return result

    def _succeed(self) -> None:
        if self._after_success:
            with context.entered(self._strategy, None):
                for callback in self._after_success.values():
                    callback()
            self._after_success = {}

    def after_success(self, key: Hashable, callback: Callable[[], None]) -> None:
        """Call ``callback`` once (per ``key``) after all replicas have succeeded; not after a failure.

        It runs on the thread that called ``run``, in cross-replica context.
        """
        self._after_success.setdefault(key, callback)

    @property
    def aborted(self) -> bool:
        """True if a replica failed, so that the results of replicas still running are not used."""
        return self.size > 1 and self._rendezvous.aborted

    def check_running(self) -> None:
        """End this replica if its run has failed: the tensors it asks for belong to later runs."""
        if self.size > 1 and self._rendezvous.aborted:
            raise Aborted

    def _give_up(self, used: Sequence[ReplicaThread], *, limit_s: float) -> None:
        """Abort all replicas; abandon the threads of those that do not end."""
        self._rendezvous.abort_and_wait(limit_s)
        for thread in used:
            if thread.busy:
                thread.stop()

    def _first_error(self) -> BaseException:
        # The errors' tracebacks refer to this group: drop them, or they form a cycle.
        meeting = self._rendezvous
        errors, meeting.errors = meeting.errors, {}
        first, *others = sorted(errors)
        error = errors[first]
        if error is not meeting.combine_error:
            rows = self.rows
            share = "" if rows is None else f", which got {rows[first]} of {sum(rows)} rows"
            _note(error, f"(in {self.replicas[first]!r}{share})")
            if rows is not None and rows[first] == 1 and isinstance(error, ValueError):
                _note(error, _ONE_ROW.format(least=2 * self.size))
        for i in others:
            if errors[i] is not error:
                _note(error, f"(replica {i} also failed: {_text(errors[i])})")
        missing = [i for i in range(self.size) if i not in meeting.ended]
        if missing:
            error.add_note(f"(replicas {missing} had not ended and were left behind)")
        return error

    # -------------------------------------------------------------- rendezvous

    def rendezvous(
        self,
        replica_id: int,
        label: Hashable,
        value: Any,
        combine: Combine,
        *,
        on_caller: bool = False,
        waits: bool = True,
    ) -> Any:
        """Wait for all replicas, ``combine`` their values once, return this replica's result.

        Args:
            replica_id: the replica that arrives.
            label: names the place; all replicas must meet at the same one.
            value: what the replica brings.
            combine: gets the values in replica order (None for a replica without rows that has ended) and
                returns one result per replica. It runs in cross-replica context; the function of the lowest
                replica is used. An error is raised in every replica.
            on_caller: run ``combine`` on the thread that called ``run``, else on any.
            waits: wait for the others here. Else the replica goes on, with the result None, and must call `wait`
                before it uses what ``combine`` writes. Replicas that run at the same time always wait.

        Raises:
            ReplicaMismatch: the replicas make different calls.
            ReplicaTimeout: a replica did not arrive within the limit.
        """
        if self.size == 1:
            with context.entered(self._strategy, None):
                return combine([value])[0]
        return self._rendezvous.meet(
            replica_id, label, value, combine, on_caller=on_caller, waits=waits or self._parallel
        )

    def wait(self, replica_id: int) -> None:
        """Wait for the others at the last rendezvous, at which the replica has not waited."""
        self._rendezvous.wait(replica_id)

    @override
    def __repr__(self) -> str:
        return f"<ReplicaGroup of {self.size}>"


class _Job:
    """The job of one replica of one run, on a replica thread or (None) on the calling thread."""

    __slots__ = ("_call", "_group", "_id", "_thread")

    def __init__(
        self, group: ReplicaGroup, id: int, call: Callable[[], Any], thread: ReplicaThread | None
    ) -> None:
        self._group, self._id, self._call, self._thread = group, id, call, thread

    def __call__(self) -> None:
        group, i = self._group, self._id
        meeting = group._rendezvous
        error: BaseException | None = None
        try:
            self._run(group, group.replicas[i])
        except Aborted:
            pass
        except BaseException as raised:  # noqa: BLE001 - raised again by run()
            error = raised
        finally:
            if self._thread is not None:
                self._thread.busy = False
            meeting.leave(i, error)

    def _run(self, group: ReplicaGroup, replica: Replica) -> None:
        settings = group._settings
        if replica.device.type == "cpu":
            running = group.size if group._parallel else 1
            settings.limit_cores(self._thread, max(1, settings.intra_op_threads // running))
        stack = settings.apply(replica.device)
        try:
            with context.entered(replica.strategy, replica), group.streams.active():
                join_run(replica)
                group._results[replica.id] = settings.variables.copy().run(self._call)
        finally:
            if stack is not None:
                stack.close()


def merge_call(
    replica: Replica, merge_fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Implement `ReplicaContext.merge_call` for a replica of a group."""
    group, strategy = replica.group, replica.strategy

    def combine(brought: list[Any]) -> Sequence[Any]:
        if group.size == 1:
            return [merge_fn(strategy, *args, **kwargs)]
        merged_args, merged_kwargs = _merge_present(brought)
        result = merge_fn(strategy, *merged_args, **merged_kwargs)
        parts = values.split(result, group.size)
        return [result] * group.size if parts is None else parts

    return once_for_all(replica, "merge_call", (args, kwargs), combine)


def once_for_all(replica: Replica, label: Hashable, value: Any, combine: Combine) -> Any:
    """Wait for all replicas; call ``combine`` once, as `ReplicaGroup.rendezvous` does, on the caller's thread.

    ``combine`` finds gradients and buffers on the central tensors and may write parameters: afterwards the leaves
    join the run again.
    """
    group = replica.group
    used = [] if replica.record is None else [leaf.managed for leaf in replica.record.leaves]

    def on_centrals(brought: list[Any]) -> Sequence[Any]:
        records = {each.id: each.record for each in group.replicas if each.record is not None}
        gradients.aggregate_by_hand(group, {i: each.leaves for i, each in records.items()})
        finish_run(group.replicas)
        return combine(brought)

    try:
        return group.rendezvous(replica.id, label, value, on_centrals, on_caller=True)
    finally:
        for managed in used:
            managed.resolve()


def _merge_present(brought: list[Any]) -> Any:
    """Merge the replicas' arguments; a replica that has ended gets the component None."""
    present = [i for i, each in enumerate(brought) if each is not None]
    if len(present) == len(brought):
        return values.merge(brought)
    trees = [brought[i] for i in present]
    given = {id(leaf) for tree in trees for leaf in values.leaves(tree)}

    def with_gaps(leaf: Any) -> Any:
        if id(leaf) in given and not (len(present) == 1 and isinstance(leaf, torch.Tensor)):
            return leaf
        parts = leaf.values if isinstance(leaf, values.PerReplica) else (leaf,)
        by_replica = dict(zip(present, parts, strict=True))
        return values.PerReplica([by_replica.get(i) for i in range(len(brought))])

    return values.map_leaves(with_gaps, values.merge(trees))


def _note(error: BaseException, words: str) -> None:
    """Add a note once: a program may raise the same error object repeatedly."""
    if words not in getattr(error, "__notes__", ()):
        error.add_note(words)


def _text(error: BaseException) -> str:
    """Return an error in one line, even if its own text cannot be made."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as broken:  # noqa: BLE001 - any error: user code makes the text
        return f"{type(error).__name__}, whose text raised {type(broken).__name__}"


def _weights(size: int, rows: Sequence[int] | None) -> tuple[float, ...]:
    total = 0 if rows is None else sum(rows[:size])
    if rows is None or total == 0:
        return (1.0 / size,) * size if size else ()
    return tuple([rows[i] / total for i in range(size)])
