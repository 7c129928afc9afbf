"""Installed modules are told from the user's own by where their files are."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from stratagem._core.installed import is_installed


@pytest.mark.parametrize(
    ("folder", "metadata", "expected"),
    [
        (".local/lib/python3/site-packages", "", True),
        ("python3/dist-packages", "", True),
        ("target", "found-1.0.dist-info", True),  # pip install --target, found by PYTHONPATH
        ("my_project", "", False),
        ("my_editable_project", "found.egg-info", False),
    ],
)
def test_packages_of_any_environment_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, metadata: str, expected: bool
) -> None:
    name = f"sg_found_in_{Path(folder).name.replace('-', '_')}"
    place = tmp_path / folder
    (place / metadata).mkdir(parents=True)
    (place / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(place))
    try:
        importlib.import_module(name)
        assert is_installed(name) is expected
    finally:
        sys.modules.pop(name, None)
        is_installed.cache_clear()
