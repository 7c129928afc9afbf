"""Report of a run: one HTML file that needs no server and no network."""

from __future__ import annotations

import os
from pathlib import Path

from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.resources import INLINE

from stratagem._monitor.cluster_view import ClusterView
from stratagem._monitor.page import CARDS, TEMPLATE, Page


def write_report(view: ClusterView, path: str | os.PathLike[str], *, title: str) -> Path:
    """Write the page of a view to a file, with everything that a browser needs; return the path."""
    document = Document(title=title)
    for root in Page(view).roots:
        document.add_root(root)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = file_html(
        document, INLINE, title, template=TEMPLATE, template_variables={"cards": CARDS}
    )
    target.write_text(text, encoding="utf-8")
    return target
