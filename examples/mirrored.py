"""Mirrored training, and a check that its results equal those of one device.

python examples/mirrored.py
python examples/mirrored.py --replicas 3 --steps 20
"""

import argparse

import torch
from torch import nn

import stratagem as sg

# Settings.
STEPS = 50
REPLICAS = 2
GLOBAL_BATCH = 30
FEATURES = 20


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer, batch):
    x, y = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def main(steps: int = STEPS, replicas: int = REPLICAS) -> float:
    generator = torch.Generator().manual_seed(1)
    truth = torch.randn(FEATURES, 1, generator=generator)
    batches = []
    for _ in range(steps):
        x = torch.randn(GLOBAL_BATCH, FEATURES, generator=generator)
        batches.append((x, x @ truth))
    batches.append((batches[0][0][:1], batches[0][1][:1]))  # one row: one replica gets none

    strategy = sg.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    with strategy:
        sg.testing.assert_equivalent(make_model, make_optimizer, step, batches, strategy)
        print(
            f"{len(batches)} steps on {replicas} replicas equal {len(batches)} steps on one device"
        )

        with strategy.scope():
            model = make_model()
            optimizer = make_optimizer(model)
        for batch in strategy.distribute_dataset(batches):
            losses = strategy.run(step, args=(model, optimizer, batch))
        loss = strategy.reduce("mean", losses, axis=None).item()
        print(f"last loss {loss:.4f}")
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    options = parser.parse_args()
    main(options.steps, options.replicas)
