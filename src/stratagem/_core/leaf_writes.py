"""In-place writes to parameters during the turns of replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from stratagem._core.context import Replica
from stratagem._core.rendezvous import OwnValues
from stratagem._core.torch_patches.private_api import version


class LeafWrites(OwnValues):
    """Writes in place to parameters (``average.mul_(0.9)`` under ``no_grad``), in the turns of replicas.

    When a replica's turn ends, its leaf keeps what was written, and the next replica finds the value from before.
    `finish_run` compares the replicas' values and writes them once.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    @override
    def pause(self, replica_id: int) -> None:
        """Keep the writes of a replica apart from the others'."""
        record = self._replicas[replica_id].record
        if record is None:
            return
        for leaf in record.leaves:
            if leaf.has_own_memory or version(leaf.tensor) == leaf.version:
                continue
            if not leaf.shares or leaf.managed.can_undo:
                with torch.inference_mode(False), torch.no_grad():
                    leaf.keep_write()
