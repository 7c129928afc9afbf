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
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from stratagem._ps.worker.dense_parameter import DenseParameter
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
        is_sole: whether the cluster has no other worker, so that functions may write trained parameters.
        rounds: servers make the steps at the end of synchronous rounds.
        replicas: number of replicas that a function runs on.
    """

    def __init__(
        self,
        client: PsClient,
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
        self._buffers: dict[int, WorkerBuffer] = {}
        self.new_buffers = NewBuffers()
        self.wrappers = WrapperStates()
        self._remotes: weakref.WeakSet[RemoteVariable] = weakref.WeakSet()
        # Live parameters whose versions are noted when they are read; of a sole worker, which may write them, all.
        self._noted: list[tuple[RemoteVariable, MappedVariable]] | None = None
        self._has_moved = False  # a backup has taken variables over: parameters lie over old memory
        if client.failover is not None:
            client.failover.on_move = self._forget_memory
        self._written = WrittenParameters(self._dense, self._buffers, is_sole=is_sole)
        self._steps = StepBuilder(client, self._dense, self._tables, held=rounds)
        self._is_replicated = replicas > 1
        # Gradients of several replicas are written into the leaves at each step.
        compares = not self._is_replicated
        self._round = RoundSteps(self._dense, self._tables, compares=compares) if rounds else None
        self._staleness = metrics.distribution("ps.staleness")
        self._push_time = metrics.timer("ps.push")
        self._acknowledge_time = metrics.timer("ps.acknowledge")  # a part of ps.push
        self._wait_time = metrics.timer("ps.wait")
        self._refresh_time = metrics.timer("ps.refresh")

    # -------------------------------------------------------------- parameters and buffers

    def remote(self, description: Description) -> RemoteVariable:
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
    ) -> nn.Parameter:
        """Return a new parameter for a variable."""
        remote = self.remote(description)
        if as_table:
            may_write = self._written.is_sole and not self._is_replicated
            source = WorkerRows(remote, self._written.copied, may_write=may_write)
            table = TableParameter.over(source, requires_grad=requires_grad)
            self._tables[id(table)] = (table, remote)
            return table
        dense = DenseParameter(remote, requires_grad=requires_grad, channels_last=channels_last)
        self._dense[id(dense.leaf)] = dense
        self._noted = None
        if not dense.is_live:
            self._copies.add(dense)
        if not self._is_replicated:  # else gradients come from the replicas' leaves
            dense.keep_gradient_in_slot()
        return dense.leaf

    def buffer(self, description: Description, *, counts: bool) -> Tensor:
        """Return a new copy of a buffer; `counts`: increases of several workers add up."""
        made = WorkerBuffer(self.remote(description), counts=counts)
        self._copies.add(made)
        self._buffers[id(made.tensor)] = made
        return made.tensor

    def watched(self, buffers: dict[str, Any]) -> dict[str, Any]:
        """Return a module's dict of buffers that also sends tensors assigned to their names."""
        found = {
            name: self._buffers[id(value)]
            for name, value in buffers.items()
            if id(value) in self._buffers
        }
        return WatchedBuffers(buffers, found) if buffers else buffers

    # -------------------------------------------------------------- around a closure

    @contextmanager
    def closure(
        self,
        number: int = 0,
        *,
        exactly_once: bool = False,
        gathers: bool = False,
        arrived: float = math.inf,
        scope: AbstractContextManager[Any] = _NO_SCOPE,
        recorder: AdvanceRecorder | None = None,
    ) -> Iterator[None]:
        """Run one scheduled function: refresh copies before it and send changes after it.

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
        outbox = self.client.outbox
        with scope:
            try:
                outbox.begin_closure(number, exactly_once=exactly_once, gathers=gathers)
                self._begin_closure(arrived)
                recorder = recorder or AdvanceRecorder()
                recorder.begin()
                succeeded = False
                try:
                    try:
                        yield
                    except BaseException:
                        self._end_closure(succeeded=False)
                        raise
                    self._end_closure(succeeded=True)
                    succeeded = True
                finally:
                    recorder.end(succeeded=succeeded)
            finally:
                outbox.end_closure()

    def _begin_closure(self, arrived: float) -> None:
        self.wrappers.begin()
        self._failed_step = None
        for _, remote in self._tables.values():
            remote.keys.clocks.clear()  # of lookups without a step
        if self._round is not None:
            self._round.begin_closure()
        if self._dense or self._copies:
            if not self.client.outbox.is_idle:  # this closure reads them
                with self._wait_time.measure():
                    self.client.wait_for_writes()
            self._follow_move()
            if not self._copies.are_fresh(arrived):
                self._refresh()
            self._note_reads()

    def _end_closure(self, *, succeeded: bool) -> None:
        try:
            if succeeded and self._failed_step is not None:
                raise self._failed_step  # the function went on as if the step had been made
            if succeeded:
                self.wrappers.check()
                self._send_changes()
        except BaseException:
            succeeded = False
            raise
        finally:
            # After an error too: a page that this process wrote hides what the server writes there from all later closures.
            unnoted = self._written.undo(succeeded=succeeded)
            unknown = self.new_buffers.take_back()
        for error in (unnoted, unknown):
            if succeeded and error is not None:
                raise error

    def _refresh(self, *known: Any) -> None:
        """Update copies; parameters over shared memory are current."""
        if self._copies:
            with self._refresh_time.measure():
                self._copies.refresh(*known)

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
            written = self._written.find()
            trained: Any = ()

            def first(batch: WriteBatch) -> None:
                nonlocal trained
                trained = written.add_changes(batch)

            step = self._steps.build(number, optimizer, settings, first if written else None)
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
        written.undo(watch=True)
        self._written.check(trained, versions, own=2)
        self._written.follow_step()
        self._note_staleness(step.watched, versions)
        self._follow_move()
        self._refresh(client.outbox.values, asked)
        client.outbox.values.clear()
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
        buffer = self._buffers.pop(id(tensor), None)
        if buffer is not None:
            self._copies.remove(buffer)
        self._steps.forget()

    def close(self) -> None:
        """Release every variable and the servers' memory."""
        self._dense.clear()
        self._noted = None
        self._copies.clear()
        self._tables.clear()
        self._buffers.clear()
        self._steps.forget()

    def _send_changes(self) -> None:
        """Send the buffers and parameters that the function wrote."""
        written = self._written.find()
        if not written:
            return
        versions: Mapping[tuple[int, int], int] = {}
        with self.client.lock:
            batch = self.client.batch()
            trained = written.add_changes(batch)
            if not batch.is_empty:
                self.client.send(batch)
            if trained:
                versions = self.client.wait_for_writes()
        written.undo(watch=False)
        self._written.check(trained, versions, own=1)

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
        if self._noted is None:
            some = None if self._written.is_sole else WATCHED
            live = [one for one in itertools.islice(self._dense.values(), some) if one.is_live]
            pairs = [(one.remote, one.remote.mapped) for one in live]
            self._noted = [(one, mapped[0]) for one, mapped in pairs if mapped is not None]
        for remote, mapped in self._noted:
            remote.seen = (mapped.version,)

    @override
    def __repr__(self) -> str:
        return (
            f"<WorkerVariables {len(self._dense)} parameters, {len(self._tables)} tables, "
            f"{len(self._buffers)} buffers>"
        )
