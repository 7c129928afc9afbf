"""The leak police finds every kind of leak, and reports it at the test that caused it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# The inner session imports torch; on a busy machine that alone can take half a minute.
pytestmark = pytest.mark.process

PLUGINS = Path(__file__).parent / "plugins"

# One inner session for all kinds: each inner session imports torch, which takes seconds.
LEAVES = '''
import atexit, gc, logging, mmap, os, socket, subprocess, sys, threading, warnings, weakref
import pytest, torch, police

police.GRACE_S = 0.3
kept = []

def test_nothing():
    thread = threading.Thread(target=int, name="short")
    thread.start()
    thread.join()
    a, b = socket.socketpair()
    a.close(); b.close()
    subprocess.run(["true"], check=True)
    fd = os.memfd_create("gone")
    os.close(fd)

def test_still_ending():
    """Ends within the grace period."""
    threading.Timer(0.1, int).start()

def test_cycle():
    """Owners in a reference cycle are collected before anybody is blamed."""
    held = os.memfd_create("held-by-a-ring")
    class Owner: pass
    owner = Owner(); owner.me = owner
    weakref.finalize(owner, os.close, held)
def test_logged_error():
    """pytest keeps log records, and with them the frames of a logged error."""
    held = os.memfd_create("held-by-a-frame")
    class Owner: pass
    owner = Owner()
    weakref.finalize(owner, os.close, held)
    try:
        raise ValueError("logged")
    except ValueError as error:
        logging.getLogger("inner").warning("found %s", error)

def test_thread():
    kept.append(threading.Event())
    threading.Thread(target=kept[-1].wait, args=(60,), name="left-thread", daemon=True).start()

def test_process():
    kept.append(subprocess.Popen(["sleep", "60"]))

def test_zombie():
    pid = os.fork()
    if pid == 0:
        os._exit(0)

def test_memfd():
    kept.append(os.memfd_create("left-memfd"))

def test_mapping():
    fd = os.memfd_create("left-mapping")
    os.ftruncate(fd, 4096)
    kept.append(mmap.mmap(fd, 4096))
    os.close(fd)

def test_tensor():
    fd = os.memfd_create("left-tensor")
    os.ftruncate(fd, 4096)
    tensors = [torch.frombuffer(mmap.mmap(fd, 4096), dtype=torch.float32)]
    os.close(fd)
    kept.append(tensors)

def test_shm_name():
    path = f"/dev/shm/left-name-{os.getpid()}"
    open(path, "w").close()
    kept.append(path)

def test_socket():
    kept.append(socket.socket())

def test_pipe():
    kept.append(os.pipe())

def test_environment_added():
    os.environ["LEFT_VARIABLE"] = "1"

def test_environment_removed():
    del os.environ["HOME"]

def test_directory():
    os.chdir("/")

def test_file():
    """Such as a directory named after an option that reached the script."""
    os.mkdir("--restarts")

def test_dtype():
    torch.set_default_dtype(torch.float64)

def test_threads_of_torch():
    torch.set_num_threads(torch.get_num_threads() + 1)

def test_grad_mode():
    torch.set_grad_enabled(False)

def test_deterministic():
    torch.use_deterministic_algorithms(True)

def test_warning():
    warnings.warn("left-warning")

def test_exception_in_thread():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()

def test_after():
    """A test is not blamed for earlier ones: the police has restored the settings."""
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert "HOME" in os.environ

@pytest.fixture(scope="module")
def wide():
    child = subprocess.Popen(["sleep", "60"])
    yield child
    child.kill(); child.wait()

def test_wide_fixture(wide):
    """What a module's fixture holds is not the test's."""
    assert wide.poll() is None

@pytest.fixture(scope="module")
def watch():
    """A coordinator's watch thread: connects during a test, closes with the fixture."""
    connect, connected, end = threading.Event(), threading.Event(), threading.Event()
    def run():
        connect.wait()
        with socket.socket():
            connected.set()
            end.wait()
    thread = threading.Thread(target=run, name="stratagem-watch-servers")
    thread.start()
    yield connect, connected
    connect.set(); end.set(); thread.join()

def test_wide_connection(watch):
    """A socket that a fixture's thread opens is not the test's."""
    connect, connected = watch
    connect.set(); connected.wait()

@pytest.fixture(scope="module")
def task():
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="stratagem-worker-0")
    thread.start()
    yield
    end.set(); thread.join()

def test_task_memory(task):
    """A fixture's worker in this process may keep memory until the module ends."""
    kept.append(os.memfd_create("stratagem"))

def test_orphan():
    """A grandchild whose parent has ended."""
    code = "import subprocess as s; print(s.Popen(['sleep', '61'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    kept.append(int(done.stdout))

def test_scope():
    """Last, for the police cannot close it."""
    import stratagem as sg
    kept.append(sg.OneDeviceStrategy("cpu:0").scope())
    kept[-1].__enter__()

def clean_up():
    for one in kept:
        if isinstance(one, subprocess.Popen): one.kill(); one.wait()
        elif isinstance(one, int) and one > 100: os.kill(one, 9)
        elif isinstance(one, str): os.unlink(one)
        elif isinstance(one, threading.Event): one.set()

atexit.register(clean_up)
'''

INNOCENT = {
    "nothing",
    "still_ending",
    "cycle",
    "logged_error",
    "after",
    "wide_fixture",
    "wide_connection",
    "task_memory",
    "orphan",
}
# Test -> what its report must name. Warnings fail the test itself, leaks are errors at its end.
GUILTY = {
    "thread": "thread 'left-thread'",
    "process": "sleep 60",
    "zombie": "did not wait for it",
    "memfd": "/memfd:left-memfd",
    "mapping": "/memfd:left-mapping",
    "tensor": "tensor of shape (1024,) over it, held by list",
    "shm_name": "shared memory /dev/shm/left-name-",
    "socket": "-> socket:",
    "pipe": "-> pipe:",
    "environment_added": "LEFT_VARIABLE: was None, is '1'",
    "environment_removed": "HOME: was '",
    "directory": "working directory: was ",
    "file": "file '--restarts' in ",
    "dtype": "default dtype: was torch.float32, is torch.float64",
    "threads_of_torch": "number of threads",
    "grad_mode": "grad mode: was True, is False",
    "deterministic": "deterministic algorithms: was False, is True",
    "warning": "UserWarning: left-warning",
    "exception_in_thread": "ZeroDivisionError",
    "scope": "current strategy: was none, is OneDeviceStrategy",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Output of one inner session in which every test misbehaves in its own way."""
    place = tmp_path_factory.mktemp("inner")
    (place / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {PLUGINS}\nfilterwarnings = error\naddopts = -p no:cacheprovider\n"
    )
    (place / "conftest.py").write_text('pytest_plugins = ["police"]\n')
    (place / "test_leaves.py").write_text(LEAVES)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:xdist", "--tb=short", str(place)],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(GUILTY))
def test_guilty_tests_are_caught(reports: str, name: str) -> None:
    """Each kind is reported at the test that left it, by name."""
    blamed = [
        line
        for line in reports.splitlines()
        if line.startswith(("ERROR ", "FAILED ")) and f"::test_{name} " in f"{line} "
    ]
    assert blamed, reports
    assert GUILTY[name] in reports, reports


@pytest.mark.parametrize("name", sorted(INNOCENT))
def test_innocent_tests_are_not_blamed(reports: str, name: str) -> None:
    """Short-lived things, wide fixtures and the victims of others pass."""
    assert f"PASSED test_leaves.py::test_{name}\n" in reports, reports
    assert f"ERROR test_leaves.py::test_{name} " not in reports, reports


def test_orphans_are_found_when_the_module_ends(reports: str) -> None:
    """A process whose parent is gone is still ours."""
    assert "fixtures of this module left behind" in reports
    assert "orphan process" in reports
    assert "sleep 61" in reports


def test_memory_of_tasks_is_found_when_the_module_ends(reports: str) -> None:
    """It is not blamed on a test."""
    assert "-> /memfd:stratagem (deleted)" in reports.partition("fixtures of this module")[2]
