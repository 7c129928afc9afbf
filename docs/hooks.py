"""What mkdocs runs around a build: documents may link to files of the repository.

A link such as ``../src/stratagem/metrics.py`` works when the document is read in the repository; in
the site it becomes ``files/src/stratagem/metrics.py``, and the linked file is copied there.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(?:#[^)\s]*)?\)")

_linked: set[str] = set()


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/ to the copies that `on_post_build` makes."""
    here = posixpath.dirname(f"docs/{page.file.src_uri}")

    def rewritten(found: re.Match[str]) -> str:
        text, target = found.groups()
        path = posixpath.normpath(posixpath.join(here, target))
        if "://" in target or path.startswith(("docs/", "..")) or not (ROOT / path).exists():
            return found.group(0)
        _linked.add(path)
        # As HTML, for mkdocs knows links between documents only. Lines of a file (#L10) are
        # dropped: they mean nothing to a browser that shows plain text.
        return f'<a href="{posixpath.relpath(f"docs/files/{path}", here)}">{text}</a>'

    return LINK.sub(rewritten, markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Copy every linked file of the repository into the site."""
    for path in sorted(_linked):
        source, target = ROOT / path, Path(config["site_dir"]) / "files" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(
                source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copyfile(source, target)
