"""The coordinator's side of a parameter-server strategy, as `ClusterCoordinator` uses it.

`describe` gives a token to everything that belongs to the strategy: the strategy, its variables, modules
with parameters on its servers (and all their submodules), their parameters and buffers, and optimizers
over them. Everything else travels by value. `changes` returns what workers do not know yet
(`change_tracking.py`), after local writes have been sent to the servers.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from stratagem._core.counters import CountedFunction
from stratagem._core.managed import find_managed
from stratagem._core.strategy_hooks import StrategyHooks
from stratagem._core.variables import Variable
from stratagem._ps import definitions
from stratagem._ps.client.remote_storage import RemoteStorage
from stratagem._ps.coordinator.advance_ledger import AdvanceLedger
from stratagem._ps.coordinator.change_tracking import ChangeTracker, entries_of
from stratagem._ps.coordinator.coordinator_variables import (
    CoordinatorBuffer,
    CoordinatorParameter,
    CoordinatorVariables,
)
from stratagem._ps.coordinator.named_job import NamedJob
from stratagem._ps.coordinator.server_control import ServerControl
from stratagem._ps.coordinator.server_optimizers import OptimizersOnServers
from stratagem._ps.coordinator.variable_creation import PerWorkerVariable
from stratagem._ps.coordinator.wrapped_optimizers import (
    define_wrapper,
    inner_of,
    innermost,
    unwrapped,
)
from stratagem._ps.definitions import ATTRIBUTES, HOOKS, Token
from stratagem._wire.codec import is_channels_last
from stratagem.config import ClusterOptions
from stratagem.errors import ForeignParameterError, StratagemError

_log = logging.getLogger("stratagem.ps")


class ObjectHandles:
    """The strategy as `ClusterCoordinator` uses it.

    Args:
        strategy: the strategy whose objects these are.
        variables: the strategy's variables.
        setup: returns the object that a worker needs to connect.
        staleness: as of the strategy. `averages`: rounds use the mean of gradients, not the sum.
    """

    def __init__(
        self,
        strategy: StrategyHooks,
        variables: CoordinatorVariables,
        setup: Callable[[], object],
        *,
        staleness: int | None = None,
        averages: bool = True,
    ) -> None:
        self.staleness = staleness
        self._strategy = weakref.ref(strategy)
        self._variables = variables
        self._setup = setup
        self._servers = ServerControl(variables)
        self._optimizers = OptimizersOnServers(self._variables)
        self.apply_round = functools.partial(self._optimizers.apply_round, mean=averages)
        self._numbers = 0
        # By id: a Variable's == compares values. An entry is deleted with its object.
        self._tokens: dict[int, tuple[Token, weakref.ref[Any]]] = {}
        self._objects: weakref.WeakValueDictionary[Token, Any] = weakref.WeakValueDictionary()
        self._gone: deque[tuple[int, Token]] = deque()
        self._tracker = ChangeTracker(self._token_or_none, self._name_parts)
        self._ledger = AdvanceLedger(self._objects.get)
        self._tables: set[Token] = set()  # parameters that are tables of rows on workers
        self._unsent: list[Token] = []  # objects that are gone, until an update says so

    # -------------------------------------------------------------- handles

    @property
    def job(self) -> NamedJob | None:
        return self._variables.job

    @property
    def has_advances(self) -> bool:
        """True if scheduled functions advance schedulers or scalers of the coordinator."""
        return self._ledger.is_used

    @property
    def optimizers(self) -> OptimizersOnServers:
        return self._optimizers

    def describe(self, obj: object) -> Token | None:
        """Return a token if `obj` belongs to the strategy, else None."""
        known = self._tokens.get(id(obj))
        if known is not None and known[1]() is obj:
            return known[0]
        if isinstance(obj, Tensor):
            return self._describe_tensor(obj)
        obj = unwrapped(obj)
        if isinstance(obj, (nn.Module, Optimizer, Variable, PerWorkerVariable)):
            return self._describe_new(obj)
        if isinstance(obj, LRScheduler) and self.describe(obj.optimizer) is not None:
            return self._token_of(obj, "scheduler")
        if isinstance(obj, GradScaler) and obj.is_enabled():
            return self._token_of(obj, "scaler")
        if obj is self._ledger:
            return "counters", 0
        return ("strategy", 0) if obj is self._strategy() else None

    def _token_or_none(self, obj: object) -> Token | None:
        try:
            return self.describe(obj)
        except (ValueError, StratagemError):  # refused when it is sent
            return None

    def definitions(self, token: Token) -> Sequence[object]:
        """Return what a worker needs to rebuild the object of a token, in order."""
        kind, _ = token
        if kind in ("strategy", "counters"):
            return ()  # every worker has its own from the start
        obj = self._objects[token]
        if isinstance(obj, CoordinatorParameter | CoordinatorBuffer):
            return self._define_tensor(token, obj)
        if isinstance(obj, nn.Module):
            self._tracker.define(token, obj)
            return definitions.define_module(obj)
        if isinstance(obj, Optimizer):
            return self._define_optimizer(token, obj)
        if isinstance(obj, LRScheduler | GradScaler):
            return self._define_stateful(token, obj)
        return (self._define_variable(obj),)

    def check_definition(self, token: Token, named: Collection[Hashable]) -> None:
        """Raise if the definition of a module does not name all parameters and buffers that it has.

        Args:
            token: the module's.
            named: tokens of the objects in its definition.

        Raises:
            ForeignParameterError: a worker would make tensors of its own and train those.
        """
        module = self._objects.get(token)
        if not isinstance(module, nn.Module):
            return
        missing = list(self._missing(module, named))
        if missing:
            raise ForeignParameterError(
                f"{type(module).__name__} pickles without its parameter or buffer {missing[0]!r} "
                f"({len(missing)} in all), so a worker would train a private copy that no parameter "
                "server knows. The reason is a __reduce__, __reduce_ex__ or __getstate__ of its class. "
                "Remove that method, or let it keep `_parameters`, `_buffers` and `_modules` in the "
                "state, as torch.nn.Module does. Train a Keras model with its own fit(), evaluate() and predict()."
            )

    def _missing(self, module: nn.Module, named: Collection[Hashable]) -> Iterator[str]:
        """Yield names of parameters and buffers on servers that are neither named nor in a named part."""
        # As the dicts hold them: looking values up would ask the servers for each.
        for name, one in (*dict.items(module._parameters), *dict.items(module._buffers)):
            token = None if one is None else self._describe_tensor(one)
            if token is not None and token not in named:
                yield name
        for prefix, part in dict.items(module._modules):
            if part is not None and self._known(part) not in named:
                yield from (f"{prefix}.{name}" for name in self._missing(part, named))

    @staticmethod
    def _define_variable(obj: Any) -> object:
        if isinstance(obj, PerWorkerVariable):
            return definitions.VariableDefinition(obj.descriptions, obj.request, per_worker=True)
        place = obj._storage
        assert isinstance(place, RemoteStorage)
        request = replace(obj._request, initial_value=None)
        return definitions.VariableDefinition((place.remote.description,), request)

    def _describe_tensor(self, tensor: Tensor) -> Token | None:
        managed = find_managed(tensor)
        if isinstance(managed, CoordinatorParameter) and managed.kept.owner is self._variables:
            return self._token_of(managed, "parameter")
        buffer = self._variables.managed_buffer(tensor)
        return None if buffer is None else self._token_of(buffer, "buffer")

    def _describe_new(self, obj: Any) -> Token | None:
        if isinstance(obj, torch.jit.ScriptModule):
            raise ValueError(
                "a torch.jit.script module was captured by or passed to a scheduled function: it cannot be "
                "pickled, and its parameters are not on the parameter servers. Use the Python module, and "
                "torch.compile if speed matters; or load the scripted module inside the function."
            )
        if isinstance(obj, nn.Module):
            if next(self._missing(obj, ()), None) is None:
                return None
            self._name_parts(obj)
            return self._known(obj)
        if isinstance(obj, Optimizer):
            ours = (self._describe_tensor(p) for group in obj.param_groups for p in group["params"])
            if not any(ours):
                # A worker would train a copy of its own, and the result would be lost.
                raise ForeignParameterError(
                    f"{type(obj).__name__} was captured by or passed to a scheduled function, but none "
                    "of its parameters belongs to this strategy: workers would train copies, and the "
                    "model here would stay as it is. Create the model and its optimizer inside "
                    "`with strategy.scope():` (a bare tensor: as nn.Parameter of an nn.Module made there), or, "
                    "if copies are meant, make the optimizer inside the function."
                )
            return self._token_of(obj, "optimizer")
        if isinstance(obj, PerWorkerVariable):
            return self._token_of(obj, "variable")
        ours_too = obj._strategy is self._strategy() and isinstance(obj._storage, RemoteStorage)
        return self._token_of(obj, "variable") if ours_too else None

    def _name_parts(self, module: nn.Module) -> None:
        """Give tokens to all submodules of a module, also to those without parameters, and paths to its tensors."""
        if self._known(module) is None:
            for prefix, part in module.named_modules():
                self._token_of(part, "module")
                for name, one in (*dict.items(part._parameters), *dict.items(part._buffers)):
                    token = None if one is None or not prefix else self._describe_tensor(one)
                    if token is not None:
                        self._objects[token].kept.qualify(f"{prefix}.{name}")

    def _known(self, obj: object) -> Token | None:
        known = self._tokens.get(id(obj))
        return known[0] if known is not None and known[1]() is obj else None

    def _token_of(self, obj: Any, kind: str) -> Token:
        token = self._known(obj)
        if token is None:
            self._numbers += 1
            token = (kind, self._numbers)
            self._tokens[id(obj)] = token, weakref.ref(obj)
            self._objects[token] = obj
            # May run in any thread, at any time: `changes` does the rest.
            weakref.finalize(obj, self._gone.append, (id(obj), token)).atexit = False
        return token

    def _define_tensor(
        self, token: Token, managed: CoordinatorParameter | CoordinatorBuffer
    ) -> Sequence[object]:
        if managed.kept.remote is None:
            self._variables.flush()
        description = managed.kept.description
        if description is None:
            raise ValueError(
                "a lazy module was captured by a scheduled function before it has a shape: call it "
                "once on the coordinator, on an example batch, first."
            )
        shown = replace(description, name=managed.kept.name)
        if isinstance(managed, CoordinatorBuffer):
            return (definitions.BufferDefinition(shown, managed.counts),)
        self._tracker.define(token, managed)
        if managed.as_table:
            self._tables.add(token)
        made = definitions.ParameterDefinition(
            shown,
            managed.central.requires_grad,
            managed.as_table,
            channels_last=managed.kept.plan is None and is_channels_last(managed.central),
        )
        return made, *_hook_entries(token, managed)

    def _define_optimizer(self, token: Token, optimizer: Optimizer) -> Sequence[object]:
        inner = inner_of(optimizer)
        number = self._optimizers.create(optimizer) if inner is None else 0
        self._tracker.define(token, optimizer)
        # The optimizer steps on the servers. Without this mark, torch's LR schedulers would warn that it
        # never stepped.
        optimizer.__dict__["_opt_called"] = True
        if inner is not None:
            return define_wrapper(optimizer, inner), *_hook_entries(token, optimizer)
        made = definitions.OptimizerDefinition(
            number=number,
            kind=type(optimizer),
            defaults=dict(optimizer.defaults),
            groups=[dict(group) for group in optimizer.param_groups],
            settings=self._optimizers.initial_settings(optimizer),
        )
        return made, *_hook_entries(token, optimizer)

    def _define_stateful(self, token: Token, obj: LRScheduler | GradScaler) -> Sequence[object]:
        if isinstance(obj, LRScheduler):
            inner = innermost(obj.optimizer)
            self._ledger.watch(self._token_of(inner, "optimizer"), inner)
        self._ledger.watch(token, obj)
        reduced: Any = obj.__reduce_ex__(4)
        return definitions.ModuleDefinition(*reduced[:2]), definitions.ModuleState(reduced[2])

    # -------------------------------------------------------------- changes

    def changes(self) -> tuple[Sequence[object], Sequence[Token]]:
        """Return updates that later functions must see, and objects to define again; until `accept`."""
        self._variables.flush()
        while self._gone:
            key, token = self._gone.popleft()
            self._unsent.append(token)
            if self._tokens.get(key, (None,))[0] == token:
                del self._tokens[key]
            self._tables.discard(token)
            self._tracker.forget((token,))
            self._ledger.forget(token)
        with self._ledger.lock:
            for token, settings in self._ledger.settings().items():
                self._tracker.take_as_sent(token, settings)
            self._ledger.look()
            changed = self._tracker.changes()
        if not changed and not self._unsent:
            return (), ()
        for change in changed:
            obj = self._objects.get(change.token)
            if isinstance(obj, Optimizer) and change.entry[-1] in ("params", ATTRIBUTES):
                if inner_of(obj) is None:
                    self._optimizers.create(obj)
            elif change.token in self._tables and change.entry in HOOKS:
                raise ValueError(
                    f"parameter {obj and obj.kept.name!r} got a gradient hook after its first use in a scheduled "
                    "function: workers look up rows of it, and a hook needs the whole gradient. Register "
                    "the hook before you schedule anything with the model, or remove it and change the "
                    "gradients of the rows in the function, between backward() and step()."
                )
        updates: list[object] = list(changed)
        if self._unsent:
            updates.append(definitions.ForgetObjects(tuple(self._unsent)))
        return updates, self._tracker.outdated()

    def accept(self) -> None:
        """Take what `changes` returned as sent."""
        self._unsent = []
        self._tracker.accept()

    def current(self) -> Sequence[object]:
        """Return updates that bring every definition up to date, for a worker that connects now."""
        return self._tracker.current()

    def publish(self, obj: nn.Module | Optimizer) -> None:
        """Send an object, as it is, with the next function that is scheduled."""
        token = self.describe(obj)
        if token is None:
            raise ForeignParameterError(
                f"publish got {type(obj).__name__}, which has no parameter or buffer on this strategy's "
                "servers: it travels by value with each function that uses it. Publish a module or "
                "optimizer that was created inside `with strategy.scope():`."
            )
        found = [token]
        for part in obj.modules() if isinstance(obj, nn.Module) else ():
            held = [
                self._describe_tensor(one)
                for one in dict.values(part._parameters)
                if one is not None
            ]
            found += [one for one in (self._known(part), *held) if one is not None]
        self._tracker.publish(found)

    def explain(self, update: object) -> str:
        """Return a phrase about an update, for an error."""
        if not isinstance(update, definitions.EntryChange):
            return repr(update)
        owner = type(self._objects.get(update.token)).__name__
        what = "a hook" if update.entry in HOOKS else repr(update.entry)
        return f"{what} of {owner}, which was set after the first use of it,"

    # -------------------------------------------------------------- advances

    def counted(
        self, function: Callable[..., Any], owners: Sequence[tuple[Any, str]]
    ) -> CountedFunction:
        """Return a function with its counters, as it is sent to workers."""
        places = [(self._ledger.count(owner, name), owner, name) for owner, name in owners]
        return CountedFunction(function, places, self._ledger)

    def advance(self, worker: int, incarnation: int, report: int, advances: Sequence[Any]) -> None:
        """Make what a closure did to schedulers, gradient scalers and settings on the coordinator's objects."""
        self._ledger.advance(worker, incarnation, report, advances)

    def snapshot(self, worker: int, incarnation: int, known: Collection[Any]) -> object | None:
        """Return the state of these objects that the worker must get before its next closure, if any."""
        return self._ledger.snapshot(worker, incarnation, known)

    # -------------------------------------------------------------- workers and servers

    @property
    def servers(self) -> ServerControl:
        return self._servers

    def worker_setup(self) -> object:
        return self._setup()

    def close(self, options: ClusterOptions | None = None) -> None:
        """End the session on the servers; models keep their last values.

        Servers that hang are waited for once, all together, before anything is asked of them.
        """
        if not self._variables.closed:
            options = ClusterOptions.from_environment() if options is None else options
            self._variables.client.await_servers(options)
            for error in self._variables.fetch_last_values():  # a server is gone
                _log.warning("some last values of the model were not fetched: %s", error)
            for error in self._optimizers.fetch_all():
                _log.warning("the last state of an optimizer was not fetched: %s", error)
        self._variables.close()

    @override
    def __repr__(self) -> str:
        return f"<ObjectHandles {len(self._tokens)} handles, {self._tracker!r}>"


def _hook_entries(token: Token, obj: CoordinatorParameter | Optimizer) -> list[object]:
    """Return the hooks on a parameter or optimizer, which its definition leaves out."""
    return [
        definitions.EntryChange(token, entry, value, exists=True)
        for entry, value in entries_of(obj).items()
        if entry in HOOKS and value
    ]
