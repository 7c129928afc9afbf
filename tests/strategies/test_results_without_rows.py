"""A replica without rows contributes nothing: not to the weights, and not to what is reported."""

from __future__ import annotations

import pytest
import torch

import stratagem as sg

ROWS = [torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[5.0]])]


def strategies():
    return [
        sg.CentralStorageStrategy(["cpu:0", "cpu:1"]),
        sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]),
    ]


@pytest.mark.parametrize("number", [0, 1])
def test_a_mean_loss_over_no_rows_does_not_spoil_the_reported_loss(number: int) -> None:
    """One row over several replicas: the others' NaN stays out of the mean and of the sum."""
    with strategies()[number] as strategy:
        (batch,) = strategy.distribute_dataset([ROWS[1]])
        losses = strategy.run(lambda x: {"loss": x.mean()}, args=(batch,))["loss"]
        assert losses.values[-1].isnan()  # kept for whoever wants to look
        assert strategy.reduce("mean", losses, axis=None).item() == 5.0
        assert strategy.reduce("sum", losses, axis=None).item() == 5.0


def test_the_mark_goes_on_through_another_run() -> None:
    """Results handed to a second run keep their row counts, so they weigh the same there."""
    with strategies()[0] as strategy:
        (batch,) = strategy.distribute_dataset([ROWS[1]])
        losses = strategy.run(lambda x: x.mean(), args=(batch,))
        doubled = strategy.run(lambda loss: 2 * loss, args=(losses,))
        assert strategy.reduce("mean", doubled, axis=None).item() == 10.0


def test_replicas_with_rows_count_as_ever() -> None:
    """RED-2: an uneven split divides by the number of replicas when no axis is given."""
    with strategies()[0] as strategy:
        (batch,) = strategy.distribute_dataset([ROWS[0]])
        means = strategy.run(lambda x: x.mean(), args=(batch,))
        assert strategy.reduce("mean", means, axis=None).item() == (1.5 + 3.0) / 2
        per_row = strategy.run(lambda x: x[:, 0], args=(batch,))
        assert strategy.reduce("mean", per_row, axis=0).item() == 2.0


def test_empty_components_of_the_user_count() -> None:
    """RED-3: an empty component built by hand is a component."""
    with strategies()[0] as strategy:
        value = sg.PerReplica([torch.tensor([1.0, 2.0]), torch.tensor([])])
        assert strategy.reduce("mean", value, axis=0).item() == 1.5
        nan = sg.PerReplica([torch.tensor(1.0), torch.tensor(float("nan"))])
        assert strategy.reduce("mean", nan, axis=None).isnan()
