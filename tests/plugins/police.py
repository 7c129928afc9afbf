"""Leak police: fail a test that leaves something behind, and say what it left.

After every test the police compares the process with its state before the test: threads, child
processes, shared memory, sockets and pipes, environment, working directory and the files in it, torch's
global state and the current strategy. Things that need a moment to end get `GRACE_S` seconds. Fixtures of a wider scope
are set up before the first comparison, so their resources are not the test's. The police checks them
when their module ends, together with orphans (processes whose parent has ended).

The police restores the environment, the directory and torch's state, so that one bad test does not
spoil the next. It looks only at resources of its own test process and of processes that this process
started, so other test processes on the machine do not disturb it. Loaded by the root ``conftest.py``.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

# Long enough for a process to end on a heavily loaded machine; only a leak waits so long.
GRACE_S = 30.0
# Leftovers in reference cycles need a collection; most others end by themselves before this.
COLLECT_AFTER_S = 0.05
# Then include objects that `_exempt_old_objects` has exempted, although that makes collections slow.
THAW_AFTER_S = 5.0
# A module that has made so many lasting objects (imports of torch's compiler, of Keras) has them exempted, too.
MANY_OBJECTS = 200_000

# Compile in this process: inductor would otherwise keep a pool of children for the whole session.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Every process that this test process starts inherits the mark. Each xdist worker has its own mark.
MARK = "STRATAGEM_TEST_SESSION"
os.environ[MARK] = uuid.uuid4().hex

# Set by pytest, and by torch on its first use of inductor or OpenMP.
_FREE_VARIABLES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
_FREE_PREFIXES = ("KMP_", "PYTEST_", "_TORCHINDUCTOR_")

# Where the session was started; caches and what git ignores may appear there.
ROOT = os.getcwd()
_FREE_FILES = re.compile(r"\..*|__pycache__|.*\.egg-info|build|dist|site|demo-output")

_HELD = re.compile(r"socket:|/memfd:|/dev/shm/|pipe:|anon_inode:\[?(eventpoll|eventfd)")

# Shared memory of servers and clients, and the threads of tasks in this process (`LocalCluster(in_process=True)`).
_OUR_MEMORY = "/memfd:stratagem (deleted)"
_TASK_THREAD = re.compile(r"stratagem-(ps|worker)-\d+")

# Kinds of descriptors that a library in this process opens when it chooses and keeps (Ray's gRPC). A fixture adds
# them; they are counted again in the next module.
uncounted_kinds: set[str] = set()


@dataclass(frozen=True)
class State:
    """Resources and settings of this process at one moment."""

    threads: frozenset[threading.Thread]
    children: frozenset[tuple[int, str]]
    descriptors: frozenset[tuple[str, str]]
    mappings: frozenset[str]
    shm_names: frozenset[str]
    environment: dict[str, str]
    directory: str
    files: frozenset[str]
    torch_state: dict[str, Any]
    strategy: str


def _threads() -> frozenset[threading.Thread]:
    # Dummy threads are native threads (torch's) that once ran Python; Python cannot end them.
    return frozenset(t for t in threading.enumerate() if not isinstance(t, threading._DummyThread))


def _children() -> frozenset[tuple[int, str]]:
    """Return pid and start time of direct children, zombies included."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        try:
            pids = Path(f"/proc/self/task/{task}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        for pid in pids:
            stat = _stat(int(pid))
            if stat is not None:
                found.add((int(pid), stat[19]))
    return frozenset(found)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat after the command (state, ppid, …), None if it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _describe_process(pid: int) -> str:
    stat = _stat(pid)
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except (FileNotFoundError, ProcessLookupError):
        command = ""
    if stat is not None and stat[0] == "Z":
        return f"process {pid} (ended, but its parent did not wait for it)"
    return f"process {pid}: {command.strip()}"


def _descriptors() -> frozenset[tuple[str, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if _HELD.match(target):
            found.add((name, target))
    return frozenset(found)


def _mappings() -> frozenset[str]:
    """Return mapped shared memory as 'device:inode name'."""
    found = set()
    with open("/proc/self/maps") as lines:
        for line in lines:
            if "memfd:" in line or "/dev/shm/" in line:
                _, _, _, device, inode, *name = line.split(None, 5)
                found.add(f"{device}:{inode} {''.join(name).strip()}")
    return frozenset(found)


def _shm_names() -> frozenset[str]:
    return frozenset(os.listdir("/dev/shm"))


def _holds(pid: int, path: str) -> bool:
    """Return whether a process has a file in /dev/shm open or mapped."""
    try:
        if path in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
            return True
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        return any(link.startswith(path) for link in links)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def _shm_is_ours(name: str) -> bool:
    """Return whether this process, or one that it started, created /dev/shm/<name>.

    Other programs and other test processes create names there too. torch and others put the pid of
    the creator into the name; otherwise a process that has the file open tells.
    """
    if str(os.getpid()) in re.findall(r"\d+", name):
        return True
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return any(_is_ours(pid) and _holds(pid, f"/dev/shm/{name}") for pid in pids)


def _is_ours(pid: int) -> bool:
    wanted = f"{MARK}={os.environ[MARK]}".encode()
    try:
        return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _FREE_VARIABLES and not name.startswith(_FREE_PREFIXES)
    }


_TORCH_STATE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (
        lambda: str(torch.get_default_device()),
        lambda device: torch.set_default_device(None if device == "cpu" else device),
    ),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "grad mode": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "autocast on cpu": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
    ),
}


def _files() -> frozenset[str]:
    """Return the names in the directory where the session was started."""
    return frozenset(name for name in os.listdir(ROOT) if not _FREE_FILES.fullmatch(name))


def _torch_state() -> dict[str, Any]:
    return {what: read() for what, (read, _) in _TORCH_STATE.items()}


def _strategy() -> str:
    """Return the strategy whose scope is open in this thread, if the package is loaded."""
    context = sys.modules.get("stratagem._core.context")
    if context is None or not context.has_strategy():
        return "none"
    return repr(context.get_strategy())


def look() -> State:
    """Return the state of this process now."""
    return State(
        threads=_threads(),
        children=_children(),
        descriptors=_descriptors(),
        mappings=_mappings(),
        shm_names=_shm_names(),
        environment=_environment(),
        directory=os.getcwd(),
        files=_files(),
        torch_state=_torch_state(),
        strategy=_strategy(),
    )


def _added(now: Collection[Any], before: Collection[Any]) -> list[Any]:
    """Return new items, unless as many or more have gone: a fixture's cluster may reconnect."""
    return [one for one in now if one not in before] if len(now) > len(before) else []


def _kind_of(target: str) -> str:
    """Return ``socket`` or ``pipe`` or the name of a file that a descriptor leads to."""
    return target.split(":[")[0]


def _fixture_connects(before: State) -> bool:
    """Return whether a fixture's coordinator runs, whose watch threads connect when they choose."""
    return any(t.name.startswith("stratagem-watch-") and t.is_alive() for t in before.threads)


def _fixture_serves(before: State) -> bool:
    """Return whether a fixture's workers and servers run in this process: they may keep memory until their next task."""
    return any(_TASK_THREAD.fullmatch(t.name) and t.is_alive() for t in before.threads)


def _added_descriptors(before: State) -> list[str]:
    now = _descriptors()
    kinds = {_kind_of(target) for _, target in now} - uncounted_kinds
    if _fixture_connects(before):
        kinds.discard("socket")  # checked when the module ends
    if _fixture_serves(before):
        kinds.discard(_OUR_MEMORY)  # likewise
    return [
        f"descriptor {fd} -> {target}"
        for kind in kinds
        for fd, target in _added(
            [one for one in now if _kind_of(one[1]) == kind],
            [one for one in before.descriptors if _kind_of(one[1]) == kind],
        )
    ]


def _lingering(before: State) -> list[str]:
    """Describe new resources, of the kinds that may need a moment to go away."""
    return [
        *(f"thread {t.name!r}" for t in _added(_threads(), before.threads)),
        *(_describe_process(pid) for pid, _ in _added(_children(), before.children)),
        *_added_descriptors(before),
        *(
            f"mapping of shared memory {name}"
            for name in _added(_mappings(), before.mappings)
            if not (name.endswith(_OUR_MEMORY) and _fixture_serves(before))
        ),
        *(
            f"shared memory /dev/shm/{name}"
            for name in _shm_names() - before.shm_names
            if _shm_is_ours(name)
        ),
    ]


def _release_errors(records: Iterable[logging.LogRecord]) -> None:
    """Keep the texts of log records only: their errors refer to frames, whose variables own resources."""
    for record in records:
        record.msg, record.args, record.exc_info = record.getMessage(), None, None


def _describe_holders(before: State) -> list[str]:
    """Describe tensors over new shared memory by the types of the objects that refer to them."""
    with open("/proc/self/maps") as lines:
        new = [
            [int(end, 16) for end in line.split()[0].split("-")]
            for line in lines
            if "memfd:" in line
            and not any(line.split(None, 5)[4] in one for one in before.mappings)
        ]
    if not new:
        return []
    objects = gc.get_objects()
    found = []
    for one in objects:
        if type(one) not in (torch.Tensor, torch.nn.Parameter) or one.layout is not torch.strided:
            continue
        address = one.data_ptr() if one.device.type == "cpu" else 0
        if any(start <= address < end for start, end in new):
            holders = [h for h in gc.get_referrers(one) if h is not objects]
            kinds = sorted({type(h).__name__ for h in holders} - {"frame"})
            found.append(f"tensor of shape {tuple(one.shape)} over it, held by {', '.join(kinds)}")
    return found


def _await_quiet(before: State, records: Sequence[logging.LogRecord] = ()) -> list[str]:
    """Return what still lingers after the grace period; return at once when nothing does."""
    began = time.monotonic()
    pause_s, is_thawed = 0.002, False
    while left := _lingering(before):
        waited_s = time.monotonic() - began
        if waited_s > GRACE_S:
            left += _describe_holders(before)
            break
        if waited_s > COLLECT_AFTER_S:
            _release_errors(records)
            if waited_s > THAW_AFTER_S:
                gc.unfreeze()  # garbage may refer to objects that are older than the tests
                is_thawed = True
            gc.collect()  # objects in reference cycles release what they own when collected
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
    if is_thawed:
        _exempt_old_objects()
    return left


def _exempt_old_objects() -> None:
    """Exempt all present objects from garbage collection: it makes a collection 1000 × faster."""
    gc.collect()
    gc.freeze()


def _changed(before: State) -> list[str]:
    """Describe changed settings, and restore them."""
    found = []
    now = _environment()
    for name in sorted(now.keys() | before.environment.keys()):
        was, is_now = before.environment.get(name), now.get(name)
        if was != is_now:
            found.append(f"environment variable {name}: was {was!r}, is {is_now!r}")
            if was is None:
                del os.environ[name]
            else:
                os.environ[name] = was
    if os.getcwd() != before.directory:
        found.append(f"working directory: was {before.directory}, is {os.getcwd()}")
        os.chdir(before.directory)
    found.extend(f"file {name!r} in {ROOT}" for name in sorted(_files() - before.files))
    for what, is_now in _torch_state().items():
        was = before.torch_state[what]
        if was != is_now:
            found.append(f"torch's {what}: was {was}, is {is_now}")
            _TORCH_STATE[what][1](was)
    if _strategy() != before.strategy:
        found.append(f"current strategy: was {before.strategy}, is {_strategy()}")
    return found


def complaints(before: State, records: Sequence[logging.LogRecord] = ()) -> list[str]:
    """Return everything left behind or changed since `before`, one sentence each.

    pytest keeps the test's log `records`, with the errors that they show, until the test is over.
    """
    return _changed(before) + _await_quiet(before, records)


def orphans() -> list[str]:
    """Return processes of this session whose parent has ended."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid() or not _is_ours(int(entry)):
            continue
        stat = _stat(int(entry))
        if stat is None or stat[0] == "Z":
            continue
        parent = int(stat[1])
        if parent != os.getpid() and not _is_ours(parent):
            found.append(_describe_process(int(entry)))
    return found


def _report(what: str, found: list[str]) -> None:
    if found:
        pytest.fail(f"{what} left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exempt everything imported so far from garbage collection."""
    _exempt_old_objects()


@pytest.fixture(autouse=True)
def _leak_police(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    before = look()
    yield
    records = [*caplog.get_records("setup"), *caplog.get_records("call"), *caplog.records]
    _report("this test", complaints(before, records))


@pytest.fixture(autouse=True, scope="module")
def _module_leak_police(request: pytest.FixtureRequest) -> Iterator[None]:
    before = look()
    yield
    found = complaints(before)
    deadline = time.monotonic() + GRACE_S
    alone = orphans()
    while alone and time.monotonic() < deadline:
        time.sleep(0.05)
        alone = orphans()
    uncounted_kinds.clear()
    if len(gc.get_objects()) > MANY_OBJECTS:
        _exempt_old_objects()
    _report("the fixtures of this module", found + [f"orphan {one}" for one in alone])
