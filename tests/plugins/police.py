"""Leak police: a test that leaves something behind fails, and says what it left.

After every test the process is compared with what it was before: threads, child processes, shared
memory, sockets and pipes, environment, working directory, torch's global state, the current
strategy. Things that need a moment to end are given `GRACE_S` seconds. Fixtures of a wider scope
are set up before the first comparison and so are not the test's; what they leave is found when
their module ends, together with orphans (processes whose parent is gone).

What can be restored (environment, directory, torch's state) is restored, so that one bad test does
not blame the next. Loaded by the root ``conftest.py``.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

# Long enough for a process told to end on a loaded machine with two cores; only a leak waits so long.
GRACE_S = 10.0

# Compile in this process: inductor would otherwise keep a pool of children for the whole session.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Every process started by this session inherits the mark, so that orphans can be told from others.
MARK = "STRATAGEM_TEST_SESSION"
os.environ[MARK] = uuid.uuid4().hex

# pytest's own; and what torch sets on its first use of inductor or OpenMP.
_FREE_VARIABLES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
_FREE_PREFIXES = ("KMP_", "PYTEST_", "_TORCHINDUCTOR_")

_HELD = re.compile(r"socket:|/memfd:|/dev/shm/|pipe:|anon_inode:\[?(eventpoll|eventfd)")


@dataclass(frozen=True)
class State:
    """What a process holds at one moment."""

    threads: frozenset[threading.Thread]
    children: frozenset[tuple[int, str]]
    descriptors: frozenset[tuple[str, str]]
    mappings: frozenset[str]
    shm_names: frozenset[str]
    environment: dict[str, str]
    directory: str
    torch_state: dict[str, Any]
    strategy: str


def _threads() -> frozenset[threading.Thread]:
    # Dummy threads are foreign threads (torch's) that once ran Python: not Python's to end.
    return frozenset(t for t in threading.enumerate() if not isinstance(t, threading._DummyThread))


def _children() -> frozenset[tuple[int, str]]:
    """Direct children: pid and start time, zombies included."""
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
    """Fields of /proc/<pid>/stat after the command: state, ppid, …; None if it is gone."""
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
        return f"process {pid} (ended, but nobody waited for it)"
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
    """Shared memory that is mapped, as 'device:inode name'."""
    found = set()
    with open("/proc/self/maps") as lines:
        for line in lines:
            if "memfd:" in line or "/dev/shm/" in line:
                _, _, _, device, inode, *name = line.split(None, 5)
                found.add(f"{device}:{inode} {''.join(name).strip()}")
    return frozenset(found)


def _shm_names() -> frozenset[str]:
    return frozenset(os.listdir("/dev/shm"))


def _mapped_elsewhere(name: str) -> bool:
    """Whether a process outside this session's tree has /dev/shm/<name> open or mapped."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            if f"/dev/shm/{name}" in Path(f"/proc/{entry}/maps").read_text(errors="replace"):
                return not _is_ours(int(entry))
            for fd in os.listdir(f"/proc/{entry}/fd"):
                if os.readlink(f"/proc/{entry}/fd/{fd}").startswith(f"/dev/shm/{name}"):
                    return not _is_ours(int(entry))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return False


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


def _torch_state() -> dict[str, Any]:
    return {what: read() for what, (read, _) in _TORCH_STATE.items()}


def _strategy() -> str:
    """The strategy whose scope is open in this thread, if the package is loaded at all."""
    context = sys.modules.get("stratagem._core.context")
    if context is None or not context.has_strategy():
        return "none"
    return repr(context.get_strategy())


def look() -> State:
    """The state of this process now."""
    return State(
        threads=_threads(),
        children=_children(),
        descriptors=_descriptors(),
        mappings=_mappings(),
        shm_names=_shm_names(),
        environment=_environment(),
        directory=os.getcwd(),
        torch_state=_torch_state(),
        strategy=_strategy(),
    )


def _lingering(before: State) -> list[str]:
    """What is here that was not, of the kinds that may need a moment to go."""
    return [
        *(f"thread {t.name!r}" for t in _threads() - before.threads),
        *(_describe_process(pid) for pid, _ in _children() - before.children),
        *(f"descriptor {fd} -> {target}" for fd, target in _descriptors() - before.descriptors),
        *(f"mapping of shared memory {name}" for name in _mappings() - before.mappings),
        *(f"shared memory /dev/shm/{name}" for name in _shm_names() - before.shm_names),
    ]


def _await_quiet(before: State) -> list[str]:
    """What still lingers after the grace period; returns at once when nothing does."""
    left = _lingering(before)
    deadline = time.monotonic() + GRACE_S
    while left and time.monotonic() < deadline:
        gc.collect()  # owners caught in reference cycles end what they own when collected
        time.sleep(0.02)
        left = _lingering(before)
        if left and all(_is_strangers(one) for one in left):
            return []
    return [one for one in left if not _is_strangers(one)]


def _is_strangers(one: str) -> bool:
    """Names in /dev/shm may belong to other programs on this machine, other test sessions too."""
    prefix = "shared memory /dev/shm/"
    if not one.startswith(prefix):
        return False
    name = one.removeprefix(prefix)
    # torch and others put the number of the process that made a segment into its name.
    numbers = [int(digits) for digits in re.findall(r"\d{2,}", name)]
    makers = [n for n in numbers if n != os.getpid() and _stat(n) is not None]
    if any(not _is_ours(pid) for pid in makers):
        return True
    return _mapped_elsewhere(name)


def _changed(before: State) -> list[str]:
    """What was changed and not put back; puts it back."""
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
    for what, is_now in _torch_state().items():
        was = before.torch_state[what]
        if was != is_now:
            found.append(f"torch's {what}: was {was}, is {is_now}")
            _TORCH_STATE[what][1](was)
    if _strategy() != before.strategy:
        found.append(f"current strategy: was {before.strategy}, is {_strategy()}")
    return found


def complaints(before: State) -> list[str]:
    """Everything left behind or changed since `before`, one sentence each."""
    return _changed(before) + _await_quiet(before)


def orphans() -> list[str]:
    """Processes started in this session whose parent is gone."""
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


@pytest.fixture(autouse=True)
def _leak_police(request: pytest.FixtureRequest) -> Iterator[None]:
    before = look()
    yield
    _report("this test", complaints(before))


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
    _report("the fixtures of this module", found + [f"orphan {one}" for one in alone])
