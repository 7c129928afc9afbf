"""Prediction metrics that are computed batch by batch and merged exactly over workers.

Each metric is a sum of counts, so the result does not depend on how rows were divided among batches and
workers. The objects are small and plain: return one from a scheduled function, and add up those of all workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self, final

import torch

# Bins of AUC by the distance of a score to the nearer of 0 and 1, one half of them for each. Below 1/64 a bin has the exponent
# of a float64 and 8 bits of its mantissa, down to 2 ** -22; above, bins are equally wide.
_BINS = 1 << 14
_SHIFT = 52 - 8
_LOWEST = (1023 - 22) << 8
_RELATIVE, _EVEN = 16 << 8, 1 << 13


@final
@dataclass
class Mean:
    """Mean of values, such as losses, weighted if wanted.

    Example:
        >>> import stratagem as sg
        >>> first, second = sg.metrics.Mean(), sg.metrics.Mean()
        >>> first.update([1.0, 2.0])
        >>> second.update(6.0)
        >>> (first + second).result()
        3.0
    """

    total: float = 0.0
    weight: float = 0.0

    def update(self, values: Any, weights: Any = 1.0) -> None:
        """Add values, with one weight each or one for all."""
        numbers = _flat(values)
        weighted = _flat(weights).expand(numbers.shape)
        self.total += float((numbers * weighted).sum())
        self.weight += float(weighted.sum())

    def result(self) -> float:
        """Return the mean; nan if there were no values."""
        return self.total / self.weight if self.weight else float("nan")

    def __add__(self, other: Self) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)


@final
@dataclass
class Accuracy:
    """Share of rows whose prediction is right.

    Example:
        >>> import stratagem as sg, torch
        >>> accuracy = sg.metrics.Accuracy()
        >>> accuracy.update(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        >>> accuracy.result()
        0.5
    """

    right: int = 0
    rows: int = 0

    def update(self, predictions: Any, labels: Any) -> None:
        """Add rows: scores of classes [rows, classes], or predicted classes [rows]; with the right classes."""
        given, wanted = torch.as_tensor(predictions), torch.as_tensor(labels)
        if given.dim() == wanted.dim() + 1:
            given = given.argmax(-1)
        if given.shape != wanted.shape:
            raise ValueError(
                f"predictions of shape {tuple(given.shape)} do not fit labels of shape "
                f"{tuple(wanted.shape)}: expected [rows] or [rows, classes], and [rows]"
            )
        self.right += int((given == wanted).sum())
        self.rows += wanted.numel()

    def result(self) -> float:
        """Return the share; nan if there were no rows."""
        return self.right / self.rows if self.rows else float("nan")

    def __add__(self, other: Self) -> Accuracy:
        return Accuracy(self.right + other.right, self.rows + other.rows)


def _no_counts() -> torch.Tensor:
    return torch.zeros(2, _BINS, dtype=torch.int64)


@final
@dataclass
class AUC:
    """Area under the ROC curve: probability that a positive row scores higher than a negative one.

    Scores must be probabilities, from 0 to 1. They are counted in 16,384 bins, and scores in one bin count as equal. Bins
    are narrower near 0 and 1: scores in one bin differ by less than 1/8192 and, below 1/64, by less than 0.4 % of their
    value. So the error of the area is below 1e-4, also for rare clicks, unless most scores are closer together than a bin.

    Example:
        >>> import stratagem as sg
        >>> first, second = sg.metrics.AUC(), sg.metrics.AUC()
        >>> first.update([0.9, 0.2], [1, 0])
        >>> second.update([0.4, 0.6], [1, 0])
        >>> (first + second).result()
        0.75
    """

    counts: torch.Tensor = field(default_factory=_no_counts)
    """Rows by label (negative, positive) and bin."""

    def update(self, scores: Any, labels: Any) -> None:
        """Add rows: their scores, and their labels 0 or 1."""
        given, wanted = _flat(scores), _flat(labels)
        if given.shape != wanted.shape:
            raise ValueError(f"{given.numel()} scores do not fit {wanted.numel()} labels")
        if not bool(((given >= 0) & (given <= 1)).all()):
            raise ValueError(
                f"scores from {given.min():g} to {given.max():g} are not probabilities: expected 0 to 1. "
                "Apply torch.sigmoid to logits."
            )
        if not bool(((wanted == 0) | (wanted == 1)).all()):
            raise ValueError(f"labels from {wanted.min():g} to {wanted.max():g}: expected 0 or 1")
        # Integers only: the bin of a score must not depend on how torch rounds in a long or a short tensor.
        distances = torch.minimum(given, 1 - given)
        relative = ((distances.view(torch.int64) >> _SHIFT) - _LOWEST).clamp_(min=0)
        even = (distances * _EVEN).long() + (_RELATIVE - _EVEN // 64)
        places = torch.where(distances < 1 / 64, relative, even)
        bins = torch.where(given > 0.5, _BINS - 1 - places, places) + wanted.long() * _BINS
        self.counts += torch.bincount(bins, minlength=2 * _BINS).view(2, _BINS)

    def result(self) -> float:
        """Return the area; nan without rows of both labels."""
        negative, positive = self.counts.double()
        pairs = float(negative.sum() * positive.sum())
        below = negative.cumsum(0) - negative
        ordered = float((positive * (below + negative / 2)).sum())
        return ordered / pairs if pairs else float("nan")

    def __add__(self, other: Self) -> AUC:
        return AUC(self.counts + other.counts)


def _flat(values: Any) -> torch.Tensor:
    return torch.as_tensor(values).detach().double().cpu().reshape(-1)
