"""One script for every strategy: `stratagem train` or TF_CONFIG chooses.

python examples/any_strategy.py                                     # one device, or all GPUs
stratagem train examples/any_strategy.py --strategy mirrored --replicas 2
stratagem train examples/any_strategy.py --strategy ps --workers 2 --ps 2 --epochs 5
"""

import argparse

import torch
from torch import nn

import stratagem as sg

# Settings.
EPOCHS = 10
GLOBAL_BATCH = 64
LEARNING_RATE = 0.05
ROWS = 1800
HELD_OUT = 360


def main(epochs: int = EPOCHS) -> float:
    torch.manual_seed(0)
    # Noisy images of ten patterns.
    labels = torch.randint(10, (ROWS,))
    pixels = torch.rand(10, 64)[labels] + 0.6 * torch.randn(ROWS, 64)
    train = sg.data.Dataset.from_tensor_slices((pixels[HELD_OUT:], labels[HELD_OUT:]))
    batches = train.shuffle(seed=1).batch(GLOBAL_BATCH)

    strategy = sg.auto_strategy()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for epoch in range(epochs):
        losses = list(strategy.run_steps(step, batches))
        print(f"epoch {epoch}: loss {torch.stack(losses).mean():.4f}")

    with torch.no_grad():
        right = model(pixels[:HELD_OUT]).argmax(1) == labels[:HELD_OUT]
    accuracy = right.float().mean().item()
    print(f"{type(strategy).__name__}: held-out accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    main(parser.parse_args().epochs)
