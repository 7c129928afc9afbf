"""Refuses functions that would only make a coroutine: nobody here awaits one, and the step would silently not happen."""

from __future__ import annotations

import functools
import inspect
from types import AsyncGeneratorType, CoroutineType
from typing import Any, Final

from stratagem._core.values import PerReplica

_ASYNC: Final = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
_UNAWAITED: Final = (CoroutineType, AsyncGeneratorType)


def refuse_async(fn: Any, what: str) -> None:
    """Refuses a function declared with ``async def``, before it is called or sent anywhere.

    Not `inspect.iscoroutinefunction`, which takes five times as long and would be felt in small steps.

    Args:
        fn: anything callable: functions, methods, partial calls and objects with ``__call__``.
        what: the caller, for the error: ``"run()"``.

    Raises:
        TypeError: it is asynchronous.
    """
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    code = getattr(inner, "__code__", None)  # of functions, and of methods
    if code is None and not isinstance(inner, type):
        code = getattr(type(inner).__call__, "__code__", None)
    if code is not None and code.co_flags & _ASYNC:
        raise _error(fn, what)


def refuse_unawaited(result: Any, fn: Any, what: str) -> Any:
    """What a call gave, unless it is a coroutine: a plain function may have called an asynchronous one.

    Raises:
        TypeError: it is a coroutine, or replicas gave some.
    """
    made = result.values if type(result) is PerReplica else (result,)
    if isinstance(made[0], _UNAWAITED):
        for one in made:
            if isinstance(one, CoroutineType):
                one.close()  # else Python warns, long after the error, that it was never awaited
        raise _error(fn, what)
    return result


def _error(fn: Any, what: str) -> TypeError:
    name = getattr(fn, "__qualname__", None) or repr(fn)
    return TypeError(
        f"{what} of {name}: it is asynchronous (async def) and would give a coroutine that nobody "
        f"awaits, so nothing would be computed. Give a plain function: await what it needs before, or "
        f"call asyncio.run(...) inside it."
    )
