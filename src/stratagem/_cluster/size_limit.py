"""The largest call or result that one message can carry."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem._wire.frames import Buffer, Limits


def check_size(buffers: Sequence[Buffer]) -> None:
    """Reject a call or a result that is too large for one message."""
    size = sum(memoryview(buffer).nbytes for buffer in buffers)
    limit = Limits().frame_bytes
    if size > limit:
        raise ValueError(
            f"{size} bytes of tensors in one call or result: at most {limit} bytes can be sent. Use "
            "a variable or a per-worker dataset for data of this size."
        )
