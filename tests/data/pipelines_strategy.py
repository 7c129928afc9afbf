"""Random pipelines for hypothesis: shared by the tests of positions and of fusing."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from stratagem.data import Dataset


def _noise(x, rng):
    return x + torch.randint(0, 5, (), generator=rng.torch) * 1000


def _torch_noise(x):
    return x + torch.randint(0, 5, ()) * 1000


def _sources():
    sizes = st.integers(0, 12)
    return st.one_of(
        sizes.map(lambda n: ("range", lambda: Dataset.range(n))),
        sizes.map(lambda n: ("slices", lambda: Dataset.from_tensor_slices(torch.arange(n) * 10))),
        sizes.map(lambda n: ("generator", lambda: Dataset.from_generator(lambda: iter(range(n))))),
        sizes.map(lambda n: ("zip", lambda: Dataset.zip(Dataset.range(n), Dataset.range(5)).map(lambda a, b: a * 7 + b))),
        sizes.map(lambda n: ("concatenate", lambda: Dataset.range(n).concatenate(Dataset.range(20, 23)))),
    )  # fmt: skip


ROWS_ONLY = st.one_of(
    st.just(("shuffle", lambda d: d.shuffle(seed=3))),
    st.just(("shuffle_unseeded", lambda d: d.shuffle())),
    st.integers(1, 6).map(lambda n: (f"shuffle({n})", lambda d: d.shuffle(n, seed=5))),
    st.just(("shuffle_fixed", lambda d: d.shuffle(seed=9, reshuffle_each_iteration=False))),
    st.integers(0, 3).map(lambda n: (f"repeat({n})", lambda d: d.repeat(n))),
    st.integers(0, 9).map(lambda n: (f"take({n})", lambda d: d.take(n))),
    st.integers(0, 4).map(lambda n: (f"skip({n})", lambda d: d.skip(n))),
    st.tuples(st.integers(1, 3), st.integers(0, 2)).map(
        lambda t: (f"shard({t[0]},{t[1] % t[0]})", lambda d: d.shard(t[0], t[1] % t[0]))
    ),
)

_OTHERS = st.one_of(
    st.just(("map", lambda d: d.map(lambda x: x + 1))),
    st.just(("map_noise", lambda d: d.map(_noise, seed=4))),
    st.just(("map_noise_unseeded_parallel", lambda d: d.map(_noise, 2))),
    st.just(("map_torch_parallel", lambda d: d.map(_torch_noise, 3))),
    st.just(("filter", lambda d: d.filter(lambda x: x % 3 != 0))),
    st.just(("cache", lambda d: d.cache())),
    st.integers(0, 3).map(lambda n: (f"prefetch({n})", lambda d: d.prefetch(n))),
    st.integers(1, 4).map(lambda n: (f"batch_unbatch({n})", lambda d: d.batch(n).unbatch())),
    st.just(("enumerate", lambda d: d.enumerate().map(lambda i, x: i * 100 + x))),
    st.sampled_from([None, 2]).map(
        lambda p: (
            f"interleave({p})",
            lambda d: d.interleave(
                lambda x: Dataset.from_tensors(x).repeat(2), 2, 1, num_parallel_calls=p
            ),
        )
    ),
)

_LAST = st.one_of(
    st.none(),
    st.tuples(st.integers(1, 4), st.booleans()).map(
        lambda t: (f"batch{t}", lambda d: d.batch(t[0], drop_remainder=t[1]))
    ),
)


@st.composite
def pipelines(draw, *, rows_only=False):
    """(description, builder): the builder makes the same dataset anew each time."""
    if rows_only:
        n = draw(st.integers(0, 14))
        source = (
            f"slices({n})",
            lambda: Dataset.from_tensor_slices((torch.arange(n), torch.arange(n) * 2)),
        )
        steps = draw(st.lists(ROWS_ONLY, max_size=5))
    else:
        source = draw(_sources())
        steps = draw(st.lists(st.one_of(ROWS_ONLY, _OTHERS), max_size=5))
    last = draw(_LAST)
    if last is not None:
        steps = [*steps, last]

    def build():
        dataset = source[1]()
        for _, step in steps:
            dataset = step(dataset)
        return dataset

    return " > ".join([source[0], *(name for name, _ in steps)]), build
