"""Distinguish installed code, which every task can import, from the user's own code."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path, PurePath
from typing import Final

_PACKAGE_FOLDERS: Final = frozenset({"site-packages", "dist-packages"})
"""Of any environment: a user's own (``pip install --user``), Debian's, those that a ``.pth`` file adds."""


@functools.cache
def _roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(sorted(path + "/" for path in found))


@functools.cache
def _holds_packages(directory: str) -> bool:
    """Return whether pip has installed into this directory of ``sys.path`` (``pip install --target``)."""
    try:
        return any(path.suffix == ".dist-info" for path in Path(directory).iterdir())
    except OSError:  # an archive, or a directory that does not exist
        return False


@functools.cache
def is_installed(module: str | None) -> bool:
    """Return whether a module belongs to an installed package.

    Example:
        >>> is_installed("torch.nn"), is_installed("__main__")
        (True, False)
    """
    if module is None or module == "__main__":
        return False
    if module == "stratagem" or module.startswith("stratagem."):
        return True
    found = sys.modules.get(module)
    if found is None:
        return False
    file = getattr(found, "__file__", None)
    if file is None or str(file).startswith(_roots()):
        return True
    if not _PACKAGE_FOLDERS.isdisjoint(PurePath(str(file)).parts):
        return True
    entries = (entry.rstrip("/") for entry in sys.path)
    return any(
        entry and str(file).startswith(entry + "/") and _holds_packages(entry) for entry in entries
    )
