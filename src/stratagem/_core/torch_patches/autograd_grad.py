"""``torch.autograd.grad(loss, params)`` in a replica, for parameters that were taken outside ``run``.

``params = list(model.parameters())`` outside ``run`` are the central parameters, the model in a replica computes with
the replica's leaves: torch would say that the parameters are not used in the graph, or give None under
``allow_unused=True``. A loss may also use both (a penalty over ``params``), and then its gradient is the sum of what
arrives at either. So in a replica the gradient of a parameter, whichever of its tensors is asked for, is that of
its leaf plus that of the central parameter. Nothing is put in any ``.grad``, so replicas cannot disturb each other.

``backward(inputs=params)`` does put it there: it means the leaves, and `foreign` refuses the pass if it
reached the central parameter as well.

`install` wraps the one function through which both reach the engine; not ``torch.autograd.grad`` itself, which
programs import by name before there is any strategy: docs/design/0004-wrapped-torch-methods.md.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem._core.context import current_replica
from stratagem._core.managed import find_managed
from stratagem._core.replicated_parameters import ReplicatedParameter
from stratagem._core.torch_patches.compiling import eagerly
from stratagem._core.torch_patches.private_api import ENGINE, explain

_log = logging.getLogger("stratagem.torch")


def own_leaf(tensor: Any) -> tuple[Any, Tensor | None]:
    """What stands for a tensor in this replica, and the central parameter behind it if there is one."""
    managed = find_managed(tensor) if isinstance(tensor, Tensor) else None
    if not isinstance(managed, ReplicatedParameter):
        return tensor, None
    central, leaf = managed.central, managed.resolve()
    if leaf is central:  # a replica of another strategy
        return tensor, None
    return (leaf if tensor is central else tensor), central


def _add(leafs: Tensor | None, centrals: Tensor | None) -> Tensor | None:
    if leafs is None or centrals is None:
        return centrals if leafs is None else leafs
    return leafs + centrals.to(leafs.device)


def _gradients(
    run: Any, outputs: Any, args: tuple[Any, ...], inputs: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """As the engine gives them, with `inputs` any of a parameter's tensors."""
    found = [own_leaf(each) for each in inputs]
    asked = [(i, each) for i, (_, each) in enumerate(found) if each is not None]
    if not asked:
        return run(outputs, *args, **kwargs)
    leaves = tuple(each for each, _ in found)
    if kwargs.get("accumulate_grad"):
        return run(outputs, *args[:3], leaves, *args[4:], **kwargs)
    asked = [(i, central) for i, central in asked if central.requires_grad]
    unused_allowed = args[4]
    got = run(outputs, *args[:3], (*leaves, *(each for _, each in asked)), True, **kwargs)
    results = list(got[: len(leaves)])
    for (i, _), more in zip(asked, got[len(leaves) :], strict=True):
        results[i] = _add(results[i], more)
    if not unused_allowed:
        for i, result in enumerate(results):
            if result is None:
                raise RuntimeError(  # in torch's own words
                    f"The differentiated Tensor at index {i} appears to not have been used in the "
                    "graph. Set allow_unused=True if this is the desired behavior."
                )
    return tuple(results)


_INSTALLED: list[Any] = []


def install() -> None:
    """Stand before the engine, once per process; the first strategy calls it."""
    if _INSTALLED:
        return
    autograd: Any = torch.autograd  # which does not export the name
    plain = getattr(autograd, "_engine_run_backward", None)
    if plain is None:
        _INSTALLED.append(None)
        _log.warning("%s", explain(ENGINE, "torch.autograd.grad of parameters taken outside run()"))
        return

    @eagerly
    @functools.wraps(plain)
    def engine(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        # args: gradients of the outputs, retain_graph, create_graph, inputs, and for grad() allow_unused
        if len(args) < 4 or not args[3] or current_replica() is None:
            return plain(outputs, *args, **kwargs)
        return _gradients(plain, outputs, args, args[3], kwargs)

    autograd._engine_run_backward = engine
    _INSTALLED.append(plain)
