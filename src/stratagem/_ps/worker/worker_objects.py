"""The worker's views of the coordinator's strategy, modules, optimizers and variables.

`PsWorkerSetup` is sent to a worker and connects it to the servers. `WorkerObjects` then rebuilds, from the
coordinator's definitions, the objects that a scheduled function works with: real modules over the worker's
parameters, real optimizer objects whose step sends gradients to the servers, and variables. There is one
`WorkerObjects` per worker session. Nothing here is process-global, since an in-process cluster runs
several workers in one process.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from stratagem._core.fingerprints import PLAIN
from stratagem._core.replicated_buffers import ReplicatedBuffer
from stratagem._core.replicated_parameters import ReplicatedParameter
from stratagem._core.torch_patches import module_members, special_modules
from stratagem._core.variables import Variable
from stratagem._ps import definitions
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.remote_storage import ReadCache, RemoteStorage
from stratagem._ps.client.server_connection import Membership
from stratagem._ps.client.shard_holders import ShardHolders
from stratagem._ps.tables.replicated_table import ReplicatedTable
from stratagem._ps.training_state import Advance, StateSnapshot
from stratagem._ps.worker.advance_recorder import AdvanceRecorder, WatchedGroup
from stratagem._ps.worker.entry_changes import EntryWriter
from stratagem._ps.worker.step_state import StateOnServers, refuse_changes
from stratagem._ps.worker.worker_variables import WorkerVariables
from stratagem._wire.handshake import ClusterKey
from stratagem.errors import NotFoundError


@dataclass(frozen=True, kw_only=True)
class PsWorkerSetup:
    """Data with which a worker joins a strategy's session."""

    servers: tuple[tuple[str, str], ...]
    workers: tuple[int, ...]
    """Indices of all workers, in order; they need not be 0, 1, 2 …"""
    session: str
    instance: str = ""
    epoch: int = 0
    """Of a named job."""
    compute_devices: tuple[str, ...]
    gradient_aggregation: Literal["mean", "sum"]
    make_strategy: Callable[[PsWorkerSetup, WorkerVariables, ReadCache], Any]
    """Class of the worker's strategy; named by the caller, since `_ps` does not import `_strategies`."""
    rounds: bool = False
    """True if servers make steps at the end of synchronous rounds (``staleness=0``)."""
    holders: tuple[int, ...] = ()
    """With backups: by server, which of the processes `servers` has its variables."""

    def connect(
        self, *, worker_index: int, incarnation: int, key: ClusterKey | None
    ) -> WorkerObjects:
        """Build the worker's objects. The key is the worker's own: it is never sent."""
        membership = Membership(
            session=self.session,
            task=f"/job:worker/task:{worker_index}",
            key=key,
            instance=self.instance,
            epoch=self.epoch,
        )
        holders = ShardHolders(self.servers, self.holders) if self.holders else None
        servers = self.servers if holders is None else holders.servers()
        client = PsClient(servers, membership, incarnation=incarnation, holders=holders)
        try:
            return WorkerObjects(self, client, worker_index)
        except BaseException:  # Ctrl-C too: no other code could close it
            client.close()
            raise


class WorkerObjects:
    """The worker's own objects for the coordinator's tokens."""

    def __init__(self, setup: PsWorkerSetup, client: PsClient, worker_index: int) -> None:
        self._client = client
        self._worker_index = worker_index
        workers = setup.workers
        self._place = workers.index(worker_index) if worker_index in workers else None
        # In a round, a step comes after the function: a write of a trained parameter would come before it.
        is_sole = workers == (worker_index,) and not setup.rounds
        self._variables = WorkerVariables(
            client, is_sole=is_sole, rounds=setup.rounds, replicas=len(setup.compute_devices)
        )
        self._cache = ReadCache()
        self._strategy = setup.make_strategy(setup, self._variables, self._cache)
        self._recorder = AdvanceRecorder()
        self._objects: dict[Hashable, Any] = {
            ("strategy", 0): self._strategy,
            ("counters", 0): self._recorder,
        }
        self._variables.new_buffers.is_view = self._is_view
        # Changes of objects that are not defined here yet.
        self._waiting: dict[Hashable, dict[definitions.Entry, definitions.EntryChange]] = {}
        self._writer = EntryWriter(self._put_buffer)
        self._is_replicated = self._strategy.num_replicas_in_sync > 1
        # Parameters of several replicas; modules hold them only by name.
        self._managed: dict[Hashable, ReplicatedParameter] = {}

    # -------------------------------------------------------------- contract 7

    def define(self, token: Hashable, definition: object, *, last: bool) -> None:
        """Rebuild the object of a token, or add to it; `last`: its definition is complete."""
        if isinstance(definition, definitions.ModuleState):
            self._fill(token, definition.state)
        elif isinstance(definition, definitions.EntryChange):
            self._set(self._objects[token], definition)
        elif token not in self._objects:  # it is, if a later part of the definition failed
            self._objects[token] = self._build(token, definition)
        if last:
            # Changes that are younger than the definition: this worker may have had them before it.
            for change in self._waiting.pop(token, {}).values():
                self._set(self._objects[token], change)

    def _build(self, token: Hashable, definition: object) -> Any:
        if isinstance(definition, definitions.ParameterDefinition):
            return self._parameter(token, definition)
        if isinstance(definition, definitions.BufferDefinition):
            return self._variables.buffer(definition.description, counts=definition.counts)
        if isinstance(definition, definitions.ModuleDefinition):
            return definition.make(*definition.arguments)
        if isinstance(definition, definitions.OptimizerDefinition):
            return self._optimizer(token, definition)
        if isinstance(definition, definitions.WrapperDefinition):
            return self._wrapper(definition)
        assert isinstance(definition, definitions.VariableDefinition)
        return self._variable(definition)

    def rebuild(self, token: Hashable) -> object:
        """Return the worker's object for `token`, the same at every call."""
        found = self._objects.get(token)
        if found is None:
            raise NotFoundError(
                f"a function names {token!r}, which the coordinator has forgotten: keep the model, "
                "optimizer or variable until the functions that use it are done."
            )
        return found

    def apply(
        self, updates: Sequence[object]
    ) -> tuple[dict[Hashable, Exception], Sequence[Hashable]]:
        """Apply the coordinator's changes; return failures by token, and tokens of objects that are gone.

        A change may fail, since code of the user's classes runs.
        """
        failures: dict[Hashable, Exception] = {}
        gone: list[Hashable] = []
        for update in updates:
            if isinstance(update, StateSnapshot):
                self._recorder.load(update)
                continue
            if isinstance(update, definitions.ForgetObjects):
                self._forget(update.tokens)
                gone += update.tokens
                continue
            assert isinstance(update, definitions.EntryChange)
            token = update.token
            if token not in self._objects:
                # A definition is younger than every other change of its object.
                if type(update.value) in PLAIN:
                    self._waiting.setdefault(token, {})[update.entry] = update
            elif token not in failures:
                try:
                    self._set(self._objects[token], update)
                except Exception as error:  # noqa: BLE001 - raised by closures that use the object
                    failures[token] = error
        return failures, gone

    def _set(self, obj: Any, change: definitions.EntryChange) -> None:
        if isinstance(obj, Optimizer) and change.entry[-1] == "params":
            self._set_group(obj, change)
        elif isinstance(obj, Optimizer) and change.entry == definitions.ATTRIBUTES:
            if id(obj) not in self._strategy.steppers:
                self._variables.wrappers.set(obj, dict(change.value or {}))
        else:
            self._writer.set(obj, change)

    def closure(
        self, number: int, *, exactly_once: bool, quick: bool, arrived: float
    ) -> AbstractContextManager[None]:
        """Return a context manager around one closure: fresh values, the strategy's scope."""
        return self._variables.closure(
            number,
            exactly_once=exactly_once,
            gathers=quick,
            arrived=arrived,
            scope=self._strategy.scope(),
            recorder=self._recorder,
        )

    def advances(self) -> tuple[int, Sequence[Advance]] | None:
        """Return what the last closure did to schedulers, scalers and settings, with a number; None: nothing."""
        return self._recorder.last()

    def written(self) -> int:
        """Return how many writes have been made so far."""
        return self._client.outbox.sent

    def acknowledged(self, *, wait: bool) -> int:
        """Return how many writes, from the first on, are acknowledged; all of them after `wait`."""
        if wait:
            self._client.wait_for_writes()
        elif not self._client.outbox.is_idle:
            self._client.progress()
        return self._client.outbox.acknowledged

    def reaches(self, task: str) -> bool:
        """Return whether the connection to a server is open, as far as this worker knows."""
        return self._client.is_connected(task)

    def late_failure(self, number: int) -> Exception | None:
        """Return, once, the error of a closure's write that failed after the closure ended."""
        return self._client.outbox.failures.pop(number, None)

    def abandon(self) -> None:
        """Let requests to servers fail from now on, also those that wait. Any thread may call it."""
        self._client.abandon()

    def close(self) -> None:
        """End the connections to the servers."""
        self._strategy.close()
        self._strategy.steppers.clear()
        self._objects.clear()
        self._managed.clear()
        self._variables.close()
        self._client.close()

    # -------------------------------------------------------------- rebuilding

    def _is_view(self, module: nn.Module) -> bool:
        return any(module is one for one in self._objects.values())

    def _parameter(
        self, token: Hashable, definition: definitions.ParameterDefinition
    ) -> nn.Parameter:
        parameter = self._variables.parameter(
            definition.description,
            requires_grad=definition.requires_grad,
            as_table=definition.as_table,
            channels_last=definition.channels_last,
        )
        if self._is_replicated:
            kind: Any = ReplicatedTable if definition.as_table else ReplicatedParameter
            self._managed[token] = kind(parameter, self._strategy, definition.description.name)
        return parameter

    def _fill(self, token: Any, state: Any) -> None:
        """Give a module, scheduler or scaler its state."""
        module = self._objects[token]
        set_state = getattr(module, "__setstate__", None)
        if set_state is not None:
            set_state(state)
        else:
            module.__dict__.update(state)
        if not isinstance(module, nn.Module):
            self._recorder.add(token, module)
            return
        self._writer.define(token, module)
        if self._is_replicated:
            self._answer_by_replica(module)
        else:
            module._buffers = self._variables.watched(module._buffers)

    def _put_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor) -> None:
        held: Any = module._buffers
        if isinstance(held, module_members.BuffersByReplica):
            held.bind(name, ReplicatedBuffer(buffer, strategy=self._strategy))
        else:
            dict.__setitem__(held, name, buffer)
            module._buffers = self._variables.watched(held)

    def _answer_by_replica(self, module: nn.Module) -> None:
        """Several replicas in this worker: each sees leaves and buffer copies of its own."""
        held = module_members.ParametersByReplica(dict(module._parameters))
        for name, managed in held.managed.items():
            special_modules.prepare(module, managed, name)
        module._parameters = held
        buffers = module_members.BuffersByReplica(dict(module._buffers))
        for name, value in dict.items(buffers):
            if value is not None:
                buffers.bind(name, ReplicatedBuffer(value, strategy=self._strategy))
        module._buffers = buffers

    def _optimizer(self, token: Any, definition: definitions.OptimizerDefinition) -> Optimizer:
        groups = [dict(group) for group in definition.groups]
        made = _without_state(definition.kind, groups, definition.defaults)
        stepper = OptimizerStepper(self._variables, definition.number, definition.settings)
        self._strategy.steppers[id(made)] = stepper
        self._recorder.add(token, made, watch_reads=not self._is_replicated)
        if not self._is_replicated:
            made.__dict__["step"] = types.MethodType(stepper.step, made)
            if type(made).zero_grad is Optimizer.zero_grad:
                made.__dict__["zero_grad"] = types.MethodType(clear_gradients, made)
        made.state = StateOnServers({}, made)
        return made

    def _wrapper(self, definition: definitions.WrapperDefinition) -> Optimizer:
        inner = definition.inner
        groups = [{"params": list(group["params"])} for group in inner.param_groups]
        made = _without_state(definition.kind, groups, definition.defaults)
        made.param_groups = inner.param_groups
        made.__dict__["step"] = types.MethodType(step_as_written, made)
        self._recorder.add_wrapper(made, inner)
        self._variables.wrappers.add(made, inner, definition.attributes)
        return made

    def _forget(self, tokens: Sequence[Any]) -> None:
        for token in tokens:
            gone = self._objects.pop(token, None)
            self._waiting.pop(token, None)
            self._managed.pop(token, None)
            self._writer.forget(token)
            self._recorder.forget(token, gone)
            if isinstance(gone, torch.Tensor):
                self._variables.forget(gone)
            elif isinstance(gone, Optimizer):
                self._strategy.steppers.pop(id(gone), None)
                self._variables.wrappers.forget(gone)

    def _set_group(self, optimizer: Optimizer, change: definitions.EntryChange) -> None:
        """Add a parameter group, or give one other parameters."""
        number, group = int(change.entry[0]), dict(change.value)
        if number < len(optimizer.param_groups):
            optimizer.param_groups[number]["params"] = group["params"]
            return
        settings = {name: value for name, value in group.items() if name != "params"}
        self._strategy.steppers[id(optimizer)].settings[number] = settings
        type(optimizer).add_param_group(optimizer, group)
        if not self._is_replicated:
            optimizer.param_groups[-1] = WatchedGroup(optimizer.param_groups[-1])

    def _variable(self, definition: definitions.VariableDefinition) -> Variable:
        index = self._place if definition.per_worker else 0
        if index is None:
            raise ValueError(
                f"per-worker variable {definition.request.name!r} has no part on worker "
                f"{self._worker_index}, which joined after the strategy was made: use an ordinary variable "
                "in a cluster whose workers join and leave."
            )
        remote = self._variables.remote(definition.descriptions[index])
        if definition.per_worker:  # a new incarnation starts anew (PSS-13)
            remote.put(definition.request.initial_tensor())
        place = RemoteStorage(
            remote,
            tracks=definition.request.tracks_gradient() and not definition.per_worker,
            strategy=self._strategy,
            cache=self._cache,
        )
        return Variable.at(place, definition.request, self._strategy)

    @override
    def __repr__(self) -> str:
        return f"<WorkerObjects of worker {self._worker_index}, {len(self._objects)} objects>"


def _without_state(
    kind: type[Optimizer], groups: list[dict[str, Any]], defaults: Mapping[str, Any]
) -> Optimizer:
    """Return an optimizer without the class's own ``__init__``: it may allocate state, which is on the servers."""
    made = kind.__new__(kind)
    Optimizer.__init__(made, groups, dict(defaults))
    made.__dict__["_opt_called"] = True  # or schedulers would warn that it never stepped
    refuse_changes(made)
    return made


class OptimizerStepper:
    """Sends the steps of one optimizer to the parameter servers."""

    def __init__(
        self, variables: WorkerVariables, number: int, settings: dict[int, dict[str, Any]]
    ) -> None:
        self._variables = variables
        self._number = number
        self.settings = {group: dict(values) for group, values in settings.items()}

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Send one step to the servers, between the hooks; return the result of the closure."""
        arguments = (optimizer,) if closure is None else (optimizer, closure)
        for before in tuple(optimizer._optimizer_step_pre_hooks.values()):
            before(optimizer, arguments, {})
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._variables.push(self._number, optimizer, self.settings)
        for after in tuple(optimizer._optimizer_step_post_hooks.values()):
            after(optimizer, arguments, {})
        return loss


def step_as_written(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Run the step of an optimizer around another one, as its class defines it."""
    return type(optimizer).step(optimizer, *args, **kwargs)


# Or schedulers would warn.
OptimizerStepper.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
step_as_written._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def clear_gradients(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """As ``Optimizer.zero_grad``, without its annotation for profilers: half of its time."""
    if not set_to_none:
        Optimizer.zero_grad(optimizer, set_to_none=False)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
