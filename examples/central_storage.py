"""Ten classes of images on two replicas with one central copy of the model; the step does not change.

python examples/central_storage.py
python examples/central_storage.py --replicas 3 --epochs 2
"""

import argparse

import torch
from torch import nn

import stratagem as sg

# Settings.
EPOCHS = 10
REPLICAS = 2
GLOBAL_BATCH = 64
LEARNING_RATE = 1e-2
ROWS = 1800
HELD_OUT = 360


def main(epochs: int = EPOCHS, replicas: int = REPLICAS) -> float:
    torch.manual_seed(0)
    # Noisy images of ten patterns.
    labels = torch.randint(10, (ROWS,))
    pixels = torch.rand(10, 64)[labels] + 0.6 * torch.randn(ROWS, 64)
    train = sg.data.Dataset.from_tensor_slices((pixels[HELD_OUT:], labels[HELD_OUT:]))
    batches = train.shuffle(seed=1).batch(GLOBAL_BATCH)

    # Each logical CPU device is a replica with its own thread. On a machine with GPUs leave out the
    # list, and every GPU is a replica.
    strategy = sg.CentralStorageStrategy([f"cpu:{i}" for i in range(replicas)], "cpu:0")
    with strategy.scope():
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the gradient of the whole batch
        optimizer.step()
        return loss.detach()

    with strategy:
        for epoch in range(epochs):
            losses = list(strategy.run_steps(step, batches))
            print(f"epoch {epoch}: loss {torch.stack(losses).mean():.4f}")

    with torch.no_grad():
        right = model(pixels[:HELD_OUT]).argmax(1) == labels[:HELD_OUT]
    accuracy = right.float().mean().item()
    print(f"held-out accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    options = parser.parse_args()
    main(options.epochs, options.replicas)
