"""Steps of a real ``torch.optim`` class on the shards that one server holds.

Called by `store.py` only. Knows parameters, gradients and optimizer classes, but no version, worker or message.

Three ways to apply a gradient given as rows (unique ids, one value each):

- *compact*: gather the parameter rows and their state rows, step on these alone with the real class, and put
  the rows back. Used where a zero gradient changes nothing (`rows_suffice`), so that the result is that of the
  dense gradient (`row_step.py`).
- *sparse*: the layer asked for sparse gradients (``sparse=True``) and the class is another one: it gets a
  sparse tensor, as in plain PyTorch, and may refuse it, as in plain PyTorch.
- *dense*: every other class (Adam's moments decay with zero gradients, too): spread the rows over a gradient of
  the shard's shape, a chunk at a time (`chunked_step.py`). Costs the time of the whole shard and gives plain
  PyTorch's numbers.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from stratagem._ps.malloc import give_back_freed_memory
from stratagem._ps.optimizer_settings import (
    DEFAULT_DTYPE,
    KEPT_BY_TORCH,
    can_send_state,
    constructor_arguments,
    default_dtype,
    is_known_class,
    plain_settings,
    rows_suffice,
    sequences_as_tuples,
    settings_of,
    state_refusal,
)
from stratagem._ps.server.chunked_step import (
    CHUNK_BYTES,
    ELEMENTWISE,
    RowsOfGradient,
    batches,
    step_in_chunks,
)
from stratagem._ps.server.planned_step import Plan, PlannedGroup, step_plan
from stratagem._ps.server.row_step import RowsToStep, step_on_rows
from stratagem._ps.server.state_memory import (
    StateApart,
    bytes_held,
    check_state,
    expected_tensors,
)
from stratagem._ps.types import Gradient, GroupSpec, Hyperparameters, StateEntry, StateValue
from stratagem._wire.codec import dtype_from
from stratagem._wire.messages import OptimizerRecord, StateRecord
from stratagem._wire.shm import zeros_apart
from stratagem.errors import UnsupportedOptimizer

_ABSENT = object()

ANY_MODULE = "*"
"""In a list of optimizer modules: every module. For a server whose clients are programs of the same user."""


def resolve_optimizer_class(class_name: str, modules: Sequence[str] = ()) -> type[Optimizer]:
    """Return the class of a dotted name, if its module may be imported here.

    Raises:
        UnsupportedOptimizer: the module is not allowed, or the name is no optimizer class.

    Example:
        >>> resolve_optimizer_class("torch.optim.SGD")
        <class 'torch.optim.sgd.SGD'>
    """
    module_name, _, name = class_name.rpartition(".")
    allowed = ("torch.optim", *modules)
    # And our own: those for tables, and the update of Keras optimizers.
    known = (*allowed, "stratagem._core.row_optimizers", "stratagem._keras")
    is_allowed = any(module_name == one or module_name.startswith(one + ".") for one in known)
    if not is_allowed and ANY_MODULE not in modules:
        raise UnsupportedOptimizer(
            f"parameter servers may not import {class_name!r}: only optimizers from "
            f"{', '.join(allowed)} are allowed. Start the servers with "
            f"STRATAGEM_OPTIMIZER_MODULES={','.join((*modules, module_name))}."
        )
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise UnsupportedOptimizer(
            f"a parameter server cannot import {class_name!r}: {error}. Install the module there, or put "
            "it on the server's PYTHONPATH."
        ) from error
    except (
        Exception,
        SystemExit,
    ) as error:  # the user's code: a script that parses its command line
        raise UnsupportedOptimizer(
            f"a parameter server cannot import {class_name!r}: module {module_name!r} raised {error!r}. Parameter servers "
            "import it without the program: move the class to a module of its own."
        ) from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        main = module_name == "__main__"
        raise UnsupportedOptimizer(
            f"{class_name!r} is not a torch.optim.Optimizer class that a parameter server can import."
            + (" Move the class from the main script to its own module." if main else "")
        )
    return found


class ServerOptimizer:
    """One optimizer over the variables of one server.

    Args:
        class_name: dotted name of the class.
        groups: its parameter groups; a group may have no variable here.
        parameters: memory of every variable named in the groups.
        modules: modules beside ``torch.optim`` that may be imported.
        defaults: arguments the coordinator's object was made with; those that ``__init__`` takes are given
            to it, since it may make state (Adagrad does).
        attributes: what else the class keeps on the coordinator's object.

    Example:
        >>> w = torch.ones(2)
        >>> groups = [GroupSpec(variables=(1,), settings={"lr": 0.5})]
        >>> stepper = ServerOptimizer("torch.optim.SGD", groups, {1: w})
        >>> stepper.step([Gradient(variable=1, values=torch.ones(2))])
        >>> w
        tensor([0.5000, 0.5000])
    """

    def __init__(
        self,
        class_name: str,
        groups: Sequence[GroupSpec],
        parameters: Mapping[int, Tensor],
        *,
        modules: Sequence[str] = (),
        defaults: Hyperparameters = MappingProxyType({}),
        attributes: Hyperparameters = MappingProxyType({}),
    ) -> None:
        self._class = cast("Any", resolve_optimizer_class(class_name, modules))
        self._is_known = is_known_class(self._class)
        self._made_from = (class_name, plain_settings(defaults), plain_settings(attributes))
        self._parameters = {
            number: nn.Parameter(tensor, requires_grad=False)
            for number, tensor in parameters.items()
        }
        self._tensors = dict(parameters)
        self._unstepped = set(parameters)
        self.uncounted: set[int] = set()
        """Variables that use their state's memory bit by bit: dynamic tables."""
        self._group_of = {
            number: index for index, group in enumerate(groups) for number in group.variables
        }
        self.has_dtype = DEFAULT_DTYPE in attributes
        with StateApart(), default_dtype(attributes):
            self._optimizer: Any = self._class(
                [
                    {
                        "params": [self._parameters[number] for number in group.variables],
                        **sequences_as_tuples(group.settings),
                    }
                    for group in groups
                ],
                **constructor_arguments(self._class, {**attributes, **defaults}),
            )
        for name, value in sequences_as_tuples(attributes).items():
            if name not in KEPT_BY_TORCH:
                self._optimizer.__dict__[name] = value

    @property
    def class_name(self) -> str:
        """Name of the optimizer class, without its module."""
        return str(self._class.__name__)

    @contextmanager
    def settings(self, changes: Mapping[int, Hyperparameters]) -> Iterator[None]:
        """Give groups (by their number) other settings while the context is open, and torch the program's default dtype."""
        before = []
        try:
            for index, values in changes.items():
                group = self._optimizer.param_groups[index]
                before.append((group, {key: group.get(key, _ABSENT) for key in values}))
                group.update(sequences_as_tuples(values))
            with default_dtype(self._made_from[2]):
                yield
        finally:
            for group, own in before:
                group.update(own)
                for key in [key for key, value in own.items() if value is _ABSENT]:
                    del group[key]

    def step(self, gradients: Sequence[Gradient]) -> None:
        """Do one step of the real class; variables without a gradient are left alone."""
        whole: list[Gradient] = []
        large: list[Gradient] = []
        compact: list[Gradient] = []
        plain: list[Gradient] = []
        groups = self._optimizer.param_groups
        suffice = [rows_suffice(self._class, group) for group in groups]
        writes = [self._may_write_gradients(group) for group in groups]
        is_sgd, is_adagrad = (self._class is one for one in (torch.optim.SGD, torch.optim.Adagrad))
        for gradient in gradients:
            parameter = self._find(gradient.variable)
            _check_gradient(parameter, gradient)
            may_be_rows = suffice[self._group_of[gradient.variable]]
            if writes[self._group_of[gradient.variable]]:
                gradient = replace(gradient, values=gradient.values.clone())
            if may_be_rows and gradient.ids is not None:
                compact.append(gradient)
            elif may_be_rows and is_sgd:  # works in place, for any size
                plain.append(gradient)
            elif self._goes_in_chunks(parameter, gradient):
                large.append(gradient)
            elif may_be_rows and is_adagrad:
                plain.append(gradient)
            else:
                whole.append(gradient)
        if whole or not self._is_known:  # another class may count steps in its groups
            self._step_whole(whole)
        for gradient in large:
            index = self._group_of[gradient.variable]
            parts = RowsOfGradient(gradient.values, gradient.ids)
            step_in_chunks(self._optimizer, index, self._find(gradient.variable), parts)
        if compact:
            self._step_rows(compact)
        if plain:
            step_plan(self._optimizer, self._by_group(plain))
        if self._unstepped:
            self._unstepped.difference_update(gradient.variable for gradient in gradients)

    def plan(self, gradients: Sequence[Gradient]) -> Plan | None:
        """Return the work of a step with these gradients, for `step_plan`; None if it cannot be known before.

        It holds while the optimizer has the same variables and settings.
        """
        is_sgd = self._class is torch.optim.SGD
        if not is_sgd and self._class is not torch.optim.Adagrad:
            return None
        for gradient in gradients:
            parameter = self._parameters.get(gradient.variable)
            if parameter is None or gradient.ids is not None:
                return None
            group = self._optimizer.param_groups[self._group_of[gradient.variable]]
            if not rows_suffice(self._class, group) or self._may_write_gradients(group):
                return None
            if not is_sgd and self._goes_in_chunks(parameter, gradient):
                return None
            if gradient.values.shape != parameter.shape or gradient.values.dtype != parameter.dtype:
                return None  # `step` raises the error
        return self._by_group(gradients)

    def step_plan(self, plan: Plan) -> None:
        """Do the step of a plan. Each variable has been stepped before."""
        step_plan(self._optimizer, plan)

    def check(self, gradient: Gradient) -> None:
        """Raise if the gradient does not fit its parameter."""
        _check_gradient(self._find(gradient.variable), gradient)

    def touches_rows_only(self, gradient: Gradient) -> bool:
        """Return whether a step with this gradient changes no other rows than those it names."""
        self._find(gradient.variable)
        group = self._optimizer.param_groups[self._group_of[gradient.variable]]
        return gradient.ids is not None and rows_suffice(self._class, group)

    # State.

    def forget(self, variable: int) -> int:
        """Release a deleted variable's memory and state; return the bytes of the state."""
        parameter = self._parameters.get(variable)
        if parameter is None:
            return 0
        freed = self.state_bytes([variable])
        del self._parameters[variable], self._tensors[variable]
        group = self._optimizer.param_groups[self._group_of.pop(variable)]
        group["params"] = [one for one in group["params"] if one is not parameter]
        self._optimizer.state.pop(parameter, None)
        self._unstepped.discard(variable)
        return freed

    @property
    def is_empty(self) -> bool:
        """True if no variable is left."""
        return not self._parameters

    def state_entries(self) -> Iterator[StateEntry]:
        """Yield all state; tensors are not copied.

        Raises:
            UnsupportedOptimizer: a value cannot be sent.
        """
        for number, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if not can_send_state(value):
                    raise state_refusal(self.class_name, key, value)
                yield StateEntry(variable=number, key=key, value=value)

    def state_of(self, variable: int, key: str) -> StateValue:
        """Return one value of the state; None if there is none."""
        state: dict[str, StateValue] = self._optimizer.state.get(self._find(variable), {})
        return state.get(key)

    def load_state(self, entries: Iterable[StateEntry]) -> None:
        """Replace the state of the variables named; a tensor on ``meta`` stands for one that is written next.

        Raises:
            ValueError: a tensor does not fit its parameter; nothing has changed then.
        """
        loaded: dict[nn.Parameter, dict[str, StateValue]] = {}
        for entry in entries:
            parameter, value = self._find(entry.variable), entry.value
            if isinstance(value, Tensor):
                name = f"variable {entry.variable!r}"
                check_state(self._class, entry.key, value, parameter, name)
                is_meta = value.device.type == "meta"
                value = self._to_be_written(entry, value) if is_meta else value.clone()
            loaded.setdefault(parameter, {})[entry.key] = value
        self._optimizer.state.update(loaded)

    def take_states(self, variables: Iterable[int]) -> dict[int, dict[str, StateValue] | None]:
        """Remove the state of these variables and return it; None for those without any."""
        state, own = self._optimizer.state, self._parameters
        return {number: state.pop(own[number], None) for number in variables if number in own}

    def put_states(self, states: Mapping[int, dict[str, StateValue] | None]) -> None:
        """Put state back that `take_states` returned, also of another optimizer."""
        self.take_states(states)
        for number in states.keys() & self._parameters.keys():
            if (state := states[number]) is not None:
                self._optimizer.state[self._parameters[number]] = state

    def _to_be_written(self, entry: StateEntry, like: Tensor) -> Tensor:
        """Return the present state if it has this shape and type, else a new tensor."""
        variable, key = entry.variable, entry.key
        known, parameter = self.state_of(variable, key), self._parameters[variable]
        if isinstance(known, Tensor) and variable not in self.uncounted:
            is_plain = known.layout is torch.strided and known.is_contiguous()
            if is_plain and (known.shape, known.dtype) == (like.shape, like.dtype):
                return known
        made = zeros_apart(tuple(like.shape), like.dtype, beside=parameter if like.dim() else None)
        first = self._first_value(variable, key)
        # Rows of a dynamic table that are not in use yet.
        return made.fill_(first) if first and variable in self.uncounted else made

    def make_state(self, records: Iterable[StateRecord]) -> None:
        """Replace all state: plain values as recorded, tensors of zeros whose rows follow."""
        self._optimizer.state.clear()
        self.load_state(
            StateEntry(
                variable=one.variable,
                key=one.key,
                value=torch.empty(one.shape, dtype=dtype_from(one.dtype), device="meta")
                if one.is_tensor
                else one.value,
            )
            for one in records
        )

    def state_bytes(self, variables: Iterable[int] | None = None) -> int:
        """Return the bytes of the state of these variables (of all, if none are named)."""
        wanted = self._parameters if variables is None else variables
        numbers = [number for number in wanted if number not in self.uncounted]
        states = (self._optimizer.state.get(self._find(number), {}) for number in numbers)
        return sum(bytes_held(value) for state in states for value in state.values())

    def expected_bytes(self, variables: Iterable[int]) -> int:
        """Return about how many bytes of state the first step on these variables makes."""
        groups = self._optimizer.param_groups
        return sum(
            expected_tensors(self._class, groups[self._group_of[number]])
            * self._parameters[number].nbytes
            for number in variables
            if number not in self.uncounted
            and not self._optimizer.state.get(self._parameters[number])
        )

    def reset_rows(self, variable: int, rows: Tensor) -> None:
        """Set the state of rows to that before the first step: they belong to other keys now."""
        parameter = self._parameters.get(variable)
        if parameter is None:
            return
        for key, value in self._optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == parameter.shape[0]:
                value.index_fill_(0, rows, self._first_value(variable, key))

    def _first_value(self, variable: int, key: str) -> float:
        """Return what a state of a row is before the first step."""
        group = self._optimizer.param_groups[self._group_of[variable]]
        return float(group.get("initial_accumulator_value", 0)) if key == "sum" else 0.0

    def unstepped(self, gradients: Iterable[Gradient]) -> list[int]:
        """Return the variables of the gradients that no step has changed yet."""
        if not self._unstepped:
            return []
        return [one.variable for one in gradients if one.variable in self._unstepped]

    def record(self, number: int) -> OptimizerRecord:
        """Return what another server needs to create this optimizer."""
        class_name, defaults, attributes = self._made_from
        variables: list[list[int]] = [[] for _ in self._optimizer.param_groups]
        for variable, index in self._group_of.items():
            variables[index].append(variable)
        settings = settings_of(self._optimizer)
        groups = tuple(GroupSpec(tuple(some), settings[n]) for n, some in enumerate(variables))
        return OptimizerRecord(number, class_name, groups, defaults, attributes)

    # Inside.

    def _find(self, variable: int) -> nn.Parameter:
        if variable not in self._parameters:
            raise ValueError(
                f"variable {variable!r} got a gradient for a {self.class_name} that does not train "
                "it: add it to one of the optimizer's parameter groups."
            )
        return self._parameters[variable]

    def _may_write_gradients(self, group: Mapping[str, Any]) -> bool:
        """Return whether a step may change or keep its gradient, which is a worker's memory."""
        if self._class is torch.optim.SGD:
            return bool(group["nesterov"] and group.get("foreach"))
        return not self._is_known

    def _goes_in_chunks(self, parameter: nn.Parameter, gradient: Gradient) -> bool:
        return parameter.nbytes > CHUNK_BYTES and self._class in ELEMENTWISE and not gradient.sparse

    def _step_whole(self, gradients: Sequence[Gradient]) -> None:
        """Step the real class on whole parameters; a few at a time where all would take much memory."""
        by_parameter = {self._find(one.variable): one for one in gradients}
        parameters = list(by_parameter)
        is_first = any(not self._optimizer.state.get(parameter) for parameter in parameters)
        makes_copies = any(group.get("foreach") for group in self._optimizer.param_groups)
        in_batches = self._is_known and (is_first or makes_copies)
        for batch in batches(parameters) if in_batches else [parameters]:
            try:
                for parameter in batch:
                    parameter.grad = _full_gradient(parameter, by_parameter[parameter])
                self._optimizer.step()
            finally:
                for parameter in batch:
                    parameter.grad = None
            if is_first and len(batch) < len(parameters):
                give_back_freed_memory()  # else new state would lie between freed temporaries

    def _by_group(self, gradients: Iterable[Gradient]) -> Plan:
        found: dict[int, PlannedGroup] = {}
        for gradient in gradients:
            index = self._group_of[gradient.variable]
            group = self._optimizer.param_groups[index]
            planned = found.setdefault(index, PlannedGroup(group, [], [], []))
            parameter = self._tensors[gradient.variable]
            planned.parameters.append(parameter)
            planned.gradients.append(_full_gradient(parameter, gradient))
            planned.keys.append(self._parameters[gradient.variable])
        return [*found.values()]

    def _step_rows(self, gradients: Sequence[Gradient]) -> None:
        """Step on the rows of the gradients alone, all variables of a group in one call."""
        by_group: dict[int, list[RowsToStep]] = {}
        for gradient in gradients:
            assert gradient.ids is not None
            parameter = self._parameters[gradient.variable]
            state = self._optimizer.state[parameter]
            memory = self._tensors[gradient.variable]
            rows = RowsToStep(memory, state, gradient.ids, gradient.values)
            by_group.setdefault(self._group_of[gradient.variable], []).append(rows)
        for index, items in by_group.items():
            step_on_rows(self._optimizer, self._optimizer.param_groups[index], items)

    @override
    def __repr__(self) -> str:
        return f"<ServerOptimizer {self.class_name} over {len(self._parameters)} variables>"


def _full_gradient(parameter: Tensor, gradient: Gradient) -> Tensor:
    values, ids = gradient.values, gradient.ids
    if ids is None:
        return values
    if gradient.sparse:
        return torch.sparse_coo_tensor(
            ids.unsqueeze(0), values, parameter.shape, is_coalesced=True, check_invariants=False
        )
    return torch.zeros_like(parameter).index_copy_(0, ids, values)


def _check_gradient(parameter: Tensor, gradient: Gradient) -> None:
    ids, values = gradient.ids, gradient.values
    expected = parameter.shape if ids is None else (ids.numel(), *parameter.shape[1:])
    if values.shape != expected or values.dtype != parameter.dtype:
        raise ValueError(
            f"variable {gradient.variable!r} got a gradient of shape {tuple(values.shape)!r} and "
            f"{values.dtype}: expected {tuple(expected)!r} and {parameter.dtype}."
        )
