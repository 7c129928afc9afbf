"""State dicts in which placeholders represent tensors on parameter servers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem._checkpoint import optimizer_names
from stratagem._checkpoint.server_group import (
    RemoteTensor,
    ServerGroup,
    is_plain_module,
    layout_of,
)
from stratagem._checkpoint.server_parts import ServerCut
from stratagem._checkpoint.server_reads import ServerReads
from stratagem._ps.blocks.manifest import StoredTensor

_NUMBERS = (type(None), bool, int, float)


def remote_tensors(values: Iterable[Any], group: ServerGroup) -> list[RemoteTensor]:
    """Return the tensors of live objects that are on the servers of one strategy."""
    found = []
    for value in values:
        if isinstance(value, nn.Module):
            if is_plain_module(value):
                with group.frozen():
                    found += [layout_of(group, one) for one in kept_state(value).values()]
        elif isinstance(value, Optimizer):
            for parameters in value.param_groups:
                found += [layout_of(group, one) for one in parameters["params"]]
        else:
            found.append(layout_of(group, value))
    return [one for one in found if one is not None]


def kept_state(module: nn.Module) -> OrderedDict[str, Any]:
    """Return a module's state dict of the parameters and buffers themselves."""
    state: Any = module.state_dict(keep_vars=True)
    return cast("OrderedDict[str, Any]", state)  # with torch's versions as an attribute


def on_servers(value: Any, cuts: Sequence[ServerCut]) -> RemoteTensor | None:
    """Return a parameter, buffer or variable as a tensor on the servers of a cut, if it is there."""
    for cut in cuts:
        found = layout_of(cut.group, value)
        if found is not None:
            return found
    return None


def without_rows(state: OrderedDict[str, Any], cuts: Sequence[ServerCut]) -> OrderedDict[str, Any]:
    """Replace tensors on servers by their places, in a state dict of the tensors themselves."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            remote = on_servers(value, cuts)
            state[key] = value.detach() if remote is None else remote
    return state


def note_server_state(optimizer: Optimizer, state: Any, cuts: Sequence[ServerCut]) -> None:
    """Replace state that is on servers by its places, in an optimizer's state dict."""
    if not optimizer_names.has_usual_form(state):
        return
    for cut in cuts:
        number = cut.group.number_of(optimizer)
        if number is None:
            continue
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                where = cut.group.find(parameter)
                if where is not None:
                    found = cut.optimizer_state(where, number)
                    state["state"].pop(key, None)
                    if found:
                        state["state"][key] = found


def take_state(
    servers: ServerReads,
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    names: list[list[str]],
    stored: Mapping[str, StoredTensor],
) -> set[str]:
    """Let servers read their optimizer state; return the names of the parameters it is for."""
    taken: set[str] = set()
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        for parameter, name in zip(group["params"], group_names, strict=True):
            tensors, plain = {}, {}
            for key, entry in saved.get(name, {}).items():
                tensor = entry.get("$tensor") if isinstance(entry, dict) else None
                if tensor is not None:
                    tensors[key] = (tensor, stored[tensor])
                else:
                    plain[key] = entry
            if tensors and all(type(one) in _NUMBERS for one in plain.values()):
                taken |= servers.take_state(optimizer, parameter, name, tensors, plain)
    return taken
