"""Random pipelines for hypothesis, and the steps they are made of: shared by several tests."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from stratagem.data import Dataset


def _noise(x, rng):
    return x + torch.randint(0, 5, (), generator=rng.torch) * 1000


def _torch_noise(x):
    return x + torch.randint(0, 5, ()) * 1000


def _twice(x):
    return Dataset.from_tensors(x).repeat(2)


SOURCES = {
    "range": Dataset.range,
    "slices": lambda n: Dataset.from_tensor_slices(torch.arange(n) * 10),
    "generator": lambda n: Dataset.from_generator(lambda: iter(range(n))),
    "zip": lambda n: Dataset.zip(Dataset.range(n), Dataset.range(20)).map(lambda a, b: a * 7 + b),
    "concatenate": lambda n: Dataset.range(n).concatenate(Dataset.range(20, 23)),
}

# Steps that only choose rows: they run on row numbers over in-memory sources.
ROW_STEPS = {
    "shuffle": lambda d: d.shuffle(seed=3),
    "shuffle_unseeded": lambda d: d.shuffle(),
    "shuffle(1)": lambda d: d.shuffle(1, seed=5),
    "shuffle(3)": lambda d: d.shuffle(3, seed=5),
    "shuffle(6)": lambda d: d.shuffle(6),
    "shuffle_fixed": lambda d: d.shuffle(seed=9, reshuffle_each_iteration=False),
    "repeat(0)": lambda d: d.repeat(0),
    "repeat(2)": lambda d: d.repeat(2),
    "repeat(3)": lambda d: d.repeat(3),
    "take(0)": lambda d: d.take(0),
    "take(7)": lambda d: d.take(7),
    "take(11)": lambda d: d.take(11),
    "take(-1)": lambda d: d.take(-1),
    "skip(1)": lambda d: d.skip(1),
    "skip(4)": lambda d: d.skip(4),
    "shard(2,1)": lambda d: d.shard(2, 1),
    "shard(3,0)": lambda d: d.shard(3, 0),
}

OTHER_STEPS = {
    "map": lambda d: d.map(lambda x: x + 1),
    "map_noise": lambda d: d.map(_noise, seed=4),
    "map_noise_unseeded_parallel": lambda d: d.map(_noise, 2),
    "map_torch_parallel": lambda d: d.map(_torch_noise, 3),
    "filter": lambda d: d.filter(lambda x: x % 3 != 0),
    "filter_noise": lambda d: d.filter(lambda x, rng: rng.python.random() < 0.7, seed=1),
    "cache": lambda d: d.cache(),
    "prefetch(1)": lambda d: d.prefetch(1),
    "prefetch(3)": lambda d: d.prefetch(3),
    "batch_unbatch(3)": lambda d: d.batch(3).unbatch(),
    "enumerate": lambda d: d.enumerate().map(lambda i, x: i * 100 + x),
    "interleave": lambda d: d.interleave(_twice, 2, 1),
    "interleave_blocks": lambda d: d.interleave(
        lambda x: Dataset.from_tensors(x).repeat(5).map(_noise), 3, 2
    ),
    "interleave_parallel": lambda d: d.interleave(_twice, 2, 1, num_parallel_calls=2),
}

ALL_STEPS = {**ROW_STEPS, **OTHER_STEPS}


@st.composite
def pipelines(draw, *, rows_only=False):
    """(description, builder): the builder makes the same dataset anew each time."""
    size = draw(st.one_of(st.integers(8, 15), st.integers(0, 15)))
    sources = ["slices"] if rows_only else sorted(SOURCES)
    source = draw(st.sampled_from(sources))
    known = ROW_STEPS if rows_only else ALL_STEPS
    names = draw(st.lists(st.sampled_from(sorted(known)), max_size=4))
    last = draw(st.one_of(st.none(), st.tuples(st.integers(1, 4), st.booleans())))

    def build():
        dataset = SOURCES[source](size)
        if rows_only:
            dataset = Dataset.from_tensor_slices((torch.arange(size), torch.arange(size) * 2))
        for name in names:
            dataset = known[name](dataset)
        return dataset if last is None else dataset.batch(last[0], drop_remainder=last[1])

    return " > ".join([f"{source}({size})", *names, f"batch{last}" if last else ""]), build
