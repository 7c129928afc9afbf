"""Calls of a Keras model inside a step: each call runs on all replicas, with their rows.

Keras' ``train_step``, ``test_step`` and ``predict_step``, and a model's own versions of them, run once, on the calling thread, with the
whole batch. Only the outermost call of a layer or model in them is split: its input tensors are cut into one part per
replica, the replicas call the layer, and their outputs are joined in order. Loss, metrics and optimizer therefore see the whole
batch, and give the numbers of one device for every loss, weight, metric and optimizer. The outputs stay connected to the
replicas' graphs, so one backward pass computes the gradients of all replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from stratagem._core import torch_patches
from stratagem._core.context import current_replica
from stratagem._core.replicas import ReplicaGroup
from stratagem._core.torch_patches import compiling
from stratagem._core.torch_patches.private_api import in_backward
from stratagem._data.batch_rows import split_sizes
from stratagem._keras import server_steps
from stratagem._keras.forward_pass import KEY, ForwardPass
from stratagem._keras.keras_names import names
from stratagem._keras.model_strategies import is_on_servers, strategy_of
from stratagem._strategies.base import Strategy
from stratagem.errors import ReplicaError

_MARK = "stratagem_split_strategy"
"""The attribute of Keras' state of this thread that holds the step while it runs."""


def apply_patch() -> None:
    """Let steps run with split calls, and layers notice them."""
    trainer, layer = names().Trainer, names().Layer
    for kind in ("train", "test", "predict"):
        setattr(trainer, f"make_{kind}_function", _making(trainer, kind))
    call, add_loss, clear_losses = layer.__call__, layer.add_loss, layer._clear_losses
    state = names().global_state

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        step = state.get_global_attribute(_MARK)
        if (
            step is None
            or state.get_global_attribute("current_call_ctx") is not None
            or in_backward()  # keras.RematScope: a replica's part is computed again
        ):
            return call(self, *args, **kwargs)
        return _call_on_replicas(step, self, call, args, kwargs)

    @functools.wraps(add_loss)
    def record_loss(self: Any, loss: Any) -> None:
        running = _running_pass()
        if running is None:
            add_loss(self, loss)
        else:
            running[0].add_losses(running[1], self, names().tree.flatten(loss))

    @functools.wraps(clear_losses)
    def keep_losses(self: Any) -> None:
        if _running_pass() is None:
            clear_losses(self)

    layer.__call__ = __call__
    layer.add_loss = record_loss
    layer._clear_losses = keep_losses


def _running_pass() -> tuple[ForwardPass, int] | None:
    replica = current_replica()
    found = None if replica is None else replica.group.shared.get(KEY)
    return None if found is None or replica is None else (found, replica.id)


def _making(trainer: Any, kind: str) -> Callable[..., Any]:
    make = getattr(trainer, f"make_{kind}_function")
    attribute = f"{kind}_function"

    @functools.wraps(make)
    def make_function(self: Any, force: bool = False) -> Any:
        strategy = strategy_of(self)
        if strategy is None or not (is_on_servers(strategy) or strategy._needs_replica_patches()):
            return make(self, force=force)
        if is_on_servers(strategy):
            setattr(self, attribute, server_steps.step_function(self, kind))
            return getattr(self, attribute)
        if isinstance(getattr(self, attribute), _SplitStep) and not force:
            return getattr(self, attribute)
        compiled = self.jit_compile
        self._jit_compile = False  # the replicas' calls are compiled, not the step around them
        make(self, force=force)
        self._jit_compile = compiled
        setattr(self, attribute, _SplitStep(strategy, getattr(self, attribute), compiled))
        return None

    return make_function


class _SplitStep:
    """A train, test or predict function whose layer calls run on all replicas.

    With ``jit_compile=True`` Keras compiles the function. The calls on replicas are a graph break in it, and each replica runs a
    compiled call.
    """

    def __init__(self, strategy: Strategy, function: Callable[[Any], Any], compiled: bool) -> None:
        self.strategy = strategy
        self._function = function
        self.call = torch.compile(_call_layer) if compiled else _call_layer

    def __call__(self, data: Any) -> Any:
        state = names().global_state
        state.set_global_attribute(_MARK, self)
        try:
            return self._function(data)
        finally:
            state.set_global_attribute(_MARK, None)


# ------------------------------------------------------------------ one call


def _call_layer(call: Callable[..., Any], layer: Any, args: Any, kwargs: Any) -> Any:
    """Call a layer, by Keras' own ``__call__``."""
    return call(layer, *args, **kwargs)


def _call_on_replicas(
    step: _SplitStep, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call a layer on the replicas, each with its rows; return the joined outputs."""
    strategy = step.strategy
    tree = names().tree
    args, kwargs = tree.map_structure(_as_tensor, (args, kwargs))
    rows = _count_rows(layer, (args, kwargs))
    if rows == 0:
        return call(layer, *args, **kwargs)
    _build(layer, args, kwargs)
    devices = strategy._compute_devices[: max(1, rows)]
    sizes = split_sizes(rows, len(devices))
    layer._clear_losses()
    running = ForwardPass(strategy._central_device, sizes)
    group = ReplicaGroup(strategy, devices, rows=sizes, parallel=strategy._parallel_replicas)
    group.shared[KEY] = running
    group.read_central = running.central_value  # for the parameters of torch modules in the layer
    settings = _caller_state()
    calls = []
    for i, device in enumerate(devices):
        first = sum(sizes[:i])
        part = tree.map_structure(
            functools.partial(_part, first, sizes[i], device.torch_device), (args, kwargs)
        )
        calls.append(
            functools.partial(
                _call_here,
                layer,
                functools.partial(step.call, call),
                part,
                settings,
                device.torch_device,
            )
        )
    if len(calls) == 1:
        outputs = [group.run_alone(calls[0], (), {})]
    else:
        compiling.skip_frames()
        torch_patches.install(torch_patches.RANDOM)
        outputs = group.run(calls, strategy._threads)
    running.finish()
    return _join(layer, outputs, sizes, strategy._central_device)


def _call_here(
    layer: Any, call: Callable[..., Any], part: Any, settings: dict[str, Any], device: torch.device
) -> Any:
    """Call the layer in a replica, under the Keras state of the calling thread."""
    state = names().global_state.GLOBAL_STATE_TRACKER.__dict__
    before = dict(state)
    state.clear()
    state.update(
        {name: list(v) if isinstance(v, list) else v for name, v in settings.items()},
        torch_device=str(device),
    )
    try:
        return call(layer, *part)
    finally:
        state.clear()
        state.update(before)


def _caller_state() -> dict[str, Any]:
    """Return Keras' thread-local state (name scopes, dtype policy, autocast) without our mark."""
    state = dict(names().global_state.GLOBAL_STATE_TRACKER.__dict__)
    state.pop(_MARK, None)
    return state


def _build(layer: Any, args: Any, kwargs: Any) -> None:
    """Create the variables of a layer that is called for the first time, before the replicas run."""
    if all(each.built for each in layer._flatten_layers()):
        return
    keras = names().keras
    symbolic = names().tree.map_structure(
        lambda leaf: (
            keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype))
            if isinstance(leaf, torch.Tensor)
            else leaf
        ),
        (args, kwargs),
    )
    state = names().global_state
    step = state.get_global_attribute(_MARK)
    state.set_global_attribute(_MARK, None)  # a symbolic call is not split
    try:
        names().backend.compute_output_spec(layer, *symbolic[0], **symbolic[1])
    finally:
        state.set_global_attribute(_MARK, step)


def build_for(model: Any, x: Any) -> None:
    """Create the variables of a model that is called for the first time, with the shapes of ``x``."""
    _build(model, (names().tree.map_structure(_as_tensor, x),), {})


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
        return names().backend.convert_to_tensor(leaf)
    return leaf


def _count_rows(layer: Any, inputs: Any) -> int:
    """Return the number of rows that all input tensors have; 0 if there is none."""
    counts = {
        len(leaf)
        for leaf in names().tree.flatten(inputs)
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0
    }
    if len(counts) > 1:
        raise ReplicaError(
            f"layer {layer.name!r} was called with tensors of {sorted(counts)} rows inside a step that runs on several "
            "replicas. The strategy divides every input by its first dimension, so all need the same one: give a "
            "tensor that is not divided as an attribute of the layer, or as a scalar."
        )
    return counts.pop() if counts else 0


def _part(first: int, size: int, device: torch.device, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.ndim == 0:
        return leaf.to(device)
    backend = names().backend
    part = leaf[first : first + size].to(device)
    mask = backend.get_keras_mask(leaf)
    if mask is not None:
        backend.set_keras_mask(part, mask[first : first + size].to(device))
    return part


def _join(layer: Any, outputs: list[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """Join the outputs of the replicas in row order, with their masks."""
    tree, backend = names().tree, names().backend
    flat = [tree.flatten(output) for output in outputs]
    joined = []
    for parts in zip(*flat, strict=True):
        if not isinstance(parts[0], torch.Tensor):
            joined.append(parts[0])
            continue
        if any(part.ndim == 0 or len(part) != n for part, n in zip(parts, sizes, strict=True)):
            raise ReplicaError(
                f"layer {layer.name!r} returned a tensor of shape {tuple(parts[0].shape)} for {sizes[0]} rows. On several "
                "replicas every output needs one entry per input row, so that outputs can be joined. Compute values "
                "over the whole batch in train_step or compute_loss, which see all rows."
            )
        whole = torch.cat([part.to(device) for part in parts])
        masks = [backend.get_keras_mask(part) for part in parts]
        if masks[0] is not None:
            backend.set_keras_mask(whole, torch.cat([mask.to(device) for mask in masks]))
        joined.append(whole)
    return tree.pack_sequence_as(outputs[0], joined)
