"""A worker's side of the variables on parameter servers: what a step reads, what it sends.

`WorkerVariables` gives the parameters and buffers a shipped function works with:

- a dense parameter is a plain ``nn.Parameter`` leaf. On the servers' host it lies over their shared
  memory, so reading it costs nothing and shows every update at once; elsewhere, or when the variable
  is in several shards, it is a copy that `refresh` brings up to date;
- an embedding's weight, and every sharded variable, is a `TableParameter`;
- a buffer is a copy of the worker's own, since layers write buffers in place: what a step changed is
  sent with the step.

`push` sends the gradients of one optimizer step. Only servers write parameters; what a function writes
into a leaf itself would be lost, so it is refused. One object per worker life, used by one thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from stratagem import metrics
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.client.write_batch import PushedGradient, WriteBatch
from stratagem._ps.optimizer_settings import Settings, changed_settings
from stratagem._ps.placement import Description
from stratagem._ps.tables.table_parameter import TableParameter
from stratagem._ps.worker.worker_buffers import NewBuffers, WatchedBuffers, WorkerBuffer
from stratagem._wire import shared_heap
from stratagem.errors import ForeignParameterError, NotFoundError

WATCHED = 16
"""Variables by which staleness is measured: those of one step move together, so a few tell it."""

VARIANTS = 4
"""Batches kept of every optimizer, to be sent again."""

_NO_SCOPE = nullcontext()


class DenseParameter:
    """A parameter used as a whole, and the leaf that stands for it here."""

    __slots__ = ("is_live", "leaf", "remote", "version")

    def __init__(self, remote: RemoteVariable, *, requires_grad: bool) -> None:
        self.remote = remote
        mapped = remote.mapped if len(remote.places) == 1 else None
        self.is_live = mapped is not None  # the leaf lies over the server's memory
        data = remote.read() if mapped is None else mapped[0].tensor
        self.leaf = nn.Parameter(data, requires_grad=requires_grad)
        self.version = self.leaf._version

    def refresh(self) -> None:
        """Take over the servers' values, if the leaf is a copy and they moved."""
        if self.is_live:
            return
        if self.remote.versions() != self.remote.seen:
            self.remote.read_into(self.leaf.data)

    def take_back(self) -> bool:
        """Whether the function wrote into the leaf; if so the server's value is put back."""
        if self.leaf._version == self.version:
            return False
        self.version = self.leaf._version
        if self.is_live:
            assert self.remote.mapped is not None
            self.remote.mapped[0].refresh()
        else:
            self.remote.forget_seen()  # the next refresh reads it anew
        return True

    def take_back_hidden(self) -> bool:
        """The same for a write no version tells of, as through ``leaf.data``; asks the kernel."""
        mapped = self.remote.mapped if self.is_live else None
        if mapped is None or not mapped[0].is_overwritten():
            return False
        mapped[0].refresh()
        return True

    def gradients(self) -> Iterator[tuple[int, PushedGradient]]:
        """What each server gets of the leaf's gradient."""
        grad = self.leaf.grad
        assert grad is not None
        if grad.is_sparse:
            grad = grad.coalesce()
            yield from row_gradients(self.remote, grad.indices()[0], grad.values(), sparse=True)
            return
        for place, part in zip(self.remote.places, self.remote.cut(grad), strict=True):
            yield place.server, PushedGradient(variable=place.variable, values=part)


class PlainGradients(NamedTuple):
    """Dense gradients of a step, server by server, and the parameters they belong to."""

    key: list[int]
    tensors: list[Tensor]


class _Repeatable(NamedTuple):
    """A step's batch that can be sent again: what it was made for, it itself, what it writes."""

    key: list[int]
    settings: Settings
    batch: WriteBatch
    touched: list[RemoteVariable]


class WorkerVariables:
    """Everything one worker has of a strategy's variables.

    Args:
        client: this worker's connections to the servers.
        registry: where to count; staleness is the distribution ``ps.staleness``.
    """

    def __init__(self, client: PsClient, registry: metrics.Registry | None = None) -> None:
        self.client = client
        self.heap = shared_heap.installed()
        """Where large tensors of scheduled functions lie, if this process has one."""
        self._dense: dict[int, DenseParameter] = {}  # id(leaf)
        self._copies: list[DenseParameter] = []  # those of them that must be refreshed
        self._tables: dict[int, tuple[TableParameter, RemoteVariable]] = {}  # id(table)
        self._buffers: list[WorkerBuffer] = []
        self._by_tensor: dict[int, WorkerBuffer] = {}
        self.new_buffers = NewBuffers()
        self._turn = 0  # whose memory is looked at next for hidden writes
        self._batches: dict[int, list[_Repeatable]] = {}  # by optimizer, the latest first
        counting = metrics if registry is None else registry
        self._staleness = counting.distribution("ps.staleness")
        self._push_time = counting.timer("ps.push")
        self._refresh_time = counting.timer("ps.refresh")

    # -------------------------------------------------------------- what functions work with

    def remote(self, description: Description) -> RemoteVariable:
        """A variable, to be read and written as one likes."""
        return RemoteVariable(description, self.client)

    def parameter(
        self, description: Description, *, requires_grad: bool, as_table: bool
    ) -> nn.Parameter:
        """The worker's parameter for a variable."""
        remote = self.remote(description)
        if as_table:
            table = TableParameter.over(remote, requires_grad=requires_grad)
            self._tables[id(table)] = (table, remote)
            return table
        dense = DenseParameter(remote, requires_grad=requires_grad)
        self._dense[id(dense.leaf)] = dense
        if not dense.is_live:
            self._copies.append(dense)
        return dense.leaf

    def buffer(self, description: Description, *, counts: bool) -> Tensor:
        """The worker's copy of a buffer; `counts`: several workers' increases add up."""
        made = WorkerBuffer(self.remote(description), counts=counts)
        self._buffers.append(made)
        self._by_tensor[id(made.tensor)] = made
        return made.tensor

    def watched(self, buffers: dict[str, Any]) -> dict[str, Any]:
        """A module's buffers, such that what is assigned to their names is sent as well."""
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
        scope: AbstractContextManager[Any] = _NO_SCOPE,
    ) -> WorkerClosure:
        """Around one scheduled function: fresh values before, what it changed is sent after.

        Args:
            number: the closure's.
            exactly_once: repeated elsewhere its writes count once; its end waits for them.
            gathers: small writes may wait for more: the function is over in no time.
            scope: entered around all of this, such as the strategy's.

        Raises:
            ForeignParameterError: at the end, if the function wrote into a parameter.
            ValueError: at the end, if it registered a buffer that no server knows.
        """
        return WorkerClosure(self, number, scope, exactly_once=exactly_once, gathers=gathers)

    def _begin_closure(self) -> None:
        if self._dense or self._buffers:
            self.client.settle()  # what the last one wrote shows in what this one reads
            self.refresh()
            self._note_reads()
            for dense in self._dense.values():
                dense.version = dense.leaf._version

    def _end_closure(self, *, succeeded: bool, wait: bool) -> None:
        written: list[DenseParameter] = []
        try:
            if succeeded:
                self._send_buffers()
            else:
                for buffer in self._buffers:
                    buffer.take_back()
        finally:
            # Every one of them, and after an error too: a page this process wrote to hides what the
            # server writes there, for all closures to come.
            if self._dense:
                written = [dense for dense in self._dense.values() if dense.take_back()]
                written = written or self._take_back_hidden_writes()
            for buffer in self._buffers:
                buffer.put_back()
            unknown = self.new_buffers.take_back()
            if wait:
                self.client.settle()
        if written and succeeded:
            raise ForeignParameterError(
                f"parameter {written[0].remote.name!r} was written in place inside a scheduled "
                "function. It lives on parameter servers, and a worker's copy of it is not sent "
                "back. Let step() of an optimizer made inside `with strategy.scope():` update it "
                "(not of one made in the function), use a sg.Variable's assign methods, or write "
                "it on the coordinator."
            )
        if unknown is not None and succeeded:
            raise ValueError(unknown)

    def _take_back_hidden_writes(self) -> list[DenseParameter]:
        """Looks at one parameter per closure, in turn, and at all of them if that one was written."""
        if not self._dense:
            return []
        self._turn = (self._turn + 1) % len(self._dense)
        looked_at = next(itertools.islice(self._dense.values(), self._turn, None))
        if not looked_at.take_back_hidden():
            return []
        others = (dense for dense in self._dense.values() if dense.take_back_hidden())
        return [looked_at, *others]

    def refresh(self) -> None:
        """Bring copies up to date; what lies over shared memory is."""
        if not self._copies and not self._buffers:
            return
        with self._refresh_time.measure(), torch.no_grad():
            for dense in tuple(self._copies):
                if not self._refreshed(dense):
                    self._copies.remove(dense)
            for buffer in tuple(self._buffers):
                if not self._refreshed(buffer):
                    self._buffers.remove(buffer)

    def _refreshed(self, copy: DenseParameter | WorkerBuffer) -> bool:
        """Bring one copy up to date; False if the coordinator has deleted the variable."""
        try:
            copy.refresh()
        except NotFoundError:
            self.client.versions(copy.remote.places[0].server)  # raises if the session is over
            return False
        return True

    # -------------------------------------------------------------- an optimizer's step

    def push(self, number: int, optimizer: Optimizer, initial: Settings) -> None:
        """Send the gradients of one step, with the buffers it changed, and wait until it is done.

        Args:
            number: the optimizer's, on the servers.
            optimizer: whose parameters' gradients are sent.
            initial: settings the servers use; others are sent along, for this step.
        """
        with self._push_time.measure(), self.client.lock:
            settings = changed_settings(optimizer, initial)
            changed = [buffer for buffer in self._buffers if buffer.is_changed()]
            plain = None if changed else self._plain_gradients(optimizer)
            batch = None if plain is None else self._repeated(number, plain, settings)
            if batch is None:
                batch = self.client.batch(lends_from=shared_heap.LEAST_BYTES)
                touched = self._fill(batch, number, optimizer, settings)
                for buffer in changed:
                    buffer.add_change(batch)
                if batch.is_empty:
                    return
                if plain is not None:
                    self._remember(number, _Repeatable(plain.key, settings, batch, touched))
            self.client.send(batch)
            versions = self.client.settle()
            touched = self._batches[number][0].touched if plain is not None else touched
        self._note_staleness(touched, versions)
        self.refresh()
        self._note_reads()

    def _fill(
        self, batch: WriteBatch, number: int, optimizer: Optimizer, settings: Settings
    ) -> list[RemoteVariable]:
        """Put a step's gradients into a batch; the variables it writes."""
        by_server: dict[int, list[PushedGradient]] = {}
        touched: list[RemoteVariable] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                remote = self._add_gradients(parameter, by_server)
                if remote is not None:
                    touched.append(remote)
        for server, gradients in by_server.items():
            batch.push(server, number, gradients, settings)
        return touched

    def _plain_gradients(self, optimizer: Optimizer) -> PlainGradients | None:
        """The gradients, if all are dense and of variables in one piece; else None."""
        key: list[int] = []
        by_server: dict[int, list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                dense = self._dense.get(id(parameter))
                if dense is None or len(dense.remote.places) > 1:
                    return None
                grad = parameter.grad
                if grad is None:
                    continue
                if grad.layout != torch.strided or grad.dtype != parameter.dtype:
                    return None
                key.append(id(parameter))
                if grad.numel():
                    by_server.setdefault(dense.remote.places[0].server, []).append(grad)
        return PlainGradients(key, [grad for some in by_server.values() for grad in some])

    def _repeated(
        self, number: int, plain: PlainGradients, settings: Settings
    ) -> WriteBatch | None:
        """The last step's batch with this step's gradients, if only they differ."""
        variants = self._batches.get(number)
        if variants is None or not self.client.outbox.is_settled:
            return None
        for index, known in enumerate(variants):
            if known.key == plain.key and known.settings == settings:
                again = known.batch.again(plain.tensors)
                if again is not None:
                    if index:
                        variants.insert(0, variants.pop(index))
                    return again
        return None

    def _remember(self, number: int, made: _Repeatable) -> None:
        """Keeps a batch to be sent again, and a few more: what is lent may lie in turns here and there."""
        variants = self._batches.setdefault(number, [])
        variants.insert(0, made)
        del variants[VARIANTS:]

    def forget(self, tensor: Tensor) -> None:
        """Let go of one parameter or buffer."""
        dense = self._dense.pop(id(tensor), None)
        if dense in self._copies:
            self._copies.remove(dense)
        self._tables.pop(id(tensor), None)
        self._buffers = [buffer for buffer in self._buffers if buffer.tensor is not tensor]
        self._by_tensor.pop(id(tensor), None)
        self._batches.clear()

    def close(self) -> None:
        """Let go of every variable, and with them of the servers' memory."""
        self._dense.clear()
        self._copies.clear()
        self._tables.clear()
        self._buffers.clear()
        self._by_tensor.clear()
        self._batches.clear()

    def _add_gradients(
        self, parameter: Any, by_server: dict[int, list[PushedGradient]]
    ) -> RemoteVariable | None:
        dense = self._dense.get(id(parameter))
        if dense is not None:
            grad, remote = parameter.grad, dense.remote
            if grad is None:
                return None
            if len(remote.places) == 1 and not grad.is_sparse:  # the usual case, kept short
                place = remote.places[0]
                by_server.setdefault(place.server, []).append(
                    PushedGradient(variable=place.variable, values=grad)
                )
                return remote
            pieces = dense.gradients()
        else:
            known = self._tables.get(id(parameter))
            if known is None:
                if parameter.grad is None:
                    return None
                raise ForeignParameterError(
                    f"a parameter of shape {tuple(parameter.shape)} that is on no parameter server "
                    "got a gradient inside a scheduled function: its update would be lost with "
                    "the function. Create the module inside `with strategy.scope():`."
                )
            table, remote = known
            if table.grad is None:
                return None
            pieces = table_gradients(table, remote)
        for server, gradient in pieces:
            by_server.setdefault(server, []).append(gradient)
        return remote

    def _send_buffers(self) -> None:
        if not self._buffers:
            return
        with self.client.lock:
            batch = self.client.batch()
            for buffer in self._buffers:
                if buffer.is_changed():
                    buffer.add_change(batch)
            if not batch.is_empty:
                self.client.send(batch)

    def _note_staleness(
        self, touched: list[RemoteVariable], versions: Mapping[tuple[int, int], int]
    ) -> None:
        """How many writes of others lay between this step's reads and its write, at most."""
        worst = -1
        for remote in touched[:WATCHED]:
            for place, seen in zip(remote.places, remote.seen, strict=True):
                after = versions.get((place.server, place.variable))
                if after is not None and seen:
                    worst = max(worst, after - 1 - seen)
        if worst >= 0:
            self._staleness.record(worst)

    def _note_reads(self) -> None:
        """What lies over shared memory is read from now on: note the versions it has."""
        for dense in itertools.islice(self._dense.values(), WATCHED):
            if dense.is_live:
                dense.remote.seen = dense.remote.versions()

    @override
    def __repr__(self) -> str:
        return (
            f"<WorkerVariables {len(self._dense)} parameters, {len(self._tables)} tables, "
            f"{len(self._buffers)} buffers>"
        )


class WorkerClosure:
    """A scheduled function runs; made by `WorkerVariables.closure`.

    Written out, not an ``ExitStack``: this is around every closure, and some take 50 µs.
    """

    __slots__ = ("_exactly_once", "_gathers", "_heap", "_number", "_scope", "_variables")

    def __init__(
        self,
        variables: WorkerVariables,
        number: int,
        scope: AbstractContextManager[Any],
        *,
        exactly_once: bool,
        gathers: bool,
    ) -> None:
        self._variables = variables
        self._number = number
        self._scope = scope
        self._exactly_once = exactly_once
        self._gathers = gathers
        self._heap = variables.heap

    def __enter__(self) -> None:
        outbox = self._variables.client.outbox
        self._scope.__enter__()
        try:
            outbox.begin_closure(
                self._number, exactly_once=self._exactly_once, gathers=self._gathers
            )
            self._variables._begin_closure()
            if self._heap is not None:
                self._heap.enter()
        except BaseException as error:  # Ctrl-C included: what was entered is left, whatever came
            if self._heap is not None:
                self._heap.leave()
            outbox.end_closure()
            self._scope.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._heap is not None:
            self._heap.leave()
        try:
            self._variables._end_closure(succeeded=exc is None, wait=self._exactly_once)
        finally:
            self._variables.client.outbox.end_closure()
            self._scope.__exit__(exc_type, exc, traceback)


def table_gradients(
    table: TableParameter, remote: RemoteVariable
) -> Iterator[tuple[int, PushedGradient]]:
    """What each server gets of a table's gradient.

    Shards without a row get an empty gradient: their optimizer's step count and moments move too.
    """
    ids, values = table.gradient.ids(), table.gradient.value()
    assert values is not None
    if ids is not None:
        yield from row_gradients(remote, ids, values, sparse=table.gradient.sparse)
        return
    for place, part in zip(remote.places, remote.cut(values), strict=True):
        yield place.server, PushedGradient(variable=place.variable, values=part)


def row_gradients(
    remote: RemoteVariable, ids: Tensor, values: Tensor, *, sparse: bool
) -> Iterator[tuple[int, PushedGradient]]:
    """Sorted unique rows, cut along the shards."""
    cuts = remote.layout.cut_sorted(ids)
    for place, offset, (begin, end) in zip(remote.places, remote.layout.offsets, cuts, strict=True):
        yield (
            place.server,
            PushedGradient(
                variable=place.variable,
                values=values[begin:end],
                ids=ids[begin:end] - offset,
                sparse=sparse,
            ),
        )
