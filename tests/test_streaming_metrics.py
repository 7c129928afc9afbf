"""Streaming metrics equal their definition on all rows, however the rows are divided (issue 17, point 7)."""

from __future__ import annotations

import math
from functools import reduce
from operator import add

import pytest
import torch

import stratagem as sg
from stratagem.metrics import AUC, Accuracy, Mean

pytestmark = pytest.mark.fast


def exact_auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Compare every positive row with every negative one."""
    positive, negative = scores[labels == 1][:, None], scores[labels == 0][None]
    return float(((positive > negative).double() + (positive == negative).double() / 2).mean())


def test_parts_add_up_to_the_whole() -> None:
    torch.manual_seed(1)
    labels = torch.randint(0, 2, (3000,))
    scores = torch.sigmoid(torch.randn(3000) + labels)
    weights = torch.rand(3000)
    sizes = [7, 1000, 1, 1992]
    whole, parts = (AUC(), Accuracy(), Mean()), []
    whole[0].update(scores, labels)
    whole[1].update(scores > 0.5, labels)
    whole[2].update(scores, weights)
    rows = zip(scores.split(sizes), labels.split(sizes), weights.split(sizes), strict=True)
    for score, label, weight in rows:
        auc, accuracy, mean = AUC(), Accuracy(), Mean()
        auc.update(score, label)
        accuracy.update(score > 0.5, label)
        mean.update(score, weight)
        parts.append((auc, accuracy, mean))
    merged = [reduce(add, kind) for kind in zip(*parts, strict=True)]
    assert merged[0].result() == whole[0].result()
    assert merged[1] == whole[1]
    assert merged[2].result() == pytest.approx(whole[2].result(), rel=1e-12)
    assert whole[0].result() == pytest.approx(exact_auc(scores, labels), abs=1e-4)
    assert whole[1].result() == float(((scores > 0.5) == labels).double().mean())


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (-9.0, 0.5), (9.0, 0.5), (0.0, 0.01)])
def test_auc_of_rare_and_of_undecided_scores(mean: float, spread: float) -> None:
    """A click in ten thousand rows, and the scores of a model that has learned nothing yet."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 2, (3000,), generator=generator)
    logits = torch.randn(3000, generator=generator, dtype=torch.float64) + labels
    scores = torch.sigmoid(mean + spread * logits)
    auc = AUC()
    auc.update(scores, labels)
    assert auc.result() == pytest.approx(exact_auc(scores, labels), abs=1e-4)


def test_bins_of_auc_are_in_the_order_of_scores() -> None:
    tail = torch.rand(500, dtype=torch.float64) ** 12
    edges = [0.0, 1e-300, 2**-22, 1 / 64, 0.5, 1 - 1 / 64, 1.0]
    middle = torch.rand(500, dtype=torch.float64)
    scores = torch.cat([tail, 1 - tail, middle, torch.tensor(edges, dtype=torch.float64)])
    found = []
    for score in scores.sort().values:
        auc = AUC()
        auc.update(score, 1)
        found.append(int(auc.counts[1].nonzero()))
    assert found == sorted(found)


def test_extremes() -> None:
    auc = AUC()
    assert math.isnan(auc.result())
    auc.update([1.0, 1.0], [1, 1])
    assert math.isnan(auc.result())
    auc.update([0.0], [0])
    assert auc.result() == 1.0
    assert math.isnan(Mean().result())
    assert math.isnan(Accuracy().result())


@pytest.mark.parametrize(
    ("scores", "labels", "text"),
    [
        ([2.0, 0.1], [1, 0], "are not probabilities"),
        ([0.5], [1, 0], "1 scores do not fit 2 labels"),
        ([0.5], [3], "expected 0 or 1"),
        ([math.nan], [1], "are not probabilities"),
    ],
)
def test_wrong_rows_raise_and_count_nothing(
    scores: list[float], labels: list[int], text: str
) -> None:
    auc = AUC()
    with pytest.raises(ValueError, match=text):
        auc.update(scores, labels)
    assert auc.counts.sum() == 0


def test_shapes_that_do_not_fit_raise() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 2, 2\) do not fit"):
        Accuracy().update(torch.zeros(3, 2, 2), torch.zeros(3))


def test_workers_return_metrics() -> None:
    """A scheduled function returns a metric like any value."""

    def evaluate(part: int) -> AUC:
        auc = AUC()
        auc.update([0.1 * part, 0.9], [0, 1])
        return auc

    with sg.LocalCluster(workers=2, ps=1, in_process=True) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with sg.ClusterCoordinator(strategy) as coordinator:
            parts = [coordinator.schedule(evaluate, args=(n,)) for n in range(4)]
            merged = reduce(add, (part.get(timeout_s=60) for part in parts))
    assert merged.result() == 1.0
    assert merged.counts.sum() == 8
