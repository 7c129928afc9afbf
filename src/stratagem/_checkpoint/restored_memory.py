"""Memory of live objects into which a restore reads directly.

A restore changes nothing before everything is verified. Large tensors in the host's memory are therefore read twice: once to
compare checksums, in a small buffer, and once into their place. Reading them into a second copy first would take longer, because
the kernel has to provide the memory for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem._checkpoint import optimizer_names
from stratagem._checkpoint.live_state import kind_of, live_in, modules_in
from stratagem._checkpoint.server_group import is_plain_module
from stratagem._core.managed import find_managed
from stratagem._ps.blocks.manifest import StoredTensor
from stratagem._ps.coordinator.coordinator_variables import CoordinatorParameter
from stratagem.errors import CheckpointCorrupt

LEAST_BYTES: Final = 1 << 20
"""Smaller tensors are read once, into new memory."""


@contextmanager
def changing_objects() -> Iterator[None]:
    """Let errors about files say that objects are partly restored: a file was damaged after it was verified."""
    try:
        yield
    except CheckpointCorrupt as error:
        error.objects_changed = True
        raise


def memory_to_restore(
    objects: Mapping[str, Any], skeleton: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, Tensor]:
    """Return the memory of live tensors by their names in a checkpoint, where these can be read in place.

    Only parameters, buffers and optimizer state that are loaded as torch does it: the value is copied to where it
    already is, or kept as it is.
    """
    found: dict[str, Tensor] = {}
    twice: set[str] = set()
    for name, tensor in _pairs(objects, skeleton):
        if name in found:
            twice.add(name)  # tied, or in two objects
        elif name in stored and _can_be_read_into(tensor, stored[name]):
            found[name] = tensor.detach()
    names = {one.same_as for one in stored.values()} | twice
    return {name: tensor for name, tensor in found.items() if name not in names}


def _pairs(objects: Mapping[str, Any], skeleton: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield names in the checkpoint, and tensors of the objects."""
    modules = modules_in(objects)
    for path, value in live_in(dict(objects)):
        entry: Any = skeleton
        for key in path:
            try:
                entry = entry[key]
            except (KeyError, IndexError, TypeError):
                entry = None
                break
        if not isinstance(entry, Mapping) or entry.get("$object") != kind_of(value):
            continue
        if isinstance(value, nn.Module) and is_plain_module(value):
            yield from _of_module(value, entry["state"])
        elif isinstance(value, Optimizer) and entry.get("by_name"):
            names = optimizer_names.parameter_names(value, modules)
            yield from _of_optimizer(value, entry["state"]["state"], names)


def _of_module(module: nn.Module, saved: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for prefix, one in module.named_modules(remove_duplicate=False):
        # Past the lookup by name, which fetches the newest values from parameter servers.
        for key, value in (*dict.items(one._parameters), *dict.items(one._buffers)):
            entry = saved.get(f"{prefix}.{key}" if prefix else key)
            if value is not None and entry is not None and _is_plain_entry(entry):
                yield entry["$tensor"], value


def _of_optimizer(
    optimizer: Optimizer, saved: Mapping[str, Any], names: list[list[str]]
) -> Iterator[tuple[str, Tensor]]:
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        for parameter, name in zip(group["params"], of_group, strict=True):
            if isinstance(find_managed(parameter), CoordinatorParameter):
                continue
            known: Any = optimizer.state  # not by index, which would make an entry
            state = known.get(parameter, {})
            for key, entry in saved.get(name, {}).items():
                if _is_plain_entry(entry) and isinstance(state.get(key), Tensor):
                    yield entry["$tensor"], state[key]


def _is_plain_entry(entry: Any) -> bool:
    return isinstance(entry, Mapping) and set(entry) == {"$tensor"}


def _can_be_read_into(tensor: Tensor, stored: StoredTensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        and (tuple(tensor.shape), tensor.dtype) == (stored.shape, stored.torch_dtype)
        and tensor.nbytes >= LEAST_BYTES
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and not (stored.per_shard or stored.has_holes or stored.same_as)
        and not isinstance(find_managed(tensor), CoordinatorParameter)
    )
