"""``optimizer.step()`` inside a replica: once, at the parameters' home.

An optimizer whose parameters have homes is *adopted*: its instance gets a ``step`` of its own (as LR
schedulers do) and ``param_groups`` whose ``"params"`` answer by context. In a replica ``zero_grad``,
clipping, ``GradScaler`` and loops over groups then see the replica's leaves; ``step`` lets the replicas
meet, hands the aggregated gradient to the central parameters and runs the real step once, through the
strategy's hook ``_step_optimizer``. Outside replicas everything is plain PyTorch. State stays at home.

torch has no hook for "an optimizer was made", so `install` wraps ``Optimizer.__init__`` and
``__setstate__``: docs/design/0004-wrapped-torch-methods.md says why this exception to "no monkeypatching" is made.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from stratagem._core import gradients
from stratagem._core.context import Replica, current_replica
from stratagem._core.managed import ManagedParameter, find_managed
from stratagem._core.replicated_parameters import ReplicatedParameter
from stratagem._core.torch_patches import private_api
from stratagem._core.torch_patches.backward_guard import REMEDY
from stratagem._core.torch_patches.compiling import eagerly
from stratagem._core.torch_patches.replica_schedulers import mean_arguments
from stratagem.errors import ForeignParameterError, UnsupportedOptimizer

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_values  # what `dict` itself says it returns


STEP = "optimizer.step()"
"""Where replicas meet; it stands in messages."""


class GroupByReplica(dict[str, Any]):
    """A parameter group whose ``"params"`` are the replica's leaves inside a replica.

    Attributes:
        all_managed: one entry per parameter, in order; None where there is no home.
        replicated: those homes of which every replica has a leaf.
    """

    __slots__ = ("_strategy", "all_managed", "replicated")

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        central = plain["params"]
        self._find_managed(central)
        # Made inside a replica, an optimizer is given leaves: it keeps what they stand for.
        dict.__setitem__(
            self,
            "params",
            [
                each if managed is None else managed.central
                for each, managed in zip(central, self.all_managed, strict=True)
            ],
        )

    def _find_managed(self, parameters: Iterable[Tensor]) -> None:
        self.all_managed: list[ManagedParameter | None] = [
            find_managed(each) for each in parameters
        ]
        self.replicated = [
            managed for managed in self.all_managed if isinstance(managed, ReplicatedParameter)
        ]
        strategies = {id(managed.strategy): managed.strategy for managed in self.replicated}
        alike = len(strategies) == 1 and len(self.replicated) == len(self.all_managed)
        whose = strategies.popitem()[1] if alike else None
        self._strategy = None if whose is None else weakref.ref(whose)

    def belongs_to(self, strategy: Any) -> bool:
        """Whether all its parameters have leaves in the replicas of this strategy."""
        return self._strategy is not None and self._strategy() is strategy

    @property
    def central(self) -> list[Tensor]:
        """The parameters at home, whoever asks."""
        return dict.__getitem__(self, "params")

    @override
    def __getitem__(self, key: str) -> Any:
        value = dict.__getitem__(self, key)
        if key == "params" and current_replica() is not None:
            return [
                each if managed is None else managed.resolve()
                for each, managed in zip(value, self.all_managed, strict=True)
            ]
        return value

    @override
    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            value = list(value)
            self._find_managed(value)
        dict.__setitem__(self, key, value)

    @override
    def get(self, key: str, default: Any = None, /) -> Any:
        return self[key] if key in self else default

    @override
    def items(self) -> dict_items[str, Any]:
        return {key: self[key] for key in self}.items()

    @override
    def values(self) -> dict_values[str, Any]:
        return {key: self[key] for key in self}.values()

    @override
    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(dict.items(self)),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(dict.items(self)), memo)


class _Groups(list[dict[str, Any]]):
    """``optimizer.param_groups``: every group in it answers by context, later ones too."""

    __slots__ = ()

    def __init__(self, plain: Iterable[dict[str, Any]]) -> None:
        super().__init__(_by_replica(group) for group in plain)

    @override
    def append(self, group: dict[str, Any]) -> None:
        super().append(_by_replica(group))

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[dict[str, Any]]:
        return copy.deepcopy(list(self), memo)


def _by_replica(group: dict[str, Any]) -> GroupByReplica:
    return group if isinstance(group, GroupByReplica) else GroupByReplica(group)


class _State(defaultdict[Any, Any]):
    """``optimizer.state``: kept for the central parameters, found by a replica's leaf too.

    A step that looks at ``optimizer.state[p]`` has leaves in its hands. Lookups that hit, which are those
    of the optimizer itself, are the dict's own. Whoever copies or pickles it gets what is true now, also
    if that is kept elsewhere (`keep_state_with`).
    """

    __slots__ = ("_whose",)

    def __init__(self, plain: Mapping[Any, Any], whose: Optimizer) -> None:
        super().__init__(dict, plain)
        self._whose = weakref.ref(whose)

    @override
    def __missing__(self, key: Any) -> Any:
        central = _central(key)
        return super().__missing__(key) if central is key else self[central]

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_central(key), value)

    @override
    def __contains__(self, key: object) -> bool:
        return super().__contains__(_central(key))

    @override
    def get(self, key: Any, default: Any = None, /) -> Any:
        return super().get(_central(key), default)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        self._bring()
        return defaultdict, (dict, dict(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict[Any, Any]:
        self._bring()
        return copy.deepcopy(defaultdict(dict, self), memo)

    def _bring(self) -> None:
        optimizer = self._whose()
        keeper = None if optimizer is None else _KEEPERS.get(optimizer)
        if keeper is not None and optimizer is not None and optimizer.state is self:
            keeper.bring(optimizer)


class StateKeeper(Protocol):
    """Where the true state of an optimizer is, if not here: on parameter servers."""

    def bring(self, optimizer: Optimizer) -> None:
        """Make ``optimizer.state`` what it is there."""

    def step(self, optimizer: Optimizer, real: Callable[[], Any]) -> Any:
        """Run the class's own step here, from and to what is there."""


_KEEPERS: weakref.WeakKeyDictionary[Optimizer, StateKeeper] = weakref.WeakKeyDictionary()


def keep_state_with(optimizer: Optimizer, keeper: StateKeeper) -> None:
    """From now on the optimizer's state is the keeper's; steps, copies and pickles here ask it."""
    _KEEPERS[optimizer] = keeper


def _central(key: Any) -> Any:
    managed = find_managed(key) if isinstance(key, Tensor) else None
    return key if managed is None else managed.central


# ------------------------------------------------------------------ adopting


def adopt(optimizer: Optimizer) -> None:
    """Make an optimizer answer by context, if any of its parameters has a home. May be repeated."""
    groups = optimizer.param_groups
    if not isinstance(groups, _Groups):
        if all(find_managed(each) is None for group in groups for each in group["params"]):
            return
        optimizer.param_groups = _Groups(groups)
    if not isinstance(optimizer.state, _State):
        optimizer.state = _State(optimizer.state, optimizer)
    held = optimizer.__dict__
    if "step" not in held:
        held["step"] = types.MethodType(_step, optimizer)
        held["zero_grad"] = types.MethodType(_zero_grad, optimizer)
        optimizer.register_state_dict_pre_hook(_central_step)


@eagerly
def _zero_grad(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Reset the gradients of all optimized parameters; in a replica, of its own leaves."""
    kind = type(self)
    if (
        args
        or kwargs  # set_to_none, or what a user's optimizer takes
        or current_replica() is None
        or kind.zero_grad is not Optimizer.zero_grad
        or private_api.profiling()
    ):
        return kind.zero_grad(self, *args, **kwargs)
    # torch's own does this inside an annotation for its profiler, which costs a replica whose
    # processor has just done something else 80 µs, most of them holding the interpreter lock.
    for group in self.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad = None
    return None


def _central_step(optimizer: Optimizer) -> None:
    if current_replica() is not None:
        raise ForeignParameterError(
            f"{type(optimizer).__name__}.state_dict() was called inside a replica: the optimizer's "
            "state belongs to the central parameters. Call it outside the function given to run()."
        )


@eagerly
def _step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Perform a single optimization step; in a replica once for all of them.

    What a user's optimizer takes besides a closure goes on to it: of numbers that differ, the mean.
    """
    replica = current_replica()
    all_managed = _all_managed(self)
    if replica is None or not all_managed:
        keeper = _KEEPERS.get(self) if _KEEPERS else None
        real = _real_step(self, args, kwargs)
        return real() if keeper is None else keeper.step(self, real)
    if replica.group.size > 1 and (callable(args[0] if args else None) or kwargs.get("closure")):
        raise UnsupportedOptimizer(
            f"{type(self).__name__}.step(closure) cannot run in {replica!r}: the closure would be "
            "evaluated several times on one replica's rows only. Use OneDeviceStrategy for "
            "optimizers that need a closure (LBFGS), or an optimizer without one."
        )
    _refuse_foreign(self, replica)
    group = replica.group
    live = [i for i, weight in enumerate(group.row_weights) if weight > 0]

    def once(brought: list[tuple[Optimizer, bool, Any] | None]) -> list[Any]:
        present = [each for each in brought if each is not None]
        if any(by_hand for _, by_hand, _ in present):
            return [_BY_HAND] * len(brought)
        # Made inside a replica, each has its own optimizer: the first one's keeps the state.
        optimizer = present[0][0]
        lead = next((i for i in live if brought[i] is not None), None)
        if lead is None:
            lead = next(i for i, each in enumerate(brought) if each is not None)
        if args or kwargs:
            given = [None if each is None else each[2] for each in brought]
            real = _real_step(optimizer, *mean_arguments(given, group.row_weights))
        else:
            real = _real_step(optimizer)
        return [_step_central(optimizer, all_managed, lead, real)] * len(brought)

    # Gradients set by hand came through no meeting; one replica's word is enough to have one.
    by_hand, me = False, replica.id
    for managed in all_managed:
        leaf = managed.by_replica.get(me)
        by_hand = by_hand or (leaf is not None and not leaf.is_aggregated())
    result = group.meet(me, STEP, (self, by_hand, (args, kwargs)), once)
    if result is _BY_HAND:
        with torch.no_grad():
            gradients.aggregate_by_hand(replica, all_managed, STEP)
        result = group.meet(me, STEP, (self, False, (args, kwargs)), once)
    return result


_BY_HAND = object()


def _real_step(
    optimizer: Optimizer, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[], Any]:
    return functools.partial(type(optimizer).step, optimizer, *args, **kwargs)


def _step_central(
    optimizer: Optimizer,
    all_managed: Sequence[ReplicatedParameter],
    lead: int,
    real: Callable[[], Any],
) -> Any:
    """Runs once, in cross-replica context: central gradients, then the real step.

    Args:
        optimizer: whose step it is.
        all_managed: of its parameters.
        lead: the replica whose leaves hold the gradients.
        real: the optimizer class's own step, with its arguments.
    """
    for managed in all_managed:
        managed.refuse_writes()
    for managed in all_managed:
        spoke = managed.by_replica.get(lead)
        if spoke is None:
            managed.central.grad = None
        else:
            managed.expose_gradient(spoke)
    result = all_managed[0].strategy._step_optimizer(optimizer, real)
    for managed in all_managed:
        managed.stepped()
    return result


def _all_managed(optimizer: Optimizer) -> list[ReplicatedParameter]:
    groups = [group for group in optimizer.param_groups if isinstance(group, GroupByReplica)]
    if len(groups) == 1:
        return groups[0].replicated
    return [managed for group in groups for managed in group.replicated]


# ------------------------------------------------------------------ refusing


def _refuse_foreign(optimizer: Optimizer, replica: Replica) -> None:
    """A parameter without a home would be trained by all replicas at once, each over the others."""
    if replica.group.size == 1:
        return
    for number, group in enumerate(optimizer.param_groups):
        held = group if isinstance(group, GroupByReplica) else GroupByReplica(group)
        if held.belongs_to(replica.strategy):
            continue
        for position, (parameter, managed) in enumerate(
            zip(held.central, held.all_managed, strict=True)
        ):
            if (
                isinstance(managed, ReplicatedParameter)
                and managed.strategy is not replica.strategy
            ):
                whose = (
                    "no strategy any more" if managed.strategy is None else repr(managed.strategy)
                )
            elif managed is None and parameter.grad is not None:
                whose = "no strategy"
            else:
                continue
            raise ForeignParameterError(
                f"{type(optimizer).__name__}.step() in {replica!r} of {replica.strategy!r}: "
                f"parameter {position} of group {number}, of shape {tuple(parameter.shape)}, belongs "
                f"to {whose}. {REMEDY}"
            )


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Every optimizer's step passes here; those not adopted must not train in a replica."""
    replica = current_replica()
    if replica is not None and replica.group.size > 1:
        _refuse_foreign(optimizer, replica)
        if any(
            find_managed(each) is not None for g in optimizer.param_groups for each in g["params"]
        ):
            raise ForeignParameterError(
                f"{type(optimizer).__name__}.step() in {replica!r}: the optimizer was made before its "
                "parameters came under the strategy. Make the optimizer after the model is in its "
                "place, inside `with strategy.scope():`."
            )


# ------------------------------------------------------------------ installing

_INSTALLED: list[Any] = []


def install() -> None:
    """Adopt optimizers as they are made, once per process; the first strategy calls it."""
    if _INSTALLED:
        return
    _INSTALLED.append(register_optimizer_step_pre_hook(_before_any_step))
    _INSTALLED.append(_adopting_afterwards("__init__"))
    _INSTALLED.append(_adopting_afterwards("__setstate__"))


def _adopting_afterwards(method: str) -> Any:
    plain = getattr(Optimizer, method)

    @functools.wraps(plain)
    def wrapper(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        adopt(self)

    setattr(Optimizer, method, wrapper)
    return plain
