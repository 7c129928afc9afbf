"""The worker's side of variables on parameter servers.

`WorkerVariables` makes the parameters and buffers that a scheduled function uses:

- A dense parameter is a plain ``nn.Parameter`` leaf. On the servers' host it lies over their shared memory,
  so that reading it costs nothing and shows every update at once. Elsewhere, and if the variable is in several
  shards, it is a copy that `refresh` updates.
- An embedding's weight, and every sharded matrix, is a `TableParameter`.
- A buffer is a private copy, since layers write buffers in place. Changes are sent with the step.

`push` sends the gradients of one optimizer step, and the parameters that the function wrote in place before
(`written_parameters.py`). There is one object per worker incarnation, used by one thread.
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from stratagem import metrics
from stratagem._ps.client.mapping import MappedVariable
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.client.write_batch import WriteBatch
from stratagem._ps.optimizer_settings import Settings, changed_settings
from stratagem._ps.placement import Description
from stratagem._ps.tables.table_parameter import TableParameter
from stratagem._ps.tables.worker_rows import WorkerRows
from stratagem._ps.worker.advance_recorder import AdvanceRecorder
from stratagem._ps.worker.dense_parameter import DenseParameter, begin_closure
from stratagem._ps.worker.gradient_push import WATCHED, StepBuilder
from stratagem._ps.worker.round_steps import RoundSteps
from stratagem._ps.worker.step_state import WrapperStates
from stratagem._ps.worker.worker_buffers import NewBuffers, WatchedBuffers, WorkerBuffer
from stratagem._ps.worker.worker_copies import WorkerCopies
from stratagem._ps.worker.written_parameters import WrittenParameters

_NO_SCOPE = nullcontext()


class WorkerVariables:
    """The parameters, tables and buffers of one worker.

    Args:
        client: this worker's connections to the servers.
        registry: of the metrics; staleness is the distribution ``ps.staleness``.
        is_sole: whether the cluster has no other worker, so that functions may write trained parameters.
        rounds: servers make the steps at the end of synchronous rounds.
        replicas: number of replicas that a function runs on.
    """

    def __init__(
        self,
        client: PsClient,
        registry: metrics.Registry | None = None,
        *,
        is_sole: bool = False,
        rounds: bool = False,
        replicas: int = 1,
    ) -> None:
        self.client = client
        self._dense: dict[int, DenseParameter] = {}  # id(leaf)
        self._copies = WorkerCopies(client)
        self._failed_step: BaseException | None = None  # of the present closure
        self._tables: dict[int, tuple[TableParameter, RemoteVariable]] = {}  # id(table)
        self._buffers: list[WorkerBuffer] = []
        self._by_tensor: dict[int, WorkerBuffer] = {}
        self.new_buffers = NewBuffers()
        self.wrappers = WrapperStates()
        self._remotes: weakref.WeakSet[RemoteVariable] = weakref.WeakSet()
        # Whether these are all live parameters, and those whose versions are noted when they are read.
        self._noted: tuple[bool, list[tuple[RemoteVariable, MappedVariable]]] | None = None
        self._has_moved = False  # a backup has taken variables over: parameters lie over old memory
        if client.failover is not None:
            client.failover.on_move = self._forget_memory
        self._written = WrittenParameters(self._dense, is_sole=is_sole)
        self._steps = StepBuilder(client, self._dense, self._tables, held=rounds)
        is_one = replicas == 1  # gradients of several are written into the leaves at each step
        self._round = RoundSteps(self._dense, self._tables, compares=is_one) if rounds else None
        counting = metrics if registry is None else registry
        self._staleness = counting.distribution("ps.staleness")
        self._push_time = counting.timer("ps.push")
        self._acknowledge_time = counting.timer("ps.acknowledge")  # a part of ps.push
        self._wait_time = counting.timer("ps.wait")
        self._refresh_time = counting.timer("ps.refresh")

    # -------------------------------------------------------------- parameters and buffers

    def remote(self, description: Description) -> RemoteVariable:
        """Return a variable."""
        remote = RemoteVariable(description, self.client)
        self._remotes.add(remote)
        return remote

    def _forget_memory(self) -> None:
        """Note that a backup has taken over: the memory of the server before is not written any more."""
        self._has_moved = True
        for remote in list(self._remotes):
            remote.forget_memory()

    def _follow_move(self) -> None:
        """Lay parameters over the memory of the servers that have them now."""
        if self._has_moved:
            self._has_moved, self._noted = False, None
            for dense in self._dense.values():
                if dense.is_live and not dense.lay_over_memory():
                    self._copies.add(dense)

    def parameter(
        self,
        description: Description,
        *,
        requires_grad: bool,
        as_table: bool,
        channels_last: bool = False,
        is_replicated: bool = False,
    ) -> nn.Parameter:
        """Return a new parameter for a variable; `is_replicated`: several replicas of this worker use it."""
        remote = self.remote(description)
        if as_table:
            may_write = self._written.is_sole and not is_replicated
            source = WorkerRows(remote, self._written.copied, may_write=may_write)
            table = TableParameter.over(source, requires_grad=requires_grad)
            self._tables[id(table)] = (table, remote)
            return table
        dense = DenseParameter(remote, requires_grad=requires_grad, channels_last=channels_last)
        self._dense[id(dense.leaf)] = dense
        self._noted = None
        if not dense.is_live:
            self._copies.add(dense)
        return dense.leaf

    def keep_gradient_in_slot(self, parameter: nn.Parameter) -> None:
        """Accumulate a large gradient of a dense parameter in memory that servers read.

        Not for parameters of several replicas: their gradients come from the replicas' leaves.
        """
        dense = self._dense.get(id(parameter))
        if dense is not None:
            dense.keep_gradient_in_slot()

    def buffer(self, description: Description, *, counts: bool) -> Tensor:
        """Return a new copy of a buffer; `counts`: increases of several workers add up."""
        made = WorkerBuffer(self.remote(description), counts=counts)
        self._buffers.append(made)
        self._copies.add(made)
        self._by_tensor[id(made.tensor)] = made
        return made.tensor

    def watched(self, buffers: dict[str, Any]) -> dict[str, Any]:
        """Return a module's dict of buffers that also sends tensors assigned to their names."""
        found = {
            name: self._by_tensor[id(value)]
            for name, value in buffers.items()
            if id(value) in self._by_tensor
        }
        return WatchedBuffers(buffers, found) if buffers else buffers

    # -------------------------------------------------------------- around a closure

    def closure(
        self,
        number: int = 0,
        *,
        exactly_once: bool = False,
        gathers: bool = False,
        arrived: float = math.inf,
        scope: AbstractContextManager[Any] = _NO_SCOPE,
        recorder: AdvanceRecorder | None = None,
    ) -> WorkerClosure:
        """Return a context around one scheduled function: it refreshes copies and sends changes.

        Args:
            number: number of the closure.
            exactly_once: servers recognise its writes if another worker repeats them.
            gathers: small writes may wait for others, because the function is short.
            arrived: when the closure arrived here (`time.perf_counter`): copies that were read later are fresh.
            scope: entered around everything else, such as the strategy's.
            recorder: of changes of schedulers, scalers and settings.

        Raises:
            ForeignParameterError: at the end, if the function wrote into a parameter that cannot be sent.
            ValueError: at the end, if it registered a buffer that no server knows.
        """
        return WorkerClosure(
            self,
            number,
            scope,
            recorder,
            exactly_once=exactly_once,
            gathers=gathers,
            arrived=arrived,
        )

    def _begin_closure(self, arrived: float) -> None:
        self.wrappers.begin()
        self._failed_step = None
        for _, remote in self._tables.values():
            remote.keys.clocks.clear()  # of lookups without a step
        if self._round is not None:
            self._round.begin_closure()
        if self._dense or self._buffers:
            if not self.client.outbox.is_idle:  # this closure reads them
                with self._wait_time.measure():
                    self.client.wait_for_writes()
            self._follow_move()
            if not self._copies.are_fresh(arrived):
                self.refresh()
            self._note_reads()
            begin_closure(self._dense.values())

    def _end_closure(self, *, succeeded: bool) -> None:
        written: list[DenseParameter] = []
        may_be_written = True
        try:
            if succeeded:
                self.wrappers.check()
                may_be_written = self._send_changes()
            else:
                for buffer in self._buffers:
                    buffer.take_back()
                self._written.discard()
        finally:
            # All parameters, after an error too: a page that this process wrote hides what the server
            # writes there from all later closures.
            if self._dense:
                written = self._written.undo(may_be=may_be_written)
            self._written.forget_copies()
            for buffer in self._buffers:
                buffer.put_back()
            unknown = self.new_buffers.take_back()
        if succeeded and self._failed_step is not None:
            raise self._failed_step  # the function went on as if the step had been made
        if written and succeeded:
            raise self._written.refusal(written[0])
        if unknown is not None and succeeded:
            raise ValueError(unknown)

    def refresh(self) -> None:
        """Update copies; parameters over shared memory are current."""
        if self._copies:
            with self._refresh_time.measure():
                self._copies.refresh()
            self._remove_deleted()

    def _remove_deleted(self) -> None:
        """Forget buffers that the coordinator has deleted."""
        for copy in self._copies.take_deleted():
            if isinstance(copy, WorkerBuffer):
                self._buffers.remove(copy)

    # -------------------------------------------------------------- an optimizer's step

    def push(self, number: int, optimizer: Optimizer, initial: Settings) -> None:
        """Send the gradients of one step and changed buffers, and wait until the step is applied.

        Args:
            number: the optimizer's number on the servers.
            optimizer: whose parameters' gradients are sent.
            initial: settings of the servers; different ones are sent with this step.
        """
        client, buffers = self.client, self.client.outbox.buffers
        with self._push_time.measure(), client.lock:
            if self._round is not None:
                self._round.note(number, optimizer)
            settings = changed_settings(optimizer, initial)
            changed = [buffer for buffer in self._buffers if buffer.is_changed()]
            written, tables = self._written.find(), self._written.tables()
            trained: Any = ()

            def first(batch: WriteBatch) -> None:
                nonlocal trained
                trained = self._written.add_changes(written, tables, batch)

            kept = not changed and not written and not tables
            step = self._steps.build(number, optimizer, settings, None if kept else first)
            for buffer in changed:
                buffer.add_change(step.batch)
            for dense in written:
                if not dense.is_live:
                    dense.remote.forget_seen()  # `reads` then asks for its value in any case
            if step.batch.is_empty:
                return
            generation = buffers.generation
            try:
                client.outbox.values.clear()
                asked = time.perf_counter()
                client.send(step.batch, self._copies.reads(), self._copies.place)
                with self._acknowledge_time.measure():
                    versions = client.wait_for_writes()
            except BaseException as error:
                # Gradients may be sent again from tensors that the function changes, and copies may hold parts of new values.
                if self._copies.is_receiving or not client.outbox.is_idle:
                    self._failed_step = error
                if generation != buffers.generation or not client.outbox.is_idle:
                    self._leave_slots()
                raise
        for dense in written:
            dense.undo_write()
        self._written.check(trained, versions, own=2)
        self._written.follow_step()
        self._note_staleness(step.watched, versions)
        self._follow_move()
        if self._copies:
            with self._refresh_time.measure():
                self._copies.refresh(client.outbox.values, asked)
            client.outbox.values.clear()
            self._remove_deleted()
        self._note_reads()

    def _leave_slots(self) -> None:
        """Give up all gradient slots after a step that was not acknowledged: servers may read them later."""
        for dense in self._dense.values():
            dense.leave_slot()
        self._steps.forget()
        self.client.outbox.keep_unacknowledged()
        self.client.outbox.buffers.retire()

    def forget(self, tensor: Tensor) -> None:
        """Release one parameter or buffer."""
        dense = self._dense.pop(id(tensor), None)
        if dense is not None:
            self._noted = None
            dense.release()
            self._copies.remove(dense)
        self._tables.pop(id(tensor), None)
        buffer = self._by_tensor.pop(id(tensor), None)
        if buffer is not None:
            if buffer in self._buffers:  # else a refresh has found that the coordinator deleted it
                self._buffers.remove(buffer)
            self._copies.remove(buffer)
        self._steps.forget()

    def close(self) -> None:
        """Release every variable and the servers' memory."""
        self._dense.clear()
        self._noted = None
        self._copies.clear()
        self._tables.clear()
        self._buffers.clear()
        self._by_tensor.clear()
        self._steps.forget()

    def _send_changes(self) -> bool:
        """Send the buffers and parameters that the function wrote; return whether it may have written parameters."""
        buffers = [buffer for buffer in self._buffers if buffer.is_changed()]
        suspects = self._written.suspects()
        written, tables = self._written.allowed(suspects), self._written.tables()
        if not buffers and not written and not tables:
            return bool(suspects)
        versions: Mapping[tuple[int, int], int] = {}
        with self.client.lock:
            batch = self.client.batch()
            for buffer in buffers:
                buffer.add_change(batch)
            trained = self._written.add_changes(written, tables, batch)
            if not batch.is_empty:
                self.client.send(batch)
            if trained:
                versions = self.client.wait_for_writes()
        for dense in written:
            dense.undo_write()
        self._written.check(trained, versions, own=1)
        return bool(suspects)

    def _note_staleness(
        self, watched: list[RemoteVariable], versions: Mapping[tuple[int, int], int]
    ) -> None:
        """Record how many writes of others came between this step's reads and its write, at most."""
        worst, own = -1, 1 if self._round is None else 0  # in a round, the own step comes later
        for remote in watched:
            for place, seen in zip(remote.places, remote.seen, strict=True):
                after = versions.get((place.server, place.variable))
                if after is not None and seen > 0:
                    worst = max(worst, after - own - seen)
        if worst >= 0:
            self._staleness.record(worst)

    def _note_reads(self) -> None:
        """Note the versions of parameters over shared memory, which are read from now on."""
        every = self._written.has_sent
        if self._noted is None or self._noted[0] is not every:
            dense = itertools.islice(self._dense.values(), None if every else WATCHED)
            live = [one.remote for one in dense if one.is_live]
            self._noted = every, [(one, one.mapped[0]) for one in live if one.mapped is not None]
        for remote, mapped in self._noted[1]:
            remote.seen = (mapped.version,)

    @override
    def __repr__(self) -> str:
        return (
            f"<WorkerVariables {len(self._dense)} parameters, {len(self._tables)} tables, "
            f"{len(self._buffers)} buffers>"
        )


class WorkerClosure:
    """Context around one scheduled function; made by `WorkerVariables.closure`.

    Not an ``ExitStack``: it is used for every closure, and some take 50 µs.
    """

    __slots__ = (
        "_arrived",
        "_exactly_once",
        "_gathers",
        "_number",
        "_recorder",
        "_scope",
        "_variables",
    )

    def __init__(
        self,
        variables: WorkerVariables,
        number: int,
        scope: AbstractContextManager[Any],
        recorder: AdvanceRecorder | None,
        *,
        exactly_once: bool,
        gathers: bool,
        arrived: float,
    ) -> None:
        self._variables = variables
        self._arrived = arrived
        self._number = number
        self._scope = scope
        self._recorder = recorder
        self._exactly_once = exactly_once
        self._gathers = gathers

    def __enter__(self) -> None:
        outbox = self._variables.client.outbox
        self._scope.__enter__()
        try:
            outbox.begin_closure(
                self._number, exactly_once=self._exactly_once, gathers=self._gathers
            )
            self._variables._begin_closure(self._arrived)
            if self._recorder is not None:
                self._recorder.begin()
        except BaseException as error:  # Ctrl-C, too
            outbox.end_closure()
            self._scope.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        succeeded = False
        try:
            self._variables._end_closure(succeeded=exc is None)
            succeeded = exc is None
        finally:
            if self._recorder is not None:
                self._recorder.end(succeeded=succeeded)
            self._variables.client.outbox.end_closure()
            self._scope.__exit__(exc_type, exc, traceback)
