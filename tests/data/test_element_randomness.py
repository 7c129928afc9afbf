"""Randomness is seeded per element and epoch, whatever the threads."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from stratagem.data import AUTOTUNE, Dataset, ElementRng, as_dataset


def by_torch(x):
    return torch.stack(
        [
            torch.rand(()),
            torch.randn(()),
            torch.randint(0, 99, ()).float(),
            torch.empty(()).uniform_(),
        ]
    )


def by_rng(x, rng):
    return torch.tensor(
        [rng.python.random(), rng.numpy.random(), torch.rand((), generator=rng.torch).item()]
    )


def many(x):
    return torch.cat(
        [
            torch.rand(2), torch.rand_like(torch.zeros(2)), torch.randn_like(torch.zeros(1)),
            torch.randperm(3).float(), torch.normal(torch.zeros(2), 1.0), torch.bernoulli(torch.full((3,), 0.5)),
            torch.multinomial(torch.ones(5), 2).float(), torch.zeros(1).normal_(), torch.zeros(1).exponential_(),
            torch.zeros(2).bernoulli_(0.5), torch.zeros(1).random_(0, 10),
            torch.nn.functional.dropout(torch.ones(4)), torch.nn.functional.rrelu(-torch.ones(2), training=True),
            torch.nn.init.uniform_(torch.empty(2)), torch.randn(2, 2).flatten(),
        ]
    )  # fmt: skip


@pytest.mark.parametrize("fn", [by_torch, by_rng, many])
@pytest.mark.parametrize("parallel", [2, 4, AUTOTUNE])
def test_the_same_seed_gives_the_same_elements_whatever_the_parallelism(fn, parallel):
    def run(parallel, seed=3):
        dataset = Dataset.range(12).map(fn, parallel, seed=seed)
        return [[x.tolist() for x in dataset] for _ in range(2)]

    alone = run(None)
    assert run(parallel) == alone
    assert run(parallel, seed=4) != alone
    assert alone[0] != alone[1], "epochs must differ"
    assert len({str(x) for x in alone[0]}) == 12, "elements must differ"


def test_torchs_own_generator_is_left_alone():
    """A training step draws the same numbers whether or not its input is random."""
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    list(Dataset.range(5).map(many, 2, seed=0).prefetch(2))
    assert torch.equal(torch.rand(3), expected)


def test_a_pipeline_without_randomness_draws_no_seed():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    list(Dataset.range(5).shuffle(seed=1).batch(2).prefetch(1))
    list(as_dataset([torch.ones(2)]))
    assert torch.equal(torch.rand(3), expected)


def test_unseeded_randomness_follows_manual_seed():
    def run(seed):
        torch.manual_seed(seed)
        return [x.tolist() for x in Dataset.range(4).map(by_torch, 2)]

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_an_own_generator_is_not_replaced():
    def own(x):
        return torch.rand((), generator=torch.Generator().manual_seed(int(x)))

    found = [float(x) for x in Dataset.range(3).map(own)]
    assert found == [
        float(torch.rand((), generator=torch.Generator().manual_seed(i))) for i in range(3)
    ]


def test_random_filters_repeat():
    def half(x, rng):
        return rng.python.random() < 0.5

    dataset = Dataset.range(40).filter(half, seed=1)
    first = [int(x) for x in dataset]
    assert 5 < len(first) < 35
    assert [int(x) for x in Dataset.range(40).filter(half, seed=1)] == first
    assert [int(x) for x in dataset] != first  # the next epoch


def test_cached_elements_do_not_depend_on_the_epoch():
    def build():
        return Dataset.range(5).map(by_rng, seed=1).cache()

    whole = build()
    first = [x.tolist() for x in whole]
    assert [x.tolist() for x in whole] == first
    late = build()
    with iter(late) as iterator:  # epoch 0 abandoned, epoch 1 fills the cache
        next(iterator)
    assert [x.tolist() for x in late] == first


def test_generators_of_an_element():
    a, b = ElementRng(5), ElementRng(5)
    assert a.torch is a.torch
    assert isinstance(a.numpy, np.random.Generator)
    assert isinstance(a.python, random.Random)
    assert a.python.random() == b.python.random()
    assert repr(a) == "ElementRng(seed=0x5)"
