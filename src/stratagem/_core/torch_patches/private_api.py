"""The only module that touches names torch does not document.

A release of torch may move or drop such a name without notice. Each name is looked up once, here. If it is
missing, either a slower public function takes its place, or the first use raises `NotImplementedError` with the
name, the torch version and the purpose. ``stratagem doctor`` lists missing names beforehand.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Final, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

TRIED: Final = "2.12 to 2.15"
"""Releases of torch that parts of the test suite ran with."""

MISSING: Final[dict[str, str]] = {}
"""Names this torch lacks, with their purpose."""

_REPLACED: Final[set[str]] = set()
"""The names in `MISSING` that a public function replaces."""

_ABSENT: Final = object()
_T = TypeVar("_T")


def _look(path: str) -> Any:
    """Return the object at a dotted path, or `_ABSENT`; import submodules on the way."""
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for count, part in enumerate(parts[1:], 2):
        name = ".".join(parts[:count])
        inner = getattr(found, part, _ABSENT)
        is_package = isinstance(found, ModuleType) and "__path__" in vars(found)
        if inner is _ABSENT and is_package and importlib.util.find_spec(name) is not None:
            inner = importlib.import_module(name)
        if inner is _ABSENT:
            return _ABSENT
        found = inner
    return found


def _find(path: str, purpose: str, *, instead: Any = None) -> Any:
    """Return torch's object, its replacement, or a function that raises `NotImplementedError`."""
    found = _look(path)
    if found is not _ABSENT:
        return found
    MISSING[path] = purpose
    if instead is not None:
        _REPLACED.add(path)
        return instead

    def absent(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(explain(path, purpose))

    return absent


def explain(path: str, purpose: str) -> str:
    """Return the error text for a missing name."""
    return (
        f"torch {torch.__version__} has no {path}, which Stratagem uses for {purpose}: use a release of "
        f"torch that it was tried with ({TRIED}), or a newer Stratagem. `stratagem doctor` lists "
        f"everything that is missing."
    )


# ------------------------------------------------------------------ modes and guards

function_modes: Callable[[], int] = _find("torch._C._len_torch_function_stack", "device scopes")
"""Return the number of torch function modes that are open in this thread."""

dispatch_modes: Callable[[], int] = _find(
    "torch._C._len_torch_dispatch_stack", "random numbers in compiled steps"
)
WithoutSubclasses: Callable[[], AbstractContextManager[object]] = _find(
    "torch._C.DisableTorchFunctionSubclass", "sharded tables"
)
"""Context manager in which torch treats tensors of our classes as plain tensors."""

any_autocast: Callable[[], bool] = _find(
    "torch._C._is_any_autocast_enabled", "autocast around run()", instead=lambda: True
)
set_grad_enabled: Callable[[bool], object] = _find(
    "torch._C._set_grad_enabled", "no_grad() around run()", instead=torch.set_grad_enabled
)
_device_context: Any = _find("torch._GLOBAL_DEVICE_CONTEXT", "torch.set_default_device in scopes")
_graph_task: Callable[[], int] = _find(
    "torch._C._current_graph_task_id", "recomputation in a backward pass", instead=lambda: -1
)


def in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return _graph_task() != -1


def has_default_device() -> bool:
    """Return whether ``torch.set_default_device`` keeps a function mode open in this thread."""
    return vars(_device_context).get("device_context") is not None


def profiling() -> bool:
    """Return whether torch's profiler runs. The flag is a module variable, so read it each time."""
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))


# ------------------------------------------------------------------ random numbers (design note 0003)

_RANDOM: Final = "random numbers in replicas"
IncludeKey: Callable[[Any], AbstractContextManager[object]] = _find(
    "torch._C._IncludeDispatchKeyGuard", _RANDOM
)
ExcludeKeys: Callable[[Any], AbstractContextManager[object]] = _find(
    "torch._C._ExcludeDispatchKeyGuard", _RANDOM
)
KeySet: Callable[[Any], Any] = _find("torch._C.DispatchKeySet", _RANDOM)
parse_key: Callable[[str], Any] = _find("torch._C._parse_dispatch_key", _RANDOM)
all_schemas: Callable[[], Any] = _find("torch._C._jit_get_all_schemas", _RANDOM)
WithoutTransforms: Callable[[], AbstractContextManager[object]] = _find(
    "torch._C._DisableFuncTorch", "random numbers inside torch.func"
)

# ------------------------------------------------------------------ torch.func and torch.compile

in_transform: Callable[[], Any] = _find(
    "torch._C._functorch.peek_interpreter_stack", "torch.func in replicas"
)
"""Return a value other than None inside ``torch.func.grad``, ``vmap`` and the like."""

outside_all_transforms: Callable[[], AbstractContextManager[object]] = _find(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", "torch.func in replicas"
)
compiler_here: Callable[[], Any] = _find(
    "torch._C._dynamo.eval_frame.get_eval_frame_callback", "torch.compile", instead=lambda: True
)
"""Return a value other than None if the compiler observes this thread."""

disable_compiler: Callable[[_T], _T] = _find(
    "torch._compile._disable_dynamo", "torch.compile", instead=torch.compiler.disable
)


def skip_in_compiler(code: Any) -> None:
    """Exclude a code object from compilation. Call it only after the compiler was imported."""
    skip = _look("torch._dynamo.eval_frame.skip_code")
    if skip is not _ABSENT:
        skip(code)


_compiler_used: Final[list[bool]] = []


def compiler_used() -> bool:
    """Return whether ``torch.compile`` was called in this process; True if this torch does not say."""
    if not _compiler_used:
        compiler = sys.modules.get("torch._dynamo.eval_frame")
        # Optimizers exclude functions of theirs from compilation, which notes a backend None.
        backends = {} if compiler is None else getattr(compiler, "cached_backends", {0: True})
        if any(each is not None for each in list(backends.values())):
            _compiler_used.append(True)  # torch._dynamo.reset() forgets it
    return bool(_compiler_used)


# ------------------------------------------------------------------ autograd and tensors

queue_callback: Callable[[Callable[[], None]], None] = _find(
    "torch.autograd.Variable._execution_engine.queue_callback", "aggregation after backward()"
)
ENGINE: Final = "torch.autograd._engine_run_backward"
"""The function through which ``torch.autograd.backward`` and ``grad`` reach the engine."""

run_backward: Callable[..., Any] = _find(ENGINE, "checking backward passes in replicas")


def replace_run_backward(ours: Callable[..., Any]) -> None:
    """Make ``torch.autograd.backward`` and ``grad`` call ``ours``; raise if torch has no such name."""
    if ENGINE in MISSING:
        raise NotImplementedError(explain(ENGINE, MISSING[ENGINE]))
    cast("Any", torch.autograd)._engine_run_backward = ours


# Unknown number of users: gradients are copied instead of combined in place.
_storage_users: Callable[[int], int] = _find(
    "torch._C._storage_Use_Count", "gradients combined in place", instead=lambda cdata: 1 << 30
)


_address_of: Callable[[Any], int] = operator.attrgetter("_cdata")
_bytes_of: Callable[[Tensor], int] = cast("Any", Tensor.nbytes).__get__


def own_memory(tensors: Sequence[Tensor]) -> bool:
    """Return whether no other tensor shares the memory of any of these."""
    storages = list(map(Tensor.untyped_storage, tensors))
    users = map(_storage_users, map(_address_of, storages))  # a tensor, and its item of `storages`
    sizes = map(torch.UntypedStorage.nbytes, storages)
    return max(users, default=0) <= 2 and all(map(operator.eq, sizes, map(_bytes_of, tensors)))


_passes = itertools.count(1)

# Differences of squares never repeat, so that no pass counts as searched already.
graph_nodes: Callable[[], int] = _find(
    "torch._C._autograd._get_sequence_nr",
    "finding tensors that replicas share, without searching every pass",
    instead=lambda: next(_passes) ** 2,
)
"""Return how many nodes of autograd's graph this thread has made so far."""

_COMBINE: Final = "combining gradients"
foreach_add_: Callable[..., Any] = _find("torch._foreach_add_", _COMBINE)
foreach_copy_: Callable[..., Any] = _find("torch._foreach_copy_", _COMBINE)
foreach_lerp_: Callable[..., Any] = _find("torch._foreach_lerp_", _COMBINE)
foreach_mul_: Callable[..., Any] = _find("torch._foreach_mul_", _COMBINE)
version: Callable[[Tensor], int] = _find("torch.Tensor._version.__get__", "noticing writes")
"""Return how often a tensor was written in place; raises for an inference tensor."""


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written in place; -1 for an inference tensor, which has no count."""
    try:
        return version(tensor)
    except RuntimeError:  # asking `is_inference` first would double the price of each call
        return -1


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return `version_of` each tensor."""
    try:
        return list(map(version, tensors))
    except RuntimeError:
        return [version_of(tensor) for tensor in tensors]


_HOOKS: Final = "hooks on parameters"
_hooks_of: Callable[[Tensor], Any] = _find("torch.Tensor._backward_hooks.__get__", _HOOKS)
_post_hooks_of: Callable[[Tensor], Any] = _find(
    "torch.Tensor._post_accumulate_grad_hooks.__get__", _HOOKS
)
_layout_of: Callable[[Tensor | None], torch.layout] = cast("Any", Tensor.layout).__get__
_requires_grad: Callable[[Tensor | None], bool] = cast("Any", Tensor.requires_grad).__get__


def has_hooks(tensor: Tensor) -> bool:
    """Return whether a user registered gradient hooks on a parameter."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def any_has_hooks(tensors: Sequence[Tensor]) -> bool:
    """Return whether any tensor has hooks (`has_hooks`)."""
    return any(map(_hooks_of, tensors)) or any(map(_post_hooks_of, tensors))


def are_plain(gradients: Sequence[Tensor | None]) -> bool:
    """Return whether all these are dense tensors without a graph."""
    return (
        type(None) not in set(map(type, gradients))
        and {torch.strided}.issuperset(map(_layout_of, gradients))
        and not any(map(_requires_grad, gradients))
    )


def gradient_hooks(tensor: Tensor) -> tuple[list[Any], list[Any]]:
    """Return the hooks of ``register_hook`` and of ``register_post_accumulate_grad_hook``."""
    after = tensor._post_accumulate_grad_hooks or {}
    return list((tensor._backward_hooks or {}).values()), list(after.values())


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices and values of a sparse tensor without adding up duplicates first."""
    return tensor._indices(), tensor._values()


make_subclass: Callable[[type[Tensor], Tensor, bool], Any] = _find(
    "torch.Tensor._make_subclass", "leaves of parameters of users' classes, sharded tables"
)
pytree: Any = _find("torch.utils._pytree", "nested arguments and results")

# ------------------------------------------------------------------ modules, optimizers, scalers


# Dicts in which a module keeps its parameters and buffers, and a GradScaler its stage for each optimizer's id.
parameters_of: Callable[[nn.Module], dict[str, Any]] = operator.attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Any]] = operator.attrgetter("_buffers")
stages_of: Callable[[torch.amp.GradScaler], dict[int, Any]] = operator.attrgetter(
    "_per_optimizer_states"
)


def set_parameters(module: nn.Module, parameters: dict[str, Any]) -> None:
    """Replace the dict of `parameters_of`."""
    module._parameters = parameters


def set_buffers(module: nn.Module, buffers: dict[str, Any]) -> None:
    """Replace the dict of `buffers_of`."""
    module._buffers = buffers


_every_step: Sequence[Any] = [
    _find(
        f"torch.optim.optimizer._global_optimizer_{when}_hooks", "quick steps", instead={1: 0, 2: 0}
    )
    for when in ("pre", "post")
]
_annotated: Any = _find(
    "torch.optim.Optimizer.profile_hook_step", "quick steps", instead=lambda step: step
)(lambda optimizer: None).__code__


def step_of(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the step of an optimizer's class; without torch's annotation for its profiler, if nothing would notice.

    The annotation takes as long as the step of a small model. One hook for every step is ours.
    """
    step: Any = type(optimizer).step
    is_noticed = profiling() or has_step_hooks(optimizer) or sum(map(len, _every_step)) > 1
    if is_noticed or getattr(step, "__code__", None) is not _annotated:
        return cast("Callable[..., Any]", step)
    return cast("Callable[..., Any]", step.__wrapped__)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a user registered hooks around an optimizer's step."""
    held = vars(optimizer)
    return bool(held["_optimizer_step_pre_hooks"] or held["_optimizer_step_post_hooks"])


def set_stages(scaler: torch.amp.GradScaler, stages: dict[int, Any]) -> None:
    """Replace the dict of `stages_of`."""
    scaler._per_optimizer_states = stages


refresh_scaler_state: Callable[[], dict[str, Any]] = _find(
    "torch.amp.grad_scaler._refresh_per_optimizer_state", "GradScaler in replicas"
)
update_scale: Callable[..., Tensor] = _find(
    "torch._amp_update_scale_", "GradScaler in scheduled functions"
)
inject_class: Callable[[nn.Module], None] = _find(
    "torch.nn.utils.parametrize._inject_new_class", "parametrized modules on workers"
)
inject_property: Callable[[nn.Module, str], None] = _find(
    "torch.nn.utils.parametrize._inject_property", "parametrized modules on workers"
)

# ------------------------------------------------------------------ what the doctor reports

_CHECKED: Final = {
    # Names used on torch's own objects, here and in the patches.
    "torch.Tensor._indices": "sparse gradients",
    "torch.Tensor._values": "sparse gradients",
    "torch.Tensor._backward_hooks": "hooks on parameters",
    "torch.Tensor._post_accumulate_grad_hooks": "hooks on parameters",
    "torch.Tensor._make_wrapper_subclass": "what a scheduled write returns",
    "torch.nn.modules.batchnorm._NormBase": "statistics on parameter servers",
}

_CHECKED_OBJECTS: Final[dict[str, tuple[Callable[[], Any], tuple[str, ...]]]] = {
    "nn.Module": (
        nn.Module,
        ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_forward_hooks"),
    ),
    "torch.optim.SGD": (
        lambda: torch.optim.SGD([Tensor()]),
        ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    ),
    "torch.amp.GradScaler": (lambda: torch.amp.GradScaler("cpu"), ("_per_optimizer_states",)),
    "nn.RNN": (lambda: nn.RNN(1, 1), ("_flat_weights", "_flat_weights_names")),
}


def missing() -> Iterator[tuple[str, str, bool]]:
    """Yield every name this torch lacks: the name, its purpose, and whether it is replaced."""
    for path, purpose in MISSING.items():
        yield path, purpose, path in _REPLACED
    for path, purpose in _CHECKED.items():
        if _look(path) is _ABSENT:
            yield path, purpose, False
    for kind, (make, names) in _CHECKED_OBJECTS.items():
        held = vars(make())
        for name in names:
            if name not in held:
                yield f"{kind}.{name}", "models and optimizers in replicas and on workers", False
