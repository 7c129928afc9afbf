"""Programs that fork from the warm process behave like programs that an interpreter starts."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from warm_start import Program, run_program

pytestmark = pytest.mark.process

LIMIT_S = 120.0


@pytest.mark.parametrize("runs", [run_program, subprocess.run])
def test_programs_get_their_arguments_and_report_how_they_ended(runs, tmp_path: Path) -> None:
    """Arguments, directory, environment, output, exit code, exception: the same as without the warm process."""
    text = (
        "import os, sys, atexit; atexit.register(print, 'ended', flush=True)\n"
        "print(sys.argv[1:], os.getcwd(), os.environ['A'], __name__, sys.stdin.read())\n"
        "print('careful', file=sys.stderr)\n"
        "{1: lambda: sys.exit(3), 2: lambda: 1 / 0, 3: lambda: None}[int(sys.argv[1])]()\n"
    )
    (tmp_path / "script.py").write_text(text)
    for first in (["-c", text], ["script.py"]):
        for argument, code in (("1", 3), ("2", 1), ("3", 0)):
            options = {} if runs is run_program else {"capture_output": True, "text": True}
            done = runs(
                [sys.executable, *first, argument],
                timeout=LIMIT_S,
                cwd=tmp_path,
                env={"A": "b"},
                stdin=subprocess.DEVNULL,
                **options,
            )
            assert done.returncode == code
            assert done.stdout == f"['{argument}'] {tmp_path} b __main__ \nended\n"
            assert done.stderr.startswith("careful\n")
            assert ("ZeroDivisionError" in done.stderr) == (argument == "2")


@pytest.mark.parametrize("kind", [Program, subprocess.Popen])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, -15), (signal.SIGINT, -2)]
)
def test_signals_end_a_program(kind, number: int, code: int) -> None:
    """The number is that of the program's own process; Ctrl-C raises KeyboardInterrupt in it."""
    command = [
        sys.executable,
        "-c",
        "import os, time; print(os.getpid(), flush=True); time.sleep(99)",
    ]
    with kind(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert int(program.stdout.readline()) == program.pid
        assert program.poll() is None
        program.send_signal(number)
        assert program.wait(LIMIT_S) == code
        errors = program.stderr.read().rstrip()
        assert errors.endswith("KeyboardInterrupt") == (number == signal.SIGINT)
    assert not Path(f"/proc/{program.pid}").exists()


def test_a_program_has_a_cluster_of_its_own() -> None:
    """Its tasks end with it."""
    program = (
        "import stratagem as sg\n"
        "with sg.LocalCluster(workers=1, ps=1) as cluster:\n"
        "    with sg.ParameterServerStrategy(cluster.resolver) as strategy:\n"
        "        coordinator = sg.ClusterCoordinator(strategy)\n"
        "        print(coordinator.schedule(lambda: 6 * 7).get())\n"
    )
    done = run_program([sys.executable, "-c", program], timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
