"""DeepFM: a factorization machine and a deep network over the same embeddings."""

import copy

import torch
from torch import nn

import stratagem as sg


class DeepFM(nn.Module):
    """Logits of clicks.

    Args:
        dense: how many numbers a row has.
        categories: how many categories.
        width: numbers in an embedding.
    """

    def __init__(self, dense: int = 13, categories: int = 26, width: int = 8) -> None:
        super().__init__()
        # One number more in each row: the category's own weight. Text is hashed with its column, so all columns share a table.
        self.table: nn.Module = sg.nn.DynamicEmbedding(
            width + 1, max_rows=1 << 20, scale=0.01, seed=1
        )
        self.numbers = nn.Linear(dense, 1)
        self.deep = nn.Sequential(
            nn.Linear(dense + categories * width, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        dense = torch.log1p(dense.clamp(min=0))
        found = self.table(ids)
        rows, own = found[..., :-1], found[..., -1].sum(1)
        pairs = (rows.sum(1).square() - rows.square().sum(1)).sum(1) / 2
        deep = self.deep(torch.cat([dense, rows.flatten(1)], 1)).squeeze(1)
        return own + pairs + self.numbers(dense).squeeze(1) + deep


def for_serving(model: DeepFM) -> nn.Module:
    """Return a copy in plain PyTorch: the rows of now, zeros for categories that were never seen."""
    plain = copy.deepcopy(model).eval()
    plain.table = model.table.frozen()
    return plain
