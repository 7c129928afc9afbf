"""Every test has one kind, and a fast test starts no process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kinds import kinds_of

PLUGINS = Path(__file__).parent / "plugins"


def run_inner(place: Path, tests: str, *options: str) -> str:
    """Run tests in a session of their own; return its output."""
    (place / "pytest.ini").write_text(f"[pytest]\npythonpath = {PLUGINS}\n")
    (place / "conftest.py").write_text('pytest_plugins = ["kinds"]\n')
    (place / "test_inner.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, *options, str(place)],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.stdout + done.stderr


def test_every_test_of_this_session_has_one_kind(request: pytest.FixtureRequest) -> None:
    """Doctests included."""
    wrong = [item.nodeid for item in request.session.items if len(kinds_of(item)) != 1]
    assert wrong == []


@pytest.mark.process
def test_a_fast_test_that_starts_a_process_fails(tmp_path: Path) -> None:
    """The test itself or one of its fixtures starts the process; a marked test may."""
    out = run_inner(
        tmp_path,
        """
import os, subprocess, pytest

def test_alone(): pass

def test_itself(): subprocess.run(["true"], check=True)

def test_fork():
    if (pid := os.fork()) == 0: os._exit(0)
    os.waitpid(pid, 0)

@pytest.fixture(scope="module")
def child(): return subprocess.run(["true"], check=True)

def test_by_a_fixture(child): pass

@pytest.mark.process
def test_marked(): subprocess.run(["true"], check=True)
""",
    )
    for name in ("alone", "marked"):
        assert f"PASSED test_inner.py::test_{name}\n" in out, out
    for name in ("itself", "fork", "by_a_fixture"):
        assert f"ERROR test_inner.py::test_{name} - Failed: a fast test" in out, out


@pytest.mark.process
def test_markers_select_and_two_kinds_are_refused(tmp_path: Path) -> None:
    """`-m fast` selects tests without a marker."""
    tests = """
import pytest
def test_plain(): pass
@pytest.mark.soak
def test_long(): pass
"""
    assert "1 passed, 1 deselected" in run_inner(tmp_path, tests, "-m", "fast")
    assert "1 passed, 1 deselected" in run_inner(tmp_path, tests, "-m", "soak")
    both = f"{tests}\npytestmark = pytest.mark.slow\n"
    assert "1 passed, 1 deselected" in run_inner(tmp_path, both, "-m", "slow and not soak")
    out = run_inner(tmp_path, f"{tests}\npytestmark = pytest.mark.fast\n")
    assert "test_long is marked fast and soak: expected one kind" in out
