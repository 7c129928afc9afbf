"""The coordinator's half of contract 7: which objects are handles, and what workers must know of them.

`describe` gives a token to everything that belongs to the strategy: the strategy, its variables, modules
with parameters on its servers (and all their submodules), their parameters and buffers, and optimizers
over them. Everything else travels by value. `snapshot` notices what later closures must see: learning
rates, frozen parameters, new parameter groups, attributes and members of modules (`members.py`), hooks,
and local writes, which go to the servers.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from stratagem._core.managed import find_managed
from stratagem._core.variables import Variable
from stratagem._ps import definitions
from stratagem._ps.coordinator.coordinator_variables import CoordinatorParameter
from stratagem._ps.coordinator.module_definitions import define_module, hooks_of, part_now
from stratagem._ps.coordinator.remote_storage import PerWorkerVariable, RemoteStorage
from stratagem._ps.coordinator.sent_state import SentState
from stratagem._ps.coordinator.server_optimizers import OptimizersOnServers
from stratagem._ps.definitions import Token, Update
from stratagem._ps.optimizer_settings import Settings, are_unchanged, settings_of
from stratagem.config import ClusterOptions
from stratagem.errors import ForeignParameterError, StratagemError

_log = logging.getLogger("stratagem.ps")

LOG_LIMIT = 1 << 18
"""Updates kept one by one: as many as the coordinator's queue holds closures. Of older ones only the
last of each kind is kept."""


class ObjectHandles:
    """What `ClusterCoordinator` asks of a parameter-server strategy.

    Args:
        strategy: whose views these are.
        setup: makes what a worker needs to connect.
    """

    def __init__(self, strategy: Any, setup: Callable[[], object]) -> None:
        self._strategy = weakref.ref(strategy)
        self._variables = strategy._variables
        self._setup = setup
        self._optimizers = OptimizersOnServers(self._variables)
        self._numbers = 0
        # By identity: a Variable's == compares values. An entry goes with its object.
        self._tokens: dict[int, Token] = {}
        self._objects: weakref.WeakValueDictionary[Token, Any] = weakref.WeakValueDictionary()
        self._gone: deque[tuple[int, Token]] = deque()
        # What is looked at whenever something is scheduled, and as what workers know it. By token and
        # with plain references: iterating weak dictionaries took a third of the coordinator's time.
        self._frozen: dict[Token, tuple[weakref.ref[CoordinatorParameter], bool]] = {}
        self._settings: dict[Token, tuple[weakref.ref[Optimizer], Settings]] = {}
        self._members = SentState(self._variables.managed_buffer, self._is_handle, self._name_parts)
        self._outdated: list[Token] = []
        self._log: deque[tuple[int, Update]] = deque()
        self._oldest: dict[Hashable, Update] = {}  # the last of each kind that left the log
        self._version = 0

    # -------------------------------------------------------------- handles

    def describe(self, obj: object) -> Token | None:
        """A token if `obj` belongs to the strategy, else None."""
        if isinstance(obj, Tensor):
            return self._describe_tensor(obj)
        if isinstance(obj, nn.Module | Optimizer | Variable | PerWorkerVariable):
            known = self._known(obj)
            return known if known is not None else self._describe_new(obj)
        if isinstance(obj, LRScheduler) and self.describe(obj.optimizer) is not None:
            # Every worker would step a copy, each at its own pace, and this one would stand still.
            raise ValueError(
                f"{type(obj).__name__} was captured by or passed to a scheduled function: a learning "
                "rate is changed in one place. Call scheduler.step() on the coordinator, between "
                "closures; functions scheduled afterwards use the new rate."
            )
        return ("strategy", 0) if obj is self._strategy() else None

    def definitions(self, token: Token) -> Sequence[object]:
        """What a worker needs to rebuild `token`, in order."""
        self._variables.flush()
        kind, _ = token
        if kind == "strategy":
            return (definitions.StrategyDefinition(),)
        obj = self._objects[token]
        if kind in ("parameter", "buffer"):
            return self._define_tensor(token, obj)
        if isinstance(obj, nn.Module):
            self._members.tell(token, obj)
            return define_module(obj)
        if isinstance(obj, Optimizer):
            return self._define_optimizer(token, obj)
        return (self._define_variable(obj),)

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
        if isinstance(obj, nn.Module):
            if not self._owns(obj):
                return None
            self._name_parts(obj)
            return self._known(obj)
        if isinstance(obj, Optimizer):
            ours = (self._describe_tensor(p) for group in obj.param_groups for p in group["params"])
            if not any(ours):
                # A worker would train a copy of its own, and nobody would ever see the result.
                raise ForeignParameterError(
                    f"{type(obj).__name__} was captured by or passed to a scheduled function, but none "
                    "of its parameters belongs to this strategy: workers would train copies, and the "
                    "model here would stay as it is. Create the model and its optimizer inside "
                    "`with strategy.scope():`, or, if copies are meant, make the optimizer inside the "
                    "function."
                )
            return self._token_of(obj, "optimizer")
        if isinstance(obj, PerWorkerVariable):
            return self._token_of(obj, "variable")
        ours_too = obj._strategy is self._strategy() and isinstance(obj._storage, RemoteStorage)
        return self._token_of(obj, "variable") if ours_too else None

    def _name_parts(self, module: nn.Module) -> None:
        """Workers have views of all parts of a module, also of those without parameters."""
        for part in module.modules():
            self._token_of(part, "module")

    def _is_handle(self, obj: object) -> bool:
        try:
            return self.describe(obj) is not None
        except (ValueError, StratagemError):  # it is refused when it is to be sent
            return False

    def _owns(self, module: nn.Module) -> bool:
        for part in module.modules():
            # As the dicts hold them: looking values up would ask the servers for each.
            held = (*dict.values(part._parameters), *dict.values(part._buffers))
            if any(one is not None and self._describe_tensor(one) is not None for one in held):
                return True
        return False

    def _known(self, obj: object) -> Token | None:
        token = self._tokens.get(id(obj))
        return token if token is not None and self._objects.get(token) is obj else None

    def _token_of(self, obj: Any, kind: str) -> Token:
        token = self._known(obj)
        if token is None:
            self._numbers += 1
            token = (kind, self._numbers)
            self._tokens[id(obj)] = token
            self._objects[token] = obj
            # May run in any thread, at any time: it only notes what `snapshot` is to tell.
            weakref.finalize(obj, self._gone.append, (id(obj), token)).atexit = False
        return token

    def _define_tensor(self, token: Token, managed: Any) -> Sequence[object]:
        description = managed.kept.description
        if description is None:
            raise ValueError(
                "a lazy module was captured by a scheduled function before it has a shape: call it "
                "once on the coordinator, on an example batch, first."
            )
        if isinstance(managed, CoordinatorParameter):
            self._frozen.setdefault(token, (weakref.ref(managed), managed.central.requires_grad))
            made = definitions.ParameterDefinition(
                description, managed.central.requires_grad, managed.as_table
            )
            self._members.tell(token, managed)
            hooks = hooks_of(managed)
            return (made, hooks) if hooks else (made,)
        return (definitions.BufferDefinition(description, managed.counts),)

    def _define_optimizer(self, token: Token, optimizer: Optimizer) -> Sequence[object]:
        number = self._optimizers.create(optimizer)
        self._settings.setdefault(token, (weakref.ref(optimizer), settings_of(optimizer)))
        self._members.tell(token, optimizer)
        # It steps on the servers; torch's LR schedulers, which look at this mark of their own, would
        # else warn that it never stepped.
        optimizer.__dict__["_opt_called"] = True
        made = definitions.OptimizerDefinition(
            number=number,
            kind=type(optimizer),
            defaults=dict(optimizer.defaults),
            groups=[dict(group) for group in optimizer.param_groups],
            settings=self._optimizers.initial_settings(optimizer),
        )
        return made, hooks_of(optimizer)

    # -------------------------------------------------------------- what moved

    def snapshot(self) -> int:
        """A number that moves whenever later closures must see something new."""
        self._variables.flush()
        for moved in self._members.moved():
            if not moved.is_plain:
                self._outdated.append(moved.token)
            self._note(moved)
        if self._gone:
            self._tell_gone()
        for token, (kept, before) in list(self._frozen.items()):
            managed = kept()
            if managed is None:
                del self._frozen[token]
            elif managed.central.requires_grad != before:
                self._frozen[token] = kept, managed.central.requires_grad
                self._note(definitions.SetRequiresGrad(token, managed.central.requires_grad))
        for token, (watched, told) in list(self._settings.items()):
            optimizer = watched()
            if optimizer is None:
                del self._settings[token]
            elif not are_unchanged(optimizer, told):
                self._note_settings(token, optimizer, told)
        return self._version

    def _tell_gone(self) -> None:
        tokens = []
        while self._gone:
            key, token = self._gone.popleft()
            tokens.append(token)
            if self._tokens.get(key) == token:
                del self._tokens[key]
        self._members.forget(tokens)
        self._note(definitions.ForgetObjects(tuple(tokens)))

    def _note_settings(self, token: Token, optimizer: Optimizer, told: Settings) -> None:
        now = settings_of(optimizer)
        if now == told:
            return
        if len(now) > len(told):
            self._optimizers.create(optimizer)
        for index, values in now.items():
            if index not in told:
                group = dict(optimizer.param_groups[index])
                self._note(definitions.AddGroup(token, group, dict(values)))
            elif values != told[index]:
                changed = {
                    key: value
                    for key, value in values.items()
                    if key not in told[index] or told[index][key] != value
                }
                self._note(definitions.SetHyperparameters(token, index, changed))
        self._settings[token] = weakref.ref(optimizer), now

    def _note(self, update: Update) -> None:
        self._version += 1
        self._log.append((self._version, update))
        if len(self._log) > LOG_LIMIT:
            _, old = self._log.popleft()
            self._oldest[definitions.subject_of(old)] = old

    def updates(self, after: int, upto: int) -> Sequence[Update]:
        """What moved between two snapshots; of each thing only the last word."""
        latest: dict[Hashable, Update] = {}
        first = self._log[0][0] if self._log else self._version + 1
        if after + 1 < first:
            latest.update(self._oldest)
        for position in range(max(0, after + 1 - first), len(self._log)):
            version, update = self._log[position]
            if version > upto:
                break
            latest.pop(definitions.subject_of(update), None)
            latest[definitions.subject_of(update)] = update
        found = (self._as_told(update) for update in latest.values())
        return [update for update in found if update is not None]

    def _as_told(self, update: Update) -> Update | None:
        """An update as workers get it; None if what it is about is gone."""
        if not isinstance(update, definitions.Moved):
            return update
        obj = self._objects.get(update.token)
        if obj is None:
            return None
        if update.kind == definitions.HOOKS:
            return definitions.SetHooks(update.token, hooks_of(obj))
        return part_now(obj, update)

    def explain(self, update: object) -> str:
        """What an update is about, in words."""
        obj = self._objects.get(getattr(update, "token", ("", 0)))
        owner = "an object" if obj is None else type(obj).__name__
        if isinstance(update, definitions.SetAttribute | definitions.SetMember):
            return f"{update.name!r} of {owner}, which was set after the first use of it,"
        if isinstance(update, definitions.SetHooks):
            return f"a hook on {owner}, registered after the first use of it,"
        return repr(update)

    def outdated(self) -> Sequence[Token]:
        """What has to be defined anew for workers that come later; each is named once."""
        found, self._outdated = self._outdated, []
        return tuple(dict.fromkeys(found))

    # -------------------------------------------------------------- workers and servers

    def worker_setup(self) -> object:
        """What a worker needs to build its views."""
        return self._setup()

    def fence(self, worker_index: int, incarnation: int) -> None:
        """Makes every server refuse writes of this incarnation and older ones."""
        if not self._variables.closed:  # else there is nothing left to write to
            self._variables.client.fence(f"/job:worker/task:{worker_index}", incarnation)

    def check_servers(self, options: ClusterOptions) -> None:
        """One look at every server; raises ParameterServerLost if one counts as lost."""
        self._variables.client.check_servers(options)

    def finish_closures(self, closures: Sequence[int]) -> None:
        """Let servers refuse late writes of these closures, which are finished. Never waits."""
        if not self._variables.closed:
            self._variables.client.finish_closures(closures)

    def close(self, options: ClusterOptions | None = None) -> None:
        """Ends the session on the servers; models keep their last values.

        Servers that hang are waited for once, all together, before anything is asked of them.
        """
        if not self._variables.closed:
            options = ClusterOptions.from_environment() if options is None else options
            self._variables.client.await_servers(options)
            for (
                error
            ) in self._variables.bring_to_central():  # a server is gone, or the lease ran out
                _log.warning("some last values of the model were not brought home: %s", error)
        self._variables.close()

    @override
    def __repr__(self) -> str:
        return f"<CoordinatorViews {len(self._tokens)} handles, version {self._version}>"
