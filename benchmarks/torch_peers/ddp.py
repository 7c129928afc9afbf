"""DistributedDataParallel over gloo, one process per worker.

Tuned as its documentation says: ``gradient_as_bucket_view`` and no broadcast of buffers. Gradients are averaged, so the
learning rate of SGD is multiplied by the number of processes: a step of all of them then moves parameters as far as one step of each.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.torch_peers.trainer import Place, Trainer, model_of, optimizer_of

TIMEOUT = timedelta(seconds=60)


class Replica(Trainer):
    """One replica of the model."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place.meeting}",
            rank=place.index,
            world_size=place.workers,
            timeout=TIMEOUT,
        )
        self.plain = model_of(place.row, place.size)
        # Sparse gradients cannot be views into a bucket.
        self.model = DistributedDataParallel(
            self.plain, broadcast_buffers=False, gradient_as_bucket_view=place.row == "mlp"
        )
        self.optimizer = optimizer_of(place.row, self.model.parameters())
        if place.row == "mlp":  # Adagrad's steps do not depend on the scale of gradients
            for group in self.optimizer.param_groups:
                group["lr"] *= place.workers

    def step(self) -> None:
        inputs, labels = self.next_batch()
        self.optimizer.zero_grad()
        self.loss(self.model(inputs), labels).backward()
        self.optimizer.step()

    def output(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.plain(inputs)
        return found

    def close(self) -> None:
        dist.destroy_process_group()
