"""Environment of the peer, created once. The harness calls this; it imports nothing of the peer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REQUIREMENT = "tensorflow-cpu==2.21.*"
HOME = Path(__file__).parent / ".venv-tf"
# Two hundred megabytes over a slow connection.
INSTALL_TIMEOUT_S = 600.0


class PeerMissing(Exception):
    """The peer cannot be measured, for the reason in the text."""


def interpreter(managed: Path = HOME) -> Path:
    """Return the path of the peer's Python."""
    return managed / "bin" / "python"


def prepare(managed: Path = HOME, *, requirement: str = REQUIREMENT) -> Path:
    """Return the peer's Python; create its environment if necessary.

    Raises:
        PeerMissing: the environment cannot be made (no network, no such package, no disk space).
    """
    stamp = managed / "ready"
    if stamp.exists() and stamp.read_text() == requirement:
        return interpreter(managed)
    _run([sys.executable, "-m", "venv", str(managed)])
    _run([str(interpreter(managed)), "-m", "pip", "install", "--quiet", requirement])
    stamp.write_text(requirement)
    return interpreter(managed)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissing(f"the peer cannot be installed: {error}") from error
    if done.returncode != 0:
        words = [
            line for line in (done.stderr + done.stdout).splitlines() if "error" in line.lower()
        ]
        reason = words[-1] if words else f"{' '.join(command)} ended with {done.returncode}"
        raise PeerMissing(f"the peer cannot be installed: {reason}")
