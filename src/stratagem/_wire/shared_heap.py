"""A worker's large tensors lie in memory that servers of the same host can map.

What a step writes to a server is then read where it lies, without a copy. The allocator is C (`shared_heap.c`, which says how
torch comes to use it), built when the package is installed. Without a C compiler then, or with a torch that gets
its memory in another way, there is no heap, and writes are copied into slots as they are for small tensors.

One heap per process, while a worker runs in it. Only threads that ask for it get memory from it, while they ask
(`SharedHeap.enter`): others' tensors, and everything small, lie where they always do.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem import config
from stratagem._wire.arenas import memory_of_machine
from stratagem._wire.frames import ALIGNMENT
from stratagem._wire.messages import SegmentRef
from stratagem._wire.shm import HEADER_BYTES, Segment

_log = logging.getLogger("stratagem.wire")

NUMBER: Final = 1 << 30
"""What messages call the heap's segment; slots count from 1."""

LEAST_BYTES: Final = 1 << 17
"""Smaller tensors are copied in less time than it takes to think about them."""

KEPT_BYTES: Final = 1 << 28
"""How much freed memory stays with the process in any case."""

KEPT_S: Final = 30
"""What was in use so long ago, or up to twice as long, stays, too: the next step needs it again."""

_LIBRARY: Final = b"libc10.so"
_REASONS: Final = {
    1: "there is no memory for it",
    2: "this torch does not free memory by free()",
    3: "this torch does not get memory by posix_memalign()",
    4: "this process was forked from one that has a heap",
}


@final
class SharedHeap:
    """The heap of this process; made by `install`.

    Example:
        >>> from stratagem._wire import shared_heap
        >>> heap = shared_heap.installed()
        >>> heap is None or heap.used_bytes >= 0
        True
    """

    def __init__(self, native: ctypes.PyDLL, segment: Segment) -> None:
        self._native = native
        self._segment = segment
        self.users = 0
        self._base: int = native.shared_heap_base()
        self._end = self._base + segment.size
        self.enter = native.shared_heap_enter
        """Tensors this thread makes may lie in the heap from now on."""
        self.leave = native.shared_heap_leave
        """Until now."""
        self.is_entered = native.shared_heap_is_entered
        """Whether they may."""

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where in the heap's segment a tensor's elements lie, in order and without gaps; else None."""
        offset: int = tensor.data_ptr() - self._base
        if not 0 < offset < self._end - self._base or offset % ALIGNMENT:
            return None
        return offset if lies_as_it_reads(tensor) else None

    def close(self) -> bool:
        """Gives the memory up; False, and nothing has changed, if tensors lie in it."""
        if not self._native.shared_heap_close():
            return False
        self.forget()
        self._segment.close()
        return True

    def forget(self) -> None:
        """No tensor lies in it from now on: its addresses may soon be somebody else's."""
        self._end = self._base

    def ref(self) -> SegmentRef:
        """How servers on this host find it."""
        return self._segment.ref()

    def trim(self) -> None:
        """Gives what is free back to the kernel."""
        self._native.shared_heap_trim()

    @property
    def used_bytes(self) -> int:
        """Bytes of the tensors in it."""
        return int(self._native.shared_heap_used())

    @property
    def kept_bytes(self) -> int:
        """Bytes that are free, but not the kernel's."""
        return int(self._native.shared_heap_kept())

    @override
    def __repr__(self) -> str:
        return f"<SharedHeap {self.used_bytes} bytes in use, {self.kept_bytes} kept>"


def lies_as_it_reads(tensor: Tensor) -> bool:
    """Whether a tensor's memory holds its elements in order, without gaps, and as they are.

    What is conjugated or negated lazily (gradients of ``z.conj()`` are) has others in memory.
    """
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


_lock = threading.Lock()
_heap: SharedHeap | None = None
_why_not = "no worker runs in this process"


def installed() -> SharedHeap | None:
    """The heap of this process, if it has one."""
    return _heap


def why_not() -> str:
    """Why this process has none."""
    return _why_not


def is_built() -> bool:
    """Whether the C part was built when the package was installed."""
    return _library_path() is not None


def install() -> SharedHeap | None:
    """Makes the heap if there is none yet; None if there can be none here (`why_not`).

    Whoever does this says when it is not needed any more: `release`.
    """
    global _heap, _why_not
    with _lock:
        if _heap is None:
            try:
                _heap = _install()
            except OSError as error:
                _why_not = str(error)
                _log.debug("tensors stay in private memory: %s", error)
                return None
        _heap.users += 1
        return _heap


@contextmanager
def aside() -> Iterator[None]:
    """What this thread makes inside lies in private memory: data sets, which forked loaders would have to copy."""
    heap = _heap
    if heap is None or not heap.is_entered():
        yield
        return
    heap.leave()
    try:
        yield
    finally:
        heap.enter()


def release() -> None:
    """Undoes one `install`. With the last the memory is given up; if tensors lie in it, when the process ends."""
    global _heap
    with _lock:
        if _heap is not None:
            _heap.users -= 1
            if _heap.users == 0 and _heap.close():
                _heap = None


def _forget_in_child() -> None:
    """What a forked process has of the heap is a copy, and private: a server would read the parent's tensors."""
    global _heap, _lock, _why_not
    _lock = threading.Lock()  # another thread may have had it
    if _heap is not None:
        _heap.forget()
        _heap, _why_not = None, _REASONS[4]


os.register_at_fork(after_in_child=_forget_in_child)


def _install() -> SharedHeap:
    if not config.shared_heap_allowed():
        raise OSError("it is switched off (STRATAGEM_SHARED_HEAP=0 or STRATAGEM_SHARED_MEMORY=0)")
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        raise OSError(
            "addresses are limited here (ulimit -v), and it takes as many as there is memory"
        )
    path = _library_path()
    if path is None:
        raise OSError("its C part was not built: there was no compiler at installation")
    native = _load(path)
    # Room for everything the machine has; pages cost memory once written.
    segment = Segment(NUMBER, memory_of_machine(), writable_by_peers=True)
    missing = native.shared_heap_install(
        _LIBRARY, segment.ref().fd, segment.size, HEADER_BYTES, LEAST_BYTES, KEPT_BYTES, KEPT_S
    )
    if missing:
        segment.close()
        raise OSError(f"{_REASONS[missing]} (torch {torch.__version__})")
    return SharedHeap(native, segment)


def _load(path: str) -> ctypes.PyDLL:
    # PyDLL keeps Python's lock: the calls take less time than giving it away.
    native = ctypes.PyDLL(path)
    size = ctypes.c_size_t
    native.shared_heap_install.argtypes = [ctypes.c_char_p, ctypes.c_int, *[size] * 5]
    native.shared_heap_base.restype = size
    native.shared_heap_used.restype = size
    native.shared_heap_kept.restype = size
    for name in ("enter", "leave", "trim"):
        getattr(native, f"shared_heap_{name}").restype = None
    return native


def _library_path() -> str | None:
    spec = importlib.util.find_spec("stratagem._wire._shared_heap")
    return None if spec is None else spec.origin
