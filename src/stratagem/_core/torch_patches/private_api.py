"""What is asked of torch beyond its documented interface: found here, by name, and nowhere else.

Some of what replicas need has no public door in torch (`docs/design/0003`, `0004`). A release of torch may move or drop such a name without
notice. Then either something slower does the same, or whoever needs it is told which name is missing in which torch, and for
what; everything else goes on working. ``stratagem doctor`` lists what is missing before anybody needs it.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, NoReturn, TypeVar

import torch
from torch import Tensor, nn

TRIED: Final = "2.12 to 2.15"
"""Releases of torch that parts of the test suite ran with."""

MISSING: Final[dict[str, str]] = {}
"""Names that this torch does not have, and what for."""

_SLOWER: Final[set[str]] = set()
"""Those of them without which everything works, some of it slower."""

_T = TypeVar("_T")


def _look(path: str) -> Any:
    """What stands at a dotted path; raises AttributeError or ImportError."""
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for count, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            if part.startswith("__"):
                raise
            found = importlib.import_module(".".join(parts[:count]))
    return found


def _find(path: str, purpose: str, *, instead: Any = None) -> Any:
    """What torch has there; else what does the same, or a function that says what is missing."""
    try:
        return _look(path)
    except (AttributeError, ImportError):
        MISSING[path] = purpose
        if instead is not None:
            _SLOWER.add(path)
            return instead

        def absent(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(explain(path, purpose))

        return absent


def explain(path: str, purpose: str) -> str:
    """The sentence about a name that is missing.

    Example:
        >>> from stratagem._core.torch_patches.private_api import explain
        >>> print(explain("torch._C._gone", "device scopes").partition(":")[0])
        torch ... has no torch._C._gone, which Stratagem uses for device scopes
    """
    return (
        f"torch {torch.__version__} has no {path}, which Stratagem uses for {purpose}: use a release of "
        f"torch that it was tried with ({TRIED}), or a newer Stratagem. `stratagem doctor` lists "
        f"everything that is missing."
    )


# ------------------------------------------------------------------ modes and guards

function_modes: Callable[[], int] = _find("torch._C._len_torch_function_stack", "device scopes")
"""How many torch function modes are open in this thread."""

dispatch_modes: Callable[[], int] = _find(
    "torch._C._len_torch_dispatch_stack", "random numbers in compiled steps"
)

WithoutSubclasses: Callable[[], AbstractContextManager[object]] = _find(
    "torch._C.DisableTorchFunctionSubclass", "sharded tables"
)
"""In it, tensors of our own classes are plain tensors to torch."""

any_autocast: Callable[[], bool] = _find(
    "torch._C._is_any_autocast_enabled", "autocast around run()", instead=lambda: True
)

set_grad_enabled: Callable[[bool], object] = _find(
    "torch._C._set_grad_enabled", "no_grad() around run()", instead=torch.set_grad_enabled
)

device_context: Any = _find("torch._GLOBAL_DEVICE_CONTEXT", "torch.set_default_device in scopes")


def profiling() -> bool:
    """Whether torch's profiler runs; a variable of a module, so it is looked up each time."""
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))


# ------------------------------------------------------------------ random numbers (0003)

IncludeKey: Callable[[Any], AbstractContextManager[object]] = _find(
    "torch._C._IncludeDispatchKeyGuard", "random numbers in replicas"
)
ExcludeKeys: Callable[[Any], AbstractContextManager[object]] = _find(
    "torch._C._ExcludeDispatchKeyGuard", "random numbers in replicas"
)
KeySet: Callable[[Any], Any] = _find("torch._C.DispatchKeySet", "random numbers in replicas")
parse_key: Callable[[str], Any] = _find(
    "torch._C._parse_dispatch_key", "random numbers in replicas"
)
all_schemas: Callable[[], Any] = _find(
    "torch._C._jit_get_all_schemas", "random numbers in replicas"
)
WithoutTransforms: Callable[[], AbstractContextManager[object]] = _find(
    "torch._C._DisableFuncTorch", "random numbers inside torch.func"
)

# ------------------------------------------------------------------ torch.func

in_transform: Callable[[], Any] = _find(
    "torch._C._functorch.peek_interpreter_stack", "torch.func in replicas"
)
"""Not None inside ``torch.func.grad``, ``vmap`` and the like."""

outside_all_transforms: Callable[[], AbstractContextManager[object]] = _find(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", "torch.func in replicas"
)

# ------------------------------------------------------------------ autograd (0004)

queue_callback: Callable[[Callable[[], None]], None] = _find(
    "torch.autograd.Variable._execution_engine.queue_callback", "replicas meeting after backward()"
)

# Unknown: then nobody writes into it, and it is copied.
storage_users: Callable[[int], int] = _find(
    "torch._C._storage_Use_Count", "gradients combined in place", instead=lambda cdata: 1 << 30
)

_passes = itertools.count(1)

# Two differences of squares are never alike: no pass is taken for one of a kind that was searched already.
graph_nodes: Callable[[], int] = _find(
    "torch._C._autograd._get_sequence_nr",
    "finding tensors that replicas share, without searching every pass",
    instead=lambda: next(_passes) ** 2,
)
"""How many nodes of autograd's graph this thread has made so far."""

# ------------------------------------------------------------------ torch.compile

compiler_here: Callable[[], Any] = _find(
    "torch._C._dynamo.eval_frame.get_eval_frame_callback", "torch.compile", instead=lambda: True
)
"""Not None if the compiler watches this thread."""

disable_compiler: Callable[[_T], _T] = _find(
    "torch._compile._disable_dynamo", "torch.compile", instead=torch.compiler.disable
)

# ------------------------------------------------------------------ modules and optimizers

refresh_scaler_state: Callable[[], dict[str, Any]] = _find(
    "torch.amp.grad_scaler._refresh_per_optimizer_state", "GradScaler in replicas"
)
inject_class: Callable[[nn.Module], None] = _find(
    "torch.nn.utils.parametrize._inject_new_class", "parametrized modules on workers"
)
inject_property: Callable[[nn.Module, str], None] = _find(
    "torch.nn.utils.parametrize._inject_property", "parametrized modules on workers"
)

ENGINE: Final = "torch.autograd._engine_run_backward"
"""What ``torch.autograd.grad`` and ``backward`` call; `differentiated` stands before it."""

_ELSEWHERE: Final = {
    # Used where they belong to torch's own objects; only looked for here.
    ENGINE: "torch.autograd.grad of parameters taken outside run()",
    "torch.utils._pytree.tree_map": "nests of values",
    "torch.Tensor._version": "noticing writes",
    "torch.Tensor._indices": "sparse gradients",
    "torch.Tensor._values": "sparse gradients",
    "torch.Tensor._backward_hooks": "hooks on parameters on workers",
    "torch.Tensor._post_accumulate_grad_hooks": "hooks on parameters on workers",
    "torch.Tensor._make_subclass": "leaves of parameters of users' classes, sharded tables",
    "torch.Tensor._make_wrapper_subclass": "what a scheduled write returns",
    "torch._foreach_add_": "combining gradients",
    "torch._foreach_mul": "combining gradients",
    "torch._foreach_lerp_": "combining buffers",
    "torch._foreach_copy_": "copying gradients",
    "torch.nn.modules.batchnorm._NormBase": "statistics on parameter servers",
}

_OF_OBJECTS: Final[dict[str, tuple[Callable[[], Any], tuple[str, ...]]]] = {
    "nn.Module": (
        nn.Module,
        ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_forward_hooks"),
    ),
    "torch.optim.SGD": (
        lambda: torch.optim.SGD([Tensor()]),
        ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    ),
    "torch.amp.GradScaler": (
        lambda: torch.amp.GradScaler("cpu"),
        ("_per_optimizer_states",),
    ),
    "nn.RNN": (lambda: nn.RNN(1, 1), ("_flat_weights", "_flat_weights_names")),
}


def missing() -> Iterator[tuple[str, str, bool]]:
    """Every name this torch lacks: the name, what for, and whether something else does the same.

    Example:
        >>> from stratagem._core.torch_patches.private_api import missing
        >>> list(missing())
        []
    """
    for path, purpose in MISSING.items():
        yield path, purpose, path in _SLOWER
    for path, purpose in _ELSEWHERE.items():
        try:
            _look(path)
        except (AttributeError, ImportError):
            yield path, purpose, False
    for kind, (make, names) in _OF_OBJECTS.items():
        held = vars(make())
        for name in names:
            if name not in held:
                yield f"{kind}.{name}", "models and optimizers in replicas and on workers", False
