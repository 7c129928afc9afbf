"""Graph breaks: functions that ``torch.compile`` must not trace.

A user may compile a whole step. The compiler then follows it into our code and would try to make a graph of locks,
threads and other replicas' tensors. A function marked `eagerly` is a graph break instead: the code before and after it
is compiled, the function and all it calls run as written.

``torch.compiler.disable`` does the same, but costs every call two microseconds and every program the import of the
compiler. `eagerly` pays only if the compiler observes this thread.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch.compiler import is_compiling

from stratagem._core.torch_patches import private_api

_P = ParamSpec("_P")
_R = TypeVar("_R")

_not_skipped: list[Any] = []  # code objects that the compiler does not skip yet


def eagerly(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function so that it runs as written inside ``torch.compile`` too."""
    disabled: Callable[_P, _R] = private_api.disable_compiler(fn)

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if is_compiling() or private_api.compiler_here() is not None:
            return disabled(*args, **kwargs)
        return fn(*args, **kwargs)

    function: Any = call
    function._torchdynamo_disable = True
    if not _not_skipped:
        _not_skipped.append(function.__code__)  # all functions made here share one code object
    return call


def skip_frames() -> None:
    """Let the compiler, once it is imported, skip the wrapper of `eagerly`. Every run calls this.

    It saves compiling the wrapper for every replica. `eagerly` cannot do it: that would import the compiler.
    """
    if _not_skipped and "torch._dynamo" in sys.modules:
        for code in _not_skipped:
            private_api.skip_in_compiler(code)
        _not_skipped.clear()
