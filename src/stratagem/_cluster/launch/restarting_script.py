"""Run a command again after it crashed, for ``stratagem train --restarts``."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Final

_log = logging.getLogger("stratagem.train")

_LOOK_S: Final = 0.1
"""How often `while_running` is called."""

_CTRL_C_S: Final = 2.0
"""How long a script that Ctrl-C has reached takes to begin its end; then it gets SIGINT from us."""

END_S: Final = 30.0
"""How long a script may take to end after SIGTERM or Ctrl-C, for a last save; then it is killed."""


def run_again(
    command: Sequence[str], restarts: int, *, name: str, while_running: Callable[[], None]
) -> int:
    """Run a command, again after each crash (an exit code that is not 0, or a signal); return its last exit code.

    Ctrl-C and SIGTERM end the command and are no crash. Call this in the main thread.

    Args:
        command: program and arguments.
        restarts: how often to run it again at most.
        name: of the script, for the log.
        while_running: called again and again.
    """
    ending = [0]

    def end(number: int, _: object) -> None:
        ending[0] = number

    before = {one: signal.signal(one, end) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        for count in range(restarts + 1):
            began = time.monotonic()
            process = subprocess.Popen(command)
            try:
                code = _wait(process, ending, while_running)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            if ending[0]:
                return 128 + ending[0]
            if code == 0:
                return 0
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            ran_s = time.monotonic() - began
            if count < restarts:
                _log.warning(
                    "%s ended by %s after %.1f s: restart %d of %d",
                    name,
                    how,
                    ran_s,
                    count + 1,
                    restarts,
                )
            else:
                _log.error(
                    "%s ended by %s after %.1f s, restart %d was the last", name, how, ran_s, count
                )
        return 128 - code if code < 0 else code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(
    process: subprocess.Popen[bytes], ending: list[int], while_running: Callable[[], None]
) -> int:
    """Wait until the process has ended; end it when a signal asks for that."""
    while not ending[0]:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_S)
        while_running()
    if ending[0] == signal.SIGINT:  # a terminal sends it to the script, too
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_CTRL_C_S)
    process.send_signal(ending[0])
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
