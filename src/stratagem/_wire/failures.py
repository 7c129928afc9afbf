"""Exceptions between processes: as data on the wire, as exceptions on both sides.

`failure_from` where it was raised, `exception_from` where it is to be raised again. A receiver gets the same type
wherever that is possible: unpickled if it may unpickle and the exception survives it, rebuilt if the type is builtin or
one of ours, else `RemoteError`. In each case the remote traceback is the cause, and a note names the task.
"""

from __future__ import annotations

import builtins
import traceback

from stratagem import errors
from stratagem._wire.codec import pickle_exception, unpickle_exception
from stratagem._wire.messages import Message, Plain, RemoteFailure
from stratagem.errors import ProtocolError, RemoteError

TEXT_LIMIT = 20_000
"""Longest text or traceback sent; a message with a whole array in it helps nobody."""


def failure_from(
    error: BaseException, *, task: str = "", with_pickle: bool = False, with_traceback: bool = True
) -> RemoteFailure:
    """Describes an exception as data.

    Args:
        error: what was raised.
        task: where.
        with_pickle: for receivers that may unpickle: also send the object, if it survives.
        with_traceback: False where the error says everything: making the text takes about 0.2 ms.

    Example:
        >>> from stratagem._wire.failures import exception_from, failure_from
        >>> failure = failure_from(ValueError("no such thing"), task="/job:ps/task:0")
        >>> failure.type_name
        'builtins.ValueError'
        >>> exception_from(failure)
        ValueError('no such thing')
    """
    kind = type(error)
    plain = all(isinstance(arg, str | int | float | bool | None) for arg in error.args)
    return RemoteFailure(
        type_name=f"{kind.__module__}.{kind.__qualname__}",
        text=_shorten(_text(error)),
        task=task,
        args=tuple(_plain(arg) for arg in error.args) if plain else None,
        traceback=_shorten(_traceback_text(error)) if with_traceback else "",
        pickled=pickle_exception(error) if with_pickle else b"",
    )


def exception_from(
    failure: Message, *, may_unpickle: bool = False, any_type: bool = False
) -> BaseException:
    """The exception to raise here for a failure received.

    Args:
        failure: what arrived.
        may_unpickle: whether the sender is trusted with running code here.
        any_type: also those that end programs (SystemExit, KeyboardInterrupt …), for errors of the user's
            own functions; else such a one is a `RemoteError` here.
    """
    wanted = BaseException if any_type else Exception
    if not isinstance(failure, RemoteFailure):
        return ProtocolError(f"a failure frame holds {type(failure).__name__!r}")
    error = unpickle_exception(failure.pickled) if may_unpickle and failure.pickled else None
    if not isinstance(error, wanted):
        error = _rebuild(failure, wanted)
    origin = RemoteError(
        f"\n{failure.traceback}" if failure.traceback else failure.text,
        type_name=failure.type_name,
        task=failure.task,
        remote_traceback=failure.traceback,
    )
    if error is None:
        error = RemoteError(
            f"{failure.type_name}: {failure.text}",
            type_name=failure.type_name,
            task=failure.task,
            remote_traceback=failure.traceback,
        )
    error.__cause__ = origin
    if failure.task:
        error.add_note(f"raised by {failure.task}")
    return error


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - code of the user's class
        return f"<its str() failed: {type(failure).__name__}>"


def _traceback_text(error: BaseException) -> str:
    """As Python prints it, without the marks under parts of a line.

    Finding those means parsing the source of every frame anew: it took two thirds of the time.
    """
    described = traceback.TracebackException.from_exception(error)
    waiting: list[traceback.TracebackException | None] = [described]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        for frame in one.stack:
            frame.colno = frame.end_colno = None
        waiting += [one.__cause__, one.__context__, *(one.exceptions or ())]
    return "".join(described.format())


def _rebuild(failure: RemoteFailure, wanted: type[BaseException]) -> BaseException | None:
    """An exception of a builtin type or one of ours; None if it cannot be rebuilt."""
    module, _, name = failure.type_name.rpartition(".")
    managed = {"builtins": builtins, "stratagem.errors": errors}.get(module)
    kind = getattr(managed, name, None) if managed is not None else None
    if not (isinstance(kind, type) and issubclass(kind, wanted)):
        return None
    args = failure.args if failure.args is not None else (failure.text,)
    try:
        return kind(*args)
    except TypeError:  # its constructor wants facts that did not travel
        return None


def _plain(arg: Plain) -> Plain:
    if isinstance(arg, str):
        return _shorten(arg)
    if isinstance(arg, int) and not -(2**63) <= arg < 2**63:
        return str(arg)  # beyond what the wire carries as a number
    return arg


def _shorten(text: str) -> str:
    # Lone surrogates (file names, broken decodes) cannot be encoded; show them escaped.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(text) <= TEXT_LIMIT:
        return text
    half = TEXT_LIMIT // 2
    return f"{text[:half]}\n… {len(text) - TEXT_LIMIT} characters left out …\n{text[-half:]}"
