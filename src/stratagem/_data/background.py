"""Threads of the input pipeline: a pool that runs user functions, and a thread that reads ahead.

Both start with the first element and end with the last one, with an error, or with `close()`. Neither refers
to the user's iterator, so that dropping the iterator ends the threads too.
"""

from __future__ import annotations

import contextlib
import enum
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
_IDLE_S = 60.0  # how often a thread that waits for space checks whether it should stop

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
    """Threads that call a function; results are futures."""

    def __init__(self, fn: Callable[..., Any], threads: int, name: str) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
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


def _run_tasks(tasks: _Tasks, fn: Callable[..., Any]) -> None:
    while (task := tasks.get()) is not None:
        future, args = task
        try:
            future.set_result(fn(*args))
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            future.set_exception(error)
        del task, future, args  # an idle thread must not hold an element


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


class _Message(enum.Enum):
    """Message from the reading thread to the consumer."""

    ELEMENT = enum.auto()
    END = enum.auto()
    ERROR = enum.auto()


@final
class Prefetcher(Cursor):
    """Cursor that reads another one ahead in a thread, up to `size` prepared elements (0: no thread).

    The caller's thread reads the first element. The caller has to wait for it anyway, and a source that
    draws from torch's global generator when it begins (a DataLoader's sampler) then does so at a moment that
    does not depend on threads. With `worthwhile_s` the thread starts only if reading takes at least that
    long: handing over a cheaper element costs more than making it.

    The threads exchange messages through two queues (C code, about 1 µs a message; conditions cost 10):
    `_messages` has one item per element in `_ready`, and one for the end; `_space` has one item per free
    place. `_reading` is held while an element moves from the child to `_ready`, so that `state` finds each
    element in exactly one of them.
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
        self._limit_s = config.input_timeout_s()
        self._reads_s: deque[float] = deque(maxlen=_LOOK_BACK)
        self._ready: deque[tuple[Any, Any]] = deque()  # (element, prepared element)
        self._messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._space: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._reading = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._error: BaseException | None = None

    def next(self) -> Any:
        if self._thread is None:
            return self._next_without_thread()
        try:
            message = self._messages.get(timeout=self._limit_s)
        except queue.Empty:
            raise InputTimeout(
                f"input thread {self._name!r} delivered nothing for {self._limit_s:g} s. "
                "Set STRATAGEM_INPUT_TIMEOUT_S to wait longer."
            ) from None
        if message is _Message.ELEMENT:
            _, prepared = self._ready.popleft()
            self._space.put(None)
            return prepared
        self._messages.put(message)  # for the next call
        if self._error is not None:
            raise self._error
        return END

    def _next_without_thread(self) -> Any:
        if self._ready:
            _, prepared = self._ready.popleft()
        elif self._ended:
            return END
        else:
            began = time.perf_counter()
            element = self._child.next()
            if element is END:
                self._ended = True
                return END
            prepared = self._prepare(element)
            self._reads_s.append(time.perf_counter() - began)
        if self._size and not self._ended and not self._stopped and self._thread_pays():
            self._start()
        return prepared

    def _thread_pays(self) -> bool:
        """Return whether reads are slow. A single slow read may be a new epoch or a busy machine."""
        if self._worthwhile_s == 0.0:
            return True
        reads_s = self._reads_s
        if len(reads_s) >= 2 and min(reads_s[-1], reads_s[-2]) >= _SLOW_S:
            return True
        return len(reads_s) == _LOOK_BACK and min(reads_s) >= self._worthwhile_s

    def _start(self) -> None:
        for _ in self._ready:  # from a restored position
            self._messages.put(_Message.ELEMENT)
        for _ in range(self._size - len(self._ready)):
            self._space.put(None)
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while self._wait_for_space() and self._read_one():
                pass
        except BaseException as error:  # noqa: BLE001 - raised in the consumer
            self._error = error
            self._messages.put(_Message.ERROR)
        finally:
            self._child.close()

    def _wait_for_space(self) -> bool:
        while not self._stopped:
            with contextlib.suppress(queue.Empty):
                self._space.get(timeout=_IDLE_S)
                return not self._stopped
        return False

    def _read_one(self) -> bool:
        with self._reading:
            element = self._child.next()
            if element is END:
                self._ended = True
                self._messages.put(_Message.END)
                return False
            self._ready.append((element, self._prepare(element)))
            self._messages.put(_Message.ELEMENT)
        return True

    @override
    def state(self) -> State:
        """Return the position after the last delivered element; elements read ahead are part of it."""
        if not self._reading.acquire(timeout=self._limit_s):
            raise InputTimeout(
                f"input thread {self._name!r} has been reading one element for {self._limit_s:g} s, "
                "so its position is not known. Set STRATAGEM_INPUT_TIMEOUT_S to wait longer."
            )
        try:
            if self._error is not None:
                raise DataError(
                    f"input thread {self._name!r} failed, so there is no position to save"
                ) from self._error
            return {**super().state(), "ready": [element for element, _ in self._ready]}
        finally:
            self._reading.release()

    @override
    def restore(self, state: State) -> None:
        super().restore(state)
        self._ready.extend((element, self._prepare(element)) for element in state["ready"])

    @override
    def close(self) -> None:
        self._stopped = True
        self._space.put(None)
        if self._thread is None:
            self._child.close()
        else:
            _join(self._thread)
        self._ready.clear()
