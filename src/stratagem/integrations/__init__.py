"""Stratagem under the trainers of other libraries: `sg.integrations.ray`."""

from __future__ import annotations

from stratagem.integrations import ray as ray

__all__ = ["ray"]
