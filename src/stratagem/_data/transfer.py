"""Transfer of the parts of a batch to their devices.

Parts for host memory stay where they are. A part for a CUDA device is pinned and copied on a stream of its own,
so that the copy overlaps with the step before; the consumer's stream waits for the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from stratagem._core.values import PerReplica
from stratagem._data import nests
from stratagem._data.ragged import Ragged


@final
class DeviceTransfer:
    """Copies to the devices of the replicas.

    Args:
        devices: one per replica; `None` leaves that replica's part where it is.
    """

    def __init__(self, devices: Sequence[torch.device | None]) -> None:
        self._devices = list(devices)
        self._streams = {
            device: torch.cuda.Stream(device)
            for device in self._devices
            if device is not None and device.type == "cuda"
        }
        # Logical CPU devices are all host memory, where batches are made.
        self.idle = all(device is None or device.type == "cpu" for device in self._devices)

    def move(self, part: Any, replica: int) -> Any:
        """Return a part on its replica's device; the copy may still be in progress."""
        device = self._devices[replica]
        if self.idle or device is None:
            return part
        stream = self._streams.get(device)
        if stream is None:
            return nests.map_leaves(lambda leaf: _to(leaf, device), part)
        with torch.cuda.stream(stream):
            return nests.map_leaves(lambda leaf: _to_cuda(leaf, device), part)

    def copies(self) -> list[tuple[torch.cuda.Stream, torch.cuda.Event]]:
        """Return an event per stream that marks the end of the copies so far."""
        return [(stream, stream.record_event()) for stream in self._streams.values()]

    @staticmethod
    def wait_for(value: Any, copies: Sequence[tuple[torch.cuda.Stream, torch.cuda.Event]]) -> None:
        """Make the caller's streams wait for the copies, and keep the memory of the parts until then."""
        parts: list[Any] = []
        for leaf in nests.leaves(value):
            parts.extend(leaf.values if isinstance(leaf, PerReplica) else [leaf])
        for stream, event in copies:
            current = torch.cuda.current_stream(stream.device)
            current.wait_event(event)
            for part in parts:
                for tensor in part if isinstance(part, Ragged) else (part,):
                    if isinstance(tensor, torch.Tensor) and tensor.device == stream.device:
                        tensor.record_stream(current)


def _to(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Ragged):
        return Ragged(_to(leaf.values, device), _to(leaf.offsets, device))
    return leaf.to(device) if isinstance(leaf, torch.Tensor) and leaf.device != device else leaf


def _to_cuda(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Ragged):
        return Ragged(_to_cuda(leaf.values, device), _to_cuda(leaf.offsets, device))
    if not isinstance(leaf, torch.Tensor) or leaf.device == device:
        return leaf
    host = leaf.pin_memory() if leaf.device.type == "cpu" and not leaf.is_pinned() else leaf
    return host.to(device, non_blocking=True)
