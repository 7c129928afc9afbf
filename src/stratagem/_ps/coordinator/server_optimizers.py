"""The coordinator's side of optimizers on parameter servers.

An optimizer made on the coordinator is an ordinary one over the local parameters. When it is first sent to a
worker, its class is set up on every server that holds one of its variables. From then on the servers have the true
state: ``optimizer.state_dict()``, copies and pickles fetch it, ``load_state_dict`` sends it, and a step on the
coordinator fetches it and sends it back.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from stratagem._core.managed import find_managed
from stratagem._core.row_optimizers import RowWiseAdagrad
from stratagem._core.torch_patches.optimizer_state import keep_state_with
from stratagem._ps.coordinator.coordinator_variables import (
    CoordinatorParameter,
    CoordinatorVariables,
)
from stratagem._ps.coordinator.optimizer_trial import (
    check_construction,
    looks_across_parameters,
    looks_across_rows,
)
from stratagem._ps.optimizer_settings import (
    WHOLE_TENSOR_OPTIMIZERS,
    attributes_for_servers,
    is_known_class,
    plain_settings,
    rows_suffice,
    settings_of,
)
from stratagem._ps.types import GroupSpec, StateEntry
from stratagem._wire.arenas import default_budget
from stratagem._wire.messages import ApplyRound, Setting
from stratagem.errors import ConnectionLost, StratagemError, UnsupportedOptimizer

LARGE_TABLE_BYTES: Final = 1 << 25
"""A step of Adam on a table of this size takes about 20 ms on one core."""


class OptimizersOnServers:
    """The optimizers of one strategy."""

    def __init__(self, variables: CoordinatorVariables) -> None:
        self._variables = variables
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        # Settings of each group at its creation. Servers use them unless a step brings others.
        self._initial: weakref.WeakKeyDictionary[Optimizer, dict[int, dict[str, Setting]]] = (
            weakref.WeakKeyDictionary()
        )
        self._not_fetched: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        self._has_warned = False
        # Numbers are never used again: a collected optimizer stays on the servers.
        self._used: dict[int, int] = {}  # first shard → optimizers whose first parameter is there

    def create(self, optimizer: Optimizer) -> int:
        """Create the optimizer on its servers, or update its groups there; return its number."""
        refuse_unsupported(optimizer)
        number = self._numbers.get(optimizer)
        is_new = number is None
        self._variables.flush()
        if number is None:
            number = self._numbers[optimizer] = self._new_number(optimizer)
        settings = {**settings_of(optimizer), **self._initial.get(optimizer, {})}
        self._initial[optimizer] = settings
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        if is_new and self._variables.job is not None:
            self._variables.job.match_optimizer(number, name)
        # A class may use the arguments of its constructor beside those of its groups.
        defaults = plain_settings(optimizer.defaults)
        attributes = attributes_for_servers(optimizer)
        servers = range(len(self._variables.client.tasks))
        for server in servers:
            groups = []
            for index, all_managed in enumerate(_managed_by_group(optimizer)):
                here = tuple(
                    shard.number
                    for managed in all_managed
                    if managed is not None
                    and managed.kept.description is not None
                    and _is_trained(managed.central)
                    for shard in managed.kept.description.shards
                    if shard.server == server
                )
                groups.append(GroupSpec(variables=here, settings=settings[index]))
            if any(group.variables for group in groups):
                self._variables.client.create_optimizer(
                    server, number, name, groups, defaults=defaults, attributes=attributes
                )
        if is_new:
            self._warn_of_whole_steps(optimizer)
            if any(_has_stepped(state) for state in optimizer.state.values()):
                # A checkpoint was loaded before training began.
                self._send_state(optimizer, _all_managed(optimizer))
            self._watch(optimizer)
        return number

    def _warn_of_whole_steps(self, optimizer: Optimizer) -> None:
        """Warn once of a class that changes all rows of a large table in every step."""
        if self._has_warned:
            return
        groups = zip(optimizer.param_groups, _managed_by_group(optimizer), strict=True)
        for group, all_managed in groups:
            if rows_suffice(type(optimizer), group):
                continue
            for managed in all_managed:
                if managed is not None and managed.as_table and managed.nbytes > LARGE_TABLE_BYTES:
                    self._has_warned = True
                    warnings.warn(_whole_step_text(optimizer, managed), stacklevel=2)
                    return

    def _new_number(self, optimizer: Optimizer) -> int:
        """Return a number that is the same in every run of a script: of the first parameter, and a count."""
        placed = (managed.kept.description for managed in _all_managed(optimizer))
        first = next((where.shards[0].number for where in placed if where is not None), 0)
        count = self._used[first] = self._used.get(first, 0) + 1
        return first << 8 | count

    def number_of(self, optimizer: Optimizer) -> int | None:
        """Return the number of an optimizer that was set up on the servers; None for others."""
        return self._numbers.get(optimizer)

    def initial_settings(self, optimizer: Optimizer) -> dict[int, dict[str, Setting]]:
        """Return the settings that servers use unless a step brings others."""
        return {group: dict(values) for group, values in self._initial[optimizer].items()}

    def bring(self, optimizer: Optimizer) -> None:
        """Fetch the servers' state; after the session the state that `fetch_all` fetched stays."""
        if not (self._variables.closed or self._variables.is_frozen):
            self._fetch_state(optimizer, _all_managed(optimizer))
            return
        why = self._not_fetched.get(optimizer)
        if why is not None:
            raise ConnectionLost(
                f"the last state of {type(optimizer).__name__} was not fetched from the parameter "
                f"servers before the session ended ({why}). The state here is an older one, so that it "
                "cannot be used or saved. Restore a checkpoint into a new optimizer under a new "
                "strategy."
            )

    def apply_round(self, closures: Sequence[int], *, mean: bool) -> None:
        """Let every server make the steps that it holds of these closures, with the mean or the sum of gradients."""
        client = self._variables.client
        message = ApplyRound(closures=tuple(closures), mean=mean)
        client.ask_each([(server, message, ()) for server in range(len(client.tasks))])

    def fetch_all(self) -> list[StratagemError]:
        """Fetch the state of every optimizer before the session ends; return the errors, each once."""
        failures: dict[str, StratagemError] = {}
        for optimizer in list(self._numbers):
            all_managed = _all_managed(optimizer)
            tables = [managed.kept.name for managed in all_managed if managed.kept.plan is not None]
            if tables:  # too large for this process
                self._not_fetched[optimizer] = (
                    f"it has rows of the large table {tables[0]!r}, which "
                    "sg.Checkpoint(model=model, optimizer=optimizer).save(path) saves while the strategy is open"
                )
                continue
            try:
                self._fetch_state(optimizer, all_managed)
            except StratagemError as error:
                self._not_fetched[optimizer] = str(error)
                failures.setdefault(str(error), error)
        return list(failures.values())

    def step(self, optimizer: Optimizer, real: Callable[[], Any]) -> Any:
        """Run the class's own step on the coordinator, on the servers' state, and send the result.

        The step is not atomic with steps of workers.
        """
        if self._variables.closed:
            self.bring(optimizer)
            return real()
        # All parameters: a closure given to step() may make gradients.
        all_managed = [managed for managed in _all_managed(optimizer) if managed.kept.plan is None]
        for managed in all_managed:
            managed.resolve()
        self._fetch_state(optimizer, all_managed)
        result = real()
        self._variables.flush()
        self._send_state(optimizer, all_managed)
        return result

    def _watch(self, optimizer: Optimizer) -> None:
        keeper = _Keeper(self)
        keep_state_with(optimizer, keeper)
        optimizer.register_state_dict_pre_hook(keeper.bring)
        optimizer.register_load_state_dict_post_hook(keeper.send)

    def _fetch_state(
        self, optimizer: Optimizer, all_managed: Sequence[CoordinatorParameter]
    ) -> None:
        """Fetch the servers' state and join shards.

        Raises:
            MemoryError: it is larger than the memory of this process.
        """
        _check_fits(optimizer, all_managed)
        client, number = self._variables.client, self._numbers[optimizer]
        for managed in all_managed:
            description = managed.kept.description
            assert description is not None
            pieces: dict[str, list[Any]] = {}
            for shard in description.shards:
                for entry in client.read_state(shard.server, number, (shard.number,)):
                    pieces.setdefault(entry.key, []).append(entry.value)
            state = {key: _joined(values) for key, values in pieces.items()}
            if state:
                optimizer.state[managed.central] = state

    def _send_state(
        self, optimizer: Optimizer, all_managed: Sequence[CoordinatorParameter]
    ) -> None:
        """Send the local state to the servers, divided among the shards."""
        client, number = self._variables.client, self._numbers[optimizer]
        for managed in all_managed:
            state = optimizer.state.get(managed.central)
            remote = managed.kept.remote
            if not state or remote is None:
                continue
            for index, place in enumerate(remote.places):
                entries = []
                for key, value in state.items():
                    part = value
                    if isinstance(value, Tensor) and _has_rows_of(managed.central, value):
                        part = remote.cut(value)[index]
                    entries.append(StateEntry(variable=place.variable, key=key, value=part))
                client.write_state(place.server, number, entries)

    @override
    def __repr__(self) -> str:
        return f"<OptimizersOnServers {len(self._numbers)} optimizers>"


class _Keeper:
    """Weak link from an optimizer to its state on the servers."""

    def __init__(self, optimizers: OptimizersOnServers) -> None:
        self._optimizers = weakref.ref(optimizers)

    def bring(self, optimizer: Optimizer) -> None:
        found = self._optimizers()
        if found is not None:
            found.bring(optimizer)

    def send(self, optimizer: Optimizer) -> None:
        found = self._optimizers()
        if found is not None and not found._variables.closed:
            found._send_state(optimizer, _all_managed(optimizer))

    def step(self, optimizer: Optimizer, real: Callable[[], Any]) -> Any:
        found = self._optimizers()
        return real() if found is None else found.step(optimizer, real)


def refuse_unsupported(optimizer: Optimizer) -> None:
    """Raise if the servers' steps would not give the numbers of one step over all parameters."""
    name = type(optimizer).__name__
    if name == "LBFGS":
        raise UnsupportedOptimizer(
            "LBFGS evaluates the loss several times within one step and needs all parameters at "
            "once; it cannot run on parameter servers. Use SGD, Adagrad or Adam, or OneDeviceStrategy."
        )
    is_known = is_known_class(type(optimizer))
    if not is_known:
        check_construction(optimizer)
    placed = [(one.name, one.kept.description) for one in _all_managed(optimizer)]
    servers = {shard.server for _, where in placed if where is not None for shard in where.shards}
    if not is_known and len(servers) > 1 and looks_across_parameters(optimizer):
        raise UnsupportedOptimizer(
            f"{name} computes the update of a parameter from other parameters, too (a norm over all "
            f"of them, or state that they share). Its parameters are on {len(servers)} parameter "
            "servers, and each server sees its own only. Switch this part of the optimizer off and "
            "clip with torch.nn.utils.clip_grad_norm_ before step(), or use one parameter server, "
            "another optimizer or another strategy."
        )
    for variable, where in placed:
        if where is not None and where.is_sharded:
            if name in WHOLE_TENSOR_OPTIMIZERS or (not is_known and looks_across_rows(optimizer)):
                raise UnsupportedOptimizer(
                    f"{name} looks at a whole tensor at once, but {variable!r} of shape "
                    f"{where.shape} is in {len(where.shards)} shards: on parts of it {name} would "
                    "compute something else. Use an elementwise optimizer (SGD, Adagrad, Adam …), "
                    "or a partitioner that leaves this variable in one piece."
                )
            if not is_known:
                return  # the trial says the same for every shard


def _managed_by_group(optimizer: Optimizer) -> list[list[CoordinatorParameter | None]]:
    found: list[list[CoordinatorParameter | None]] = []
    for group in optimizer.param_groups:
        all_managed = [find_managed(parameter) for parameter in group["params"]]
        found.append(
            [
                managed if isinstance(managed, CoordinatorParameter) else None
                for managed in all_managed
            ]
        )
    return found


def _all_managed(optimizer: Optimizer) -> list[CoordinatorParameter]:
    return [
        managed
        for group in _managed_by_group(optimizer)
        for managed in group
        if managed is not None
    ]


def _check_fits(optimizer: Optimizer, all_managed: Sequence[CoordinatorParameter]) -> None:
    """Raise if the state of tables that only servers hold does not fit in this process."""
    tables = [managed for managed in all_managed if managed.kept.plan is not None]
    # SGD without momentum, as tables need, has no state.
    if not tables or isinstance(optimizer, torch.optim.SGD):
        return
    by_row = isinstance(optimizer, RowWiseAdagrad)  # one number for each row
    needed = sum(one.nbytes // (one.central.shape[1] if by_row else 1) for one in tables)
    free = default_budget()
    if needed > free:
        raise MemoryError(
            f"the state of {type(optimizer).__name__} for table {tables[0].kept.name!r} and others like it has at "
            f"least {needed / 1e9:,.1f} GB, and this process may use {free / 1e9:,.1f} GB more. Save it with "
            "sg.Checkpoint(model=model, optimizer=optimizer).save(path): servers write their own rows, and plain "
            "PyTorch reads the files."
        )


def _whole_step_text(optimizer: Optimizer, managed: CoordinatorParameter) -> str:
    name = type(optimizer).__name__
    return (
        f"{name} changes every row of table {managed.kept.name!r} {tuple(managed.central.shape)} "
        f"({managed.nbytes / (1 << 20):,.0f} MiB) in every step, not only the rows of the batch: its state "
        "moves without a gradient, too. Give tables an optimizer that changes the batch's rows alone, such as "
        "sg.optim.LazyAdam, sg.optim.RowWiseAdagrad or torch.optim.Adagrad, and the other parameters to "
        f"{name}."
    )


def _is_trained(parameter: Tensor) -> bool:
    """Return whether a parameter can have gradients; the keys of dynamic tables cannot."""
    return parameter.dtype.is_floating_point or parameter.dtype.is_complex


def _has_rows_of(parameter: Tensor, value: Tensor) -> bool:
    """Return whether state has one row for each row of the parameter."""
    return value.dim() > 0 and parameter.dim() > 0 and value.shape[0] == parameter.shape[0]


def _has_stepped(state: dict[str, Any]) -> bool:
    """Return whether the state is worth sending; some classes make it before the first step."""
    return float(state["step"]) > 0 if "step" in state else bool(state)


def _joined(values: list[Any]) -> Any:
    first = values[0]
    if len(values) > 1 and isinstance(first, Tensor) and first.dim() > 0:
        return torch.cat(values)
    return first
