"""The current strategy, scope and replica of each thread.

Every thread is in one of three states: the *default replica context* (where it starts), the *cross-replica
context* of a strategy (inside ``scope()``), or the *replica context* of a strategy (inside a function given to
``run``). This module keeps that state and answers questions about it. It is the only module with thread-local
state.
"""

from __future__ import annotations

import contextvars
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from typing_extensions import override

from stratagem._core.devices import Device
from stratagem._core.torch_patches import private_api
from stratagem.errors import ContextError, StrategyMismatch

if TYPE_CHECKING:
    from stratagem._core.managed import RunRecord
    from stratagem._core.replicas import ReplicaGroup
    from stratagem._core.strategy_hooks import StrategyHooks
    from stratagem._core.user_contexts import ReplicaContext

RandomStream = Callable[[torch.device], torch.Generator | None]
"""Returns the generator to draw from on a device; None means torch's own."""


class Replica:
    """One of the R executions of a ``run``.

    Attributes:
        id: its number, from 0.
        group: the `ReplicaGroup` it belongs to.
        device: the torch device it computes on.
        strategy: the strategy that runs it.
        record: the tensors it touched in this run; None until it touches one.
        is_ahead: whether its gradients are not aggregated yet, because it has not waited at the end of ``backward()``.
    """

    __slots__ = ("_context", "_logical", "device", "group", "id", "is_ahead", "record", "strategy")

    def __init__(
        self, id: int, group: ReplicaGroup, device: Device, strategy: StrategyHooks
    ) -> None:
        self.id = id
        self.group = group
        self.device = device.torch_device
        self.strategy = strategy
        self.record: RunRecord | None = None
        self.is_ahead = False
        self._logical = device
        self._context: ReplicaContext | None = None

    @property
    def context(self) -> ReplicaContext:
        """The public `ReplicaContext` of this replica."""
        if self._context is None:
            from stratagem._core.user_contexts import ReplicaContext

            self._context = ReplicaContext(self.strategy, self.id)
        return self._context

    @override
    def __repr__(self) -> str:
        return f"<Replica {self.id} of {self.group.size} on {self._logical.short}>"


class _Frame:
    """One level of nesting; ``replica`` None means cross-replica context."""

    __slots__ = ("outer", "replica", "strategy")

    def __init__(
        self, strategy: StrategyHooks, replica: Replica | None, outer: _Frame | None
    ) -> None:
        self.strategy = strategy
        self.replica = replica
        self.outer = outer


class _ThreadState(threading.local):
    # Class attributes are the start state of every thread (CTX-10).
    replica: Replica | None = None
    frame: _Frame | None = None
    worker_index: int | None = None
    global_scope: Scope | None = None
    default_depth: int = 0
    updating: Any = None
    stream: RandomStream | None = None

    def __init__(self) -> None:  # runs once in every thread that uses the state
        self.scopes: list[_OpenScope] = []


_state = _ThreadState()


def current_replica() -> Replica | None:
    """Return the replica this thread computes for, or None. Hot path: one thread-local read."""
    return _state.replica


# ------------------------------------------------------------------ queries


def default_strategy() -> StrategyHooks:
    """Return the process-wide default strategy.

    Its class is defined above this package, so it is imported when first needed.
    """
    module = importlib.import_module("stratagem._strategies.default")
    return cast("StrategyHooks", module.default_strategy())


def get_strategy() -> Any:
    """Return the current strategy; the process-wide default one if no scope is open.

    Example:
        >>> import stratagem as sg
        >>> strategy = sg.OneDeviceStrategy("cpu:0")
        >>> with strategy.scope():
        ...     sg.get_strategy() is strategy
        True
    """
    # Any, because users expect the public class `Strategy`, which is defined above this package.
    frame = _state.frame
    return default_strategy() if frame is None else frame.strategy


def current_strategy() -> StrategyHooks | None:
    """Return the current strategy; None if it is the default one."""
    frame = _state.frame
    return None if frame is None or frame.strategy._is_default else frame.strategy


def has_strategy() -> bool:
    """Return whether a strategy other than the default one is current.

    Example:
        >>> import stratagem as sg
        >>> sg.has_strategy()
        False
    """
    return current_strategy() is not None


def in_cross_replica_context() -> bool:
    """Return whether this thread is inside a scope but not inside a replica.

    Example:
        >>> import stratagem as sg
        >>> sg.in_cross_replica_context()
        False
        >>> with sg.OneDeviceStrategy("cpu:0").scope():
        ...     sg.in_cross_replica_context()
        True
    """
    frame = _state.frame
    return frame is not None and frame.replica is None


def get_replica_context() -> ReplicaContext | None:
    """Return the replica context of this thread; None in cross-replica context.

    Example:
        >>> import stratagem as sg
        >>> sg.get_replica_context().num_replicas_in_sync
        1
    """
    frame = _state.frame
    if frame is None:
        from stratagem._core.user_contexts import default_context

        return default_context()
    return None if frame.replica is None else frame.replica.context


def get_current_worker_index() -> int:
    """Return the number of the worker that runs this scheduled function, from 0.

    Raises:
        RuntimeError: outside a function given to ``ClusterCoordinator.schedule`` (or a dataset
            function of ``create_per_worker_dataset``).

    Example:
        >>> import stratagem as sg
        >>> sg.get_current_worker_index()
        Traceback (most recent call last):
        ...
        stratagem.errors.ContextError: get_current_worker_index() was called outside a scheduled \
function: no worker is running this thread. Call it inside a function given to \
ClusterCoordinator.schedule or create_per_worker_dataset.
    """
    index = _state.worker_index
    if index is None:
        raise ContextError(
            "get_current_worker_index() was called outside a scheduled function: no worker is "
            "running this thread. Call it inside a function given to ClusterCoordinator.schedule "
            "or create_per_worker_dataset."
        )
    return index


@contextmanager
def worker_index(index: int | None) -> Iterator[None]:
    """Make this thread run scheduled functions for worker ``index`` while open."""
    before = _state.worker_index
    _state.worker_index = index
    try:
        yield
    finally:
        _state.worker_index = before


def describe_context() -> str:
    """Describe this thread's context, for error messages."""
    frame = _state.frame
    if frame is None:
        return "no scope"
    if frame.replica is None:
        return f"the cross-replica context of {frame.strategy!r}"
    return f"replica {frame.replica.id} of {frame.strategy!r}"


# ------------------------------------------------------------------ scopes


def _open_modes() -> int:
    """Return how many torch function modes (device scopes) are open, `set_default_device` aside."""
    depth = private_api.function_modes()
    return depth - 1 if depth and private_api.has_default_device() else depth


class _OpenScope(NamedTuple):
    """One entry of a scope that has not been left yet."""

    scope: Scope
    before: _Frame | None  # the thread's frame before this entry
    held: AbstractContextManager[object] | None  # from the strategy's hook
    modes: int  # torch function modes open right after the entry


class Scope:
    """Context manager of ``strategy.scope()``; may be entered repeatedly and nested."""

    __slots__ = ("_strategy",)

    def __init__(self, strategy: StrategyHooks) -> None:
        self._strategy = strategy

    def __enter__(self) -> Any:
        strategy = self._strategy
        state = _state
        frame = state.frame
        held: AbstractContextManager[object] | None = None
        if strategy._is_default:
            if frame is not None and not frame.strategy._is_default:
                raise ContextError(
                    "the default strategy's scope must not nest inside another: "
                    f"{frame.strategy!r} is current. Leave its scope first."
                )
            state.default_depth += 1
        else:
            require_cross_replica_or_default(strategy, "scope()")
            state.frame = _Frame(strategy, None, frame)
            if frame is None:
                try:
                    held = strategy._scope_entered()
                    held.__enter__()
                except BaseException:  # Ctrl-C too: this scope must not stay current
                    state.frame = None
                    raise
        state.scopes.append(_OpenScope(self, frame, held, _open_modes()))
        return strategy

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        state = _state
        entry = state.scopes[-1] if state.scopes else None
        if entry is None or entry.scope is not self:
            raise ContextError(
                f"the scope of {self._strategy!r} is not the innermost open scope of this thread "
                f"(current: {describe_context()}). Leave scopes in the opposite order of entering "
                "them, each once, in the thread that entered it."
            )
        if exc_type is None and _open_modes() > entry.modes:
            raise ContextError(
                f"the scope of {self._strategy!r} is being left while a device scope "
                "(`with torch.device(...)`, or another torch function mode) opened inside it is "
                "still open. Close the device scope first, then leave the strategy's scope."
            )
        state.scopes.pop()
        if self._strategy._is_default:
            state.default_depth -= 1
        else:
            state.frame = entry.before
        if entry.held is not None:
            entry.held.__exit__(exc_type, exc, traceback)

    @override
    def __repr__(self) -> str:
        return f"<Scope of {self._strategy!r}>"


def set_strategy(strategy: StrategyHooks | None) -> None:
    """Make a strategy current without a ``with`` block; None restores the default one.

    A further call first leaves the strategy of the previous call.

    Raises:
        RuntimeError: inside a ``with strategy.scope()`` block.

    Example:
        >>> import stratagem as sg
        >>> strategy = sg.OneDeviceStrategy("cpu:0")
        >>> sg.set_strategy(strategy)
        >>> sg.get_strategy() is strategy
        True
        >>> sg.set_strategy(None)
        >>> sg.has_strategy()
        False
    """
    scope = _state.global_scope
    frame = _state.frame
    in_block = frame is not None and (scope is None or frame.outer is not None)
    own_default = 1 if scope is not None and scope._strategy._is_default else 0
    if in_block or _state.default_depth > own_default:
        raise ContextError(
            "set_strategy() must not be called inside a `with strategy.scope()` block or a "
            f"replica (current: {describe_context()}). Call it at the top level of the program."
        )
    if scope is not None:
        scope.__exit__(None, None, None)
        _state.global_scope = None
    if strategy is not None:
        new = Scope(strategy)
        new.__enter__()
        _state.global_scope = new


def default_scope_is_open() -> bool:
    """Return whether this thread opened the default strategy's scope."""
    return _state.default_depth > 0


# ------------------------------------------------------------------ checks


def require_cross_replica_or_default(strategy: StrategyHooks, what: str) -> None:
    """Raise unless in the default context or in the strategy's own cross-replica context."""
    frame = _state.frame
    if frame is None:
        return
    if frame.strategy is not strategy:
        if frame.strategy._is_default and (frame.replica is None or strategy._is_default):
            return
        raise StrategyMismatch(
            f"mixing different strategy objects: {what} of {strategy!r} was called under "
            f"{describe_context()}. Leave that scope first, or use the strategy that is current."
        )
    if frame.replica is not None:
        raise ContextError(
            f"{what} of {strategy!r} was called inside {describe_context()}; it needs the "
            "cross-replica context. Call it outside the function given to run(), or reach the "
            "cross-replica context with get_replica_context().merge_call(fn)."
        )


def require_scope(strategy: StrategyHooks, what: str) -> None:
    """Raise unless the strategy is current, in cross-replica or replica context."""
    frame = _state.frame
    if frame is None or frame.strategy is not strategy:
        raise ContextError(
            f"{what} needs to be inside `with strategy.scope()` of {strategy!r}; this thread is "
            f"in {describe_context()}."
        )


def require_replica(asked: ReplicaContext, what: str) -> None:
    """Raise unless this thread runs the replica that the context belongs to."""
    frame = _state.frame
    strategy = asked.strategy
    if frame is None and strategy._is_default:
        return
    if frame is not None and frame.strategy is not strategy:
        raise StrategyMismatch(
            f"{what}: mismatching strategies: this context belongs to "
            f"{strategy!r}, the thread is in {describe_context()}."
        )
    if frame is None or frame.replica is None:
        raise ContextError(
            f"{what} needs to be inside the function given to run() (or "
            f"call_for_each_replica), but the thread is in {describe_context()}."
        )
    if frame.replica.context is not asked:
        raise ContextError(
            f"{what}: mismatching context: this is not the context of "
            f"{describe_context()}. Ask get_replica_context() inside the replica that uses it."
        )


# ------------------------------------------------------------------ state of other modules


class entered:  # noqa: N801 - used like a function
    """Context manager: this thread computes for a replica, or (None) in cross-replica context.

    A class with slots, because it is on the path of every ``run`` and every rendezvous.
    """

    __slots__ = ("_frame", "_frame_before", "_replica", "_replica_before")

    def __init__(self, strategy: StrategyHooks, replica: Replica | None) -> None:
        self._replica = replica
        self._frame = _Frame(strategy, replica, None)

    def __enter__(self) -> None:
        state = _state
        self._frame_before = self._frame.outer = state.frame
        self._replica_before = state.replica
        state.frame = self._frame
        state.replica = self._replica

    def __exit__(self, *_: object) -> None:
        state = _state
        state.frame = self._frame_before
        state.replica = self._replica_before


@contextmanager
def updating(device: Any) -> Iterator[None]:
    """Mark this thread as inside an ``extended.update`` function for ``device``."""
    before = _state.updating
    _state.updating = device
    try:
        yield
    finally:
        _state.updating = before


def update_device() -> Any:
    """Return the device of the ``extended.update`` in progress in this thread, or None."""
    return _state.updating


def current_stream() -> RandomStream | None:
    """Return the random stream that `random_streams.Drawing` set for this thread, or None."""
    return _state.stream


def swap_stream(stream: RandomStream | None) -> RandomStream | None:
    """Set `current_stream` and return the previous one."""
    before = _state.stream
    _state.stream = stream
    return before


def caller_variables() -> contextvars.Context:
    """Return a copy of this thread's context variables; each replica runs in a copy of it."""
    return contextvars.copy_context()
