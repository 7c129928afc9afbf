"""Would it pay to send only the largest row gradients of a table? A simulation on one process.

``python -m benchmarks.bench_top_rows`` trains the click model with Adagrad. Before each step it keeps a part of the table's row gradients,
those with the largest norms, and drops the others or adds them to the row's next gradient (*error feedback*). It prints the AUC over several
seeds, and the time that the selection takes for the embedding row of ``make bench``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from stratagem._demo.clicks import ClickWorld, WideAndDeep, auc

STEPS, BATCH, TEST_ROWS = 1200, 256, 20_000
LEARNING_RATE = 0.05
ROWS, WIDTH, IDS = 1_000_000, 16, 26 * 1024

Narrow = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes distinct ids and their gradients; returns those that are sent."""


class Largest:
    """Keeps the rows with the largest gradients; with ``feedback``, what is not sent is added the next time."""

    def __init__(self, part: float, rows: int, width: int, *, feedback: bool) -> None:
        self.part = part
        self.rest = torch.zeros(rows, width) if feedback else None

    def __call__(self, ids: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        if self.rest is not None:
            gradients = gradients + self.rest.index_select(0, ids)
        count = max(1, round(self.part * len(ids)))
        chosen = gradients.square().sum(1).topk(count, sorted=False).indices
        if self.rest is not None:
            kept = gradients.index_fill(0, chosen, 0.0)
            self.rest.index_copy_(0, ids, kept)
        return ids[chosen], gradients[chosen]


def train(seed: int, part: float, *, feedback: bool) -> float:
    """Train the click model on one process; return the AUC on other rows."""
    world = ClickWorld(seed=seed + 1)
    data, test = world.sample(STEPS * BATCH, seed=seed + 2), world.sample(TEST_ROWS, seed=seed + 3)
    torch.manual_seed(seed + 4)
    model = WideAndDeep(
        num_categories=world.num_categories,
        num_fields=len(world.vocabulary),
        num_dense=data.dense.shape[1],
    )
    optimizer = torch.optim.Adagrad(model.parameters(), LEARNING_RATE)
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    narrow = [Largest(part, *table.shape, feedback=feedback) for table in tables]
    for number in range(STEPS):
        rows = slice(number * BATCH, (number + 1) * BATCH)
        optimizer.zero_grad()
        logits = model(data.ids[rows], data.dense[rows])
        F.binary_cross_entropy_with_logits(logits, data.label[rows]).backward()
        if part < 1:
            ids = torch.unique(data.ids[rows])
            for table, select in zip(tables, narrow, strict=True):
                assert table.grad is not None
                whole = table.grad.to_dense() if table.grad.is_sparse else table.grad
                sent, gradients = select(ids, whole.index_select(0, ids))
                table.grad = torch.sparse_coo_tensor(
                    sent.unsqueeze(0), gradients, table.shape, check_invariants=False
                )
        optimizer.step()
    with torch.no_grad():
        return auc(model(test.ids, test.dense), test.label)


def selection_ms(part: float, *, feedback: bool, turns: int = 50) -> float:
    """Return the median processor milliseconds of a selection for the embedding row."""
    select = Largest(part, ROWS, WIDTH, feedback=feedback)
    ids = torch.randperm(ROWS)[:IDS].sort().values
    gradients = torch.randn(IDS, WIDTH)
    taken = []
    for _ in range(turns):
        begin = time.process_time()
        select(ids, gradients)
        taken.append(time.process_time() - begin)
    return 1e3 * statistics.median(taken)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seeds = [4 * number for number in range(given.seeds)]
    plain = [train(seed, 1.0, feedback=False) for seed in seeds]
    print(f"all rows: AUC {statistics.mean(plain):.4f} (mean of {len(seeds)} seeds)", flush=True)
    for part in (0.5, 0.25):
        for feedback in (False, True):
            each = [train(seed, part, feedback=feedback) for seed in seeds]
            change = [a - b for a, b in zip(each, plain, strict=True)]
            error = statistics.stdev(change) / len(change) ** 0.5 if len(change) > 1 else 0.0
            saved = (1 - part) * IDS * (4 * WIDTH + 8)
            print(
                f"{part:.0%} of the rows, {'with' if feedback else 'without'} error feedback: AUC "
                f"{statistics.mean(each):.4f}, {statistics.mean(change):+.4f} ± {error:.4f}; selection "
                f"{selection_ms(part, feedback=feedback):.2f} ms of processor time, {saved / 1e6:.2f} MB less to send",
                flush=True,
            )
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
