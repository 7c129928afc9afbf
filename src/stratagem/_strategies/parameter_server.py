"""`ParameterServerStrategy`: variables on parameter servers, computation on workers.

This is the coordinator's strategy. It checks the cluster, opens a session on the servers and places variables. The
worker's side is in `_ps/worker/worker_objects.py`. `ClusterCoordinator` schedules functions; it reaches the strategy
through `_cluster_views` (contract 7).
"""

from __future__ import annotations

import functools
import importlib
import logging
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from stratagem import config
from stratagem._core import devices, reduction
from stratagem._core.user_contexts import InputContext
from stratagem._core.variables import Variable, VariableRequest
from stratagem._data import distribute
from stratagem._ps.client.job_connection import JobConnection
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.remote_storage import ReadCache, RemoteStorage
from stratagem._ps.client.server_connection import Membership, ServerConnection
from stratagem._ps.client.server_replacement import promotion
from stratagem._ps.client.shard_holders import ShardHolders
from stratagem._ps.coordinator import variable_creation
from stratagem._ps.coordinator.coordinator_variables import CoordinatorVariables
from stratagem._ps.coordinator.deferred_tables import DeferredTables
from stratagem._ps.coordinator.handles import ObjectHandles
from stratagem._ps.coordinator.named_job import NamedJob
from stratagem._ps.coordinator.server_backups import ServerBackups
from stratagem._ps.partition import Partitioner
from stratagem._ps.placement import device_name
from stratagem._ps.worker.worker_objects import PsWorkerSetup
from stratagem._strategies import step_loop
from stratagem._strategies.base import GradientAggregation, Strategy
from stratagem._strategies.parameter_server_arguments import (
    check_backups,
    check_cluster,
    check_job,
    check_staleness,
    worker_device_names,
)
from stratagem._strategies.worker_strategy import (
    UnbuiltDataset,
    WorkerStrategy,
    caching,
    reduce_nest,
)
from stratagem._wire.cluster_key import cluster_key
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.round_trip import attempt_limit_s

_log = logging.getLogger("stratagem.ps")


@final
class ParameterServerStrategy(Strategy):
    """Strategy with variables on parameter servers and asynchronous functions on workers.

    The variables of models and optimizers created under `scope` are placed on the servers in turn.
    `variable_partitioner` divides them into shards. A `ClusterCoordinator` schedules functions, which are
    ordinary PyTorch.

    Args:
        cluster_resolver: describes the cluster: at least one ``ps`` and one ``worker``.
        variable_partitioner: a `partitioners.Partitioner`; None leaves variables in one piece.
        gradient_aggregation: how replicas within one worker combine gradients: ``"mean"`` over the
            rows of the batch, or ``"sum"``.
        worker_devices: devices of each worker, one replica each; None: the accelerators that the resolver
            reports, else the CPU.
        job: name of the training job. Servers keep a named job when its coordinator is lost, and the script
            continues it when it is started again (`CheckpointManager.restore_or_initialize`).
        job_lease_s: how long servers keep the job; by default ``STRATAGEM_JOB_LEASE_S`` (600 seconds).
        backups: with 1, every write is applied on two servers before it is acknowledged, so that no
            acknowledged write is lost with one of them.
        staleness: the largest number of functions of other workers whose updates a function may miss between
            its read of the parameters and its write. None: no limit, and no worker waits for another. 0:
            synchronous rounds, in which the gradients of all workers make one step.

    Raises:
        ValueError: the cluster cannot be used, an address is invalid, there are too few servers for backups, or
            `staleness` is neither None nor a whole number of at least 0.
        JobInUse: a live coordinator has the job.
        ParameterServerLost: servers did not answer within ``STRATAGEM_SERVER_WAIT_S`` (60 seconds).

    Example:
        >>> import stratagem as sg
        >>> with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
        ...     strategy = sg.ParameterServerStrategy(cluster.resolver)
        ...     with strategy, strategy.scope():
        ...         a, b = sg.Variable(1.0), sg.Variable(2.0)
        ...         print(a.device, b.device)
        /job:ps/replica:0/task:0/device:CPU:0 /job:ps/replica:0/task:1/device:CPU:0
    """

    def __init__(
        self,
        cluster_resolver: Any,
        variable_partitioner: Partitioner | None = None,
        *,
        gradient_aggregation: GradientAggregation = "mean",
        worker_devices: Sequence[str] | None = None,
        job: str | None = None,
        job_lease_s: float | None = None,
        backups: int = 0,
        staleness: int | None = None,
    ) -> None:
        spec = check_cluster(cluster_resolver)
        check_job(job, job_lease_s)
        check_backups(backups, spec.num_tasks("ps"))
        check_staleness(staleness, backups)
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise TypeError(
                f"variable_partitioner={variable_partitioner!r} has type "
                f"{type(variable_partitioner).__name__}: expected a partitioner, such as "
                "sg.partitioners.FixedShardsPartitioner(2), or None."
            )
        self._cluster_resolver = cluster_resolver
        self._variable_partitioner = variable_partitioner
        self._worker_devices = worker_devices
        self._workers = tuple(spec.task_indices("worker"))
        self._servers = tuple(
            (f"/job:ps/task:{index}", spec.task_address("ps", index))
            for index in spec.task_indices("ps")
        )
        self._device_names = worker_device_names(cluster_resolver, worker_devices)
        self._job, self._job_lease_s = job, job_lease_s
        self._backups = backups
        self._staleness = staleness
        self._cache = ReadCache()
        self._views: ObjectHandles | None = None
        self._cluster_coordinator: Any = None
        super().__init__(gradient_aggregation=gradient_aggregation)
        key = cluster_key(cluster_resolver.cluster_key_text())
        # A server that is started again may have another address.
        addresses = [
            (task, functools.partial(_server_address, cluster_resolver, index, address))
            for index, (task, address) in zip(spec.task_indices("ps"), self._servers, strict=True)
        ]
        membership, named = join_job(job, job_lease_s, addresses, key)
        self._membership, self._session = membership, membership.session
        try:
            client, kept = connect_servers(addresses, membership, backups, named)
        except BaseException:
            if named is not None:
                named.close()
            raise
        self._variables = CoordinatorVariables(
            client, len(self._servers), variable_partitioner, weakref.ref(self), named, kept
        )
        # A strategy that is not closed ends its session when it is collected; a named job stays.
        self._session_end = weakref.finalize(self, _end, self._variables)
        if kept is not None:
            try:
                kept.set_up(self._variables)
            except BaseException:
                self._session_end()
                raise

    # -------------------------------------------------------------- properties

    @property
    @override
    def cluster_resolver(self) -> Any:
        """The cluster resolver given at construction."""
        return self._cluster_resolver

    @property
    def variable_partitioner(self) -> Partitioner | None:
        """The partitioner given at construction."""
        return self._variable_partitioner

    @property
    def staleness(self) -> int | None:
        """The largest staleness, given at construction."""
        return self._staleness

    @contextmanager
    def cache_variable_reads(self) -> Iterator[None]:
        """Return a context manager that caches the first read of each variable until it exits."""
        with caching(self._cache):
            yield

    def publish(self, obj: nn.Module | Optimizer) -> None:
        """Send the current state of a module or optimizer to the workers with the next scheduled function.

        Workers receive changes of attributes, hooks, parts and settings without a call of this method.
        Two cases need it: an attribute of more than 64 KB that is not a tensor, which is otherwise
        compared at every `schedule`; and a change that cannot be detected from outside the object, such
        as a change of state inside a C extension.

        Args:
            obj: a module (with all its submodules) or an optimizer of this strategy.

        Raises:
            ForeignParameterError: `obj` has no parameter on this strategy's servers.

        Example:
            >>> import stratagem as sg
            >>> with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
            ...     strategy = sg.ParameterServerStrategy(cluster.resolver)
            ...     with sg.ClusterCoordinator(strategy) as coordinator:
            ...         with strategy.scope():
            ...             model = torch.nn.Linear(2, 1)
            ...         model.words = [str(number) for number in range(20_000)]
            ...         strategy.publish(model)
            ...         first = coordinator.schedule(lambda: model.words[0]).get()
            ...         model.words[0] = "zero"
            ...         strategy.publish(model)
            ...         print(first, coordinator.schedule(lambda: model.words[0]).get())
            0 zero
        """
        self._cluster_views().publish(obj)

    @property
    @override
    def _compute_devices(self) -> tuple[devices.Device, ...]:
        return tuple(devices.parse_device(name) for name in self._device_names)

    @property
    @override
    def _parameter_names(self) -> tuple[str, ...]:
        return tuple(device_name(task) for task, _ in self._servers)

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterServerStrategy:
        if self._views is not None:
            raise TypeError(
                "a ParameterServerStrategy with a coordinator cannot be copied: its threads and "
                "connections belong to one strategy. Make a new one from the resolver."
            )
        return super().__deepcopy__(memo)

    # -------------------------------------------------------------- the coordinator's side

    def _cluster_views(self) -> ObjectHandles:
        """Return the strategy's interface for `ClusterCoordinator` (contract 7)."""
        if self._views is None:
            variables = self._variables  # not `self`: threads hold the function
            setup = PsWorkerSetup(
                servers=self._servers,
                workers=self._workers,
                session=self._session,
                instance=self._membership.instance,
                epoch=self._membership.epoch,
                compute_devices=self._device_names,
                gradient_aggregation=self._gradient_aggregation,
                rounds=self._staleness == 0,
                make_strategy=WorkerStrategy,
            )
            self._views = ObjectHandles(
                self,
                variables,
                lambda: replace(setup, **server_addresses(variables)),
                staleness=self._staleness,
                averages=self._gradient_aggregation == "mean",
            )
        return self._views

    @override
    def _scope_entered(self) -> AbstractContextManager[object]:
        if self._cluster_coordinator is None:
            # Not started (PSS-5): it connects to the workers at its first use.
            _coordinator_class().of(self)
        tables = DeferredTables(config.remote_table_bytes())
        job = self._variables.job
        return tables if job is None or not job.is_attaching else self._adopting(tables)

    @contextmanager
    def _adopting(self, tables: DeferredTables) -> Iterator[None]:
        """Compare what was created with the live job at the end of the scope."""
        with tables:
            yield
        self._variables.flush()

    @override
    def _close(self) -> None:
        _coordinator_class().of(self).close()  # a new one could not connect either
        self._session_end.detach()
        self._variables.close()

    # -------------------------------------------------------------- variables

    @override
    def _create_variable(self, request: VariableRequest) -> Any:
        if request.per_worker_variable:
            return variable_creation.create_per_worker(self._variables, request, self._workers)
        return variable_creation.create(self._variables, request, strategy=self, cache=self._cache)

    @override
    def _adopt_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
        return self._variables.adopt_parameter(module, name, parameter)

    @override
    def _adopt_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor) -> Any:
        return self._variables.adopt_buffer(self, module, name, buffer)

    @override
    def _colocated(self, variable: Variable) -> AbstractContextManager[object]:
        return self._beside(variable)

    @contextmanager
    def _beside(self, variable: Any) -> Iterator[None]:
        """Place new variables on the server of this one, undivided."""
        place = variable._storage
        assert isinstance(place, RemoteStorage)
        before, self._variables.beside = self._variables.beside, place.remote.description
        try:
            yield
        finally:
            self._variables.beside = before

    # -------------------------------------------------------------- outside a scheduled function

    @override
    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        _log.warning(
            "run() of %s was called outside a scheduled function: it runs here, on the coordinator, "
            "not on the workers. Use ClusterCoordinator.schedule.",
            type(self).__name__,
        )
        return super()._run(fn, args, kwargs)

    @override
    def _run_steps(self, step: Any, dataset: Any, steps: int | None) -> Iterator[Any]:
        coordinator = _coordinator_class()(self)
        return step_loop.run_on_workers(coordinator, step, dataset, steps)

    @override
    def _reduce(self, op: reduction.ReduceOp, value: Any, axis: Any) -> Any:
        return reduce_nest(self, op, value, axis)

    @override
    def _gather(self, value: Any, axis: int) -> Any:
        return reduction.gather(value, axis, negative=True)

    @override
    def _distribute_dataset(
        self, dataset: Any, options: config.InputOptions | None
    ) -> UnbuiltDataset:
        return UnbuiltDataset(distribute.distribute_dataset, dataset, options)

    @override
    def _distribute_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: config.InputOptions | None,
    ) -> UnbuiltDataset:
        return UnbuiltDataset(distribute.distribute_datasets_from_function, dataset_fn, options)


def _coordinator_class() -> Any:
    """Return `ClusterCoordinator`, imported by name because its package is a higher layer."""
    return importlib.import_module("stratagem._cluster.coordinator.coordinator").ClusterCoordinator


def _end(variables: CoordinatorVariables) -> None:
    """End a session whose strategy was not closed; servers keep a named job for its lease."""
    variables.client.keeps_session = variables.job is not None
    variables.close()


def _server_address(resolver: Any, index: int, known: str) -> str:
    """Return where a parameter server is now; where it was, if the resolver does not say."""
    try:
        return str(resolver.cluster_spec().task_address("ps", index))
    except Exception:  # noqa: BLE001 - resolvers are users' classes and ask other services
        return known


def join_job(
    job: str | None,
    lease_s: float | None,
    servers: Sequence[tuple[str, Callable[[], str]]],
    key: ClusterKey | None,
) -> tuple[Membership, NamedJob | None]:
    """Return the session to open: one of its own, or that of a named job, which is claimed."""
    task = "/job:chief/task:0"
    if job is None:
        session, lease_s = secrets.token_hex(8), config.session_lease_s()
        return Membership(session=session, task=task, is_owner=True, lease_s=lease_s, key=key), None
    connection = JobConnection(
        job,
        servers,
        key=key,
        lease_s=config.job_lease_s() if lease_s is None else lease_s,
        limit_s=config.job_limit_s(),
        wait_s=config.server_wait_s(),
        seed=torch.initial_seed(),
    )
    membership = Membership(
        session=connection.session,
        task=task,
        is_owner=True,
        lease_s=connection.lease_s,
        key=key,
        instance=connection.instance,
        epoch=connection.epoch,
    )
    return membership, NamedJob(connection)


def connect_servers(
    addresses: Sequence[tuple[str, Callable[[], str]]],
    membership: Membership,
    backups: int,
    job: NamedJob | None = None,
) -> tuple[PsClient, ServerBackups | None]:
    """Connect the coordinator to all servers; return also where backups are, if there are any.

    Backups of a live job whose primary was lost take over.
    """
    wait_s = config.server_wait_s()
    if job is not None:
        job.check_backups(backups)
    if not backups:
        return PsClient(addresses, membership, connect_timeout_s=wait_s), None
    live = () if job is None or not job.is_attaching else job.state.shards
    holders = ShardHolders(addresses, [one.holder for one in live])
    kept = ServerBackups(holders)
    for shard, one in enumerate(live):
        kept.views[shard], kept.backups[shard] = one.view, one.backup
        if one.is_orphan:
            kept.views[shard] += 1
            promote_orphan(holders, membership, shard, kept.views[shard])
    client = PsClient(holders.servers(), membership, connect_timeout_s=wait_s, holders=holders)
    return client, kept


def promote_orphan(holders: ShardHolders, membership: Membership, shard: int, view: int) -> None:
    """Let the backup of a shard take over whose primary was lost while no coordinator ran."""
    task, address = holders.processes[holders.holders[shard]]
    alone = replace(membership, session="", is_owner=False)
    with closing(ServerConnection(task, address, alone)) as connection:
        connection.open(timeout_s=attempt_limit_s())
        connection.request(promotion(membership, shard, view))


def server_addresses(variables: CoordinatorVariables) -> dict[str, Any]:
    """Return what a worker needs to find the servers."""
    holders = variables.client.replacement.holders
    if holders is None:
        return {"servers": variables.client.addresses()}
    tasks = [task for task, _ in holders.processes]
    known = tuple((task, holders.address(process)) for process, task in enumerate(tasks))
    return {"servers": known, "holders": tuple(holders.holders)}
