"""Distributing datasets over replicas (spec section 5 as amended by 13.1, 13.10, 13.11)."""

from __future__ import annotations

import collections
import gc
import threading

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.config import InputReplicationMode
from stratagem.data import Dataset, PerReplicaSpec, TensorSpec

CPUS = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


@pytest.fixture(
    params=[sg.CentralStorageStrategy, sg.MirroredStrategy], ids=["central", "mirrored"]
)
def make(request):
    made = []

    def build(replicas):
        made.append(request.param(CPUS[:replicas]))
        return made[-1]

    yield build
    for strategy in made:
        strategy.close()


@pytest.fixture
def one():
    with sg.OneDeviceStrategy("cpu:0") as strategy:
        yield strategy


@pytest.fixture
def two():
    with sg.CentralStorageStrategy(CPUS[:2]) as strategy:
        yield strategy


def parts(strategy, step):
    return [part.tolist() for part in strategy.local_results(step)]


# --- the split rule ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "batch", "replicas", "expected"),
    [
        (8, 4, 3, [[[0, 1], [2], [3]], [[4, 5], [6], [7]]]),
        (3, 2, 2, [[[0], [1]], [[2], []]]),
        (7, 7, 3, [[[0, 1, 2], [3, 4], [5, 6]]]),
        (5, 5, 4, [[[0, 1], [2], [3], [4]]]),
        (10, 4, 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]),
        (5, 4, 2, [[[0, 1], [2, 3]], [[4], []]]),
        (1, 1, 4, [[[0], [], [], []]]),
    ],
)
def test_inp_2_3_4_5_one_split_rule(make, rows, batch, replicas, expected):
    """13.10: every batch by itself, sizes differ by at most one, larger first, nothing lost."""
    strategy = make(replicas)
    steps = strategy.distribute_dataset(Dataset.range(rows).batch(batch))
    assert [parts(strategy, step) for step in steps] == expected


@pytest.mark.parametrize(
    "source",
    [
        lambda x: Dataset.from_tensor_slices(x).batch(3),
        lambda x: DataLoader(TensorDataset(x), batch_size=3, collate_fn=lambda rows: torch.stack([r[0] for r in rows])),
        lambda x: list(x.split(3)),
        lambda x: [part.numpy() for part in x.split(3)],
        lambda x: (part for part in x.split(3)),
        lambda x: Dataset.from_generator(lambda: iter(x.split(3))),
        lambda x: Dataset.from_tensor_slices(x).batch(3).map(lambda b: b + 0).prefetch(1),
        lambda x: Dataset.from_tensor_slices(x).batch(3).filter(lambda b: True),
    ],
    ids=["dataset", "DataLoader", "list", "numpy", "generator", "from_generator", "map", "filter"],
)  # fmt: skip
def test_the_rule_holds_for_every_source(two, source):
    """13.10; INP-8: no batch size is inferred, so what follows the batching changes nothing."""
    steps = two.distribute_dataset(source(torch.arange(8)))
    assert [parts(two, step) for step in steps] == [[[0, 1], [2]], [[3, 4], [5]], [[6], [7]]]


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(0, 40), batch=st.integers(1, 13), replicas=st.integers(1, 4))
def test_no_row_is_lost_or_doubled_or_moved(rows, batch, replicas):
    """Parts in replica order, step after step, are the rows of the dataset (INP-4)."""
    with sg.MirroredStrategy(CPUS[:replicas]) as strategy:
        steps = list(strategy.distribute_dataset(Dataset.range(rows).batch(batch)))
        found = [part for step in steps for part in parts(strategy, step)]
        assert [row for part in found for row in part] == list(range(rows))
        assert len(steps) == -(-rows // batch)
        for step in steps:
            sizes = [len(p) for p in parts(strategy, step)]
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)


def test_empty_parts_have_the_right_shape_and_dtype(two):
    data = {
        "x": torch.ones(1, 3, 2, dtype=torch.float16),
        "n": (np.arange(1, dtype=np.int32), ["t"]),
    }
    (step,) = two.distribute_dataset(Dataset.from_tensor_slices(data).batch(4))
    empty = step["x"].values[1]
    assert (empty.shape, empty.dtype) == ((0, 3, 2), torch.float16)
    assert step["n"][0].values[1].dtype is torch.int32
    assert [list(part) for part in step["n"][1].values] == [["t"], []]


def test_parts_carry_their_rows(two):
    """So that `run` weighs gradients by rows."""
    (step,) = two.distribute_dataset(Dataset.range(3).batch(3))
    assert step.rows == (2, 1)


def test_inp_1_one_replica_passes_elements_through(one):
    """Unwrapped, even unbatched scalars."""
    assert [x.item() for x in one.distribute_dataset(Dataset.range(3))] == [0, 1, 2]
    elements = list(one.distribute_dataset([{"x": torch.ones(2), "t": "text"}]))
    assert isinstance(elements[0]["x"], torch.Tensor)
    assert elements[0]["t"] == "text"


def test_inp_7_scalars_with_several_replicas_say_batch(two):
    steps = iter(two.distribute_dataset(Dataset.range(4)))
    with pytest.raises(ValueError, match=r"no first dimension.*\.batch\(global_batch_size\)"):
        next(steps)


def test_inp_7_a_number_of_enumerate_says_to_count_in_the_step(two):
    steps = iter(two.distribute_dataset([(0, torch.ones(4, 2))]))
    with pytest.raises(
        ValueError, match=r"\[0\] has no first dimension.*count in the step: steps \+= 1"
    ):
        next(steps)


def test_inp_7_unbatched_rows_and_nested_batches_are_cut_along_their_first_dimension(two):
    rows = Dataset.from_tensor_slices([[0, 1], [2, 3]])
    assert [parts(two, s) for s in two.distribute_dataset(rows)] == [[[0], [1]], [[2], [3]]]
    (outer,) = two.distribute_dataset(rows.batch(1).batch(2))
    assert parts(two, outer) == [[[[0, 1]]], [[[2, 3]]]]


def test_tensors_that_disagree_in_length_are_named(two):
    steps = iter(two.distribute_dataset([{"x": torch.ones(4), "y": torch.ones(3)}]))
    with pytest.raises(sg.errors.UnequalRows, match=r"\['x'\]: 4, \['y'\]: 3"):
        next(steps)


def test_something_that_is_no_dataset(two):
    with pytest.raises(TypeError, match="int 5 is not a dataset"):
        two.distribute_dataset(5)


def test_a_distributed_dataset_is_not_distributed_again(two):
    with pytest.raises(TypeError, match="distributed already"):
        two.distribute_dataset(two.distribute_dataset(Dataset.range(2).batch(2)))


def test_other_mappings_are_nests_too(two):
    """Such as the tokenizer outputs of Hugging Face, which are UserDicts."""
    (step,) = two.distribute_dataset([collections.UserDict({"ids": torch.arange(3)})])
    assert isinstance(step, collections.UserDict)
    assert parts(two, step["ids"]) == [[0, 1], [2]]


def test_run_takes_the_steps(two):
    total = 0
    for step in two.distribute_dataset(Dataset.range(5).batch(3)):
        sums = two.run(lambda x: x.sum(), args=(step,))
        total += int(two.reduce("sum", sums, axis=None))
    assert total == 10


# --- iterating -----------------------------------------------------------------------------------


def test_inp_9_iteration(two):
    dataset = two.distribute_dataset(Dataset.range(5).batch(2))
    assert dataset.cardinality == 3
    assert len(dataset) == 3
    iterator = iter(dataset)
    assert len(list(iterator)) == 3
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
    with pytest.raises(sg.errors.EndOfData, match="no more elements"):
        iterator.get_next()
    assert isinstance(sg.errors.EndOfData("x"), StopIteration)
    assert len(list(dataset)) == 3
    assert dataset.reduce(0, lambda n, step: n + step.values[0].shape[0]) == 3


def test_inp_9_next_inside_a_replica_is_refused(two):
    iterator = iter(two.distribute_dataset(Dataset.range(4).batch(2)))
    with pytest.raises(ValueError, match="outside the replicas"):
        two.run(lambda: next(iterator))
    assert parts(two, next(iterator)) == [[0], [1]]
    iterator.close()


def test_inp_10_optional(two):
    iterator = iter(two.distribute_dataset(Dataset.range(1).batch(2)))
    first, second = iterator.get_next_as_optional(), iterator.get_next_as_optional()
    assert first.has_value()
    assert parts(two, first.get_value()) == [[0], []]
    assert not second.has_value()
    with pytest.raises(ValueError, match="no value"):
        second.get_value()
    assert "empty" in repr(second)


def test_inp_11_infinite_and_empty(two):
    endless = iter(two.distribute_dataset(Dataset.range(3).repeat().batch(2)))
    assert [parts(two, next(endless)) for _ in range(3)] == [[[0], [1]], [[2], [0]], [[1], [2]]]
    endless.close()
    assert list(two.distribute_dataset(Dataset.range(0).batch(2))) == []


def test_inp_6_element_spec(one, two):
    dataset = Dataset.from_tensor_slices({"x": torch.ones(8, 3)})
    assert one.distribute_dataset(dataset.batch(4)).element_spec == dataset.batch(4).element_spec
    even = two.distribute_dataset(dataset.batch(4, drop_remainder=True)).element_spec
    assert even == {"x": PerReplicaSpec((TensorSpec((2, 3), torch.float32),) * 2)}
    odd = two.distribute_dataset(dataset.batch(3, drop_remainder=True)).element_spec
    assert odd["x"].specs[0].shape == (None, 3)
    mapped = two.distribute_dataset(dataset.batch(4)).map(lambda d: d["x"].double())
    assert [s.dtype for s in mapped.element_spec.specs] == [torch.float64] * 2


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_inp_12_13_options_work_on_every_strategy(make, one, ahead):
    options = sg.InputOptions(fetch_to_device=None, per_replica_buffer_size=ahead)
    assert options.fetch_to_device is True
    strategy = make(2)
    expected = [[[0], [1]], [[2], [3]]]
    steps = strategy.distribute_dataset(Dataset.range(4).batch(2), options)
    assert [parts(strategy, step) for step in steps] == expected
    host = sg.InputOptions(fetch_to_device=False, per_replica_buffer_size=ahead)
    steps = strategy.distribute_dataset(Dataset.range(4).batch(2), host)
    assert [parts(strategy, step) for step in steps] == expected
    assert [x.tolist() for x in one.distribute_dataset(Dataset.range(2).batch(1), host)] == [
        [0],
        [1],
    ]


def test_inp_13_per_replica_needs_a_function(make, one):
    options = sg.InputOptions(replication_mode=InputReplicationMode.PER_REPLICA)
    for strategy in (make(2), one):
        with pytest.raises(NotImplementedError, match="distribute_datasets_from_function"):
            strategy.distribute_dataset(Dataset.range(4).batch(2), options)


def test_bad_options():
    with pytest.raises(ValueError, match="per_replica_buffer_size=-1"):
        sg.InputOptions(per_replica_buffer_size=-1)
    with pytest.raises(ValueError, match="PER_NOTHING"):
        sg.InputOptions(replication_mode="PER_NOTHING")
    with sg.OneDeviceStrategy("cpu:0") as strategy, pytest.raises(TypeError, match="InputOptions"):
        strategy.distribute_dataset(Dataset.range(3), {"fetch_to_device": True})


def test_inp_23_default_strategy_returns_the_dataset_itself():
    dataset = Dataset.range(3)
    default = sg.get_strategy()
    assert default.distribute_dataset(dataset) is dataset
    seen = []
    assert default.distribute_datasets_from_function(lambda c: seen.append(c) or dataset) is dataset
    assert seen[0].num_replicas_in_sync == 1


def test_13_11_map_is_applied_to_each_part(two):
    dataset = (
        two.distribute_dataset(Dataset.range(5).batch(3)).map(lambda x: x * 10).map(lambda x: x + 1)
    )
    assert [parts(two, step) for step in dataset] == [[[1, 11], [21]], [[31], [41]]]
    (step,) = two.distribute_dataset(Dataset.range(3).batch(3)).map(lambda x: (x[:1], {"y": x[:1]}))
    assert step[0].rows == (1, 1)


def test_13_11_map_randomness_repeats(two):
    def noise(x, rng):
        return x + torch.rand(x.shape, generator=rng.torch)

    def run():
        torch.manual_seed(3)
        dataset = two.distribute_dataset(Dataset.range(4).shuffle().batch(2)).map(noise)
        return [[parts(two, s) for s in dataset] for _ in range(2)]

    first = run()
    assert run() == first
    assert first[0] != first[1]
    flat = [x for step in first[0] for part in step for x in part]
    assert len({round(x % 1, 6) for x in flat}) == 4  # each replica and step its own stream


def test_each_pass_is_another_epoch(two):
    dataset = two.distribute_dataset(Dataset.range(20).shuffle(seed=1).batch(20))
    first, second = [[parts(two, s) for s in dataset] for _ in range(2)]
    assert first != second


@settings(max_examples=40, deadline=None)
@given(
    stop=st.integers(0, 9),
    ahead=st.integers(0, 3),
    replicas=st.integers(1, 3),
    mapped=st.booleans(),
    slow=st.booleans(),
)
def test_positions_of_distributed_iterators(stop, ahead, replicas, mapped, slow):
    """What was read ahead is not lost, and not delivered twice; with the thread and without."""

    def build(strategy):
        dataset = Dataset.range(17).shuffle(seed=4).repeat(2).batch(5)
        if slow:  # the thread starts only where reading takes a moment
            dataset = dataset.map(lambda x: (threading.Event().wait(0.006), x)[1])
        steps = strategy.distribute_dataset(dataset, sg.InputOptions(per_replica_buffer_size=ahead))
        return steps.map(lambda x, rng: x + rng.python.random()) if mapped else steps

    with sg.MirroredStrategy(CPUS[:replicas]) as strategy:
        with iter(build(strategy)) as iterator:
            for _, _ in zip(range(stop), iterator, strict=False):
                pass
            state = iterator.state_dict()
            rest = [parts(strategy, s) for s in iterator]
        with iter(build(strategy)) as resumed:
            resumed.load_state_dict(state)
            if not mapped:
                assert [parts(strategy, s) for s in resumed] == rest
            else:
                assert len(list(resumed)) == len(rest)


def test_mapped_position_is_exact_with_one_seed(two):
    def build():
        torch.manual_seed(9)
        dataset = Dataset.range(12).batch(3)
        return two.distribute_dataset(dataset).map(lambda x, rng: x + rng.python.random())

    with iter(build()) as iterator:
        next(iterator)
        state = iterator.state_dict()
        rest = [parts(two, s) for s in iterator]
    with iter(build()) as resumed:
        resumed.load_state_dict(state)
        assert [parts(two, s) for s in resumed] == rest


def test_distributed_datasets_travel():
    """CCO-34: a worker gets the description and builds it again."""
    with sg.OneDeviceStrategy("cpu:0") as strategy:
        dataset = strategy.distribute_dataset(Dataset.range(6).shuffle(seed=1).batch(2))
        expected = [x.tolist() for x in dataset]
        copy = cloudpickle.loads(cloudpickle.dumps(dataset))
        assert [x.tolist() for x in copy] == expected


# --- datasets from a function ----------------------------------------------------------------------


def test_inp_20_each_step_takes_consecutive_elements(make):
    strategy = make(2)
    seen = []

    def dataset_fn(context):
        seen.append(
            (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync)
        )
        return Dataset.range(8).batch(context.get_per_replica_batch_size(4))

    steps = strategy.distribute_datasets_from_function(dataset_fn)
    assert [parts(strategy, s) for s in steps] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert seen == [(1, 0, 2)]
    assert steps.cardinality == 2


def test_inp_21_nothing_is_dropped_at_the_end(make):
    strategy = make(2)
    steps = strategy.distribute_datasets_from_function(lambda c: Dataset.range(5).batch(2))
    found = list(steps)
    assert [parts(strategy, s) for s in found] == [[[0, 1], [2, 3]], [[4], []]]
    assert found[-1].rows == (1, 0)
    assert found[-1].values[1].shape == (0,)
    scalars = strategy.distribute_datasets_from_function(lambda c: Dataset.range(3))
    assert [parts(strategy, s) for s in scalars] == [[0, 1], [2, []]]


def test_inp_22_per_replica_pipelines(make, one):
    strategy = make(3)
    options = sg.InputOptions(replication_mode=InputReplicationMode.PER_REPLICA)

    def dataset_fn(context):
        assert context.num_input_pipelines == context.num_replicas_in_sync
        return (
            Dataset.range(5).shard(context.num_input_pipelines, context.input_pipeline_id).batch(1)
        )

    steps = strategy.distribute_datasets_from_function(dataset_fn, options)
    assert [parts(strategy, s) for s in steps] == [[[0], [1], [2]], [[3], [4], []]]
    with iter(steps) as iterator:
        next(iterator)
        state = iterator.state_dict()
    with iter(strategy.distribute_datasets_from_function(dataset_fn, options)) as resumed:
        resumed.load_state_dict(state)
        assert [parts(strategy, s) for s in resumed] == [[[3], [4], []]]
    alone = one.distribute_datasets_from_function(dataset_fn, options)
    assert [x.tolist() for x in alone] == [[0], [1], [2], [3], [4]]


def test_inp_22_contradicting_options(two):
    with pytest.raises(ValueError, match="needs replication_mode"):
        two.distribute_datasets_from_function(
            lambda c: Dataset.range(3), sg.InputOptions(place_dataset_on_device=True)
        )
    mode = InputReplicationMode.PER_REPLICA
    with pytest.raises(ValueError, match="contradict"):
        two.distribute_datasets_from_function(
            lambda c: Dataset.range(3),
            sg.InputOptions(place_dataset_on_device=True, replication_mode=mode),
        )
    allowed = sg.InputOptions(
        place_dataset_on_device=True, replication_mode=mode, fetch_to_device=False
    )
    steps = two.distribute_datasets_from_function(lambda c: Dataset.range(2).batch(2), allowed)
    assert len(list(steps)) == 1


def test_inp_14_placing_is_not_the_business_of_distribute_dataset(make, one):
    """The option that datasets from a function are refused with is no obstacle here (CSS-6)."""
    options = sg.InputOptions(place_dataset_on_device=True)
    strategy = make(2)
    steps = strategy.distribute_dataset(Dataset.range(2).batch(2), options)
    assert [parts(strategy, step) for step in steps] == [[[0], [1]]]
    alone = one.distribute_dataset(Dataset.range(2).batch(2), options)
    assert [x.tolist() for x in alone] == [[0, 1]]


def test_inp_23_bad_dataset_functions(two):
    with pytest.raises(TypeError, match="dataset_fn returned int 5"):
        two.distribute_datasets_from_function(lambda c: 5)
    with pytest.raises(TypeError, match="not callable"):
        two.distribute_datasets_from_function(Dataset.range(3))
    with pytest.raises(ValueError, match="does not divide evenly"):
        two.distribute_datasets_from_function(
            lambda c: Dataset.range(3).batch(c.get_per_replica_batch_size(3))
        )


def test_from_function_spec(two):
    steps = two.distribute_datasets_from_function(
        lambda c: Dataset.range(4).batch(2, drop_remainder=True)
    )
    assert steps.element_spec == PerReplicaSpec((TensorSpec((None,), torch.int64),) * 2)


# --- ends ----------------------------------------------------------------------------------------


def input_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("stratagem-input")]


def slow(x):
    """Takes a moment, or no thread would be started to read ahead of it."""
    threading.Event().wait(0.006)
    return x


def threaded_iterator(strategy, dataset=None):
    dataset = Dataset.range(100).map(slow).batch(1) if dataset is None else dataset
    iterator = iter(strategy.distribute_dataset(dataset))
    for _ in range(3):  # two slow reads, then the thread
        next(iterator)
    return iterator


def test_threads_end_with_the_data_with_close_and_with_the_iterator(two):
    iterator = threaded_iterator(two)
    assert input_threads(), "the thread this test is about never started"
    iterator.close()
    assert not input_threads()
    with pytest.raises(sg.errors.DataError, match="was closed"):
        next(iterator)
    iterator = threaded_iterator(two)
    assert input_threads()
    del iterator
    gc.collect()
    assert not input_threads()
    list(threaded_iterator(two, Dataset.range(6).map(slow).batch(1)))
    assert not input_threads()
    for _ in two.distribute_dataset(Dataset.range(50).map(slow).batch(2)):
        break
    gc.collect()
    assert not input_threads()


def test_an_exception_in_the_users_function_comes_with_its_traceback(two):
    def explode_at_seven(x):
        slow(x)
        if x == 7:
            raise KeyError("seven")
        return x

    iterator = threaded_iterator(two, Dataset.range(20).map(explode_at_seven).batch(1))
    assert input_threads()
    with pytest.raises(KeyError, match="seven") as caught:
        list(iterator)
    assert any(entry.name == "explode_at_seven" for entry in caught.traceback)
    assert "element 7" in "".join(caught.value.__notes__)
    assert not input_threads()
    with pytest.raises(sg.errors.DataError, match="ended with an error"):
        next(iterator)


def test_two_strategies_may_share_a_dataset(one, two):
    dataset = Dataset.range(4).batch(2)
    pairs = zip(one.distribute_dataset(dataset), two.distribute_dataset(dataset), strict=True)
    assert [(a.tolist(), parts(two, b)) for a, b in pairs] == [
        ([0, 1], [[0], [1]]),
        ([2, 3], [[2], [3]]),
    ]
