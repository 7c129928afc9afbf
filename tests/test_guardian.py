"""Processes that tests have started end with their session, even if that is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

pytestmark = pytest.mark.process

PLUGINS = Path(__file__).parent / "plugins"

# A test that never ends, with a child, and a child of that child in a session of its own.
INNER = """
import subprocess, sys
from pathlib import Path

def test_that_hangs():
    code = "import subprocess as s; print(s.Popen(['sleep', '600'], start_new_session=True).pid, flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True)
    grandchild = child.stdout.readline().strip()
    Path("pids.part").write_text(f"{child.pid} {grandchild}")
    Path("pids.part").rename("pids")
    child.wait()
"""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_killed_session_leaves_no_process_behind(tmp_path: Path) -> None:
    """SIGKILL, as a time limit sends it: no fixture runs to its end, and yet."""
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {PLUGINS}\n")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["police", "guardian"]\n')
    (tmp_path / "test_inner.py").write_text(INNER)
    session = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "."],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        told = tmp_path / "pids"
        wait_until(lambda: told.exists() or session.poll() is not None)
        pids = [int(one) for one in told.read_text().split()]
        assert [is_alive(pid) for pid in pids] == [True, True]
    finally:
        session.kill()
        session.wait(30.0)
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
