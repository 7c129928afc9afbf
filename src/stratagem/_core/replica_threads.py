"""The threads replicas run on: one lane per replica, kept between runs, owned by a strategy.

A lane is a named daemon thread that waits for a job. Lanes hold no reference to their owner, so that a
forgotten strategy can be collected; its finalizer closes the lanes. What a job does, and how jobs meet,
is `replicas.py`'s business.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch
from typing_extensions import override

CLOSE_LIMIT_S = 5.0
"""How long closing waits for an idle lane's thread to end; they end in microseconds."""

EXIT_LIMIT_S = 2.0
"""How long the end of the process waits for replicas that were left behind."""

_AGAIN_S = 0.05
"""How often they are told, in case they catch it."""


class _ProcessEnds(SystemExit):
    """Raised in a replica that is still computing when the interpreter ends."""


class ReplicaThread:
    """One thread that runs jobs handed to it, one at a time."""

    __slots__ = ("__weakref__", "_go", "_job", "abandoned", "busy", "intra_op_threads", "thread")

    def __init__(self, name: str) -> None:
        self._go = _thread.allocate_lock()  # held while there is nothing to do
        self._go.acquire()
        self._job: Callable[[], None] | None = None
        self.busy = False
        self.abandoned = False
        self.intra_op_threads = 0  # what this thread told torch to use; 0: nothing yet
        self.thread = threading.Thread(target=_serve, args=(self,), name=name, daemon=True)
        _LANES.add(self)
        self.thread.start()

    def start(self, job: Callable[[], None]) -> None:
        """Hand over a job; the lane must be idle."""
        self._job = job
        self.busy = True
        self._go.release()

    def stop(self) -> None:
        """Let the thread end, at once when idle, else after its job."""
        # Order matters: the thread clears `busy` before it looks at `abandoned`, so that one of
        # the two always sees the other.
        self.abandoned = True
        if not self.busy:
            self._go.release()

    @override
    def __repr__(self) -> str:
        state = "abandoned" if self.abandoned else "busy" if self.busy else "idle"
        return f"<Lane {self.thread.name} [{state}]>"


def _serve(thread: ReplicaThread) -> None:
    while True:
        # Idle lanes wait without a limit: they end by stop(), called by close(), by the finalizer
        # of their owner or at interpreter exit, whichever comes first.
        thread._go.acquire()
        job = thread._job
        thread._job = None
        if job is None:
            return
        job()  # clears lane.busy itself, before anybody can hand over the next job
        del job  # keeps the user's function, and through it a strategy, alive no longer
        if thread.abandoned:
            return


_LANES: weakref.WeakSet[ReplicaThread] = weakref.WeakSet()


@atexit.register
def _end_busy_threads() -> None:
    """Let replicas that still compute end before the interpreter does.

    Until Python 3.14 a thread that comes back from native code after the interpreter's end is ended there and then;
    inside torch that unwinds C++ which must not be unwound, and the process aborts.
    """
    deadline = time.monotonic() + EXIT_LIMIT_S
    busy = [thread.thread for thread in list(_LANES) if thread.busy]
    while (busy := [each for each in busy if each.is_alive()]) and time.monotonic() < deadline:
        for each in busy:
            if each.ident is not None:
                # Arrives when it next runs Python; one that sleeps, or waits, for longer does no harm.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(each.ident), ctypes.py_object(_ProcessEnds)
                )
        busy[0].join(_AGAIN_S)


class ReplicaThreads:
    """The lanes of one strategy; made when first used, closed with it."""

    __slots__ = ("_busy", "_holder", "_name", "_nested", "_threads")

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: list[ReplicaThread] = []
        self._nested: ReplicaThreads | None = None
        self._busy = _thread.allocate_lock()
        self._holder = 0

    def for_this_thread(self) -> ReplicaThreads:
        """These lanes, or spare ones for a run started from within a meeting of a run.

        The lanes of the outer run are waiting then, and would never become free.
        """
        me = _thread.get_ident()
        if self._holder != me and all(thread.thread.ident != me for thread in self._threads):
            return self
        if self._nested is None:
            self._nested = ReplicaThreads(f"{self._name}-nested")
        return self._nested.for_this_thread()

    def acquire(self, size: int, *, limit_s: float) -> Sequence[ReplicaThread]:
        """Reserve ``size`` idle lanes for one run; `release` gives them back.

        Runs of one strategy started by several threads take turns: replicas have one set of
        gradients and buffers each.
        """
        if not self._busy.acquire(timeout=limit_s):
            raise TimeoutError(
                f"another thread has been inside run() of {self._name} for {limit_s:g} s. "
                "Runs of one strategy take turns; use one strategy per thread to run side by side."
            )
        self._holder = _thread.get_ident()
        for i in range(size):
            if i == len(self._threads):
                self._threads.append(ReplicaThread(f"{self._name}-replica-{i}"))
            elif self._threads[i].abandoned or not self._threads[i].thread.is_alive():
                # Left behind by a failed run, or lost in a fork, which takes no threads along.
                self._threads[i] = ReplicaThread(f"{self._name}-replica-{i}")
        return self._threads[:size]

    def release(self) -> None:
        """Give the lanes back."""
        self._holder = 0
        self._busy.release()

    def close(self) -> None:
        """End all idle threads, and busy ones as soon as their job is over. May be called again."""
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.stop()
        for thread in threads:
            # The finalizer may run on a lane's own thread: the job held the last reference.
            if thread.thread is not threading.current_thread() and not thread.busy:
                thread.thread.join(CLOSE_LIMIT_S)
        nested, self._nested = self._nested, None
        if nested is not None:
            nested.close()

    @override
    def __repr__(self) -> str:
        busy = sum(thread.busy for thread in self._threads)
        return f"<ReplicaThreads {self._name} [{len(self._threads)} threads, {busy} busy]>"


def share_of_cores(thread: ReplicaThread, wanted: int) -> bool:
    """Limit torch's own threads in this lane, so that R replicas do not fight for the cores.

    torch keeps the number per thread, but a thread that sets it also changes what threads
    started later begin with; returns True if the caller has to set that right again.
    """
    if thread.intra_op_threads == wanted:
        return False
    torch.set_num_threads(wanted)
    thread.intra_op_threads = wanted
    return True
