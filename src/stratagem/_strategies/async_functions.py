"""Reject ``async def`` functions, whose call would only create a coroutine."""

from __future__ import annotations

import functools
import inspect
from types import AsyncGeneratorType, CoroutineType
from typing import Any, Final

from stratagem._core.values import PerReplica

_ASYNC: Final = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE


def refuse_async(fn: Any, what: str) -> None:
    """Raise `TypeError` if a callable is declared with ``async def``.

    `inspect.iscoroutinefunction` takes five times as long, which small steps would notice.

    Args:
        fn: a function, method, partial call or object with ``__call__``.
        what: the caller, for the error: ``"run()"``.
    """
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    code = getattr(inner, "__code__", None)  # of functions and methods
    if code is None and not isinstance(inner, type):
        code = getattr(type(inner).__call__, "__code__", None)
    if code is not None and code.co_flags & _ASYNC:
        raise _error(fn, what)


def refuse_unawaited(result: Any, fn: Any, what: str) -> Any:
    """Return a call's result; raise `TypeError` if it is a coroutine, which a plain function can return."""
    made = result.values if type(result) is PerReplica else (result,)
    if isinstance(made[0], CoroutineType | AsyncGeneratorType):
        for one in made:
            if isinstance(one, CoroutineType):
                one.close()  # else Python warns later that it was never awaited
        raise _error(fn, what)
    return result


def _error(fn: Any, what: str) -> TypeError:
    name = getattr(fn, "__qualname__", None) or repr(fn)
    return TypeError(
        f"{what} of {name}: it is asynchronous (async def) and would return a coroutine that is never "
        f"awaited, so nothing would be computed. Pass a plain function: await its inputs before the call, or "
        f"call asyncio.run(...) inside it."
    )
