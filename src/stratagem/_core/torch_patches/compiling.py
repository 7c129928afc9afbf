"""Where ``torch.compile`` must not look: what replicas do together.

A user may compile a whole step. The compiler then follows it into our code, frame by frame, and would try
to make a graph of locks, threads and other replicas' tensors. A function marked `eagerly` is a graph
break instead: what comes before and after it is compiled, it runs as written, and so does all it
calls.

``torch.compiler.disable`` says the same, but costs every call two microseconds and every program the import
of the compiler; here a call asks whether the compiler watches this thread, and only then pays.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch.compiler import is_compiling

from stratagem._core.torch_patches.private_api import compiler_here, disable_compiler

_P = ParamSpec("_P")
_R = TypeVar("_R")

_unknown: list[Any] = []  # code the compiler was not told of yet


def eagerly(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that runs as written also inside ``torch.compile``.

    Example:
        >>> import torch
        >>> from stratagem._core.torch_patches.compiling import eagerly, tell_compiler
        >>> seen = []
        >>> @eagerly
        ... def look():
        ...     seen.append(torch.compiler.is_compiling())
        >>> step = torch.compile(lambda x: (look(), 2 * x)[1], backend="eager")
        >>> tell_compiler()
        >>> step(torch.tensor(21))
        tensor(42)
        >>> seen
        [False]
    """
    alone: Callable[_P, _R] = disable_compiler(fn)

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if is_compiling() or compiler_here() is not None:
            return alone(*args, **kwargs)
        return fn(*args, **kwargs)

    function: Any = call
    function._torchdynamo_disable = True
    if not _unknown:
        _unknown.append(function.__code__)  # one code for every function made here
    return call


def tell_compiler() -> None:
    """Once the compiler is loaded, have it leave the frames of `eagerly` alone; a run begins with it.

    They would do without, but it saves compiling each of them for every replica. `eagerly` itself
    cannot say so: it would have to import the compiler.
    """
    if _unknown and "torch._dynamo" in sys.modules:
        compiler: Any = importlib.import_module("torch._dynamo.eval_frame")
        skip = getattr(compiler, "skip_code", None)
        if skip is not None:
            for code in tuple(_unknown):
                skip(code)
        _unknown.clear()
