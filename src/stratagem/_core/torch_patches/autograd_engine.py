"""``backward()`` and ``torch.autograd.grad`` in a replica.

Three things happen at the one function through which both reach the autograd engine. (Programs import
``torch.autograd.grad`` by name before there is any strategy, so wrapping that function would miss them.)

Parameters taken outside ``run``. ``params = list(model.parameters())`` outside ``run`` are the central parameters,
but the model in a replica computes with the replica's leaves. In ``torch.autograd.grad(loss, params)`` the gradient of a
parameter is that of its leaf plus that of the central parameter; a loss may use both (a penalty over ``params``).
``backward(inputs=params)`` means the leaves.

Failed passes. The engine drops its callbacks, so the record of the pass is reset.

Shared tensors. A model made outside the scope, a bare ``nn.Parameter`` or a central parameter used in a closure has one
``.grad`` for all replicas: R backward passes add up in it. No hook of ours fires, so the graph of the pass is searched
for tensors that took a gradient:

- the replica's own leaf of a parameter: fine;
- a central parameter of this strategy (a library keeps parameters in a list): its gradient is computed apart and added
  to the leaf's;
- another replica's leaf (a loss that the replicas keep in a shared attribute): refused;
- any other tensor: refused when a second replica of the run reaches the same one. A tensor that only one replica
  reaches (an adversarial input, a module made in the replica) is its own.

A search costs microseconds per node. So a pass like an earlier one (as many new graph nodes, as many of our leaves with
a gradient) is searched at its 1st, 2nd, 4th, 8th, … occurrence only, unless passes reach central parameters.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from stratagem._core import gradients
from stratagem._core.context import Replica, current_replica
from stratagem._core.managed import find_managed
from stratagem._core.replicated_parameters import ReplicatedParameter
from stratagem._core.strategy_hooks import StrategyHooks
from stratagem._core.torch_patches import private_api
from stratagem._core.torch_patches.compiling import eagerly
from stratagem.errors import ForeignParameterError

REMEDY = (
    "Create the model inside `with strategy.scope():`, so that each replica gets its own view of the parameter and "
    "gradients are aggregated. If a library creates the model, make it a submodule of one that is created there; if it "
    "is a bare tensor, make it an nn.Parameter of an nn.Module that is created there. Or train it outside run()."
)

KINDS_KEPT = 256
"""How many kinds of passes a thread remembers; a program with more searches some of them again."""


def own_leaf(tensor: Any) -> tuple[Any, Tensor | None]:
    """Return the tensor to use in this replica, and the central parameter behind it if there is one."""
    managed = find_managed(tensor) if isinstance(tensor, Tensor) else None
    if not isinstance(managed, ReplicatedParameter):
        return tensor, None
    central, leaf = managed.central, managed.resolve()
    if leaf is central:  # a replica of another strategy
        return tensor, None
    return (leaf if tensor is central else tensor), central


def _backward(
    run: Any, replica: Replica, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a pass that accumulates gradients; ``args[3]`` are the inputs, empty for all leaves."""
    if replica.is_ahead:
        gradients.wait_for_gradients(replica)
    own = [own_leaf(each) for each in args[3]]
    inputs = tuple(each for each, _ in own)
    check = _PassCheck(replica, outputs, own) if replica.group.size > 1 else None
    try:
        if check is not None and check.centrals:
            inputs = check.inputs
            found = run(outputs, args[0], True, False, check.centrals, True, accumulate_grad=False)
            gradients.add_to_pass(replica, zip(check.centrals, found, strict=True))
        if inputs or check is None or not check.centrals:
            run(outputs, *args[:3], inputs, *args[4:], **kwargs)
        if replica.record is not None:
            gradients.end_pass(replica.record)
    except BaseException:
        if replica.record is not None:
            gradients.forget_pass(replica.record)  # the step may catch this and go on
        raise
    if check is not None:
        check.finish()


def _grad(run: Any, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return gradients of ``args[3]``, any of which may be the central tensor of a parameter."""
    own = [own_leaf(each) for each in args[3]]
    leaves = [each for each, _ in own]
    centrals = [(i, each) for i, (_, each) in enumerate(own) if each is not None]
    if not centrals:
        return run(outputs, *args, **kwargs)
    centrals = [(i, each) for i, each in centrals if each.requires_grad]
    inputs = (*leaves, *(each for _, each in centrals))
    found = run(outputs, *args[:3], inputs, True, **kwargs)
    results = list(found[: len(leaves)])
    for (i, _), more in zip(centrals, found[len(leaves) :], strict=True):
        if more is not None:
            results[i] = more if results[i] is None else results[i] + more.to(results[i].device)
    allow_unused = args[4]
    for i, result in enumerate(results):
        if result is None and not allow_unused:
            raise RuntimeError(  # torch's own text
                f"The differentiated Tensor at index {i} appears to not have been used in the "
                "graph. Set allow_unused=True if this is the desired behavior."
            )
    return tuple(results)


# ------------------------------------------------------------------ shared tensors


class _Passes:
    """Backward passes of one replica that were searched."""

    __slots__ = ("counts", "reach_centrals")

    def __init__(self) -> None:
        self.counts: dict[int, tuple[int, int]] = {}  # new nodes -> (passes, leaves of ours)
        self.reach_centrals = False


# Strategy -> passes of each replica.
_PASSES: weakref.WeakKeyDictionary[StrategyHooks, dict[int, _Passes]] = weakref.WeakKeyDictionary()


def _passes_of(replica: Replica) -> _Passes:
    by_replica = _PASSES.get(replica.strategy)
    if by_replica is None:
        by_replica = _PASSES.setdefault(replica.strategy, {})
    found = by_replica.get(replica.id)
    if found is None:
        found = by_replica[replica.id] = _Passes()
    return found


class _PassCheck:
    """The check of one backward pass; the constructor runs before the pass, `finish` after it.

    Attributes:
        centrals: central parameters of the replica's strategy that the pass reaches.
        inputs: the other tensors that take a gradient, if there are centrals.
    """

    __slots__ = ("_clean", "_count", "_kind", "_leaves", "_own", "_passes", "_replica", "_roots",
                 "_searched", "centrals", "inputs")  # fmt: skip

    def __init__(
        self, replica: Replica, roots: Any, own: Sequence[tuple[Any, Tensor | None]]
    ) -> None:
        self._replica, self._roots, self._own = replica, roots, own
        self._passes = passes = _passes_of(replica)
        record = replica.record
        self._kind = private_api.graph_nodes() - (0 if record is None else record.nodes)
        count, self._leaves = passes.counts.get(self._kind, (0, 0))
        self._count = count = count + 1
        self.centrals: tuple[Tensor, ...] = ()
        self.inputs: tuple[Tensor, ...] = ()
        self._clean = True
        self._searched = count & (count - 1) == 0 or passes.reach_centrals
        if self._searched:
            reached = list(self._search())
            centrals = tuple(each for each in reached if self._is_central(each))
            if centrals and not own:
                passes.reach_centrals = True
                self.inputs = tuple(each for each in reached if not self._is_central(each))
                self.centrals = centrals
            elif centrals:
                self._refuse_central(centrals[0])

    def finish(self) -> None:
        """Search the pass that has ended if it differs from earlier ones, and remember it."""
        passes, record = self._passes, self._replica.record
        leaves = 0
        if record is not None:
            leaves, record.arrived = record.arrived, 0
        if not self._searched and leaves != self._leaves:
            for each in self._search():
                if self._is_central(each):
                    self._refuse_central(each)
        if record is not None:
            record.nodes = private_api.graph_nodes()
        if not self._clean:  # it reached tensors of its own: search such a pass every time
            passes.counts.pop(self._kind, None)
            return
        if len(passes.counts) >= KINDS_KEPT and self._kind not in passes.counts:
            passes.counts.clear()
        passes.counts[self._kind] = (self._count, leaves)

    def _search(self) -> Iterator[Tensor]:
        """Yield the tensors that take a gradient; raise if other replicas use one of them."""
        reached: Iterable[Tensor] = _leaves(self._roots)
        if self._own:
            # A parameter among the inputs whose central tensor is also in the graph misses part of its gradient.
            centrals = {id(central) for _, central in self._own}
            given = (_tensor_of(each) for each, _ in self._own)
            reached = itertools.chain(
                (each for each in given if each is not None),
                (each for each in reached if id(each) in centrals),
            )
        for each in reached:
            if not self._is_ours(each):
                self._clean = False
                self._refuse_shared(each)
            yield each

    def _is_central(self, tensor: Tensor) -> bool:
        managed = find_managed(tensor)
        ours = (
            isinstance(managed, ReplicatedParameter) and managed.strategy is self._replica.strategy
        )
        return ours and managed is not None and managed.central is tensor

    def _is_ours(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a result of this replica or belongs to a parameter of its strategy."""
        if not tensor.is_leaf:  # an input that is a result of this replica
            return True
        managed, replica = find_managed(tensor), self._replica
        if not isinstance(managed, ReplicatedParameter) or managed.strategy is not replica.strategy:
            return False
        leaf = managed.by_replica.get(replica.id)
        if tensor is not managed.central and (leaf is None or leaf.tensor is not tensor):
            raise gradients.other_replicas_graph(replica)
        return True

    def _refuse_central(self, tensor: Tensor) -> None:
        managed = find_managed(tensor)
        assert isinstance(managed, ReplicatedParameter)
        raise ForeignParameterError(
            f"backward() in {self._replica!r} put a gradient on {managed.describe()} itself, not on this "
            "replica's view of it: the tensor was taken from the model outside the function given to "
            "run() (a list of parameters, a closure), so its gradient is not aggregated. Ask the "
            "model for it inside the function: model.parameters(), module.weight."
        )

    def _refuse_shared(self, tensor: Tensor) -> None:
        replica = self._replica
        seen: dict[int, tuple[Tensor, int]] = replica.group.shared.setdefault("foreign tensors", {})
        # setdefault is atomic: one replica is first. The dict keeps the tensor, so that its id is not reused.
        _, first = seen.setdefault(id(tensor), (tensor, replica.id))
        if first != replica.id:
            raise ForeignParameterError(
                f"backward() in {replica!r} of {replica.strategy!r} put a gradient on a tensor of "
                f"shape {tuple(tensor.shape)} that replica {first} trains as well and that belongs to "
                f"{owner_of(tensor)}: the replicas' gradients add up in its one .grad, which is of no use "
                f"now. {REMEDY}"
            )


def _leaves(roots: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors that take a gradient when ``roots`` are differentiated."""
    waiting: list[Any] = []
    for root in roots:
        node = root.grad_fn if isinstance(root, Tensor) else root.node
        if node is None:
            yield root
        else:
            waiting.append(node)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)  # AccumulateGrad has one
        if leaf is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _tensor_of(given: Any) -> Tensor | None:
    """Return the tensor that an input stands for: itself, or the leaf of a gradient edge."""
    return given if isinstance(given, Tensor) else getattr(given.node, "variable", None)


def owner_of(tensor: Tensor) -> str:
    """Return the strategy that a parameter belongs to, for error messages."""
    managed = find_managed(tensor)
    if managed is None:
        return "no strategy"
    return "no strategy any more" if managed.strategy is None else repr(managed.strategy)


def apply_patch() -> None:
    """Wrap the function that runs the autograd engine; raise if this torch has no such function."""
    plain = private_api.run_backward

    @eagerly
    @functools.wraps(plain)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        # args: gradients of the outputs, retain_graph, create_graph, inputs, and for grad() allow_unused
        replica = current_replica()
        if replica is None:
            return plain(outputs, *args, **kwargs)
        if kwargs.get("accumulate_grad"):
            return _backward(plain, replica, outputs, args, kwargs)
        return _grad(plain, outputs, args, kwargs)

    private_api.replace_run_backward(run_backward)
