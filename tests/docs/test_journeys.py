"""The journeys name functions that exist, in the files they link to."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
LINK = re.compile(r"\[`([A-Za-z_][\w.]*)`\]\((\.\./src/[\w/]+\.py)\)")
LINKS = sorted(set(LINK.findall((DOCS / "journeys.md").read_text(encoding="utf-8"))))


def defined_in(path: Path) -> set[str]:
    """Names of classes, functions and methods (as ``Class.method`` and alone)."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
    return found


def test_there_are_links_to_check() -> None:
    """The page is made of them."""
    assert len(LINKS) > 30


@pytest.mark.parametrize(("name", "target"), LINKS)
def test_every_function_named_stands_in_its_file(name: str, target: str) -> None:
    """Renaming a function means telling its journey."""
    assert name in defined_in((DOCS / target).resolve())
