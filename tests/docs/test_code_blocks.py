"""Every code block of README.md and docs/ runs, and every link inside them leads somewhere.

Blocks of one page share their names, as a reader expects. ``python`` blocks are executed, ``pycon``
blocks are doctests. A block that cannot run here has a comment on the line before its fence that
says why: ``<!-- not run: TensorFlow -->``.
"""

from __future__ import annotations

import doctest
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^(?P<indent>\s*)(?P<ticks>`{3,})\s*(?P<language>\w*)")
NOT_RUN = re.compile(r"^\s*<!-- not run: (?P<reason>\S.*?) -->\s*$")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        marker = NOT_RUN.match(lines[number - 1]) if number else None
        start = number = number + 1
        indent, ticks = opening["indent"], opening["ticks"]
        while lines[number].strip() != ticks:
            number += 1
        found.append(
            Block(
                page=page,
                line=start + 1,
                language=opening["language"],
                text="\n".join(line.removeprefix(indent) for line in lines[start:number]),
                not_run=marker["reason"] if marker else None,
            )
        )
        number += 1
    return found


def execute(blocks: list[Block]) -> int:
    """Run the blocks of one page in one namespace; returns how many ran."""
    names: dict[str, object] = {"__name__": "__main__"}
    ran = 0
    for block in blocks:
        if block.not_run is not None or block.language not in {"python", "pycon"}:
            continue
        if block.language == "pycon":
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            example = doctest.DocTestParser().get_doctest(
                block.text, names, block.page.name, str(block.page), block.line - 1
            )
            doctest.DebugRunner(optionflags=flags).run(example, clear_globs=False)
            names.update(example.globs)
        else:
            # Blank lines in front, so that a traceback names the line of the page.
            source = "\n" * (block.line - 1) + block.text
            exec(compile(source, str(block.page), "exec"), names)
        ran += 1
    return ran


def runnable(page: Path) -> bool:
    return any(b.language in {"python", "pycon"} and b.not_run is None for b in blocks_of(page))


# Pages with a cluster start processes, which takes seconds on a busy machine.
@pytest.mark.process
@pytest.mark.parametrize(
    "page", [p for p in PAGES if runnable(p)], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_every_code_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code blocks of a page run in order and raise no error."""
    monkeypatch.chdir(tmp_path)
    assert execute(blocks_of(page)) > 0


def test_the_first_example_is_short() -> None:
    """The README opens with a whole program of at most 15 lines of code."""
    first = blocks_of(ROOT / "README.md")[0]
    assert first.language == "python"
    assert len([line for line in first.text.splitlines() if line.strip()]) <= 15


def anchors_of(page: Path) -> set[str]:
    """Anchors that headings make, by the rule of GitHub and mkdocs."""
    found: set[str] = set()
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if FENCE.match(line):
            inside = not inside
        if not inside and line.startswith("#"):
            text = re.sub(r"[`*]", "", line.lstrip("#").strip().lower())
            found.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    """Files exist and headings are there; addresses on the net are left to a person."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    dead = []
    for first, second in LINK.findall(text):
        target = first or second
        if "://" in target or target.startswith("mailto:"):
            continue
        path_text, _, anchor = target.partition("#")
        path = (page.parent / path_text).resolve() if path_text else page
        if not path.exists():
            dead.append(f"{target}: no such file")
        elif anchor and path.suffix == ".md" and anchor not in anchors_of(path):
            dead.append(f"{target}: no such heading")
    assert dead == []


# The runner itself.


def page_with(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text)
    return page


def test_blocks_share_names_and_errors_name_the_line(tmp_path: Path) -> None:
    """A failing block is found at its own line in the page."""
    page = page_with(
        tmp_path,
        "# T\n```python\nx = 1\n```\n\n```pycon\n>>> x + 1\n2\n```\n```python\nassert x == 2\n```\n",
    )
    with pytest.raises(AssertionError) as caught:
        execute(blocks_of(page))
    assert caught.traceback[-1].lineno + 1 == 11


def test_wrong_output_in_a_session_is_an_error(tmp_path: Path) -> None:
    """Output in a pycon block must be the real output."""
    page = page_with(tmp_path, "```pycon\n>>> 1 + 1\n3\n```\n")
    with pytest.raises(doctest.DocTestFailure):
        execute(blocks_of(page))


def test_a_block_with_a_reason_is_left_out_and_others_are_not(tmp_path: Path) -> None:
    """Only the block right after the comment is left out; shell blocks never run."""
    page = page_with(
        tmp_path,
        "<!-- not run: TensorFlow -->\n```python\n1 / 0\n```\n\n```sh\nfalse\n```\n"
        "```python\nran = True\n```\n",
    )
    assert execute(blocks_of(page)) == 1


def test_dead_links_are_found(tmp_path: Path) -> None:
    """The link check can fail."""
    page = page_with(tmp_path, "# Head\n[a](#head) [b](nowhere.md) [c](#nothing)\n")
    with pytest.raises(AssertionError, match="nowhere"):
        test_every_link_leads_somewhere(page)
