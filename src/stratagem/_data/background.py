"""Threads of the input pipeline: a pool that runs user functions, and a cursor that reads ahead.

Threads start with the first element and end with `close()`, which iterators call after the last element and after an
error. They do not refer to the user's iterator, so that dropping the iterator ends them too.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, final

from typing_extensions import override

from stratagem import config
from stratagem._data.cursor import END, Cursor, State
from stratagem.errors import DataError, InputTimeout

_CLOSE_S = 10.0  # a user function that runs longer is left to end by itself, with a warning
_SLOW_S = 5e-3  # two reads in a row above this are not caused by a busy machine
_LOOK_BACK = 8  # reads; the fastest of them is the cost of reading on an idle machine

_Tasks: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], tuple[Any, ...]] | None]"


def _join(thread: threading.Thread) -> None:
    """Wait for a thread to end; warn and leave it if it is stuck in user code."""
    if thread is threading.current_thread():
        return  # the garbage collector may close a pipeline in one of its own threads
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
    """Threads that call a function; results are futures.

    Args:
        fn: the function.
        threads: how many.
        name: of the threads.
        at_end: called by each thread when it ends.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        threads: int,
        name: str,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(
                target=_run_tasks, args=(self._tasks, fn, at_end), name=f"{name}-{i}", daemon=True
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
        """Drop queued calls and wait for running ones."""
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


def _run_tasks(tasks: _Tasks, fn: Callable[..., Any], at_end: Callable[[], None]) -> None:
    while (task := tasks.get()) is not None:
        future, args = task
        try:
            future.set_result(fn(*args))
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            future.set_exception(error)
        del task, future, args  # an idle thread must not hold an element
    at_end()


def wait_for(future: Future[Any], what: str) -> Any:
    """Return a future's result within the input time limit."""
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
class Prefetcher(Cursor):
    """Cursor that reads another one ahead in a thread, up to `size` prepared elements (0: no thread).

    The caller's thread reads the first element. The caller has to wait for it anyway, and a source that
    draws from torch's global generator when it begins (a DataLoader's sampler) then does so at a moment that
    does not depend on threads. With `worthwhile_s` the thread starts only if reading takes at least that
    long: handing over a cheaper element costs more than making it.
    """

    KEPT = ("ended",)
    _ended = False  # the child has ended

    def __init__(
        self,
        child: Cursor,
        size: int,
        *,
        name: str,
        prepare: Callable[[Any], Any] | None = None,
        worthwhile_s: float = 0.0,
    ) -> None:
        self._children = (child,)
        self._child = child
        self._size = size
        self._name = name
        self._prepare = prepare or (lambda element: element)
        self._worthwhile_s = worthwhile_s
        self._reads_s: deque[float] = deque(maxlen=_LOOK_BACK)
        self._pool: Pool | None = None
        # Elements read ahead, each with the prepared one. The consumer asks for every read, so that no element is
        # read while it takes the position.
        self._ready: deque[Future[Any]] = deque()

    def next(self) -> Any:
        if self._ready:
            found = self._wait_for(self._ready[0])
            self._ready.popleft()
        elif self._pool is None:
            began = time.perf_counter()
            found = self._read()
            self._reads_s.append(time.perf_counter() - began)
        else:
            return END
        if found is END:
            self._ready.clear()
            return END
        if self._pool is None and self._size and not self._ended and self._thread_pays():
            self._pool = Pool(self._read, 1, self._name, at_end=self._child.close)
        while self._pool is not None and len(self._ready) < self._size:
            self._ready.append(self._pool.submit())
        return found[1]

    def _read(self) -> Any:
        """Return the next element and the prepared one, or `END`."""
        element = END if self._ended else self._child.next()
        if element is END:
            self._ended = True
            return END
        return element, self._prepare(element)

    def _wait_for(self, future: Future[Any]) -> Any:
        return wait_for(future, f"input thread {self._name!r}")

    def _thread_pays(self) -> bool:
        """Return whether reads are slow. A single slow read may be a new epoch or a busy machine."""
        if self._worthwhile_s == 0.0:
            return True
        reads_s = self._reads_s
        if len(reads_s) >= 2 and min(reads_s[-1], reads_s[-2]) >= _SLOW_S:
            return True
        return len(reads_s) == _LOOK_BACK and min(reads_s) >= self._worthwhile_s

    @override
    def state(self) -> State:
        """Return the position after the last delivered element; elements read ahead are part of it."""
        try:
            found = [self._wait_for(future) for future in self._ready]
        except InputTimeout:
            raise
        except Exception as error:
            raise DataError(
                f"input thread {self._name!r} failed, so there is no position to save"
            ) from error
        return {**super().state(), "ready": [each[0] for each in found if each is not END]}

    @override
    def restore(self, state: State) -> None:
        super().restore(state)
        for element in state["ready"]:
            future: Future[Any] = Future()
            future.set_result((element, self._prepare(element)))
            self._ready.append(future)

    @override
    def close(self) -> None:
        if self._pool is None:
            self._child.close()
        else:
            self._pool.close()  # its thread closes the child
        self._ready.clear()
