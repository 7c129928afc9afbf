"""Detect that a program imports Keras, and adapt it.

Stratagem never imports Keras. A program may import it before or after it creates a strategy, so every strategy calls
`prepare_keras`: it adapts Keras at once if it is loaded, else right after the program has imported it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import override

_wanted: set[str] = set()


def prepare_keras(*, replicas: bool) -> None:
    """Adapt Keras to strategies, now or when the program imports it.

    Args:
        replicas: whether the strategy runs a model on several replicas, or away from its variables.
    """
    _wanted.update(("strategy", "replicas") if replicas else ("strategy",))
    if "keras" in sys.modules:
        _adapt()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _adapt() -> None:
    # `_keras` is a higher layer, and loads Keras.
    module = importlib.import_module("stratagem._keras.keras_patches")
    module.install(frozenset(_wanted))


class _Watch:
    """An import finder that finds nothing itself; it wraps the loader of the module ``keras``."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the ordinary spec of Keras with a loader that calls us; None for other modules."""
        del path, target
        if name != "keras":
            return None
        sys.meta_path.remove(self)  # and the search below finds the real one
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)  # not installed: it may be later
            return spec
        wrapped: Any = _Loader(spec.loader)
        spec.loader = wrapped
        return spec


class _Loader:
    """The loader of Keras, and then our adaptation."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as the real loader does."""
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """Load Keras, then adapt it."""
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader  # for tools that ask the module for its source
        self._loader.exec_module(module)
        _adapt()

    @override
    def __repr__(self) -> str:
        return f"<loader of Keras for Stratagem around {self._loader!r}>"
