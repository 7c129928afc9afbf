"""Read the random streams of a process for a checkpoint, and restore them.

A run derives the streams of its replicas from torch's default generator (docs/design/0003-randomness.md). So a
checkpoint needs only the generators of torch, Python and NumPy.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def read_random_state() -> dict[str, Any]:
    """Return the state of every generator, as plain values and tensors.

    Example:
        >>> saved = read_random_state()
        >>> before = torch.rand(3)
        >>> set_random_state(saved)
        >>> torch.equal(torch.rand(3), before)
        True
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 # the stream that users draw from
    state: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "python": random.getstate(),
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ],
    }
    # A process that has not used CUDA must not start it for this.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Continue every stream where `read_random_state` found it."""
    torch.default_generator.set_state(state["torch"])
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    words = keys.numpy().astype(np.uint32)
    np.random.set_state((kind, words, position, has_gauss, gauss))  # noqa: NPY002 # as above
    for device, own in enumerate(state.get("cuda", ())):
        if device < torch.cuda.device_count():
            torch.cuda.set_rng_state(own, device)
