"""The verbs of `sg.data.Dataset`, one by one and at their edges."""

from __future__ import annotations

from typing import NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch

import stratagem as sg
from stratagem.data import AUTOTUNE, INFINITE, UNKNOWN, Dataset, ObjectSpec, TensorSpec


class Pair(NamedTuple):
    a: list
    b: list


def numbers(dataset):
    return [x.tolist() for x in dataset]


def test_slices_keep_nests_and_dtypes():
    """Tuples, dicts and named tuples come back as they were, leaves as tensors."""
    source = {
        "x": np.arange(4, dtype=np.int16),
        "y": (torch.ones(4, 2), Pair([1, 2, 3, 4], [0.5] * 4)),
    }
    elements = list(Dataset.from_tensor_slices(source))
    assert len(elements) == 4
    first = elements[1]
    assert first["x"].dtype is torch.int16
    assert first["y"][0].shape == (2,)
    assert isinstance(first["y"][1], Pair)
    assert first["y"][1].a.item() == 2
    assert first["y"][1].b.dtype is torch.float32


def test_a_list_of_arrays_is_stacked():
    """INP-43: a list is one array, a tuple is several."""
    (element,) = Dataset.from_tensor_slices([np.array([1, 2])])
    assert element.tolist() == [1, 2]
    stacked = Dataset.from_tensor_slices([torch.ones(3), torch.zeros(3)])
    assert numbers(stacked) == [[1, 1, 1], [0, 0, 0]]
    with pytest.raises(ValueError, match="one shape"):
        Dataset.from_tensor_slices([torch.ones(3), torch.zeros(2)])


def test_text_travels_as_text():
    dataset = Dataset.from_tensor_slices((["a", "b", "c"], [1, 2, 3]))
    assert [name for name, _ in dataset] == ["a", "b", "c"]
    names, _ = next(iter(dataset.batch(2)))
    assert isinstance(names, np.ndarray)
    assert names.tolist() == ["a", "b"]
    assert dataset.element_spec == (ObjectSpec((), "str"), TensorSpec((), torch.int64))


def test_slices_that_disagree_in_length_are_refused_by_name():
    with pytest.raises(
        ValueError, match=r"disagree in length \(\['x'\]: 3, \['y'\]: 4\).*\.batch\("
    ):
        Dataset.from_tensor_slices({"x": torch.ones(3), "y": torch.ones(4)})
    with pytest.raises(ValueError, match="no first dimension"):
        Dataset.from_tensor_slices(torch.tensor(3))


def test_elements_do_not_alias_their_source():
    """Changing an element in place leaves the dataset as it was."""
    rows = torch.zeros(3, 2)
    dataset = Dataset.from_tensor_slices(rows)
    for element in dataset:
        element += 1
    for batch in dataset.batch(2):
        batch += 1
    for element in Dataset.from_tensors(rows).repeat(2):
        element += 1
    assert rows.sum() == 0


def test_changing_an_element_in_place_leaves_the_cache_as_it_was(tmp_path):
    """A step may normalize its batch in place and add to a dict: the next epoch must not see it."""
    np.savez(tmp_path / "a.npz", x=np.arange(6))
    columns = Dataset.from_numpy(tmp_path / "a.npz", ["x"], 4)
    rows = Dataset.range(6).map(lambda x: {"x": x})
    for cached in (columns.cache(), rows.cache(), rows.cache().map(lambda e: e)):
        expected = [element["x"].clone() for element in cached]
        for _ in range(2):
            for element in cached:
                element["x"] += 100
                element["more"] = 1
        again = list(cached)
        assert all(torch.equal(e["x"], x) for e, x in zip(again, expected, strict=True))
        assert all(set(element) == {"x"} for element in again)


def test_elements_of_a_generator_that_reuses_its_array_stay_apart():
    """User code may hand out one array again and again; reading ahead must not see it change."""

    def reuse():
        buffer = np.zeros(2)
        for i in range(4):
            buffer[:] = i
            yield buffer

    assert numbers(Dataset.from_generator(reuse).prefetch(3)) == [[i, i] for i in range(4)]


def test_range_takes_python_arguments():
    assert numbers(Dataset.range(5, 0, -2)) == [5, 3, 1]
    assert numbers(Dataset.range(5, 0, -2).batch(2)) == [[5, 3], [1]]
    assert len(Dataset.range(3, 1)) == 0


def test_empty_datasets_work_everywhere():
    """INP-11."""
    empty = Dataset.range(0)
    for dataset in (
        empty, empty.batch(2), empty.repeat(), empty.shuffle(), empty.map(lambda x: x), empty.cache(),
        empty.prefetch(2), empty.unbatch(), empty.repeat().batch(3), empty.filter(lambda x: True),
        Dataset.zip(empty, Dataset.range(3)), empty.concatenate(empty), empty.shuffle(2).repeat(3),
        empty.interleave(Dataset.from_tensors), empty.map(lambda x: x, 2).repeat(),
    ):  # fmt: skip
        assert list(dataset) == [], dataset
    assert empty.repeat().cardinality() == 0


def test_infinite_datasets_work():
    """INP-11."""
    assert numbers(Dataset.range(2).repeat().take(5)) == [0, 1, 0, 1, 0]
    endless = Dataset.range(3).repeat()
    assert endless.cardinality() == INFINITE
    with pytest.raises(TypeError, match="has no end"):
        len(endless)
    with pytest.raises(ValueError, match="no end"):
        endless.shuffle()
    assert len(list(endless.shuffle(2).batch(2).take(4))) == 4


def test_batch_keeps_or_drops_the_remainder():
    dataset = Dataset.range(5)
    assert numbers(dataset.batch(2)) == [[0, 1], [2, 3], [4]]
    assert numbers(dataset.batch(2, drop_remainder=True)) == [[0, 1], [2, 3]]
    streamed = dataset.map(lambda x: x)
    assert numbers(streamed.batch(2, drop_remainder=True)) == [[0, 1], [2, 3]]
    assert numbers(streamed.batch(2)) == [[0, 1], [2, 3], [4]]


def test_batching_different_shapes_says_what_to_do():
    ragged = Dataset.from_generator(lambda: iter([torch.ones(2), torch.ones(3)]))
    with pytest.raises(sg.errors.DataError, match="Pad or crop"):
        list(ragged.batch(2))
    mixed = Dataset.from_generator(lambda: iter([{"a": 1}, {"b": 1}]))
    with pytest.raises(sg.errors.DataError, match="key 'a' is missing"):
        list(mixed.batch(2))


def test_unbatch_undoes_batch():
    pairs = Dataset.from_tensor_slices(([1, 2, 3], ["a", "b", "c"]))
    assert [(int(x), y) for x, y in pairs.batch(2).unbatch()] == [(1, "a"), (2, "b"), (3, "c")]


def test_tuples_are_unpacked_into_arguments():
    pairs = Dataset.from_tensor_slices(([1, 2], [3, 4]))
    assert numbers(pairs.map(lambda x, y: x * y)) == [3, 8]
    assert [int(x) for x, _ in pairs.filter(lambda x, y: y > 3)] == [2]


def test_map_results_become_tensors():
    results = list(
        Dataset.range(2).map(lambda x: {"n": 1.5, "l": [1, 2], "t": "text", "a": np.ones(2)})
    )
    assert results[0]["n"].dtype is torch.float32
    assert results[0]["l"].tolist() == [1, 2]
    assert results[0]["t"] == "text"
    assert isinstance(results[0]["a"], torch.Tensor)


def test_parallel_map_keeps_order():
    assert numbers(Dataset.range(50).map(lambda x: x * 2, num_parallel_calls=4)) == [
        2 * i for i in range(50)
    ]
    assert numbers(Dataset.range(5).map(lambda x: x, AUTOTUNE)) == [0, 1, 2, 3, 4]


def test_shuffle_is_a_permutation_and_changes_with_the_epoch():
    dataset = Dataset.range(100).shuffle(seed=3)
    first, second = numbers(dataset), numbers(dataset)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    again = Dataset.range(100).shuffle(seed=3)
    assert numbers(again) == first
    assert numbers(again) == second


def test_shuffle_can_keep_one_order():
    dataset = Dataset.range(50).shuffle(seed=3, reshuffle_each_iteration=False)
    assert numbers(dataset) == numbers(dataset)
    unseeded = Dataset.range(50).shuffle(reshuffle_each_iteration=False)
    assert numbers(unseeded) == numbers(unseeded)
    repeated = numbers(unseeded.repeat(2))
    assert repeated[:50] == repeated[50:]


def test_each_repeat_is_an_epoch():
    both = numbers(Dataset.range(40).shuffle(seed=1).repeat(2))
    assert sorted(both[:40]) == sorted(both[40:])
    assert both[:40] != both[40:]


def test_torch_manual_seed_repeats_unseeded_shuffles():
    torch.manual_seed(7)
    first = numbers(Dataset.range(50).shuffle())
    torch.manual_seed(7)
    assert numbers(Dataset.range(50).shuffle()) == first
    assert numbers(Dataset.range(50).shuffle()) != first


def test_buffered_shuffle_looks_no_further_than_its_buffer():
    order = numbers(Dataset.range(100).shuffle(10, seed=0))
    assert sorted(order) == list(range(100))
    assert all(value <= position + 9 for position, value in enumerate(order))
    assert order != list(range(100))


def test_shuffle_of_unknown_length_reads_everything():
    dataset = Dataset.range(20).filter(lambda x: x % 2 == 0).shuffle(seed=1)
    assert sorted(numbers(dataset)) == list(range(0, 20, 2))


def test_shard_take_skip():
    dataset = Dataset.range(10)
    assert numbers(dataset.shard(3, 2)) == [2, 5, 8]
    assert len(dataset.shard(3, 0)) == 4
    assert len(dataset.shard(20, 15)) == 0
    assert numbers(dataset.take(-1).skip(8)) == [8, 9]
    assert numbers(dataset.skip(-1)) == []
    assert numbers(dataset.take(0)) == []
    assert numbers(dataset.skip(20)) == []


def test_zip_follows_the_nest_and_the_shortest():
    a, b = Dataset.range(3), Dataset.range(10, 20)
    assert [(int(x), int(y)) for x, y in Dataset.zip(a, b)] == [(0, 10), (1, 11), (2, 12)]
    nested = list(Dataset.zip({"a": a, "b": (b, a)}))
    assert {k: str(v) for k, v in nested[1].items()} == {
        "a": "tensor(1)",
        "b": "(tensor(11), tensor(1))",
    }
    with pytest.raises(TypeError, match="zip"):
        Dataset.zip(a, [1, 2])


def test_concatenate_and_enumerate():
    both = Dataset.range(2).concatenate(Dataset.range(5, 7))
    assert numbers(both) == [0, 1, 5, 6]
    assert [(int(i), int(x)) for i, x in both.enumerate(start=10)] == [
        (10, 0),
        (11, 1),
        (12, 5),
        (13, 6),
    ]


@pytest.mark.parametrize("parallel", [None, 2])
def test_interleave_takes_turns(parallel):
    def block(x):
        return Dataset.from_tensors(x).repeat(3)

    order = numbers(Dataset.range(3).interleave(block, 2, 2, num_parallel_calls=parallel))
    assert order == [0, 0, 1, 1, 0, 1, 2, 2, 2]
    assert numbers(Dataset.range(3).flat_map(block)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_cache_reads_its_input_once():
    calls = []
    dataset = Dataset.range(4).map(lambda x: calls.append(int(x)) or x).cache().repeat(3)
    assert numbers(dataset) == [0, 1, 2, 3] * 3
    assert numbers(dataset) == [0, 1, 2, 3] * 3
    assert calls == [0, 1, 2, 3]


def test_half_read_cache_is_not_taken_for_whole():
    dataset = Dataset.range(4).cache()
    with iter(dataset) as iterator:
        next(iterator)
    assert numbers(dataset) == [0, 1, 2, 3]


def test_cardinality_of_chains():
    dataset = Dataset.range(10)
    assert dataset.batch(4).cardinality() == 3
    assert dataset.batch(4, drop_remainder=True).cardinality() == 2
    assert dataset.repeat(3).shard(4, 1).cardinality() == 8
    assert dataset.filter(lambda x: True).cardinality() == UNKNOWN
    assert dataset.filter(lambda x: True).take(0).cardinality() == 0
    assert dataset.repeat().take(7).skip(3).cardinality() == 4
    assert Dataset.zip(dataset, dataset.repeat()).cardinality() == 10
    assert dataset.concatenate(dataset.repeat()).cardinality() == INFINITE


def test_element_spec_is_that_of_the_first_element():
    dataset = Dataset.from_tensor_slices({"x": torch.ones(4, 3), "y": np.arange(4)})
    assert dataset.element_spec["x"] == TensorSpec((3,), torch.float32)
    assert dataset.batch(2).element_spec["x"] == TensorSpec((None, 3), torch.float32)
    assert dataset.batch(2, drop_remainder=True).element_spec["y"] == TensorSpec((2,), torch.int64)
    assert dataset.batch(2).unbatch().shuffle().repeat().element_spec == dataset.element_spec
    mapped = dataset.batch(4).map(lambda d: d["x"].double())
    assert mapped.element_spec == TensorSpec((None, 3), torch.float64)
    with pytest.raises(sg.errors.DataError, match="is empty, so its element_spec"):
        _ = dataset.skip(4).element_spec


def test_looking_at_the_spec_is_not_an_epoch():
    one, other = (Dataset.range(30).map(lambda x: x).shuffle(seed=1) for _ in range(2))
    _ = one.element_spec
    assert numbers(one) == numbers(other)


def test_datasets_travel_with_cloudpickle():
    """A worker gets the description; passes, seeds and threads stay behind."""
    factor = 3
    dataset = Dataset.range(20).shuffle(seed=2).map(lambda x: x * factor, 2).batch(4).prefetch(2)
    expected = numbers(dataset)
    with iter(dataset) as running:
        next(running)
        copy = cloudpickle.loads(cloudpickle.dumps(dataset))
    assert numbers(copy) == expected


def test_iterating_twice_at_once_is_two_passes():
    dataset = Dataset.range(5).prefetch(2)
    assert [(int(a), int(b)) for a, b in zip(dataset, dataset, strict=True)] == [
        (i, i) for i in range(5)
    ]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda d: d.batch(0), "batch_size=0"),
        (lambda d: d.batch(2.0), "batch_size=2.0"),
        (lambda d: d.shuffle(0), "buffer_size=0"),
        (lambda d: d.shard(0, 0), "num_shards=0"),
        (lambda d: d.shard(2, 2), "index=2 must be smaller"),
        (lambda d: d.take(-2), "count=-2"),
        (lambda d: d.repeat(-3), "count=-3"),
        (lambda d: d.prefetch(-2), "buffer_size=-2"),
        (lambda d: d.map(lambda x: x, -5), "num_parallel_calls=-5"),
        (lambda d: d.interleave(lambda x: d, cycle_length=0), "cycle_length=0"),
    ],
)
def test_bad_arguments_name_the_value(call, text):
    with pytest.raises(ValueError, match=text):
        call(Dataset.range(3))


@pytest.mark.parametrize("verb", ["map", "filter", "interleave"])
def test_a_function_is_needed(verb):
    with pytest.raises(TypeError, match=verb):
        getattr(Dataset.range(3), verb)(5)


def test_generator_object_instead_of_function_is_explained():
    with pytest.raises(TypeError, match="generator function itself"):
        Dataset.from_generator(i for i in range(3))
    with pytest.raises(TypeError, match="cannot be iterated"):
        list(Dataset.from_generator(lambda: 5))


def test_filter_wants_one_answer_per_element():
    with pytest.raises(ValueError, match="one True or False"):
        list(Dataset.range(4).batch(2).filter(lambda x: x > 1))


def test_numpy_iterator_and_reduce_and_apply():
    dataset = Dataset.range(4)
    assert [type(x) for x in dataset.as_numpy_iterator()] == [np.ndarray] * 4
    assert int(dataset.reduce(torch.tensor(0), lambda s, x: s + x)) == 6
    assert numbers(dataset.apply(lambda d: d.take(1))) == [0]


def test_repr_shows_the_pipeline():
    assert (
        repr(Dataset.range(4).shuffle().batch(2)) == "<Dataset Batch(Shuffle(Range)), 2 elements>"
    )
    assert "without end" in repr(Dataset.range(4).repeat())
    iterator = iter(Dataset.range(2))
    assert repr(iterator) == "<DatasetIterator open, epoch 0 of Range>"
    list(iterator)
    assert "ended" in repr(iterator)
