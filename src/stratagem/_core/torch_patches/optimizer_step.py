"""``optimizer.step()`` in a replica: once for all replicas, on the central parameters.

An optimizer over managed parameters is *adopted* when it is created: its instance gets a ``step`` of its own (as LR
schedulers do it) and ``param_groups`` whose ``"params"`` depend on the context. In a replica, ``zero_grad``, clipping,
``GradScaler`` and loops over groups see the replica's leaves. ``step`` is a rendezvous: one replica passes the aggregated
gradients to the central parameters and runs the real step, through the strategy's hook ``_step_optimizer``.
Optimizer state belongs to the central parameters. Outside replicas everything is plain PyTorch.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stratagem._core import gradients
from stratagem._core.context import Replica, current_replica, current_strategy
from stratagem._core.managed import ManagedParameter, find_managed, write_grad
from stratagem._core.replicas import once_for_all
from stratagem._core.replicated_parameters import (
    Leaf,
    ReplicatedParameter,
    follow_centrals,
    is_any_written,
)
from stratagem._core.torch_patches import closure_step, private_api
from stratagem._core.torch_patches.autograd_engine import REMEDY, owner_of
from stratagem._core.torch_patches.compiling import eagerly
from stratagem._core.torch_patches.module_members import adopt_parameter
from stratagem._core.torch_patches.optimizer_groups import GroupByReplica
from stratagem._core.torch_patches.optimizer_state import CentralState, keeper_of
from stratagem._core.torch_patches.schedulers import mean_arguments
from stratagem._core.values import leaves
from stratagem.errors import (
    ForeignParameterError,
    MisuseError,
    UnsupportedOptimizer,
)

if TYPE_CHECKING:
    from stratagem._core.replicas import ReplicaGroup

STEP = "optimizer.step()"
"""Label of the rendezvous, for error messages."""


def _by_replica(group: dict[str, Any]) -> GroupByReplica:
    return group if isinstance(group, GroupByReplica) else GroupByReplica(group)


# ------------------------------------------------------------------ state


def _refuse_state_dict(optimizer: Optimizer) -> None:
    if current_replica() is not None:
        raise ForeignParameterError(
            f"{type(optimizer).__name__}.state_dict() was called inside a replica: the optimizer's "
            "state belongs to the central parameters. Call it outside the function given to run()."
        )


# ------------------------------------------------------------------ the step


def _adopt_bare(optimizer: Optimizer) -> list[ManagedParameter | None]:
    """Make tensors of no module (``log_alpha = torch.zeros(1, requires_grad=True)``) parameters of the strategy.

    Parameters are left alone: their module may be made outside the scope, and is refused in a replica.
    """
    strategy = current_strategy()
    if strategy is None or not strategy._steps_here or strategy.num_replicas_in_sync == 1:
        return []
    adopted: list[ManagedParameter | None] = []
    for tensor in (each for group in optimizer.param_groups for each in group["params"]):
        if type(tensor) is Tensor and find_managed(tensor) is None and current_replica() is None:
            tensor.__class__ = nn.Parameter
            adopted.append(
                adopt_parameter(strategy, "", cast("nn.Parameter", tensor), tensor.device)
            )
    return adopted


def _adopt(optimizer: Optimizer) -> None:
    """Adopt an optimizer if any of its parameters is managed. May be repeated."""
    groups = optimizer.param_groups
    bare = _adopt_bare(optimizer)  # the groups below keep them
    for i, group in enumerate(groups):
        if any(find_managed(each) is not None for each in group["params"]):
            groups[i] = _by_replica(group)
    del bare
    if not any(isinstance(group, GroupByReplica) for group in groups):
        return
    if not isinstance(optimizer.state, CentralState):
        optimizer.state = CentralState(optimizer.state, optimizer)
    held = optimizer.__dict__
    if "step" not in held:
        if (replica := current_replica()) is not None:
            replica.group.shared[_made_here(optimizer)] = optimizer
        held["step"] = types.MethodType(_step, optimizer)
        for name in _own_methods(type(optimizer)):
            held[name] = types.MethodType(_once(getattr(type(optimizer), name)), optimizer)
        optimizer.register_state_dict_pre_hook(_refuse_state_dict)


@eagerly
def _step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Perform a single optimization step; in a replica, once for all replicas.

    Arguments other than a closure are passed on to a user's optimizer: the mean of numbers that differ.
    """
    replica = current_replica()
    parameters = _replicated(self)
    if replica is None or not parameters:
        keeper = keeper_of(self)
        real = _real_step(self, args, kwargs)
        return real() if keeper is None else keeper.step(self, real)
    group, me = replica.group, replica.id
    closure = args[0] if args else kwargs.get("closure")
    _refuse_foreign(self, replica)
    if group.size > 1 and callable(closure):
        return _step_closure(self, replica, closure, args[1:] if args else None, kwargs)

    def once(brought: list[tuple[Optimizer, Sequence[Leaf], Any] | None]) -> list[Any]:
        present = {i: each[1] for i, each in enumerate(brought) if each is not None}
        gradients.aggregate_by_hand(group, present)
        lead = next((i for i in present if group.row_weights[i] > 0), min(present))
        # Optimizers made in the replicas are several: the first one's keeps the state.
        first = brought[min(present)]
        assert first is not None
        real: Callable[[], Any] = functools.partial(private_api.step_of(first[0]), first[0])
        if args or kwargs:
            given = [None if each is None else each[2] for each in brought]
            real = _real_step(first[0], *mean_arguments(given, group.row_weights))
        return [_step_central(group, first[0], parameters, lead, real)] * len(brought)

    for each in parameters:
        if me not in each.by_replica or each.by_replica[me].record is not replica.record:
            each.resolve()  # not used in this run: it may have the gradient of an earlier one
    own = [leaf for each in parameters if (leaf := each.by_replica.get(me)) is not None]
    result = group.rendezvous(me, STEP, (self, own, (args, kwargs)), once)
    replica.is_ahead = False
    return result


def _step_closure(
    optimizer: Optimizer,
    replica: Replica,
    closure: Callable[[], Any],
    others: Sequence[Any] | None,
    kwargs: Mapping[str, Any],
) -> Any:
    """Run a step with a closure; ``others`` are the arguments after it, None if it was given by name."""
    if not replica.strategy._steps_here:
        raise UnsupportedOptimizer(
            f"{type(optimizer).__name__}.step(closure) cannot run on {replica.strategy!r}: parameter servers "
            "step optimizers. Use a strategy of one machine, or an optimizer without a closure."
        )
    plain: Callable[..., Any] = type(optimizer).step

    def step(closure: Callable[[], Any]) -> Any:
        if others is None:
            return plain(optimizer, **{**kwargs, "closure": closure})
        return plain(optimizer, closure, *others, **kwargs)

    label = f"{type(optimizer).__name__}.step(closure)"
    adds_up = replica.strategy.gradient_aggregation == "sum"
    return closure_step.run(replica, label, step, closure, adds_up=adds_up)


def _own_methods(kind: type[Optimizer]) -> set[str]:
    """Return the names of the public methods that a user's optimizer class adds (SAM's ``first_step``)."""
    found: set[str] = set()
    for each in kind.__mro__[: kind.__mro__.index(Optimizer)]:
        if not each.__module__.startswith("torch.optim"):
            found.update(n for n, v in vars(each).items() if isinstance(v, types.FunctionType))
    return {name for name in found if not name.startswith("_")} - set(dir(Optimizer))


def _once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that runs once for all replicas, on the central parameters, as ``step`` does."""

    @eagerly
    @functools.wraps(plain)
    def method(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        replica = current_replica()
        given = [each for value in (*args, *kwargs.values()) for each in leaves(value)]
        if (
            replica is None
            or not replica.strategy._steps_here
            or not _replicated(self)
            or any(callable(each) or isinstance(each, Tensor) for each in given)
        ):
            return plain(self, *args, **kwargs)
        weights = replica.group.row_weights

        def combine(brought: list[Any]) -> list[Any]:
            given_args, given_kwargs = mean_arguments(brought, weights)
            return [plain(self, *given_args, **given_kwargs)] * len(brought)

        label = f"{type(self).__name__}.{plain.__name__}()"
        return once_for_all(replica, label, (args, kwargs), combine)

    return method


def _real_step(
    optimizer: Optimizer, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[], Any]:
    return functools.partial(type(optimizer).step, optimizer, *args, **kwargs)


def _step_central(
    group: ReplicaGroup,
    optimizer: Optimizer,
    parameters: Sequence[ReplicatedParameter],
    lead: int,
    real: Callable[[], Any],
) -> Any:
    """Pass the gradients to the central parameters and run the real step, in cross-replica context.

    Args:
        group: the replicas of the run.
        optimizer: the optimizer.
        parameters: its parameters that have leaves.
        lead: the replica whose leaves hold the gradients.
        real: the optimizer class's own step, with its arguments.
    """
    if is_any_written(parameters):
        for managed in parameters:
            managed.settle()
            managed.refuse_writes()
    for managed in parameters:
        managed.expose_gradient(managed.by_replica.get(lead))
    strategy = parameters[0].strategy
    assert strategy is not None, "a replica of it is running"
    result = strategy._step_optimizer(optimizer, real)
    follow_centrals(parameters)
    if private_api.has_step_hooks(optimizer):  # a hook may write other parameters (averages)
        for replica in group.replicas:
            for leaf in () if replica.record is None else replica.record.leaves:
                leaf.refresh(leaf.managed.central)
    return result


def _replicated(optimizer: Optimizer) -> list[ReplicatedParameter]:
    groups = [group for group in optimizer.param_groups if isinstance(group, GroupByReplica)]
    if len(groups) == 1:
        return groups[0].replicated
    return [managed for group in groups for managed in group.replicated]


# ------------------------------------------------------------------ refusals


def _refuse_foreign(optimizer: Optimizer, replica: Replica) -> None:
    """Refuse parameters of other strategies or of none: all replicas would train them at once.

    A single replica trains parameters of no strategy as plain PyTorch does.
    """
    several = replica.group.size > 1
    for number, group in enumerate(optimizer.param_groups):
        held = _by_replica(group)
        if held.belongs_to(replica.strategy):
            continue
        for position, (parameter, managed) in enumerate(
            zip(held.central, held.managed, strict=True)
        ):
            if managed is None:
                copies = replica.group.shared.get(("copies", replica.id), {})
                foreign = several and parameter.grad is not None and id(parameter) not in copies
            else:
                own = managed.strategy is replica.strategy
                foreign = isinstance(managed, ReplicatedParameter) and not own
            if foreign:
                raise ForeignParameterError(
                    f"{type(optimizer).__name__}.step() in {replica!r} of {replica.strategy!r}: "
                    f"parameter {position} of group {number}, of shape {tuple(parameter.shape)}, "
                    f"belongs to {owner_of(parameter)}. {REMEDY}"
                )


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse the step of an optimizer that was not adopted, in a replica of several."""
    replica = current_replica()
    if replica is not None and replica.group.size > 1:
        _refuse_foreign(optimizer, replica)
        name = type(optimizer).__name__
        if any(isinstance(group, GroupByReplica) for group in optimizer.param_groups):
            raise ForeignParameterError(
                f"{name}.step() in {replica!r}: {name} wraps another optimizer and does not call "
                "Optimizer.__init__, so every replica would run it. Run it once for all replicas: "
                "sg.get_replica_context().merge_call(lambda strategy: optimizer.step())."
            )
        if any(
            find_managed(each) is not None for g in optimizer.param_groups for each in g["params"]
        ):
            raise ForeignParameterError(
                f"{name}.step() in {replica!r}: the optimizer was made before its "
                "parameters came under the strategy. Make the optimizer after the model is in its "
                "place, inside `with strategy.scope():`."
            )


# ------------------------------------------------------------------ patching


def _quick_zero_grad(plain: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Optimizer.zero_grad``: in a replica, skip torch's annotation for its profiler.

    The annotation takes up to 80 µs, most of them holding the interpreter lock.
    """

    @eagerly
    @functools.wraps(plain)
    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        replica = current_replica()
        if replica is None or not set_to_none or private_api.profiling():
            plain(self, set_to_none)
            return
        if replica.is_ahead:
            gradients.wait_for_gradients(replica)
        for group in self.param_groups:
            if isinstance(group, GroupByReplica) and group.belongs_to(replica.strategy):
                for leaf in group["params"]:
                    write_grad(leaf, None)
            else:
                for parameter in group["params"]:
                    parameter.grad = None

    return zero_grad


def _refuse_in_replica(optimizer: Optimizer, method: str) -> None:
    """Refuse to change an optimizer of all replicas in one of them; each may change one that it has made."""
    replica = current_replica()
    if replica is None or replica.group.size == 1 or "step" not in vars(optimizer):
        return
    if _made_here(optimizer) not in replica.group.shared:
        raise MisuseError(
            f"{type(optimizer).__name__}.{method}() was called in {replica!r}. All replicas share the optimizer, and every "
            "replica would call this. Call it outside the function given to run(), or once for all replicas:\n"
            f"    sg.get_replica_context().merge_call(lambda strategy: optimizer.{method}(...))"
        )


def _made_here(optimizer: Optimizer) -> tuple[str, int]:
    """Return the key in `ReplicaGroup.shared` of an optimizer that a replica of the group has made."""
    return "optimizer made in a replica", id(optimizer)


def _refuse_first(method: str) -> None:
    plain = getattr(Optimizer, method)

    @functools.wraps(plain)
    def wrapper(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        _refuse_in_replica(self, method)
        plain(self, *args, **kwargs)

    setattr(Optimizer, method, wrapper)


def _adopt_afterwards(method: str) -> None:
    plain = getattr(Optimizer, method)

    @functools.wraps(plain)
    def wrapper(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        _adopt(self)

    setattr(Optimizer, method, wrapper)


def apply_patch() -> None:
    """Adopt optimizers as they get parameters or are unpickled; check every step in a replica."""
    register_optimizer_step_pre_hook(_before_any_step)
    _adopt_afterwards("add_param_group")
    for method in ("add_param_group", "load_state_dict"):
        _refuse_first(method)
    _adopt_afterwards("__setstate__")
    optimizer: Any = Optimizer
    optimizer.zero_grad = _quick_zero_grad(Optimizer.zero_grad)
