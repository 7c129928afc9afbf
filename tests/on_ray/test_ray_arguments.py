"""Arguments of `RayCluster` are checked before Ray is imported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import stratagem as sg


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"workers": 0}, ValueError, "workers=0"),
        ({"workers": (1, 2, 3)}, ValueError, r"workers=\(1, 2, 3\): expected a number, or two"),
        ({"workers": (3, 2)}, ValueError, r"expected the smallest number of workers first"),
        ({"workers": (1, 2.5)}, TypeError, "workers=2.5 has type float"),
        ({"ps": True}, TypeError, "ps=True has type bool"),
        ({"threads": 0}, ValueError, "threads=0"),
        ({"placement_strategy": "RANDOM"}, ValueError, "'RANDOM': expected one of PACK, SPREAD"),
        ({"resources_per_ps": 2}, TypeError, r"resources_per_ps=2: expected a mapping"),
        ({"resources_per_worker": {}}, TypeError, r"resources_per_worker={}: expected a mapping"),
        ({"resources_per_worker": {"CPU": 0}}, ValueError, "CPU must be a number above 0"),
        ({"resources_per_worker": {"GPU": 1}}, ValueError, "tasks on Ray cannot have GPUs"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        sg.RayCluster(**arguments)


def test_a_missing_ray_is_an_error_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'stratagem\[ray\]'"):
        sg.RayCluster()


@pytest.mark.process
def test_the_agent_imports_no_torch() -> None:
    """It must be small, and up in a moment; the fork server that it starts imports torch."""
    code = "import sys, stratagem._cluster.launch.ray_agent; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.strip() == "False"
