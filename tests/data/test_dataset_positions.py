"""A dataset's own position: the next `iter()` goes on where the newest iterator was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem.data import Dataset


def make() -> Dataset:
    return (
        Dataset.range(20)
        .shuffle(seed=None)
        .map(lambda x, rng: x * 100 + rng.python.randrange(99))
        .batch(3)
    )


def elements(source: Any, epochs: int) -> list[list[int]]:
    return [batch.tolist() for _ in range(epochs) for batch in source]


@pytest.mark.parametrize("taken", [0, 1, 4, 6, 7])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_dataset_resumes_in_the_middle_of_an_epoch(taken: int, distributed: bool) -> None:
    """The rest of the epoch and the epochs after it are those of a run without a break."""
    with sg.OneDeviceStrategy("cpu:0") as strategy:

        def source() -> Any:
            return strategy.distribute_dataset(make()) if distributed else make()

        torch.manual_seed(7)
        first = source()
        epoch = iter(first)
        before = [next(epoch).tolist() for _ in range(taken)]
        position = first.state_dict()
        rest = [batch.tolist() for batch in epoch] + elements(first, 2)
        torch.manual_seed(1234)
        stream = torch.get_rng_state()
        resumed = source()
        resumed.load_state_dict(position)
        assert elements(resumed, 3) == rest
        assert torch.equal(torch.get_rng_state(), stream)
        assert len(before) == taken


def test_after_the_end_of_an_epoch_the_next_one_begins() -> None:
    first = make()
    elements(first, 1)
    position = first.state_dict()
    assert position["position"] is None
    resumed = make()
    resumed.load_state_dict(position)
    assert elements(resumed, 2) == elements(first, 2)


def test_an_iterator_that_was_dropped_has_no_position() -> None:
    first = make()
    for _ in first:
        break
    assert first.state_dict()["position"] is None
    resumed = make()
    resumed.load_state_dict(first.state_dict())
    assert elements(resumed, 1) == elements(first, 1)


def test_a_loaded_position_is_kept_until_it_is_used() -> None:
    first = make()
    epoch = iter(first)
    next(epoch)
    position = first.state_dict()
    resumed = make()
    resumed.load_state_dict(position)
    assert resumed.state_dict()["position"]["cursor"] == position["position"]["cursor"]
    again = make()
    again.load_state_dict(resumed.state_dict())
    assert elements(again, 1) == [batch.tolist() for batch in epoch]


def test_positions_of_other_pipelines_and_of_iterators_are_refused() -> None:
    with pytest.raises(ValueError, match="Build the same pipeline"):
        Dataset.range(5).load_state_dict(make().state_dict())
    with iter(Dataset.range(5)) as iterator:
        position = iterator.state_dict()
    with pytest.raises(ValueError, match="this is the position of an iterator"):
        Dataset.range(5).load_state_dict(position)
