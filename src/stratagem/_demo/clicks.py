"""Data and model of the demonstration: clicks with a known structure.

Labels are drawn from a formula, so the best score that any model can reach is known: the AUC of the
formula's own probabilities. This module is ordinary PyTorch and uses no strategy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Clicks:
    """A table of impressions.

    Attributes:
        ids: one category per field, offset into one shared vocabulary, ``[rows, fields]``.
        dense: continuous features, ``[rows, dense]``.
        label: 1.0 for a click, else 0.0, ``[rows]``.
        probability: the formula's probability of a click, ``[rows]``.
    """

    ids: Tensor
    dense: Tensor
    label: Tensor
    probability: Tensor

    def best_auc(self) -> float:
        """Return the AUC of the formula: no model is better, on average."""
        return auc(self.probability, self.label)


class ClickWorld:
    """The formula: each category has a main effect and a small taste vector; tastes interact.

    Args:
        vocabulary: number of categories of each field.
        dense: number of continuous features.
        taste: length of the taste vectors.
        exponent: popularity falls as 1 / rank ** exponent.
        seed: of the effects and tastes.

    Example:
        >>> world = ClickWorld(vocabulary=(50, 20), seed=1)
        >>> clicks = world.sample(100, seed=2)
        >>> clicks.ids.shape, clicks.label.shape
        (torch.Size([100, 2]), torch.Size([100]))
        >>> bool(clicks.ids[:, 1].min() >= 50)
        True
    """

    def __init__(
        self,
        *,
        vocabulary: tuple[int, ...] = (2000, 1000, 500, 200, 100, 50, 20, 10),
        dense: int = 4,
        taste: int = 3,
        exponent: float = 1.0,
        seed: int = 0,
    ) -> None:
        if len(vocabulary) < 2 or min(vocabulary) < 2:
            raise ValueError(
                f"vocabulary={vocabulary!r}: expected at least two fields of at least two "
                "categories each, such as (2000, 100)."
            )
        generator = torch.Generator().manual_seed(seed)
        self.vocabulary = vocabulary
        self.offsets = torch.tensor([0, *torch.tensor(vocabulary).cumsum(0).tolist()[:-1]])
        total = sum(vocabulary)
        self._main = torch.randn(total, generator=generator) * 0.6
        self._taste = torch.randn(total, taste, generator=generator) * 0.35
        self._dense_weight = torch.randn(dense, generator=generator) * 0.5
        self._popularity = [torch.arange(1, size + 1) ** -exponent for size in vocabulary]

    @property
    def num_categories(self) -> int:
        """Number of rows of an embedding table for all fields."""
        return sum(self.vocabulary)

    def sample(self, rows: int, *, seed: int) -> Clicks:
        """Draw impressions; the same seed draws the same rows."""
        generator = torch.Generator().manual_seed(seed)
        columns = [
            torch.multinomial(weights, rows, replacement=True, generator=generator)
            for weights in self._popularity
        ]
        ids = torch.stack(columns, dim=1) + self.offsets
        dense = torch.randn(rows, len(self._dense_weight), generator=generator)
        tastes = self._taste[ids]
        # Sum over all pairs of fields of the products of their tastes, by the usual identity.
        pairs = 0.5 * (tastes.sum(1).square() - tastes.square().sum(1)).sum(1)
        logit = self._main[ids].sum(1) + pairs + dense @ self._dense_weight - 1.0
        probability = torch.sigmoid(logit)
        label = torch.bernoulli(probability, generator=generator)
        return Clicks(ids=ids, dense=dense, label=label, probability=probability)

    def stream(self, batch: int, *, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield fresh batches (ids, dense, label) without end."""
        for number in itertools.count():
            # One large draw is cheaper than many small ones.
            drawn = self.sample(64 * batch, seed=seed + number)
            yield from zip(
                drawn.ids.split(batch),
                drawn.dense.split(batch),
                drawn.label.split(batch),
                strict=True,
            )


class WideAndDeep(nn.Module):
    """A wide part (one weight per category) beside a deep part (embeddings, then an MLP).

    Example:
        >>> model = WideAndDeep(num_categories=70, num_fields=2, num_dense=4)
        >>> model(torch.tensor([[3, 55]]), torch.zeros(1, 4)).shape
        torch.Size([1])
    """

    def __init__(
        self, *, num_categories: int, num_fields: int, num_dense: int, width: int = 8
    ) -> None:
        super().__init__()
        self.wide = nn.Embedding(num_categories, 1)
        self.embedding = nn.Embedding(num_categories, width)
        nn.init.zeros_(self.wide.weight)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.wide_dense = nn.Linear(num_dense, 1)
        self.deep = nn.Sequential(
            nn.Linear(num_fields * width + num_dense, 64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """Return the log-odds of a click, one per row."""
        wide = self.wide(ids).squeeze(-1).sum(1) + self.wide_dense(dense).squeeze(-1)
        features = torch.cat([self.embedding(ids).flatten(1), dense], dim=1)
        logits: Tensor = wide + self.deep(features).squeeze(-1)
        return logits


def auc(score: Tensor, label: Tensor) -> float:
    """Return the area under the ROC curve: how often a click outranks a non-click (ties: half).

    Example:
        >>> auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
        0.75
    """
    positives = int((label > 0.5).sum())
    negatives = label.numel() - positives
    if positives == 0 or negatives == 0:
        raise ValueError(
            f"AUC needs clicks and non-clicks; got {positives} clicks in {label.numel()} rows."
        )
    _, inverse, counts = torch.unique(score.double(), return_inverse=True, return_counts=True)
    mean_rank = counts.cumsum(0).double() - (counts.double() - 1) / 2
    rank_sum = float(mean_rank[inverse][label > 0.5].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)
