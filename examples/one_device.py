"""Ten classes of images on one device: ordinary PyTorch with a strategy.

python examples/one_device.py
python examples/one_device.py --epochs 2 --device cpu:0
"""

import argparse

import torch
from torch import nn

import stratagem as sg

# Settings.
EPOCHS = 10
BATCH = 64
LEARNING_RATE = 1e-2
ROWS = 1800
HELD_OUT = 360


def main(epochs: int = EPOCHS, device: str = "cpu:0") -> float:
    torch.manual_seed(0)
    # Noisy images of ten patterns.
    labels = torch.randint(10, (ROWS,))
    pixels = torch.rand(10, 64)[labels] + 0.6 * torch.randn(ROWS, 64)
    train = sg.data.Dataset.from_tensor_slices((pixels[HELD_OUT:], labels[HELD_OUT:]))
    batches = train.shuffle(seed=1).batch(BATCH)

    strategy = sg.OneDeviceStrategy(device)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

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
    print(f"held-out accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--device", default="cpu:0")
    options = parser.parse_args()
    main(options.epochs, options.device)
