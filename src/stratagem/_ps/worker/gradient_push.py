"""Build the batches that send a worker's gradients to the servers, one per optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from stratagem._core.torch_patches import private_api
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.client.send_buffers import GradientSlot, LentGradient
from stratagem._ps.client.write_batch import ServerPart, SlotGradient, WriteBatch
from stratagem._ps.optimizer_settings import Settings, is_known_class
from stratagem._ps.tables.table_parameter import TableParameter
from stratagem._ps.types import Gradient, JoinedGradient
from stratagem._ps.worker.dense_parameter import DenseParameter, gradient_parts
from stratagem._ps.worker.joined_gradients import JoinLayout, RawTable, join
from stratagem._wire.messages import Push
from stratagem.errors import ForeignParameterError, UnsupportedOptimizer

_KEPT_BATCHES: Final = 4
"""Batches kept of every optimizer: steps of one model may alternate between a few sets of gradients."""

WATCHED: Final = 16
"""Number of variables whose versions are noted when they are read, to measure staleness."""


class PreparedStep(NamedTuple):
    """A filled batch, and variables that it writes: one for each server, by which staleness is measured."""

    batch: WriteBatch
    watched: list[RemoteVariable]


class _KeptStep(NamedTuple):
    """Prepared step whose gradients are all in slots, with the key that it was prepared for."""

    key: list[int]
    settings: Settings
    step: PreparedStep


class _Slotted(NamedTuple):
    """A dense parameter, the slot of its gradient if it has one, and its type."""

    parameter: Tensor
    slot: GradientSlot | LentGradient | None
    dtype: torch.dtype


@final
class StepBuilder:
    """Builds the batches of optimizer steps, and keeps those that can be sent again.

    Args:
        client: this worker's connections to the servers.
        dense: dense parameters by the id of their leaves.
        tables: tables by their ids, each with its variable.
        held: servers make the steps at the end of a round. Every server that holds some of an optimizer's parameters
            gets each step, so that all know which closures made one.
    """

    def __init__(
        self,
        client: PsClient,
        dense: dict[int, DenseParameter],
        tables: dict[int, tuple[TableParameter, RemoteVariable]],
        *,
        held: bool = False,
    ) -> None:
        self._held = held
        self._client = client
        self._dense = dense
        self._tables = tables
        self._kept: dict[int, list[_KeptStep]] = {}  # by optimizer, the latest first
        self._generation = 0  # of the slots that kept batches name
        # By optimizer: the ids of its parameters, and what is known of them.
        self._slots: dict[int, tuple[list[int], list[_Slotted] | None]] = {}
        self._layouts: dict[tuple[int, ...], JoinLayout] = {}  # by the variables' ids

    def forget(self) -> None:
        """Forget all batches: parameters have changed."""
        self._kept.clear()
        self._slots.clear()
        self._layouts.clear()

    def build(
        self,
        number: int,
        optimizer: Optimizer,
        settings: Settings,
        first: Callable[[WriteBatch], None] | None = None,
    ) -> PreparedStep:
        """Return the batch of one step.

        Args:
            number: the optimizer's number on the servers.
            optimizer: the gradients of its parameters are sent.
            settings: those that differ from the servers', for this step.
            first: adds the writes that servers make before the step; None if the caller adds nothing to the batch.
        """
        if self._generation != self._client.outbox.buffers.generation:
            self._generation = self._client.outbox.buffers.generation
            self.forget()
        key = self._bring_into_slots(number, optimizer)
        if key is not None and first is None:
            for known in self._kept.get(number, ()):
                if known.key == key and known.settings == settings:
                    return known.step
        batch, touched = self._client.batch(), list[RemoteVariable]()
        if first is not None:
            first(batch)
        by_server: dict[int, list[Gradient | SlotGradient]] = {}
        is_known = is_known_class(type(optimizer))
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if self._held or not is_known:  # another class may count steps: every server makes each
            for remote in filter(None, map(self._remote_of, parameters)):
                by_server.update({place.server: [] for place in remote.places})
        joined = {} if not is_known else self._joined(parameters, batch, touched)
        done = {id(remote) for remote in touched}
        for parameter in parameters:
            sent = self._add(parameter, by_server, done, in_slots=key is not None)
            if sent is not None:
                touched.append(sent)
        for server in {**by_server, **joined}:
            gradients = by_server.get(server, ())
            batch.push(
                server,
                number,
                gradients,
                settings,
                joined=joined.get(server, ()),
                held=self._held,
            )
            if not is_known and _pushes(batch.parts[server]) > 1:
                raise UnsupportedOptimizer(
                    f"one step of {type(optimizer).__name__} sends more to a parameter server than "
                    "one message holds, and a class that is not torch's must step on all its "
                    "gradients at once. Set STRATAGEM_FRAME_BYTES for the servers, or use more "
                    "servers."
                )
        step = PreparedStep(batch, _one_for_each_server(touched))
        if key is not None and first is None:
            kept = self._kept.setdefault(number, [])
            kept.insert(0, _KeptStep(key, settings, step))
            del kept[_KEPT_BATCHES:]
        return step

    def _remote_of(self, parameter: Any) -> RemoteVariable | None:
        dense, table = self._dense.get(id(parameter)), self._tables.get(id(parameter))
        return dense.remote if dense is not None else None if table is None else table[1]

    def _joined(
        self, parameters: Sequence[Any], batch: WriteBatch, touched: list[RemoteVariable]
    ) -> dict[int, list[JoinedGradient]]:
        """Return the gradients of tables that travel together, by server; add their variables to `touched`."""
        by_kind: dict[Any, list[RawTable]] = {}
        for parameter in parameters:
            known = self._tables.get(id(parameter))
            if known is None or known[1].keys.clocks:
                continue
            pieces = known[0].gradient.pieces()
            if pieces is not None:
                kind = (known[1].shape[1:], known[1].dtype, known[0].gradient.sparse)
                by_kind.setdefault(kind, []).append(RawTable(*known, pieces))
        found: dict[int, list[JoinedGradient]] = {}
        for tables in by_kind.values():
            remotes = [one.remote for one in tables]
            key = tuple(map(id, remotes))
            layout = self._layouts.get(key)
            if layout is None:
                layout = self._layouts[key] = JoinLayout(remotes)
            joined = join(tables, layout, batch.reserve)
            for server, gradient in joined or ():
                found.setdefault(server, []).append(gradient)
            touched += remotes if joined else ()
        return found

    def _bring_into_slots(self, number: int, optimizer: Optimizer) -> list[int] | None:
        """Copy gradients into their slots; return the parameters' ids, or None if one has no slot and cannot be lent."""
        key: list[int] = []
        to: list[Tensor] = []
        source: list[Tensor] = []
        slots = self._slots_of(number, optimizer)
        if slots is None:
            return None
        for parameter, slot, dtype in slots:
            grad = parameter.grad
            if grad is None:
                continue
            if slot is None or grad.dtype is not dtype or grad.layout is not torch.strided:
                return None
            key.append(id(parameter))
            if isinstance(slot, LentGradient):
                if not grad.is_contiguous():
                    return None
            elif slot.taken is None or not slot.holds(grad):
                if not slot.is_free:
                    return None
                to.append(slot.view)
                source.append(grad.detach() if grad.requires_grad else grad)
        if to:
            private_api.foreach_copy_(to, source)
        return key

    def _slots_of(self, number: int, optimizer: Optimizer) -> list[_Slotted] | None:
        """Return the optimizer's parameters with their slots, looked up once; None if one is no dense parameter."""
        ids = [
            id(one) for group in optimizer.param_groups for one in dict.__getitem__(group, "params")
        ]
        known = self._slots.get(number)
        if known is None or known[0] != ids:
            every = [self._dense.get(one) for one in ids]
            found = [_Slotted(one.leaf, one.slot(), one.leaf.dtype) for one in every if one]
            known = self._slots[number] = ids, found if len(found) == len(ids) else None
        return known[1]

    def _add(
        self,
        parameter: Any,
        by_server: dict[int, list[Gradient | SlotGradient]],
        done: set[int],
        *,
        in_slots: bool,
    ) -> RemoteVariable | None:
        dense, known = self._dense.get(id(parameter)), self._tables.get(id(parameter))
        if dense is not None:
            remote, grad = dense.remote, dense.leaf.grad
            pieces = dense.gradients(in_slot=in_slots)
        elif known is not None:
            (table, remote), grad = known, None
            if id(remote) not in done:
                grad, gradient = table.gradient.value(), table.gradient
                pieces = gradient_parts(remote, grad, gradient.ids(), sparse=gradient.sparse)
        elif parameter.grad is None:
            return None
        else:
            raise ForeignParameterError(
                f"a parameter of shape {tuple(parameter.shape)} that is on no parameter server "
                "got a gradient inside a scheduled function: its update would be lost with "
                "the function. Create the module inside `with strategy.scope():`."
            )
        if grad is None:
            return None
        for server, piece in pieces:
            by_server.setdefault(server, []).append(piece)
        return remote


def _one_for_each_server(touched: Sequence[RemoteVariable]) -> list[RemoteVariable]:
    """Return few variables that lie on all servers of these: those of one step are written together."""
    covered: set[int] = set()
    found = []
    for remote in touched[:WATCHED]:
        servers = {place.server for place in remote.places}
        if max(remote.seen) > 0 and not servers <= covered:  # else its version is not known
            covered |= servers
            found.append(remote)
    return found or [*touched[:WATCHED]]


def _pushes(parts: Sequence[ServerPart]) -> int:
    """Return how many messages to one server hold gradients."""
    return sum(any(isinstance(one, Push) for one in part.operations) for part in parts)
