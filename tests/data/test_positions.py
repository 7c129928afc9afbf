"""Positions: resuming continues with exactly the next element, whatever the pipeline."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem.data import Dataset
from tests.data.pipelines_strategy import ALL_STEPS, SOURCES, pipelines
from tests.data.resuming import resumed_rest, through_a_file


def plain(element):
    if isinstance(element, tuple):
        return tuple(plain(e) for e in element)
    return element.tolist()


@pytest.mark.parametrize("batched", [False, True], ids=["rows", "batches"])
@pytest.mark.parametrize("step", sorted(ALL_STEPS))
def test_each_step_resumes_wherever_it_stopped(step, batched):
    """Over a source that is fused and one that is not."""
    for source in ("slices", "generator"):

        def build(source=source):
            dataset = ALL_STEPS[step](SOURCES[source](12))
            return dataset.batch(2) if batched else dataset

        torch.manual_seed(3)
        length = len(list(build()))
        for stop in sorted({*range(min(length, 13)), length - 1, length}):
            rest, resumed = resumed_rest(build, stop, plain)
            assert resumed == rest, (source, stop)


@pytest.mark.parametrize("first", sorted(ALL_STEPS))
def test_every_pair_of_steps_resumes(first):
    """After five elements, in the midst of most of them."""
    for second in sorted(ALL_STEPS):

        def build(second=second):
            return ALL_STEPS[second](ALL_STEPS[first](SOURCES["generator"](12)))

        rest, resumed = resumed_rest(build, 5, plain)
        assert resumed == rest, second


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=pipelines(), stop=st.integers(0, 30), seed=st.integers(0, 3))
def test_resuming_continues_with_exactly_the_next_element(pipeline, stop, seed):
    """Save after `stop` elements, resume in a fresh dataset: the same rest, epoch after included."""
    name, build = pipeline
    torch.manual_seed(seed)
    original = build()
    for _ in range(seed % 2):  # not only the first epoch
        list(original)
    with iter(original) as iterator:
        for _, _ in zip(range(stop), iterator, strict=False):
            pass
        state = through_a_file(iterator.state_dict())
        rest = [plain(x) for x in iterator]
    torch.manual_seed(1000 + seed)  # another process would have another seed
    fresh = build()
    with iter(fresh) as resumed:
        resumed.load_state_dict(state)
        assert [plain(x) for x in resumed] == rest, name
    assert [plain(x) for x in fresh] == [plain(x) for x in original], name


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=pipelines(), seed=st.integers(0, 3))
def test_the_same_seed_gives_the_same_elements_in_every_run(pipeline, seed):
    """Threads included: two runs never differ."""
    _, build = pipeline
    runs = []
    for _ in range(2):
        torch.manual_seed(seed)
        dataset = build()
        runs.append([[plain(x) for x in dataset], [plain(x) for x in dataset]])
    assert runs[0] == runs[1]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=pipelines(), stops=st.lists(st.integers(0, 6), max_size=4))
def test_resuming_again_and_again(pipeline, stops):
    """Saving right after loading, several times, loses nothing."""
    _, build = pipeline
    torch.manual_seed(5)
    expected = [plain(x) for x in build()]
    torch.manual_seed(5)
    found, state = [], None
    for stop in [*stops, 10_000]:
        with iter(build()) as iterator:
            if state is not None:
                iterator.load_state_dict(state)
            found += [plain(x) for _, x in zip(range(stop), iterator, strict=False)]
            state = iterator.state_dict()
    assert found == expected


def test_state_of_another_pipeline_is_refused():
    state = iter(Dataset.range(4).batch(2)).state_dict()
    iterator = iter(Dataset.range(4))
    with pytest.raises(ValueError, match=r"saved by 'Batch\(Range\)'.* here is 'Range'"):
        iterator.load_state_dict(state)
    assert [int(x) for x in iterator] == [0, 1, 2, 3]


def test_going_back_within_one_iterator():
    """Rolling back to an earlier checkpoint repeats what followed it."""
    iterator = iter(Dataset.range(20).shuffle(seed=1).prefetch(2))
    next(iterator)
    state = iterator.state_dict()
    first = [int(x) for x in iterator]
    iterator.load_state_dict(state)
    assert [int(x) for x in iterator] == first


def test_resuming_at_the_end_is_the_end():
    dataset = Dataset.range(2).prefetch(1)
    iterator = iter(dataset)
    list(iterator)
    fresh = iter(Dataset.range(2).prefetch(1))
    fresh.load_state_dict(iterator.state_dict())
    assert list(fresh) == []


def test_a_source_shorter_than_the_position_is_an_error():
    def source(n):
        return Dataset.from_generator(lambda: iter(range(n)))

    iterator = iter(source(5))
    for _ in range(4):
        next(iterator)
    fresh = iter(source(2))
    with pytest.raises(sg.errors.DataError, match=r"only 2 elements.* after 4"):
        fresh.load_state_dict(iterator.state_dict())


def test_text_in_a_position_survives_a_file():
    """Text is no tensor, and torch.load refuses NumPy arrays."""

    def build():
        names = Dataset.from_tensor_slices((["a", "bb", "c", "d", "e"], [1, 2, 3, 4, 5]))
        return (
            names.map(lambda n, i: (n, i))
            .shuffle(3, seed=1)
            .batch(2)
            .prefetch(2)
            .map(lambda n, i: (n, i), 2)
        )

    def text(elements):
        return [(list(names), numbers.tolist()) for names, numbers in elements]

    with iter(build()) as iterator:
        next(iterator)
        state = through_a_file(iterator.state_dict())
        rest = text(iterator)
    assert rest
    with iter(build()) as resumed:
        resumed.load_state_dict(state)
        assert text(resumed) == rest


def test_parallelism_may_change_between_saving_and_resuming():
    """The threads are no part of the position."""

    def build(parallel):
        return Dataset.range(20).map(
            lambda x, rng: x + rng.python.randrange(1000), parallel, seed=1
        )

    with iter(build(4)) as iterator:
        for _ in range(5):
            next(iterator)
        state = iterator.state_dict()
        rest = [int(x) for x in iterator]
    with iter(build(None)) as iterator:
        iterator.load_state_dict(state)
        assert [int(x) for x in iterator] == rest
