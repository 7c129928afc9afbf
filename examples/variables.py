"""A training loop with `Variable`s only: no module, no optimizer, and gradients computed by hand.

python examples/variables.py
"""

import argparse

import torch

import stratagem as sg

# Settings.
STEPS = 200
LEARNING_RATE = 0.1
REPLICAS = 2


def main(steps: int = STEPS) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, generator=generator)
    y = 3.0 * x + 2.0  # the values that the two variables should reach

    strategy = sg.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)])
    with strategy.scope():
        slope = sg.Variable(0.0, name="slope", aggregation=sg.VariableAggregation.MEAN)
        offset = sg.Variable(0.0, name="offset", aggregation=sg.VariableAggregation.MEAN)

    def step(batch):
        features, target = batch
        error = slope * features + offset - target
        # Each replica computes its own gradient; assigning averages over the replicas.
        slope.assign_sub(LEARNING_RATE * 2 * (error * features).mean())
        offset.assign_sub(LEARNING_RATE * 2 * error.mean())
        return error.square().mean()

    dataset = sg.data.Dataset.from_tensor_slices((x, y)).batch(64).repeat(steps)
    with strategy:
        for batch in strategy.distribute_dataset(dataset):
            loss = strategy.reduce("mean", strategy.run(step, args=(batch,)), axis=None)
        found = float(slope.numpy()), float(offset.numpy())
    print(f"slope {found[0]:.3f} (3), offset {found[1]:.3f} (2), last loss {loss:.2e}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    main(parser.parse_args().steps)
