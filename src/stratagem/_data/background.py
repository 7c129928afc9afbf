"""Threads of the input pipeline: a pool for user functions, and one that reads ahead.

Both start with the first element, end with the last one, with an error, or with `close()`, and refer
to nothing that refers to the user's iterator, so that dropping an iterator ends its threads too.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, final

from stratagem import config
from stratagem._data.node import END, Cursor, State
from stratagem.errors import DataError, InputTimeout

_CLOSE_S = 10.0  # a user function that takes longer is left to end by itself, with a warning
_IDLE_S = 60.0  # how often a thread that waits for room looks whether it is still wanted


def _join(thread: threading.Thread) -> None:
    """Wait for a thread to end; warns and leaves it when it is stuck in the user's code."""
    if thread is threading.current_thread():
        return  # the garbage collector may close a pipeline from one of its own threads
    thread.join(_CLOSE_S)
    if thread.is_alive():
        warnings.warn(
            f"input thread {thread.name!r} is still in a function of yours {_CLOSE_S:g} s after "
            "its iterator was closed; it ends when that function returns",
            ResourceWarning,
            stacklevel=3,
        )


@final
class Pool:
    """Threads that run a function on arguments; results are futures."""

    def __init__(self, fn: Callable[..., Any], threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self._closed = False
        self._threads = [
            threading.Thread(
                target=_run_tasks, args=(self._tasks, fn), name=f"{name}-{i}", daemon=True
            )
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, *args: Any) -> Future[Any]:
        """Queue one call."""
        future: Future[Any] = Future()
        self._tasks.put((future, args))
        return future

    def close(self) -> None:
        """Drop what is queued, let running calls end."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            _join(thread)


def _run_tasks(
    tasks: queue.SimpleQueue[tuple[Future[Any], tuple[Any, ...]] | None], fn: Callable[..., Any]
) -> None:
    while (task := tasks.get()) is not None:
        future, args = task
        try:
            future.set_result(fn(*args))
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            future.set_exception(error)
        del task, future, args  # an idle thread holds no element


def wait_for(future: Future[Any], what: str) -> Any:
    """A future's result within the input time limit."""
    limit_s = config.input_timeout_s()
    try:
        return future.result(limit_s)
    except TimeoutError:
        if future.done():
            raise  # the user's function itself raised it
        raise InputTimeout(
            f"{what} took longer than {limit_s:g} s for one element. "
            "Set STRATAGEM_INPUT_TIMEOUT_S to wait longer."
        ) from None


@final
class Prefetcher:
    """Reads a cursor ahead in a thread, keeping up to `size` prepared elements (0: no thread).

    The first element is read in the caller's thread: the caller would wait for it anyway, and
    sources that draw from torch's global generator when they begin (a DataLoader's sampler) do so
    at a moment that does not depend on thread timing.

    Locks: `_pull` is held while an element moves from the cursor to the buffer, so that `state`
    sees each element either in the cursor or in the buffer; `_change` guards buffer and flags.
    """

    def __init__(
        self, child: Cursor, size: int, *, name: str, prepare: Callable[[Any], Any] | None = None
    ) -> None:
        self._child = child
        self._size = size
        self._name = name
        self._prepare = prepare
        self._ready: deque[tuple[Any, Any]] = deque()  # (element, prepared element)
        self._pull = threading.Lock()
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._stopped = False
        self._error: BaseException | None = None

    def next(self) -> Any:
        """The next prepared element, or `END`."""
        if self._thread is None and not self._ready and not self._ended:
            return self._read_here()
        with self._change:
            if not self._has_news():
                self._wait_for_news()
            if self._ready:
                _, prepared = self._ready.popleft()
                self._change.notify_all()
                self._start_if_needed()
                return prepared
        if self._error is not None:
            raise self._error
        return END

    def _wait_for_news(self) -> None:
        limit_s = config.input_timeout_s()
        if not self._change.wait_for(self._has_news, limit_s):
            raise InputTimeout(
                f"input thread {self._name!r} delivered nothing for {limit_s:g} s. "
                "Set STRATAGEM_INPUT_TIMEOUT_S to wait longer."
            )

    def _has_news(self) -> bool:
        return bool(self._ready) or self._ended or self._error is not None

    def _read_here(self) -> Any:
        element = self._child.next()
        if element is END:
            self._ended = True
            return END
        prepared = element if self._prepare is None else self._prepare(element)
        self._start_if_needed()
        return prepared

    def _start_if_needed(self) -> None:
        if self._size and self._thread is None and not self._ended and not self._stopped:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def _work(self) -> None:
        try:
            while self._wait_for_room() and self._move_one():
                pass
        except BaseException as error:  # noqa: BLE001 - raised to the consumer, in its turn
            with self._change:
                self._error = error
                self._change.notify_all()
        finally:
            self._child.close()

    def _wait_for_room(self) -> bool:
        with self._change:
            while len(self._ready) >= self._size and not self._stopped:
                self._change.wait(_IDLE_S)
            return not self._stopped

    def _move_one(self) -> bool:
        with self._pull:
            element = self._child.next()
            if element is END:
                with self._change:
                    self._ended = True
                    self._change.notify_all()
                return False
            prepared = element if self._prepare is None else self._prepare(element)
            with self._change:
                self._ready.append((element, prepared))
                self._change.notify_all()
        return True

    def state(self) -> State:
        """The position after what was delivered: what is read ahead is in it as it is."""
        limit_s = config.input_timeout_s()
        if not self._pull.acquire(timeout=limit_s):
            raise InputTimeout(
                f"input thread {self._name!r} has been reading one element for {limit_s:g} s, so "
                "its position cannot be told. Set STRATAGEM_INPUT_TIMEOUT_S to wait longer."
            )
        try:
            if self._error is not None:
                raise DataError(
                    f"input thread {self._name!r} failed, so there is no position to save"
                ) from self._error
            return {
                "ready": [element for element, _ in self._ready],
                "ended": self._ended,
                "child": self._child.state(),
            }
        finally:
            self._pull.release()

    def restore(self, state: State) -> None:
        """Take over a position; on a fresh prefetcher only."""
        self._child.restore(state["child"])
        self._ended = state["ended"]
        self.put_back(state["ready"])

    def put_back(self, elements: Sequence[Any]) -> None:
        """Elements to deliver before anything the cursor yields."""
        prepare = self._prepare
        self._ready.extend((e, e if prepare is None else prepare(e)) for e in elements)

    def close(self) -> None:
        """End the thread, drop what was read ahead, close the cursor; idempotent."""
        with self._change:
            self._stopped = True
            self._change.notify_all()
        thread = self._thread
        if thread is None:
            self._child.close()
        else:
            _join(thread)
        self._ready.clear()
