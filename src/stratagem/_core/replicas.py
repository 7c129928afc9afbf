"""The R side-by-side executions of one ``run``, and where they meet.

A `ReplicaGroup` lives for one run. Its replicas run on the lanes of `threads.py`; the thread that called
``run`` waits, runs what must run on it, and puts the outcome together. Everything replicas do in
common (``merge_call``, collectives, gradient aggregation, optimizer steps) is built on `meet`.
"""

from __future__ import annotations

import _thread
import contextlib
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from stratagem import config
from stratagem._core import context, replica_threads, values
from stratagem._core.advice import advice
from stratagem._core.devices import Device
from stratagem._core.torch_patches import private_api, random_streams
from stratagem.errors import ReplicaMismatch, ReplicaTimeout

_Combine = Callable[[list[Any]], Sequence[Any]]

STRAGGLER_LIMIT_S = 2.0
"""After a limit has passed or Ctrl-C, how long a replica may take to end before it is left behind."""


LOOK_UP_S = 0.5
"""How often the waiting caller looks up: a Ctrl-C that arrives just before it starts to wait does not
interrupt the wait, and would otherwise be noticed only at its end."""


class _Unwound(BaseException):
    """Ends a replica whose run has failed elsewhere; never leaves this module."""


class Ambient:
    """The torch settings and context variables of the thread that calls ``run``, for every replica."""

    __slots__ = ("autocast", "grad", "inference", "intra_op_threads", "modes", "variables")

    def __init__(self) -> None:
        self.variables = context.caller_variables()  # each replica runs in a copy of it
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.modes = private_api.function_modes() > 0
        self.intra_op_threads = torch.get_num_threads()
        self.autocast: list[tuple[str, torch.dtype, bool]] = []
        if private_api.any_autocast():
            kinds = ["cpu"]
            accelerator = torch.accelerator.current_accelerator()
            if accelerator is not None:
                kinds.append(accelerator.type)
            cache = torch.is_autocast_cache_enabled()
            for kind in kinds:
                if torch.is_autocast_enabled(kind):
                    self.autocast.append((kind, torch.get_autocast_dtype(kind), cache))

    def enter(self, device: torch.device) -> contextlib.ExitStack | None:
        """Make this thread like the caller's; the stack to close, or None if nothing is open."""
        private_api.set_grad_enabled(self.grad)
        if not (self.inference or self.autocast or device.type != "cpu"):
            return None
        stack = contextlib.ExitStack()
        if self.inference:
            stack.enter_context(torch.inference_mode())
        for kind, dtype, cache in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
        if device.type != "cpu":
            _compute_on(device, stack)
        return stack


class ReplicaGroup:
    """R replicas of one run.

    Attributes:
        size: R.
        replicas: the replicas, in order.
        rows: rows of the global batch each replica got; None if nobody knows.
        row_weights: each replica's share of the rows; sums to 1, 0 for a replica without rows.
        timeout_s: how long a replica waits for the others in a meeting (groups of two and more).
        notes: shared by the replicas of this run, for the rooms that build on meetings.
        streams: the replicas' random numbers (groups of two and more).
    """

    __slots__ = (
        "_ambient", "_at_end", "_broken", "_caller", "_combine_error", "_combines", "_done",
        "_errors", "_given", "_label", "_left", "_lock", "_on_caller", "_reset_threads", "_results",
        "_strategy", "_waiting", "_wake", "notes", "replicas", "row_weights", "rows", "size",
        "streams", "timeout_s",
    )  # fmt: skip

    def __init__(
        self,
        strategy: Any,
        devices: Sequence[Device],
        *,
        rows: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.size = len(devices)
        self._strategy = strategy
        self.rows = None if rows is None else tuple(rows)
        self.row_weights = _weights(self.size, self.rows)
        self.replicas: tuple[context.Replica, ...] = tuple(
            context.Replica(i, self, each.torch_device, strategy, each.name)
            for i, each in enumerate(devices)
        )
        self.notes: dict[Hashable, Any] = {}
        self._at_end: dict[Hashable, Callable[[], None]] = {}
        if self.size > 1:  # a replica alone waits for nobody
            self._prepare(config.replica_timeout_s() if timeout_s is None else timeout_s)

    def _prepare(self, limit_s: float) -> None:
        size = self.size
        self.timeout_s = min(limit_s, _thread.TIMEOUT_MAX)
        self._lock = _thread.allocate_lock()
        self._caller = _thread.allocate_lock()  # held while the caller has nothing to do
        self._caller.acquire()
        self._wake = [_thread.allocate_lock() for _ in range(size)]  # held while replica i waits
        for each in self._wake:
            each.acquire()
        self._waiting: dict[int, Any] = {}
        self._combines: dict[int, _Combine] = {}
        self._label: Hashable = None
        self._on_caller = False
        self._given: dict[int, Any] = {}
        self._left: set[int] = set()
        self._done = 0
        self._broken = False
        self._errors: dict[int, BaseException] = {}
        self._combine_error: BaseException | None = None
        self._results: list[Any] = [None] * size
        self._reset_threads = False
        self._ambient = Ambient()
        self.streams = random_streams.Streams()

    # -------------------------------------------------------------- running

    def run(
        self, calls: Sequence[Callable[[], Any]], threads: replica_threads.ReplicaThreads
    ) -> list[Any]:
        """Run one callable per replica side by side; their results, in replica order.

        Raises:
            BaseException: the error of the first replica (by number) that failed, with a note
                naming it; the others have unwound by then.
        """
        threads = threads.for_this_thread()
        used = threads.acquire(self.size, limit_s=self.timeout_s)
        try:
            for i, thread in enumerate(used):
                thread.start(_Job(self, i, calls[i], thread))
            try:
                self._serve_replicas()
            except BaseException:  # Ctrl-C too: replicas must not run on behind the caller's back
                self._give_up(used, limit_s=STRAGGLER_LIMIT_S)
                raise
            if self._done < self.size:
                self._give_up(used, limit_s=0.0)
            if self._errors:
                raise self._first_error()
            self._end_well()  # before another thread's run may begin: it would find tensors half home
            return self._results
        finally:
            threads.release()
            if self._reset_threads:
                torch.set_num_threads(self._ambient.intra_op_threads)

    def _end_well(self) -> None:
        if self._at_end:
            with context.entered(self._strategy, None):
                for callback in self._at_end.values():
                    callback()
            self._at_end = {}
        # Replicas know their group: without this, every run would leave a cycle behind.
        self.replicas = ()

    @property
    def has_broken_up(self) -> bool:
        """Whether a replica failed, so that those still running compute for nobody."""
        return self.size > 1 and self._broken

    def check_unbroken(self) -> None:
        """Unwind a replica of a run that failed: what it asks for belongs to later runs."""
        if self.size > 1 and self._broken:
            raise _Unwound

    def at_end(self, key: Hashable, callback: Callable[[], None]) -> None:
        """Run ``callback`` once (per ``key``) when all replicas have ended well.

        It runs on the thread that called ``run``, in cross-replica context; not after a failure.
        """
        self._at_end.setdefault(key, callback)

    def run_alone(self, fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run the only replica of a group of one on the calling thread."""
        replica = self.replicas[0]
        with context.entered(self._strategy, replica):
            if replica.device.type == "cpu" and private_api.function_modes() == 0:
                result = fn(*args, **kwargs)
            else:
                with contextlib.ExitStack() as stack:
                    _compute_on(replica.device, stack)
                    result = fn(*args, **kwargs)
        self._end_well()
        return result

    def _serve_replicas(self) -> None:
        """The caller's part: run meetings that belong on this thread until all replicas ended."""
        deadline: float | None = None
        while True:
            limit_s = LOOK_UP_S if deadline is None else deadline - time.monotonic()
            if limit_s <= 0:
                return
            self._caller.acquire(timeout=min(limit_s, LOOK_UP_S))
            if self._done == self.size:
                return
            if self._on_caller and not self._broken:
                self._on_caller = False
                self._combine()
            if self._broken and deadline is None:
                late = any(isinstance(e, ReplicaTimeout) for e in self._errors.values())
                deadline = time.monotonic() + (STRAGGLER_LIMIT_S if late else self.timeout_s)

    def _call_caller(self) -> None:
        # Under self._lock: a signal that was not taken yet is enough.
        if self._caller.locked():
            self._caller.release()

    def _give_up(self, used: Sequence[replica_threads.ReplicaThread], *, limit_s: float) -> None:
        """Unwind all replicas; leave behind, on their daemon threads, those that do not end."""
        with self._lock:
            self._break_up()
        deadline = time.monotonic() + limit_s
        while self._done < self.size and (rest_s := deadline - time.monotonic()) > 0:
            self._caller.acquire(timeout=rest_s)
        for thread in used:
            if thread.busy:
                thread.stop()

    def _first_error(self) -> BaseException:
        # The errors' tracebacks lead back to this group: let go of them, or they form a cycle.
        errors, self._errors = self._errors, {}
        order = sorted(errors)
        first = order[0]
        error = errors[first]
        if error is not self._combine_error:
            _note(error, f"(in {self.replicas[first]!r})")
            if words := advice(error, first, self.rows, self.size):
                _note(error, words)
        for i in order[1:]:
            other = errors[i]
            if other is not error:
                _note(error, f"(replica {i} also failed: {_text(other)})")
        missing = [i for i in range(self.size) if i not in self._left]
        if missing:
            error.add_note(f"(replicas {missing} had not ended and were left behind)")
        self.replicas = ()
        return error

    # -------------------------------------------------------------- meeting

    def meet(
        self,
        replica_id: int,
        label: Hashable,
        value: Any,
        combine: _Combine,
        *,
        on_caller: bool = False,
    ) -> Any:
        """Wait until all replicas are here; ``combine`` their values once; this replica's result.

        Args:
            replica_id: who arrives.
            label: where; all replicas must meet at the same place.
            value: what it brings.
            combine: gets the values in replica order (None for a replica without rows that has
                left) and returns one result per replica; runs in cross-replica context. The
                function of the lowest replica is used. What it raises is raised in every replica.
            on_caller: run ``combine`` on the thread that called ``run``, else on any.

        Raises:
            ReplicaMismatch: the replicas went different ways.
            ReplicaTimeout: somebody did not come within ``timeout_s``.
        """
        if self.size == 1:
            with context.entered(self._strategy, None):
                return combine([value])[0]
        with self._lock:
            if self._waiting or self._left or self._broken:
                self._refuse(replica_id, label)
            self._label = label
            self._waiting[replica_id] = value
            self._combines[replica_id] = combine
            complete = len(self._waiting) + len(self._left) == self.size
            if complete and on_caller:
                self._on_caller = True
                self._call_caller()
        if complete and not on_caller:
            self._combine(replica_id)
        elif not self._wake[replica_id].acquire(timeout=self.timeout_s):
            self._give_up_waiting(replica_id)
        if self._broken and replica_id not in self._given:
            raise _Unwound
        result = self._given.pop(replica_id)
        if type(result) is _Raise:
            raise result.error
        return result

    def _refuse(self, replica_id: int, label: Hashable) -> None:
        """Raise if the replica must not come here now."""
        if self._broken:
            raise _Unwound
        if self._waiting and label != self._label:
            others = sorted(self._waiting)
            self._break_up()
            raise ReplicaMismatch(
                f"replicas met in different places: replica {replica_id} is at {_where(label)}, "
                f"replicas {others} wait at {_where(self._label)}. Every replica must make the "
                "same collective calls in the same order."
            )
        gone = [i for i in self._left if self.row_weights[i] > 0]
        if gone:
            self._break_up()
            raise self._unequal(gone[0], label)

    def _combine(self, runner: int | None = None) -> None:
        """Everybody is here (or gone): combine, hand out, wake."""
        waiting = self._waiting
        combine = self._combines[min(waiting)]
        self._waiting, self._combines = {}, {}
        try:
            with context.entered(self._strategy, None):
                results = combine([waiting.get(i) for i in range(self.size)])
            given = {i: results[i] for i in waiting}
        except BaseException as error:  # noqa: BLE001 - raised again in every replica
            self._combine_error = error
            given = {i: _Raise(error) for i in waiting}
        self._given.update(given)
        for i in waiting:
            if i != runner:
                self._wake[i].release()

    def _give_up_waiting(self, replica_id: int) -> None:
        while True:
            with self._lock:
                waiting = sorted(self._waiting)
                missing = [i for i in range(self.size) if i not in waiting and i not in self._left]
                if replica_id in self._waiting and missing:
                    self._break_up(but=replica_id)
                    break
            # All have arrived and are being combined, which may take its time.
            if self._wake[replica_id].acquire(timeout=self.timeout_s):
                return
        raise ReplicaTimeout(
            f"replicas {waiting} waited {self.timeout_s:g} s at {_where(self._label)} for "
            f"{[self.replicas[i] for i in missing]}, which did not arrive. Every replica must make "
            "the same collective calls; raise STRATAGEM_REPLICA_TIMEOUT_S if it is merely slow.",
            waiting=waiting,
            missing=missing,
            limit_s=self.timeout_s,
        )

    def _break_up(self, but: int = -1) -> None:
        # Under self._lock. Waiting replicas unwind; later arrivals do so at once.
        self._broken = True
        for i in self._waiting:
            if i != but:
                self._wake[i].release()
        self._waiting, self._combines = {}, {}
        self._call_caller()

    def _leave(self, replica_id: int) -> None:
        """A replica's function has ended, well or not."""
        with self._lock:
            self._left.add(replica_id)
            complete = False
            if self._waiting and not self._broken:
                if self.row_weights[replica_id] > 0:
                    self._errors[replica_id] = self._unequal(replica_id, self._label)
                    self._break_up()
                else:
                    complete = len(self._waiting) + len(self._left) == self.size
                    # No matter whose thread this belongs on: the caller has nothing else to do.
                    self._on_caller = complete
            self._done += 1
            if complete or self._done == self.size:
                self._call_caller()

    def _fail(self, replica_id: int, error: BaseException) -> None:
        with self._lock:
            self._errors[replica_id] = error
            if error is not self._combine_error:
                self._break_up()

    def _unequal(self, replica_id: int, label: Hashable) -> ReplicaMismatch:
        return ReplicaMismatch(
            f"replica {replica_id} ended without coming to {_where(label)}, where other replicas "
            "wait: a different number of merge_call (or other collective) calls. Every replica "
            "must make the same collective calls in the same order."
        )

    @override
    def __repr__(self) -> str:
        if self.size == 1:
            return "<ReplicaGroup of 1>"
        return (
            f"<ReplicaGroup of {self.size} [{len(self._waiting)} waiting at {self._label!r}, "
            f"{self._done} ended, {len(self._errors)} failed]>"
        )


def _note(error: BaseException, words: str) -> None:
    """Add a note once: a program may raise one error object again and again."""
    if words not in getattr(error, "__notes__", ()):
        error.add_note(words)


def _text(error: BaseException) -> str:
    """An error in one line, also one whose own text cannot be made."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as broken:  # noqa: BLE001 - any error: user code made the text
        return f"{type(error).__name__}, whose text raised {type(broken).__name__}"


class _Raise:
    """A meeting's outcome that is an error."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Job:
    """What a lane runs for one replica."""

    __slots__ = ("_call", "_group", "_id", "_thread")

    def __init__(
        self,
        group: ReplicaGroup,
        id: int,
        call: Callable[[], Any],
        thread: replica_threads.ReplicaThread,
    ) -> None:
        self._group, self._id, self._call, self._thread = group, id, call, thread

    def __call__(self) -> None:
        group, i = self._group, self._id
        try:
            self._run(group, group.replicas[i])
        except _Unwound:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by run()
            group._fail(i, error)
        finally:
            self._thread.busy = False
            group._leave(i)

    def _run(self, group: ReplicaGroup, replica: context.Replica) -> None:
        ambient = group._ambient
        if replica.device.type == "cpu":
            share = max(1, ambient.intra_op_threads // group.size)
            if replica_threads.share_of_cores(self._thread, share):
                group._reset_threads = True
        stack = ambient.enter(replica.device)
        try:
            with context.entered(replica.strategy, replica), group.streams.active():
                group._results[replica.id] = ambient.variables.copy().run(self._call)
        finally:
            if stack is not None:
                stack.close()


def _compute_on(device: torch.device, stack: contextlib.ExitStack) -> None:
    """New tensors, and an accelerator's current device, are this one until the stack is closed."""
    if device.type != "cpu":
        stack.enter_context(torch.get_device_module(device).device(device.index))
    stack.enter_context(device)


def merge_call(
    replica: context.Replica, merge_fn: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """`ReplicaContext.merge_call`, for a replica of a group."""
    group, strategy = replica.group, replica.strategy
    if group.size == 1:
        with context.entered(strategy, None):
            return merge_fn(strategy, *args, **kwargs)

    def combine(brought: list[Any]) -> Sequence[Any]:
        merged_args, merged_kwargs = _merge_present(brought)
        result = merge_fn(strategy, *merged_args, **merged_kwargs)
        parts = values.split(result, group.size)
        return [result] * group.size if parts is None else parts

    return group.meet(replica.id, "merge_call", (args, kwargs), combine, on_caller=True)


def _merge_present(brought: list[Any]) -> Any:
    """Merge what the replicas brought; a replica that has left gets the component None."""
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


def _where(label: Hashable) -> str:
    return str(label) if isinstance(label, str) else repr(label)


def _weights(size: int, rows: Sequence[int] | None) -> tuple[float, ...]:
    total = 0 if rows is None else sum(rows[:size])
    if rows is None or total == 0:
        return (1.0 / size,) * size if size else ()
    return tuple(rows[i] / total for i in range(size))
