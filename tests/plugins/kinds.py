"""Kinds of tests: every test is exactly one of fast, process, slow and soak.

| kind      | meaning                                           | how a test gets it               | run by           |
|-----------|---------------------------------------------------|----------------------------------|------------------|
| `fast`    | starts no process                                 | no marker                        | `make test`      |
| `process` | starts at least one process                       | ``pytest.mark.process``          | `make test`      |
| `slow`    | takes more than about 2 s on a quiet machine      | ``pytest.mark.slow``             | `make test-slow` |
| `soak`    | takes minutes: fuzzing, memory, many random orders| ``pytest.mark.soak``             | `make test-soak` |

Put the marker on the test, or on the whole module with ``pytestmark``. The longest kind counts: a slow test of a module
of process tests is slow. Some parameters of a test may be marked `slow` or `soak`: the test runs with the others in
``make test``. A fast test that starts a process fails, so the marks stay true.
Loaded by the root ``conftest.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

KINDS = ("fast", "process", "slow", "soak")

# Audit events of the interpreter that mean "a process is being started".
_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})

_started: list[str] = []


def _note_process_start(
    event: str,
    _arguments: object,
    # Defaults, because the hook outlives this module's names when the interpreter ends.
    starts: frozenset[str] = _STARTS,
    started: list[str] = _started,
) -> None:
    if event in starts:
        started.append(event)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and watch for processes."""
    config.addinivalue_line("markers", "fast: starts no process (added to tests without a kind)")
    config.addinivalue_line("markers", "process: starts processes")
    config.addinivalue_line("markers", "slow: takes seconds; run by `make test-slow`")
    config.addinivalue_line("markers", "soak: takes long; run by `make test-soak`")
    config.addinivalue_line(
        "markers", "browser: needs chromium; skipped where there is none (beside its kind)"
    )
    sys.addaudithook(_note_process_start)


def kinds_of(item: pytest.Item) -> set[str]:
    """Return the kinds that a test is marked with, on itself, its class or its module: the longest, unless one is fast."""
    found = {mark.name for mark in item.iter_markers()} & set(KINDS)
    return found if "fast" in found or not found else {max(found, key=KINDS.index)}


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests without a kind as fast; refuse tests with two kinds."""
    for item in items:
        found = kinds_of(item)
        if not found:
            item.add_marker("fast")
        elif len(found) > 1:
            raise pytest.UsageError(
                f"{item.nodeid} is marked {' and '.join(sorted(found))}: expected one kind. Mark the "
                "tests of the module one by one."
            )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Forget the processes that earlier tests started."""
    _started.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a fast test that has started a process."""
    result = yield
    if _started and "fast" in kinds_of(item):
        pytest.fail(
            f"a fast test started a process ({_started[0]}): mark it with pytest.mark.process",
            pytrace=False,
        )
    return result
