"""Resume an iterator in a fresh dataset, through a file."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch


def through_a_file(state: Any) -> Any:
    """Return a position after torch.save, which it must survive with weights_only."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def resumed_rest(
    build: Callable[[], Any], stop: int, plain: Callable[[Any], Any]
) -> tuple[list[Any], list[Any]]:
    """Return the rest after `stop` elements, without interruption and after resuming in a fresh dataset."""
    torch.manual_seed(3)
    with iter(build()) as iterator:
        for _, _ in zip(range(stop), iterator, strict=False):
            pass
        state = through_a_file(iterator.state_dict())
        rest = [plain(x) for x in iterator]
    torch.manual_seed(4)
    with iter(build()) as resumed:
        resumed.load_state_dict(state)
        return rest, [plain(x) for x in resumed]
