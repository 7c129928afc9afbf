"""Pack calls, and build the batches of messages that send closures to a worker.

A worker receives each function and definition once per incarnation, updates when something changed, then
the closure itself. `Sender` packs on the user's thread (`packer.py`) and builds batches for the links. The
engine decides which worker gets a closure.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from stratagem._cluster.contract import StrategyOnCoordinator
from stratagem._cluster.coordinator.packer import Encoded, PackedObject, Packer
from stratagem._cluster.coordinator.remote_values import PerWorkerValues, RemoteValue
from stratagem._cluster.coordinator.shared_dataset import HeldLease, SharedDataset
from stratagem._cluster.coordinator.worker_link import WorkerLink
from stratagem._wire import messages
from stratagem._wire.codec import Outgoing, dtype_name, pack
from stratagem._wire.frames import Buffer


@dataclass(slots=True, eq=False)
class Call:
    """A packed call: the function, its arguments, and the version of the strategy's state."""

    function: PackedObject
    arguments: PackedObject | None
    version: int
    holds: Sequence[object] = ()
    """Objects of the strategy that the function captures: kept alive until the call is done."""
    argument_bytes: int = 0
    dtype: str = field(default_factory=lambda: dtype_name(torch.get_default_dtype()))
    """The default dtype of the program when it made the call."""


@dataclass(slots=True, eq=False)
class Closure:
    """A scheduled call and where its result goes."""

    number: int
    call: Call
    value: RemoteValue
    scheduled_at: float
    exactly_once: bool = False
    resource: int = 0
    sent_at: float = 0.0
    leases: tuple[HeldLease, ...] = ()

    @property
    def name(self) -> str:
        """The function's name."""
        return self.call.function.name

    @property
    def part(self) -> tuple[int, ...] | None:
        """The part of a shared dataset that the function reads; None if it reads none, or any worker may."""
        return self.leases[0].part if self.leases else None

    @property
    def datasets(self) -> tuple[SharedDataset, ...]:
        """Shared datasets that the function receives."""
        found = [one for one in self._holds if type(one) is SharedDataset]
        return tuple(dict.fromkeys(found)) if found else ()

    @property
    def inputs(self) -> list[int]:
        """Numbers of the per-worker values that the function receives."""
        return [one._resource for one in self._holds if isinstance(one, PerWorkerValues)]

    @property
    def _holds(self) -> Sequence[object]:
        call = self.call
        return call.holds if call.arguments is None else (*call.holds, *call.arguments.holds)


@final
class Sender:
    """Packs calls and builds batches for one coordinator."""

    def __init__(self, views: StrategyOnCoordinator) -> None:
        self._views = views
        self._packing = threading.Lock()
        self._packer = Packer(views)
        self._version = 0
        self._updates: deque[tuple[int, PackedObject]] = deque()

    def keep_secret(self, secret: str) -> None:
        """Raise from now on if a message would contain this text, the cluster key."""
        self._packer.secret = secret.encode()

    def pack(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> Call:
        """Pack a call with the present state of everything; raise if something cannot be sent."""
        with self._packing:
            updates, outdated = self._views.changes()
            if updates:
                packed_updates = self._packer.updates(updates)
                self._packer.define_again(outdated)
                self._views.accept()
                self._version += 1
                self._updates.append((self._version, packed_updates))
            packed, holds = self._packer.function(function)
            if not (args or kwargs):
                return Call(packed, None, self._version, holds)
            arguments = self._packer.arguments(args or (), dict(kwargs or {}))
            size = len(arguments.packed.payload) + sum(
                memoryview(each).nbytes for each in arguments.buffers
            )
            return Call(packed, arguments, self._version, holds, size)

    def catch_up(self, link: WorkerLink) -> None:
        """Send a new worker the changes that its definitions will not contain."""
        with self._packing:
            version, updates = self._version, self._views.current()
            packed = self._packer.updates(updates) if updates else None
        with link.sending:
            link.sent.version = version
            if packed is not None:
                batch: list[Encoded] = []
                self._add_updates(link, packed, batch)
                link.send(batch)

    def add(self, link: WorkerLink, closure: Closure, batch: list[Encoded]) -> None:
        """Add a closure, and before it what this worker has not received yet. Holds `sending`."""
        call, sent = closure.call, link.sent
        function, arguments = call.function, call.arguments
        for token in function.tokens:
            self._add_definition(link, token, batch)
        if call.version > sent.version:
            for version, packed in tuple(self._updates):
                if sent.version < version <= call.version:
                    self._add_updates(link, packed, batch)
            sent.version = call.version
        if function.digest not in sent.functions:
            sent.functions.add(function.digest)
            define = messages.Define(value=function.packed, function=function.digest)
            batch.append((define, function.buffers))
        buffers: Sequence[Buffer] = ()
        if arguments is not None:
            for token in arguments.tokens:
                self._add_definition(link, token, batch)
            buffers = arguments.buffers
        snapshot = self._views.snapshot(link.number, link.incarnation, sent.tokens)
        if snapshot is not None:
            outgoing = Outgoing()
            update = messages.Update(updates=pack([snapshot], outgoing))
            batch.append((update, outgoing.buffers))
        run = messages.Run(
            closure=closure.number,
            function=function.digest,
            arguments=arguments.packed if arguments is not None else None,
            exactly_once=closure.exactly_once,
            resource=closure.resource,
            dtype=call.dtype,
            leases=tuple(held.message for held in closure.leases) if closure.leases else (),
        )
        batch.append((run, buffers))

    def forget(self, links: Sequence[WorkerLink], resources: Sequence[int]) -> None:
        """Drop, here and on the workers, functions and resources that nothing refers to any more."""
        with self._packing:
            functions, self._packer.evicted = tuple(self._packer.evicted), []
            oldest = min((link.sent.version for link in links if link.connected), default=0)
            while self._updates and self._updates[0][0] <= oldest:
                self._updates.popleft()
        if not functions and not resources:
            return
        for link in links:
            with link.sending:
                known = tuple(digest for digest in functions if digest in link.sent.functions)
                link.sent.functions.difference_update(known)
                if resources or known:
                    link.notify(messages.Forget(functions=known, resources=tuple(resources)))

    def _add_updates(self, link: WorkerLink, packed: PackedObject, batch: list[Encoded]) -> None:
        for token in packed.tokens:
            self._add_definition(link, token, batch)
        batch.append((messages.Update(updates=packed.packed), packed.buffers))

    def _add_definition(self, link: WorkerLink, token: Hashable, batch: list[Encoded]) -> None:
        if token in link.sent.tokens:
            return
        link.sent.tokens.add(token)
        for encoded, nested in self._packer.definitions[token]:
            for inner in nested:
                self._add_definition(link, inner, batch)
            batch.append(encoded)
