"""All changes to torch's own behaviour, installed by one function.

Stratagem avoids monkeypatching. These are the exceptions; docs/design/0004-torch-patches.md gives the reasons. Each
patch is one module with one function ``apply_patch``; `install` applies a group of them once per process. Outside replicas
every patched function does what torch's does.

| group | module | what is patched | why | cost | if this torch lacks it |
|---|---|---|---|---|---|
| STRATEGY | `module_members` | torch's registration hooks (public); ``_parameters`` and ``_buffers`` of modules under a scope | each replica sees its own tensors | one thread-local read per registration | an error when a module is built under a scope |
| STRATEGY | `special_modules` | classes of recurrent, lazy, SyncBatchNorm and weight-normalised modules under a scope | they keep tensors elsewhere | none for other modules | an error at their first call in a replica |
| STRATEGY | `optimizer_step` | ``Optimizer.add_param_group``, ``__setstate__``, ``zero_grad``; ``step`` of instances over managed parameters; the global step pre-hook (public) | one step for all replicas | 1 µs per step | public names |
| REPLICAS | `parameter_attributes` | ``nn.Parameter.grad``, ``nn.Parameter.data`` | gradients of parameters taken outside ``run``; writes are noticed | 0.2 µs per access | public names |
| REPLICAS | `autograd_engine` | ``torch.autograd._engine_run_backward`` | gradients of central parameters go to the replica's leaves; tensors that replicas share are refused | 1 µs per pass | `NotImplementedError` with several replicas |
| REPLICAS | `schedulers` | ``step`` of every ``LRScheduler`` class | one step for all replicas | 0.2 µs per step | public names |
| REPLICAS | `grad_scaler` | ``GradScaler.unscale_``, ``step``, ``update`` | stages per replica | 0.2 µs per call | `NotImplementedError` at the scaler's first use in a replica |
| RANDOM | `random_streams` | kernels on an unused dispatch key; ``torch.random.default_generator`` | a random stream per replica | 60 ms once; 5 µs per random operator in a replica | `NotImplementedError` with several replicas |
| CHANGES | `parameter_attributes` | as above | writes through ``data`` on the coordinator reach the servers | 0.2 µs per access | public names |
| CHANGES | `change_notes` | ``nn.Module.__setattr__``, ``__delattr__``; ``RemovableHandle.__init__``, ``remove`` | changes of modules are sent to workers | 0.7 µs per attribute set | public names |
| ARRAYS | `numpy_views` | ``Tensor.numpy`` | writes of functions through arrays are noticed | 0.5 µs per call | public names |

`private_api` looks every private name up once. Names with a replacement cost speed only; the others raise
`NotImplementedError` with the name at their first use. ``stratagem doctor`` lists what is missing. `compiling` is not a patch: it
keeps ``torch.compile`` out of our functions.
"""

from __future__ import annotations

import threading
from typing import Final

STRATEGY: Final = "strategy"
"""Patches that any strategy needs."""
REPLICAS: Final = "replicas"
"""Patches for strategies with several replicas, or with a replica away from the variables."""
RANDOM: Final = "random"
"""Patches for code with random streams of its own: several replicas, input functions."""
CHANGES: Final = "changes"
"""Patches for a process that coordinates workers."""
ARRAYS: Final = "arrays"
"""Patches for a process of workers."""

_installed: set[str] = set()
_installing = threading.Lock()


def install(group: str) -> None:
    """Apply a group of patches, once per process. Every later call is one set lookup."""
    if group not in _installed:
        with _installing:
            if group not in _installed:
                _apply(group)
                _installed.add(group)


def _apply(group: str) -> None:
    # Imported here: most modules of this package import `_core` modules that import `private_api`.
    from stratagem._core.torch_patches import (
        autograd_engine,
        change_notes,
        grad_scaler,
        module_members,
        numpy_views,
        optimizer_step,
        parameter_attributes,
        random_streams,
        schedulers,
    )

    modules = {
        STRATEGY: (module_members, optimizer_step),
        REPLICAS: (autograd_engine, parameter_attributes, schedulers, grad_scaler),
        RANDOM: (random_streams,),
        CHANGES: (change_notes, parameter_attributes),
        ARRAYS: (numpy_views,),
    }
    for module in modules[group]:
        module.apply_patch()
