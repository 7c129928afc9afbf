"""The threads of replicas: one for each but the first, kept between runs, owned by a strategy.

A replica thread is a named daemon thread that waits for a job. It holds no reference to its owner, so that an
unused strategy can be collected; its finalizer closes the threads. `replicas` defines the jobs.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch
from typing_extensions import override

from stratagem._core import context
from stratagem._core.torch_patches import private_api
from stratagem.errors import ReplicaTimeout

CLOSE_LIMIT_S = 5.0
"""How long closing waits for an idle thread to end; idle threads end in microseconds."""

EXIT_LIMIT_S = 2.0
"""How long the end of the process waits for abandoned threads."""

_REPEAT_S = 0.05
"""How often abandoned threads are interrupted at the end of the process, in case they catch it."""


class _ProcessEnds(SystemExit):
    """Raised in a replica that is still computing when the interpreter ends."""


class ReplicaThread:
    """One thread that runs jobs, one at a time.

    Attributes:
        busy: whether it runs a job; the job itself clears it.
        abandoned: whether the thread ends after its job.
        ident: the number of the thread, as `_thread.get_ident` returns it there.
        intra_op_threads: the number of threads that it set for torch; 0: not set yet.
    """

    __slots__ = (
        "__weakref__", "_go", "_job", "abandoned", "busy", "ident", "intra_op_threads", "thread",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self._go = _thread.allocate_lock()  # held while there is nothing to do
        self._go.acquire()
        self._job: Callable[[], None] | None = None
        self.busy = False
        self.abandoned = False
        self.intra_op_threads = 0
        self.thread = threading.Thread(target=_serve, args=(self,), name=name, daemon=True)
        _THREADS.add(self)
        self.thread.start()
        self.ident = self.thread.ident

    def start(self, job: Callable[[], None]) -> None:
        """Start a job; the thread must be idle."""
        self._job = job
        self.busy = True
        self._go.release()

    def stop(self) -> None:
        """End the thread: now if it is idle, else after its job."""
        # The order matters: the thread clears `busy` before it reads `abandoned`, so that one of the two sides
        # always sees the other.
        self.abandoned = True
        if not self.busy:
            self._go.release()

    @override
    def __repr__(self) -> str:
        state = "abandoned" if self.abandoned else "busy" if self.busy else "idle"
        return f"<ReplicaThread {self.thread.name} [{state}]>"


def _serve(thread: ReplicaThread) -> None:
    while True:
        # Without a limit: stop() ends the thread. close(), the owner's finalizer or the end of the process calls it.
        thread._go.acquire()
        job = thread._job
        thread._job = None
        if job is None:
            return
        job()
        del job  # it refers to the user's function, and so perhaps to a strategy
        if thread.abandoned:
            return


_THREADS: weakref.WeakSet[ReplicaThread] = weakref.WeakSet()


@atexit.register
def _end_busy_threads() -> None:
    """Interrupt replicas that still compute before the interpreter ends.

    Until Python 3.14 the interpreter ends a thread that returns from native code after its shutdown. Inside torch
    that unwinds C++ code that must not be unwound, and the process aborts.
    """
    deadline = time.monotonic() + EXIT_LIMIT_S
    busy = [thread.thread for thread in list(_THREADS) if thread.busy]
    while (busy := [each for each in busy if each.is_alive()]) and time.monotonic() < deadline:
        for each in busy:
            if each.ident is not None:
                # It arrives when the thread next runs Python code. A thread that sleeps for longer does no harm.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(each.ident), ctypes.py_object(_ProcessEnds)
                )
        busy[0].join(_REPEAT_S)


class ReplicaThreads:
    """The replica threads of one strategy; created when first used, closed with the strategy."""

    __slots__ = ("_busy", "_holder", "_name", "_nested", "_process", "_threads")

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: list[ReplicaThread] = []
        self._nested: ReplicaThreads | None = None
        self._busy = _thread.allocate_lock()
        self._holder = 0
        self._process = 0

    def for_this_thread(self) -> ReplicaThreads:
        """Return these threads, or others if a rendezvous of a run started this run.

        The threads of the outer run wait for that rendezvous and would never become free.
        """
        me = _thread.get_ident()
        if self._holder != me and me not in [thread.ident for thread in self._threads]:
            return self
        if self._nested is None:
            self._nested = ReplicaThreads(f"{self._name}-nested")
        return self._nested.for_this_thread()

    def acquire(self, size: int, *, limit_s: float) -> Sequence[ReplicaThread]:
        """Reserve ``size`` idle threads for one run, until `release`.

        Runs of one strategy that several threads start take turns: a replica has one set of gradients and buffers.
        """
        if not self._busy.acquire(timeout=limit_s):
            raise ReplicaTimeout(
                f"another thread has been inside run() of {self._name} for {limit_s:g} s. "
                "Runs of one strategy take turns; use one strategy per thread to run at the same time.",
                waiting=(),
                missing=(),
                limit_s=limit_s,
            )
        self._holder = _thread.get_ident()
        if self._process != os.getpid():
            self._process, self._threads = os.getpid(), []  # a fork copies no threads
        for i in range(size):
            if i == len(self._threads):
                self._threads.append(ReplicaThread(f"{self._name}-replica-{i + 1}"))
            elif self._threads[i].abandoned:  # by a failed run
                self._threads[i] = ReplicaThread(f"{self._name}-replica-{i + 1}")
        return self._threads[:size]

    def release(self) -> None:
        """Make the threads available to other runs."""
        self._holder = 0
        self._busy.release()

    def close(self) -> None:
        """End idle threads now and busy ones after their job. May be called again."""
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.stop()
        for thread in threads:
            # The finalizer may run on a replica thread: the job held the last reference.
            if thread.thread is not threading.current_thread() and not thread.busy:
                thread.thread.join(CLOSE_LIMIT_S)
        nested, self._nested = self._nested, None
        if nested is not None:
            nested.close()

    @override
    def __repr__(self) -> str:
        busy = sum(thread.busy for thread in self._threads)
        return f"<ReplicaThreads {self._name} [{len(self._threads)} threads, {busy} busy]>"


class CallerSettings:
    """Torch settings and context variables of the thread that calls ``run``, for every replica.

    Create it and call `restore` on that thread.

    Attributes:
        variables: the caller's context variables.
        intra_op_threads: how many threads torch uses on the caller's thread.
    """

    __slots__ = ("_autocast", "_grad", "_inference", "_is_limited", "intra_op_threads", "variables")

    def __init__(self) -> None:
        self.variables = context.caller_variables()
        self.intra_op_threads = torch.get_num_threads()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._is_limited = False
        self._autocast: list[tuple[str, torch.dtype, bool]] = []
        if private_api.any_autocast():
            accelerator = torch.accelerator.current_accelerator()
            cache = torch.is_autocast_cache_enabled()
            for kind in ["cpu", *([] if accelerator is None else [accelerator.type])]:
                if torch.is_autocast_enabled(kind):
                    self._autocast.append((kind, torch.get_autocast_dtype(kind), cache))

    def apply(self, device: torch.device) -> contextlib.ExitStack | None:
        """Apply the settings to this thread; return the stack to close, or None if nothing is open."""
        private_api.set_grad_enabled(self._grad)
        has_modes = private_api.function_modes() > 0  # a device scope around run(), on its thread
        if not (self._inference or self._autocast or has_modes or device.type != "cpu"):
            return None
        stack = contextlib.ExitStack()
        if self._inference:
            stack.enter_context(torch.inference_mode())
        for kind, dtype, cache in self._autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
        if has_modes or device.type != "cpu":
            compute_on(device, stack)
        return stack

    def limit_cores(self, thread: ReplicaThread | None, wanted: int) -> None:
        """Limit torch's own threads in this replica's thread, so that R replicas do not compete for the cores.

        torch keeps the number per thread, but setting it also changes the start value of threads created later.
        """
        known = self.intra_op_threads if thread is None else thread.intra_op_threads
        if known != wanted:
            torch.set_num_threads(wanted)
            self._is_limited = True
            if thread is not None:
                thread.intra_op_threads = wanted

    def restore(self) -> None:
        """Undo what replica 0 has set, or forgotten to restore, on the calling thread."""
        private_api.set_grad_enabled(self._grad)
        if self._is_limited:
            torch.set_num_threads(self.intra_op_threads)


def compute_on(device: torch.device, stack: contextlib.ExitStack) -> None:
    """Create new tensors on ``device``, and make it an accelerator's current one, until the stack closes."""
    if device.type != "cpu":
        stack.enter_context(torch.get_device_module(device).device(device.index))
    stack.enter_context(device)
