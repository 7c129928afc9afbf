"""Arrays over a worker's parameters (`_core/torch_patches/numpy_views.py`)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stratagem._core import torch_patches
from stratagem._core.torch_patches.numpy_views import plain_numpy, watch_numpy


class Watcher:
    """Counts the arrays over its parameter."""

    def __init__(self) -> None:
        self.leaf = nn.Parameter(torch.zeros(4))
        self.noted = 0

    def note_data(self) -> None:
        self.noted += 1


def test_memory_that_the_parameter_has_left_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tensors get it: an array over them is no write of the parameter."""
    monkeypatch.setattr(torch.Tensor, "numpy", plain_numpy)
    monkeypatch.setattr(torch_patches, "_installed", set())
    watcher = Watcher()
    watch_numpy(watcher)
    watcher.leaf.detach()[1:].numpy()
    assert watcher.noted == 1
    other = watcher.leaf.data
    watcher.leaf.data = torch.ones(4)
    other.numpy()
    assert watcher.noted == 1
