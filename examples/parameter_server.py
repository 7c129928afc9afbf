"""Parameter-server training with a custom loop and checkpoints, on processes of this machine.

The coordinator (this process) schedules steps, two workers run them, and two parameter servers store the
variables; the embedding table is divided into two shards. A checkpoint is written after every epoch: stop
the program at any time and start it again.

    python examples/parameter_server.py
    python examples/parameter_server.py --epochs 2 --checkpoints /tmp/clicks
"""

import argparse
import tempfile

import torch
from torch import nn

import stratagem as sg

# Settings.
EPOCHS = 3
STEPS_PER_EPOCH = 60
BATCH = 64
ITEMS = 500
WIDTH = 8
LEARNING_RATE = 0.1


class Clicks(nn.Module):
    """Predict whether a pair of items is liked: an embedding table and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.head = nn.Sequential(nn.Linear(2 * WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        return self.head(self.items(pairs).flatten(1)).squeeze(1)


def dataset_fn() -> sg.data.Dataset:
    """Return pairs of items, liked if the sum of their hidden scores is positive. Runs on each worker."""
    scores = torch.randn(ITEMS, generator=torch.Generator().manual_seed(1))
    pairs = torch.randint(0, ITEMS, (4096, 2))
    liked = (scores[pairs].sum(1) > 0).float()
    # Shuffled and repeated, so that all examples are used about equally often.
    return sg.data.Dataset.from_tensor_slices((pairs, liked)).shuffle().repeat().batch(BATCH)


def main(
    epochs: int = EPOCHS, steps: int = STEPS_PER_EPOCH, checkpoints: str | None = None
) -> float:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary, sg.LocalCluster(workers=2, ps=2) as cluster:
        strategy = sg.ParameterServerStrategy(
            cluster.resolver,
            variable_partitioner=sg.partitioners.MinSizePartitioner(
                min_shard_bytes=4 << 10, max_shards=2
            ),
        )
        with sg.ClusterCoordinator(strategy) as coordinator:
            distributed_dataset = coordinator.create_per_worker_dataset(dataset_fn)
            with strategy.scope():
                model = Clicks()
                optimizer = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE)

            def worker_fn(iterator):
                def replica_fn(pairs, liked):
                    optimizer.zero_grad()
                    loss = nn.functional.binary_cross_entropy_with_logits(model(pairs), liked)
                    loss.backward()
                    optimizer.step()
                    return loss.detach()

                return strategy.run(replica_fn, args=next(iterator))

            loss = float("nan")
            checkpoint = sg.Checkpoint(model=model, optimizer=optimizer)
            directory = checkpoints or temporary
            with sg.CheckpointManager(checkpoint, directory, max_to_keep=2) as manager:
                first_epoch = manager.restore_or_initialize()  # 0 if there is no checkpoint
                if first_epoch:
                    print(f"resuming after epoch {first_epoch - 1}")
                for epoch in range(first_epoch, epochs):
                    iterator = iter(distributed_dataset)  # a new iterator on every worker
                    # schedule() returns at once; any free worker takes the next call.
                    losses = [
                        coordinator.schedule(worker_fn, args=(iterator,)) for _ in range(steps)
                    ]
                    coordinator.join()
                    loss = float(sum(coordinator.fetch(losses)) / steps)
                    print(f"epoch {epoch}: loss {loss:.4f}")
                    manager.save()  # of epoch + 1, while the next epoch trains
            return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--steps", type=int, default=STEPS_PER_EPOCH)
    parser.add_argument("--checkpoints", metavar="DIRECTORY", default=None)
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.steps, arguments.checkpoints)
