"""What a worker must be told before and with a closure, in which order.

Functions and definitions once per worker life, updates when they moved, then the closure itself.
`Sender` packs on the user's thread (`shipping.py`) and builds the batches that links send; whether
and to whom a closure goes is decided by the engine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from stratagem._cluster.contract import StrategyOnCoordinator
from stratagem._cluster.coordinator.packer import Encoded, PackedObject, Packer
from stratagem._cluster.coordinator.remote_values import RemoteValue
from stratagem._cluster.coordinator.worker_link import WorkerLink
from stratagem._wire import messages
from stratagem._wire.frames import Buffer


@dataclass(slots=True, eq=False)
class Call:
    """A packed call: the function, its arguments, and the state of the strategy it belongs to."""

    function: PackedObject
    arguments: PackedObject | None
    version: int
    holds: Sequence[object] = ()
    """What the function captures of the strategy's: not to be freed before the call is done."""


@dataclass(slots=True, eq=False)
class Closure:
    """One closure on its way."""

    number: int
    call: Call
    value: RemoteValue
    scheduled_at: float
    exactly_once: bool = False
    resource: int = 0
    sent_at: float = 0.0

    @property
    def name(self) -> str:
        """The function's name."""
        return self.call.function.name


@final
class Sender:
    """Packs calls and builds batches for one coordinator."""

    def __init__(self, views: StrategyOnCoordinator) -> None:
        self._views = views
        self._packing = threading.Lock()
        self._shipper = Packer(views)
        self._version = 0
        self._updates: deque[tuple[int, PackedObject]] = deque()

    def pack(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> Call:
        """Packs a call as everything is now; raises what cannot be sent."""
        with self._packing:
            shipped, holds = self._shipper.function(function)
            arguments = None
            if args or kwargs:
                arguments = self._shipper.arguments(args or (), dict(kwargs or {}))
            version = self._views.snapshot()
            if version != self._version:
                shipment = self._pack_updates(self._version, version)
                self._shipper.define_again(self._views.outdated())
                if shipment is not None:
                    self._updates.append((version, shipment))
                self._version = version
        return Call(shipped, arguments, version, holds)

    def catch_up(self, link: WorkerLink) -> None:
        """Tells a new life what the strategy's state is now."""
        with self._packing:
            version = self._version
            shipment = self._pack_updates(0, version)
        with link.sending:
            link.version = version
            if shipment is not None:
                batch: list[Encoded] = []
                self._add_updates(link, shipment, batch, whole=True)
                link.send(batch)

    def send_again(self, link: WorkerLink, call: Call) -> None:
        """Something that a call needs did not arrive as it should: all of it goes with the next one.

        A worker that has an object already keeps it. What moved on goes now: it belongs to no call.
        """
        shipped = (call.function, call.arguments)
        with link.sending:
            link.functions.discard(call.function.digest)
            for shipment in shipped:
                if shipment is not None:
                    for token in shipment.tokens:
                        self._forget_definition(link, token)
        self.catch_up(link)

    def add(self, link: WorkerLink, closure: Closure, batch: list[Encoded]) -> None:
        """Adds a closure, and before it what this worker has not been told yet. Holds `sending`."""
        call = closure.call
        function, arguments = call.function, call.arguments
        for token in function.tokens:
            self._add_definition(link, token, batch)
        if call.version > link.version:
            for version, shipment in tuple(self._updates):
                if link.version < version <= call.version:
                    self._add_updates(link, shipment, batch)
            link.version = call.version
        if function.digest not in link.functions:
            link.functions.add(function.digest)
            define = messages.Define(value=function.packed, function=function.digest)
            batch.append((define, function.buffers))
        buffers: Sequence[Buffer] = ()
        if arguments is not None:
            for token in arguments.tokens:
                self._add_definition(link, token, batch)
            buffers = arguments.buffers
        run = messages.Run(
            closure=closure.number,
            function=function.digest,
            arguments=arguments.packed if arguments is not None else None,
            exactly_once=closure.exactly_once,
            resource=closure.resource,
        )
        batch.append((run, buffers))

    def forget(self, links: Sequence[WorkerLink], resources: Sequence[int]) -> None:
        """Drops, here and at the workers, what nobody will refer to any more."""
        with self._packing:
            functions, self._shipper.evicted = tuple(self._shipper.evicted), []
            oldest = min((link.version for link in links if link.connected), default=0)
            while self._updates and self._updates[0][0] <= oldest:
                self._updates.popleft()
        if not functions and not resources:
            return
        for link in links:
            with link.sending:
                known = tuple(digest for digest in functions if digest in link.functions)
                link.functions.difference_update(known)
                if resources or known:
                    link.notify(messages.Forget(functions=known, resources=tuple(resources)))

    def _pack_updates(self, after: int, upto: int) -> PackedObject | None:
        updates = self._views.updates(after, upto)
        return self._shipper.updates(updates) if updates else None

    def _add_updates(
        self, link: WorkerLink, shipment: PackedObject, batch: list[Encoded], *, whole: bool = False
    ) -> None:
        for token in shipment.tokens:
            self._add_definition(link, token, batch)
        batch.append((messages.Update(updates=shipment.packed, whole=whole), shipment.buffers))

    def _forget_definition(self, link: WorkerLink, token: Hashable) -> None:
        if token in link.tokens:
            link.tokens.discard(token)
            for _, nested in self._shipper.definitions[token]:
                for inner in nested:
                    self._forget_definition(link, inner)

    def _add_definition(self, link: WorkerLink, token: Hashable, batch: list[Encoded]) -> None:
        if token in link.tokens:
            return
        link.tokens.add(token)
        for encoded, nested in self._shipper.definitions[token]:
            for inner in nested:
                self._add_definition(link, inner, batch)
            batch.append(encoded)
