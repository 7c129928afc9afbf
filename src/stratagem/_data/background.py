"""Threads of the input pipeline: a pool for user functions, and one that reads ahead.

Both start with the first element, end with the last one, with an error, or with `close()`, and refer
to nothing that refers to the user's iterator, so that dropping an iterator ends its threads too.
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
from typing import Any, final

from stratagem import config
from stratagem._data.node import END, Cursor, State
from stratagem.errors import DataError, InputTimeout

_CLOSE_S = 10.0  # a user function that takes longer is left to end by itself, with a warning
_SLOW_S = 5e-3  # two reads in a row that take so long are no accident
_LOOK_BACK = 8  # reads; the fastest of them is what reading takes on an idle machine
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


class _News(enum.Enum):
    """What the reading thread tells the consumer."""

    ELEMENT = enum.auto()
    END = enum.auto()
    ERROR = enum.auto()


@final
class Prefetcher:
    """Reads a cursor ahead in a thread, keeping up to `size` prepared elements (0: no thread).

    The first element is read in the caller's thread: the caller would wait for it anyway, and
    sources that draw from torch's global generator when they begin (a DataLoader's sampler) do so
    at a moment that does not depend on thread timing. With `worthwhile_s` the thread starts only
    when reading takes at least that long; handing over a cheaper element costs more than making it.

    The threads talk through two queues (C code, about 1 µs a message; conditions cost 10): `_news`
    has one item per element in `_ready` and one for the end; `_room` one per place left in it.
    `_pull` is held while an element moves from the cursor to `_ready`, so that `state` finds each
    element in one of the two.
    """

    def __init__(
        self,
        child: Cursor,
        size: int,
        *,
        name: str,
        prepare: Callable[[Any], Any] | None = None,
        worthwhile_s: float = 0.0,
    ) -> None:
        self._child = child
        self._size = size
        self._worthwhile_s = worthwhile_s
        self._reads_s: deque[float] = deque(maxlen=_LOOK_BACK)
        self._name = name
        self._prepare = prepare
        self._limit_s = config.input_timeout_s()
        self._ready: deque[tuple[Any, Any]] = deque()  # (element, prepared element)
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._pull = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = False  # the cursor has
        self._stopped = False
        self._error: BaseException | None = None

    def next(self) -> Any:
        """The next prepared element, or `END`."""
        if self._thread is None:
            return self._next_without_thread()
        try:
            news = self._news.get(timeout=self._limit_s)
        except queue.Empty:
            raise InputTimeout(
                f"input thread {self._name!r} delivered nothing for {self._limit_s:g} s. "
                "Set STRATAGEM_INPUT_TIMEOUT_S to wait longer."
            ) from None
        if news is _News.ELEMENT:
            _, prepared = self._ready.popleft()
            self._room.put(None)
            return prepared
        self._news.put(news)  # the end stays the end
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
            prepared = element if self._prepare is None else self._prepare(element)
            self._reads_s.append(time.perf_counter() - began)
        if self._size and not self._ended and not self._stopped and self._thread_pays():
            self._start()
        return prepared

    def _thread_pays(self) -> bool:
        """Whether reads are slow by themselves: one may be an epoch's new order, or the machine."""
        if self._worthwhile_s == 0.0:
            return True
        reads_s = self._reads_s
        if len(reads_s) >= 2 and min(reads_s[-1], reads_s[-2]) >= _SLOW_S:
            return True
        return len(reads_s) == _LOOK_BACK and min(reads_s) >= self._worthwhile_s

    def _start(self) -> None:
        for _ in self._ready:  # left from a restored position
            self._news.put(_News.ELEMENT)
        for _ in range(self._size - len(self._ready)):
            self._room.put(None)
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while self._wait_for_room() and self._move_one():
                pass
        except BaseException as error:  # noqa: BLE001 - raised to the consumer, in its turn
            self._error = error
            self._news.put(_News.ERROR)
        finally:
            self._child.close()

    def _wait_for_room(self) -> bool:
        while not self._stopped:
            try:
                self._room.get(timeout=_IDLE_S)
            except queue.Empty:
                continue
            return not self._stopped
        return False

    def _move_one(self) -> bool:
        with self._pull:
            element = self._child.next()
            if element is END:
                self._ended = True
                self._news.put(_News.END)
                return False
            prepared = element if self._prepare is None else self._prepare(element)
            self._ready.append((element, prepared))
            self._news.put(_News.ELEMENT)
        return True

    def state(self) -> State:
        """The position after what was delivered: what is read ahead is in it as it is."""
        if not self._pull.acquire(timeout=self._limit_s):
            raise InputTimeout(
                f"input thread {self._name!r} has been reading one element for {self._limit_s:g} s, "
                "so its position cannot be told. Set STRATAGEM_INPUT_TIMEOUT_S to wait longer."
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
        prepare = self._prepare
        self._ready.extend((e, e if prepare is None else prepare(e)) for e in state["ready"])

    def close(self) -> None:
        """End the thread, drop what was read ahead, close the cursor; idempotent."""
        self._stopped = True
        self._room.put(None)
        if self._thread is None:
            self._child.close()
        else:
            _join(self._thread)
        self._ready.clear()
