"""The coordinator's side of variables on parameter servers.

A module built under the scope keeps ordinary local parameters and buffers (``central``). Each has an object here
that knows its shards on the servers. Nothing is sent while models are built and initialised: `flush` creates
new variables and sends local changes, which ``central._version`` shows. It is called before anything is
sent to a worker. Reading a parameter (``model(x)``, ``state_dict()``) first fetches newer values from the servers.
"""

from __future__ import annotations

import enum
import itertools
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from stratagem._core import devices
from stratagem._core.managed import ManagedParameter
from stratagem._core.strategy_hooks import StrategyHooks
from stratagem._core.torch_patches.module_members import BuffersByReplica
from stratagem._core.torch_patches.private_api import has_hooks
from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.coordinator.deferred_tables import planned_of
from stratagem._ps.coordinator.kept_tensor import Kept
from stratagem._ps.coordinator.named_job import NamedJob
from stratagem._ps.coordinator.server_backups import ServerBackups
from stratagem._ps.init_ops import AT_FIRST_USE, memory_kind
from stratagem._ps.partition import Partitioner, number_of_shards
from stratagem._ps.placement import Description, Placement
from stratagem._ps.types import InitOp
from stratagem.errors import StratagemError

TABLE_ROWS = 8192
"""Rows from which a matrix in a user's own module is treated as a table: below it a dense gradient of 16
columns (512 KiB) costs less than looking up rows."""


def _nothing() -> None:
    """Return None, as a weak reference to a collected object does."""


class Use(enum.Enum):
    """Use of a parameter by the module that it was registered with."""

    ROWS = "rows"
    """An embedding: rows are looked up."""
    WHOLE = "whole"
    """Another layer of torch.nn: needed as a whole."""
    UNKNOWN = "unknown"
    """A module of the user's own."""


class CoordinatorParameter(ManagedParameter):
    """The coordinator's parameter and its variable on parameter servers."""

    __slots__ = ("kept", "name", "use")

    def __init__(self, kept: Kept, name: str, use: Use) -> None:
        assert isinstance(kept.tensor, nn.Parameter)
        super().__init__(kept.tensor)
        self.kept = kept
        self.name = name
        self.use = use

    @property
    def as_table(self) -> bool:
        """True if workers get a table of rows instead of a whole tensor."""
        where = self.kept.description
        if self.kept.plan is not None and self.kept.plan.keyed is not None:
            return True
        if where is None or len(where.shape) < 2 or self.use is Use.WHOLE:
            return False
        if has_hooks(self.central):
            return False  # a hook gets the gradient as on one device
        return self.use is Use.ROWS or where.is_sharded or where.shape[0] >= TABLE_ROWS

    @property
    def nbytes(self) -> int:
        """Size of the whole variable."""
        where = self.kept.description
        return 0 if where is None else math.prod(where.shape) * where.dtype.itemsize

    @override
    def resolve(self) -> Tensor:
        self.kept.refresh()
        return self.central

    @override
    def note_write(self, *, assigned: bool) -> bool:
        if assigned:
            self.kept.forget_pushed()
        return self.kept.plan is None and self.kept.description is not None

    @property
    @override
    def strategy(self) -> Any:
        return self.kept.owner.strategy()

    @override
    def adopt_copy(self, parameter: nn.Parameter) -> ManagedParameter | None:
        return self.kept.owner.new_managed(parameter, self.name, self.use)

    @override
    def __repr__(self) -> str:
        return f"<CoordinatorParameter of {self.name!r} at {self.kept.description}>"


class CoordinatorBuffer:
    """The coordinator's buffer and its variable on parameter servers.

    Attributes:
        counts: whether increases of several workers add up (a BatchNorm's count of batches).
    """

    __slots__ = ("__weakref__", "_modules", "_name", "_strategy", "counts", "kept")

    def __init__(self, kept: Kept, strategy: StrategyHooks, name: str, *, counts: bool) -> None:
        self.kept = kept
        self.counts = counts
        self._name = name
        self._modules = 0  # that have it
        self._strategy = weakref.ref(strategy)

    @property
    def central(self) -> Tensor:
        return self.kept.tensor

    @property
    def strategy(self) -> Any:
        """The strategy of this buffer; None if it was collected."""
        return self._strategy()

    def resolve(self) -> Tensor:
        """Return the buffer with current values."""
        self.kept.refresh()
        return self.central

    def bound_to(self, buffers: BuffersByReplica, name: str) -> None:
        """Count the modules that hold the buffer."""
        del buffers, name
        self._modules += 1

    def put(self, replica: Any, tensor: Tensor) -> None:
        """Take over a tensor that code in a replica on the coordinator assigned to the buffer's name."""
        del replica
        with torch.no_grad():
            self.central.copy_(tensor)

    def adopt_copy(self, buffer: Tensor) -> CoordinatorBuffer:
        """Return the entry of a deep copy: a new variable."""
        return self.kept.owner.new_buffer(self.strategy, self._name, buffer, counts=self.counts)

    def replaced_by(self, buffer: Tensor) -> CoordinatorBuffer:
        """Return the entry of a tensor that code on the coordinator assigned to the buffer's name.

        It is this entry, with new values, if workers know it and the tensor fits.
        """
        owner = self.kept.owner
        alike = buffer.shape == self.central.shape and buffer.dtype == self.central.dtype
        known = owner.managed_buffer(buffer) is not None
        if self.kept.remote is None or not alike or known or self._modules > 1:
            return self.adopt_copy(buffer)
        self._modules -= 1  # `bound_to` counts this module again
        self.kept.stand_for(buffer)
        owner.note_buffer(self)
        return self


class CoordinatorVariables:
    """All variables of one strategy on the coordinator.

    Args:
        client: the coordinator's connections to the servers.
        servers: how many there are.
        partitioner: how variables are cut, or None.
        strategy: returns the strategy, or None if it was collected.
        job: the named job that the variables belong to, or None.
        backups: where the backups of the servers are, or None.
    """

    def __init__(
        self,
        client: PsClient,
        servers: int,
        partitioner: Partitioner | None,
        strategy: Callable[[], Any] = _nothing,
        job: NamedJob | None = None,
        backups: ServerBackups | None = None,
    ) -> None:
        self.client = client
        self.job = job
        self.backups = backups
        client.discards_writes = job is not None and job.is_attaching
        self.strategy = strategy
        self.partitioner = partitioner
        self.closed = False
        self._fetched = False  # whether the last values were fetched
        self.is_frozen = False  # while a checkpoint is described
        self.beside: Description | None = None  # while colocate_vars_with is in force
        self._placement = Placement(servers)
        # Modules own the entries.
        self._all_managed: weakref.WeakSet[CoordinatorParameter | CoordinatorBuffer] = (
            weakref.WeakSet()
        )
        self._on_servers: list[Kept] | None = (
            None  # of all entries; None after one was added or removed
        )
        self._made = 0  # entries so far
        self._numbers = itertools.count(1)
        self._buffers: weakref.WeakValueDictionary[int, CoordinatorBuffer] = (
            weakref.WeakValueDictionary()
        )
        self._forgotten: deque[Kept | tuple[ShardLocation, ...]] = deque()
        self._remotes: weakref.WeakSet[RemoteVariable] = weakref.WeakSet()
        devices.coordinate(id(self))  # this process is the cluster's chief now (PSS-10)

    def next_number(self) -> int:
        """Return the number of a new entry."""
        return next(self._numbers)

    def place(self, name: str, tensor: Tensor, partitioner: Partitioner | None) -> Description:
        """Return the place of a new variable."""
        shape = tuple(tensor.shape)
        plan = planned_of(tensor)
        keyed = None if plan is None else plan.keyed
        if keyed is not None:
            wanted = number_of_shards(partitioner, shape, tensor.dtype)
            return self._placement.place(
                name,
                shape,
                tensor.dtype,
                shards=min(wanted, keyed.rule.buckets),
                unit=keyed.rule.bucket_rows,
                like=keyed.rows_at,
            )
        if self.beside is not None:
            return self._placement.place(name, shape, tensor.dtype, beside=self.beside)
        # Lazy modules first register a parameter without elements.
        shards = number_of_shards(partitioner, shape, tensor.dtype) if tensor.numel() else 1
        return self._placement.place(name, shape, tensor.dtype, shards=shards)

    def place_variable(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, shards: int
    ) -> Description:
        """Return the place of a new `Variable` with a known number of shards."""
        return self._placement.place(name, shape, dtype, shards=shards, beside=self.beside)

    def new_remote(self, description: Description) -> RemoteVariable:
        """Return a variable that is not yet created on the servers; `close` releases it."""
        remote = RemoteVariable(description, self.client)
        self._remotes.add(remote)
        return remote

    def new_variable(self, description: Description) -> RemoteVariable:
        """Return a variable created on the servers; it is freed there when it is collected here."""
        if self.closed:
            raise RuntimeError(
                f"variable {description.name!r} cannot be made: its strategy, or the strategy's "
                "coordinator, is closed. Make a new strategy, and the variable under its scope; the "
                "cluster can serve it."
            )
        self.free_forgotten()
        remote = self.new_remote(description)
        self._create(remote.wanted())
        self._when_gone(remote, remote.places)
        return remote

    def adopt_parameter(
        self, module: nn.Module, name: str, parameter: nn.Parameter
    ) -> CoordinatorParameter:
        """Return the entry of a parameter registered under the scope."""
        return self.new_managed(parameter, name, _use_of(module, name))

    def new_managed(self, parameter: nn.Parameter, name: str, use: Use) -> CoordinatorParameter:
        managed = CoordinatorParameter(Kept(self, parameter, name), name, use)
        self._keep(managed)
        return managed

    def adopt_buffer(
        self, strategy: StrategyHooks, module: nn.Module, name: str, buffer: Tensor
    ) -> CoordinatorBuffer:
        """Return the entry of a buffer registered under the scope."""
        norm = nn.modules.batchnorm._NormBase
        counts = name == "num_batches_tracked" and isinstance(module, norm)
        return self.new_buffer(strategy, name, buffer, counts=counts)

    def new_buffer(
        self, strategy: StrategyHooks, name: str, buffer: Tensor, *, counts: bool
    ) -> CoordinatorBuffer:
        """Return the entry of a buffer, which is never divided; modules that share a buffer share the entry."""
        known = self.managed_buffer(buffer)
        if known is not None:
            return known
        kept = Kept(self, buffer, name, may_be_cut=False)
        managed = CoordinatorBuffer(kept, strategy, name, counts=counts)
        self._keep(managed)
        self.note_buffer(managed)
        return managed

    def note_buffer(self, managed: CoordinatorBuffer) -> None:
        """Register the entry of a buffer."""
        self._buffers[id(managed.central)] = managed

    def _keep(self, managed: CoordinatorParameter | CoordinatorBuffer) -> None:
        self._all_managed.add(managed)
        self._made += 1
        self._on_servers = None
        self._when_gone(managed, managed.kept)

    def _when_gone(self, owner: object, what: Kept | tuple[ShardLocation, ...]) -> None:
        # May run in any thread, at any time: it only notes what `free_forgotten` frees.
        weakref.finalize(owner, self._forgotten.append, what).atexit = False

    def free_forgotten(self) -> None:
        """Delete variables on the servers that were collected here."""
        if not self._forgotten:
            return
        self._on_servers = None
        gone: list[ShardLocation] = []
        while self._forgotten:
            what = self._forgotten.popleft()
            if not isinstance(what, Kept):
                gone.extend(what)
            elif what.remote is not None:
                gone.extend(what.remote.places)
        if gone:
            self.client.delete(gone)

    def flush(self, *, restoring: bool = False) -> None:
        """Create new variables on the servers, send local changes, delete collected variables.

        Args:
            restoring: a checkpoint follows: no value is sent, and servers compute initial values of tables only if
                they are used before.
        """
        self.free_forgotten()
        ready = self._on_servers
        if ready is None:
            ready = self._reach_all(restoring=restoring)
        for kept in () if restoring else ready:
            if kept.is_changed():
                kept.send()

    def _reach_all(self, *, restoring: bool) -> list[Kept]:
        """Create new variables on the servers and return all; lazy ones wait until they have a shape."""
        made = self._made
        # In order of creation: shards that are placed now get the same numbers in every run of a script.
        every = sorted((managed.kept for managed in self._all_managed), key=lambda one: one.number)
        ready = [kept for kept in every if not is_lazy(kept.tensor)]
        new = [kept for kept in ready if kept.remote is None]
        if new:
            wanted = [one for kept in new for one in kept.reach()]
            self._create([_at_first_use(one) for one in wanted] if restoring else wanted)
        if len(ready) == len(every) and made == self._made:  # else another thread made more
            self._on_servers = ready
        return ready

    def _create(self, wanted: Sequence[tuple[ShardLocation, str, Sequence[InitOp]]]) -> None:
        """Create shards on the servers. Servers keep those that they have: these are adopted."""
        if self.job is not None:
            self.job.match(wanted)
        self.client.create_all(wanted)

    def adopt(self) -> None:
        """Bind every entry to its variable of the live job; local values are replaced by live ones.

        Raises:
            JobMismatch: the script's variables are not those of the job.
        """
        assert self.job is not None
        every = [managed.kept for managed in self._all_managed]
        places = [
            one
            for remote in sorted(self._remotes, key=lambda one: one.places[0].variable)
            for one in remote.wanted()
        ]
        for kept in sorted(every, key=lambda one: one.number):
            if kept.remote is None and not is_lazy(kept.tensor):
                kept.place_again()
                assert kept.description is not None
                places += RemoteVariable(kept.description, self.client).wanted()
        self.job.match_all(
            places,
            next_number=self._placement.next_number,
            may_lack=any(is_lazy(kept.tensor) for kept in every),
        )
        self._on_servers = None
        self.flush()

    def managed_buffer(self, tensor: Tensor) -> CoordinatorBuffer | None:
        """Return the entry of a buffer, by identity."""
        managed = self._buffers.get(id(tensor))
        return managed if managed is not None and managed.central is tensor else None

    def fetch_last_values(self) -> list[StratagemError]:
        """Fetch the servers' last values; return the errors, each once. Values that failed raise when read."""
        failures: dict[str, StratagemError] = {}
        for managed in list(self._all_managed):
            try:
                managed.kept.refresh()
            except StratagemError as error:
                managed.kept.not_fetched = error
                failures.setdefault(str(error), error)
        self._fetched = True
        return list(failures.values())

    def close(self) -> None:
        """End the session: servers free the variables, local values stay.

        They keep those of a named job if an exception is being handled.
        """
        if not self.closed:
            self.closed = True
            if self.job is not None and sys.exception() is not None:
                self.client.keeps_session = True  # the script failed; another run may go on
            devices.coordinate_no_more(id(self))
            for managed in list(self._all_managed):
                kept = managed.kept
                if not self._fetched and kept.remote is not None:
                    kept.not_fetched = RuntimeError("the strategy was deleted without close()")
                kept.remote = None  # and with it the mapped memory of the servers
            for remote in list(self._remotes):
                remote.release()
            self.client.close()
            if self.job is not None:
                self.job.close()

    @override
    def __repr__(self) -> str:
        return f"<CoordinatorVariables {len(self._all_managed)} parameters, {self._placement!r}>"


def _at_first_use(
    wanted: tuple[ShardLocation, str, Sequence[InitOp]],
) -> tuple[ShardLocation, str, Sequence[InitOp]]:
    """Return a shard to be created whose initial values are computed when they are first used."""
    place, name, recipe = wanted
    is_computed = bool(recipe) and memory_kind(recipe) == "memory"
    return (place, name, [AT_FIRST_USE, *recipe]) if is_computed else wanted


def _use_of(module: nn.Module, name: str) -> Use:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return Use.ROWS if name == "weight" else Use.UNKNOWN
    return Use.WHOLE if type(module).__module__.startswith("torch.nn.") else Use.UNKNOWN
