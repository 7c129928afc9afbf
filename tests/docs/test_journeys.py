"""The walk through the code links to functions that exist, and a training step needs few files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "journeys.md").read_text(encoding="utf-8")
LINK = re.compile(r"\[`([A-Za-z_][\w.]*)`\]\((\.\./src/[\w/]+\.py)\)")
LINKS = sorted(set(LINK.findall(PAGE)))


def defined_in(path: Path) -> set[str]:
    """Return the names of classes, functions and methods (as ``Class.method`` and alone)."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
    return found


def files_of(heading: str) -> set[str]:
    """Return the files that one section links to."""
    _, _, rest = PAGE.partition(f"\n## {heading}\n")
    assert rest, f"no section {heading!r}"
    return {target for _, target in LINK.findall(rest.partition("\n## ")[0])}


def test_there_are_links_to_check() -> None:
    """The page consists of links."""
    assert len(LINKS) > 30


@pytest.mark.parametrize(("name", "target"), LINKS)
def test_every_name_is_defined_in_its_file(name: str, target: str) -> None:
    """A function that is renamed or moved is also changed on the page."""
    assert name in defined_in((DOCS / target).resolve())


@pytest.mark.parametrize(
    ("heading", "most"),
    [("1. A local training step", 15), ("2. A parameter-server training step", 25)],
)
def test_a_step_is_readable_in_few_files(heading: str, most: int) -> None:
    """The page states the number of files of each training step, and the number is small."""
    files = files_of(heading)
    assert len(files) <= most
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert f"{len(files)} files are enough" in " ".join(section.split())
