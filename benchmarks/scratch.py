"""Folders in which sides write: named after their process, so that what a killed side leaves can be removed.

Uses only the standard library: the peer's environment contains nothing of the project.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

PLACES = (Path("/dev/shm"), Path("/var/tmp"))
_NAME = re.compile(r"stratagem-bench-(\d+)-.*")


def make_scratch(place: str) -> Path:
    """Return a new folder of this process in `place`."""
    return Path(tempfile.mkdtemp(prefix=f"stratagem-bench-{os.getpid()}-", dir=place))


def remove_scratch(pid: int | None = None, places: tuple[Path, ...] = PLACES) -> list[Path]:
    """Remove the folders of a process, or of all processes that have ended; return them."""
    gone = []
    for place in places:
        for path in place.glob("stratagem-bench-*") if place.is_dir() else ():
            found = _NAME.fullmatch(path.name)
            if found is None:
                continue
            owner = int(found[1])
            if owner == pid or (pid is None and not Path(f"/proc/{owner}").exists()):
                shutil.rmtree(path, ignore_errors=True)
                gone.append(path)
    return gone
