"""The program on the page about Ray runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ray_nodes import ray_nodes

PAGE = Path(__file__).parents[2] / "docs" / "ray.md"


@pytest.mark.soak
def test_the_first_program_of_the_page_runs() -> None:
    text = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    assert "sg.RayCluster(" in text
    names: dict[str, object] = {"__name__": "__main__"}
    with ray_nodes(cpus=10):
        exec(compile(text, str(PAGE), "exec"), names)
    losses = names["losses"]
    assert isinstance(losses, list)
    assert len(losses) == 100
    assert "ray" in sys.modules
