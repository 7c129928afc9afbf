"""The demonstration's data has the structure it claims, and its model can find it."""

import pytest
import torch
from torch import nn

from stratagem._demo.clicks import ClickWorld, WideAndDeep, auc


def test_auc_counts_how_often_a_click_outranks_a_non_click():
    """Ties count half; a constant score is worth exactly one half."""
    score = torch.tensor([0.1, 0.4, 0.4, 0.8, 0.8])
    label = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0])
    pairs = [
        1.0 if p > n else 0.5 if p == n else 0.0
        for p in score[label > 0.5].tolist()
        for n in score[label < 0.5].tolist()
    ]
    assert auc(score, label) == pytest.approx(sum(pairs) / len(pairs))
    assert auc(torch.ones(4), torch.tensor([0.0, 1.0, 0.0, 1.0])) == 0.5


def test_auc_without_clicks_is_refused():
    """There is no area under a curve that does not exist."""
    with pytest.raises(ValueError, match="0 clicks in 3 rows"):
        auc(torch.ones(3), torch.zeros(3))


def test_the_same_seed_draws_the_same_rows_and_another_seed_does_not():
    """Workers draw their own rows by seed."""
    world = ClickWorld(seed=3)
    first, again, other = (world.sample(50, seed=s) for s in (1, 1, 2))
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.label, again.label)
    assert not torch.equal(first.ids, other.ids)


def test_no_score_beats_the_formula_itself():
    """The best possible AUC is that of the probabilities the labels were drawn from."""
    clicks = ClickWorld(seed=0).sample(20_000, seed=5)
    best = clicks.best_auc()
    noisy = torch.logit(clicks.probability) + torch.randn(20_000) * 0.5
    assert best > auc(noisy, clicks.label)
    assert 0.8 < best < 0.95


def test_the_model_learns_most_of_what_can_be_known():
    """Plain PyTorch reaches a good part of the way from chance to the best possible AUC."""
    torch.manual_seed(0)
    world = ClickWorld(vocabulary=(50, 20, 10), seed=0)
    train, held_out = world.sample(20_000, seed=1), world.sample(5_000, seed=2)
    model = WideAndDeep(num_categories=world.num_categories, num_fields=3, num_dense=4)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for start in range(0, 20_000, 500):
        rows = slice(start, start + 500)
        optimizer.zero_grad()
        logits = model(train.ids[rows], train.dense[rows])
        nn.functional.binary_cross_entropy_with_logits(logits, train.label[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        reached = auc(model(held_out.ids, held_out.dense), held_out.label)
    assert reached > 0.5 + 0.8 * (held_out.best_auc() - 0.5)


def test_a_world_of_one_field_is_refused():
    """Interactions need two fields."""
    with pytest.raises(ValueError, match="at least two fields"):
        ClickWorld(vocabulary=(5,))
