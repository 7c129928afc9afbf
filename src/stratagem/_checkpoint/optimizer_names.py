"""Optimizer state by parameter name instead of by position.

``optimizer.state_dict()`` numbers parameters. A checkpoint names them, as torch's distributed checkpoints
do, so that state and parameter match in any order, and plain PyTorch can load it with
``set_optimizer_state_dict``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer


def parameter_names(optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> list[list[str]]:
    """Return the names of an optimizer's parameters, group by group.

    Names are those inside the one module of the checkpoint that has all of the parameters. If they
    belong to several modules, the modules' names in the checkpoint are prepended. Parameters of no
    module are numbered.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> parameter_names(torch.optim.SGD(model.parameters()), {"model": model})
        [['weight', 'bias']]
    """
    groups = [list(group["params"]) for group in optimizer.param_groups]
    wanted = {id(parameter) for group in groups for parameter in group}
    found: dict[int, str] = {}
    for prefix, module in modules.items():
        inside = _names_inside(module)
        if wanted <= inside.keys():
            found = inside
            break
        for number, name in inside.items():
            found.setdefault(number, f"{prefix}.{name}")
    nameless = [parameter for group in groups for parameter in group if id(parameter) not in found]
    for number, parameter in enumerate(nameless):
        found[id(parameter)] = f"parameter_{number}"
    return [[found[id(parameter)] for parameter in group] for group in groups]


def _names_inside(module: nn.Module) -> dict[int, str]:
    """Return the names of a module's parameters by their ids, as ``named_parameters`` gives them.

    Past the lookup by name, which would fetch the newest values from parameter servers.
    """
    found: dict[int, str] = {}
    for prefix, one in module.named_modules():
        for name, parameter in dict.items(one._parameters):
            if parameter is not None:
                found.setdefault(id(parameter), f"{prefix}.{name}" if prefix else name)
    return found


def has_usual_form(state: Any) -> bool:
    """Return whether a state dict is of the form that torch's own optimizers use."""
    return (
        isinstance(state, Mapping)
        and isinstance(state.get("state"), Mapping)
        and isinstance(state.get("param_groups"), list)
        and all(
            isinstance(group, Mapping) and isinstance(group.get("params"), list)
            for group in state["param_groups"]
        )
    )


def to_names(state: Mapping[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """Return a state dict of the usual form with names in place of numbers."""
    name_of: dict[Any, str] = {}
    groups = []
    for group, group_names in zip(state["param_groups"], names, strict=True):
        name_of.update(zip(group["params"], group_names, strict=True))
        groups.append({**group, "params": list(group_names)})
    by_name = {name_of.get(key, key): value for key, value in state["state"].items()}
    return {**state, "state": by_name, "param_groups": groups}


def to_numbers(
    state: Mapping[str, Any], names: list[list[str]], current: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a named state dict in the numbered form that an optimizer's `load_state_dict` takes.

    Args:
        state: the named one.
        names: of the optimizer's parameters, group by group.
        current: the optimizer's own state dict. Its groups stand in for groups that `state` lacks.
    """
    number_of: dict[str, int] = {}
    groups = []
    saved_groups = state["param_groups"]
    same = len(saved_groups) == len(names)
    for place, (group, group_names) in enumerate(zip(current["param_groups"], names, strict=True)):
        number_of.update(zip(group_names, group["params"], strict=True))
        settings = saved_groups[place] if same else group
        groups.append({**settings, "params": list(group["params"])})
    saved_names = {name for group in saved_groups for name in group["params"]}
    by_number = {
        number_of.get(key, key): value
        for key, value in state["state"].items()
        if key in number_of or key not in saved_names  # the latter: kept for no parameter
    }
    return {**state, "state": by_number, "param_groups": groups}


def differences(state: Mapping[str, Any], names: list[list[str]]) -> tuple[list[str], list[str]]:
    """Return the parameters that a named state dict lacks, and those it has in excess or elsewhere.

    Example:
        >>> differences({"state": {}, "param_groups": [{"params": ["a", "b"]}]}, [["b", "c"]])
        (['c'], ['a'])
    """
    saved = [set(group["params"]) for group in state["param_groups"]]
    wanted = [set(group) for group in names]
    if len(saved) != len(wanted):
        missing = set().union(*wanted) - set().union(*saved)
        unexpected = set().union(*saved) - set().union(*wanted)
        return sorted(missing), sorted(unexpected) or [f"{len(saved)} groups, not {len(wanted)}"]
    pairs = list(zip(saved, wanted, strict=True))
    return (
        sorted(set().union(*(mine - theirs for theirs, mine in pairs))),
        sorted(set().union(*(theirs - mine for theirs, mine in pairs))),
    )
