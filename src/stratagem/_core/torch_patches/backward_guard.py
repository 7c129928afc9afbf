"""A backward pass in a replica that reaches a tensor all replicas share is refused.

A model made outside the scope, a bare ``nn.Parameter`` or a central parameter caught in a closure has one
``.grad`` for all replicas: R backward passes add up in it, R times too much, whoever steps afterwards.
No leaf of ours is reached then, so no hook of ours fires; hence `install` wraps
``torch.autograd.backward`` (``Tensor.backward`` goes through it), and after a pass in a replica the graph
is searched for the tensors that took a gradient:

- the replica's own leaf of a parameter: what ought to be there;
- another tensor of a home of this strategy (the central parameter): refused at once;
- any other leaf: refused when a second replica of the run reaches the same one. A tensor that only one
  replica reaches (made in the replica: an adversarial input, a module for one call) is its own business.

Searching costs microseconds per node, so a pass like an earlier one is not searched again: one that came
after as many new graph nodes of this thread and gave as many of our leaves a gradient. In case two
such passes do differ, the search is repeated at the 2nd, 4th, 8th, … of them.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from stratagem._core import gradients
from stratagem._core.context import Replica, current_replica, thread_notes
from stratagem._core.managed import find_managed
from stratagem._core.replicated_parameters import ReplicatedParameter
from stratagem._core.torch_patches import private_api
from stratagem._core.torch_patches.autograd_grad import own_leaf
from stratagem._core.torch_patches.compiling import eagerly
from stratagem.errors import ForeignParameterError

REMEDY = (
    "Create the model inside `with strategy.scope():` (one made elsewhere: make it a submodule of one "
    "created there; a bare tensor: make it an nn.Parameter of an nn.Module created there), so that "
    "each replica gets its own view of it and gradients are aggregated; or train it outside run()."
)

KINDS_KEPT = 256
"""How many kinds of passes a thread remembers; a program with more searches some of them again."""


class _Passes:
    """The backward passes of one thread that were searched and found clean."""

    __slots__ = ("clean", "nodes", "strategy")

    def __init__(self, strategy: Any) -> None:
        self.strategy = weakref.ref(strategy)
        self.nodes = 0  # the thread's graph nodes at the end of the last pass
        self.clean: dict[tuple[int, int], int] = {}  # (new nodes, leaves of ours) -> passes


def after_backward(replica: Replica, roots: Any, inputs: Any) -> None:
    """Refuse the pass that has just ended if it reached what the replicas share."""
    notes = thread_notes()
    passes: _Passes | None = notes.get("passes")
    if passes is None or passes.strategy() is not replica.strategy:
        passes = notes["passes"] = _Passes(replica.strategy)
    nodes = private_api.graph_nodes()
    record = replica.record
    ours = 0
    if record is not None:
        ours, record.arrived = record.arrived, 0
    kind = (nodes - passes.nodes, ours)
    passes.nodes = nodes
    clean = passes.clean
    count = clean.get(kind, 0) + 1
    if count & (count - 1) == 0 and not _search(replica, roots, inputs):
        clean.pop(kind, None)  # tensors of its own: whether they are shared is asked every time
        return
    if count == 1 and len(clean) >= KINDS_KEPT:
        clean.clear()
    clean[kind] = count


def _search(replica: Replica, roots: Any, inputs: Any) -> bool:
    """Whether the pass reached nothing but the replica's own leaves; raises if something shared."""
    reached = _leaves(_several(roots))
    if inputs is not None:
        given = [own_leaf(each) for each in _given(_several(inputs))]
        centrals = {id(central) for _, central in given}
        # A parameter among the inputs that the graph also holds as central got part of its gradient.
        reached = itertools.chain(
            (each for each, _ in given), (each for each in reached if id(each) in centrals)
        )
    others = [each for each in reached if not _is_own(each, replica)]
    seen: dict[int, tuple[Tensor, int]] = replica.group.notes.setdefault("foreign", {})
    for each in others:
        # setdefault is one step for the interpreter: of two replicas exactly one is first. The
        # tensor is kept, so that its id means it until the run ends.
        _, first = seen.setdefault(id(each), (each, replica.id))
        if first != replica.id:
            raise ForeignParameterError(
                f"backward() in {replica!r} of {replica.strategy!r} put a gradient on a tensor of "
                f"shape {tuple(each.shape)} that replica {first} trains as well and that belongs to "
                f"{_whose(each)}: the replicas' gradients add up in its one .grad, which is of no use "
                f"now. {REMEDY}"
            )
    return not others


def _is_own(tensor: Tensor, replica: Replica) -> bool:
    if not tensor.is_leaf:  # given as ``inputs``: a result of this replica
        return True
    managed = find_managed(tensor)
    if not isinstance(managed, ReplicatedParameter) or managed.strategy is not replica.strategy:
        return False
    leaf = managed.by_replica.get(replica.id)
    if leaf is None or leaf.tensor is not tensor:
        raise ForeignParameterError(
            f"backward() in {replica!r} put a gradient on {managed.describe()} itself, not on this "
            "replica's view of it: the tensor was taken from the model outside the function given to "
            "run() (a list of parameters, a closure), so its gradient is not aggregated. Ask the "
            "model for it inside the function: model.parameters(), module.weight."
        )
    return True


def _leaves(roots: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors that take a gradient when ``roots`` are differentiated."""
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


def _given(inputs: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among ``inputs``; an edge of the graph stands for the leaf it leads to, if any."""
    for each in inputs:
        found = each if isinstance(each, Tensor) else getattr(each.node, "variable", None)
        if found is not None:
            yield found


def _several(given: Any) -> Iterable[Any]:
    """What torch takes as roots or inputs: a tensor or an edge, several of them, or a dict."""
    if isinstance(given, Tensor | GradientEdge):
        return (given,)
    return given.values() if isinstance(given, dict) else given


def _whose(tensor: Tensor) -> str:
    managed = find_managed(tensor)
    if managed is None:
        return "no strategy"
    return "no strategy any more" if managed.strategy is None else repr(managed.strategy)


_INSTALLED: list[Any] = []


def install() -> None:
    """Look at every backward pass in a replica, once per process; the first strategy calls it."""
    if _INSTALLED:
        return
    plain = torch.autograd.backward

    @eagerly
    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> None:
        try:
            plain(*args, **kwargs)
        except BaseException:
            replica = current_replica()
            if replica is not None and replica.record is not None:
                gradients.forget_pass(replica.record)  # the step may catch this and go on
            raise
        replica = current_replica()
        if replica is not None and replica.group.size > 1:
            roots = args[0] if args else kwargs["tensors"]
            after_backward(replica, roots, args[5] if len(args) > 5 else kwargs.get("inputs"))

    torch.autograd.backward = backward
    _INSTALLED.append(plain)
