"""A griffe extension: our docstrings say "Example:", griffe reads doctests under "Examples:" only."""

from __future__ import annotations

import re
from typing import Any

import griffe

_HEADING = re.compile(r"^(\s*)Example:[ \t]*$", flags=re.MULTILINE)


class ExamplesSection(griffe.Extension):
    """Renames the heading before the docstring is parsed, so that examples are shown as code."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = _HEADING.sub(r"\1Examples:", obj.docstring.value)
