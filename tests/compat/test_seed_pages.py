"""Every code example of the seed pages, translated, shows the result that the page prints.

Pages: 000, 001, 002 (CentralStorageStrategy in three releases), 004 (V1 OneDeviceStrategy), and those
examples of 003 (ParameterServerStrategy) that need no cluster. Examples with GPUs run on logical CPU
devices. The same example on several pages is tested once, under the spellings of all of them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import stratagem as sg


@pytest.fixture
def mirrored() -> Iterator[sg.MirroredStrategy]:
    """The pages' ``MirroredStrategy(["GPU:0", "GPU:1"])``."""
    with sg.MirroredStrategy(["CPU:0", "CPU:1"]) as strategy:
        yield strategy


@pytest.fixture
def central() -> Iterator[sg.CentralStorageStrategy]:
    """The pages' ``compute_devices=['CPU:0', 'GPU:0'], parameter_device='CPU:0'``."""
    with sg.CentralStorageStrategy(["CPU:0", "CPU:1"], parameter_device="CPU:0") as strategy:
        yield strategy


def run_of(strategy: sg.Strategy, spelling: str) -> Callable[..., Any]:
    return getattr(strategy, spelling)  # type: ignore[no-any-return]


RUN = pytest.mark.parametrize("run", ["run", "experimental_run_v2"])


# ------------------------------------------------------------------ CentralStorageStrategy


@RUN
def test_central_storage_over_a_dataset(run: str) -> None:
    """000, 001, 002: ``range(5).batch(2)``, ``val + 1`` on every batch, the last one partial."""
    strategy = sg.compat.experimental.CentralStorageStrategy()
    ds = sg.data.Dataset.range(5).batch(2)
    dist_dataset = strategy.experimental_distribute_dataset(ds)
    results = []

    with strategy.scope():

        @sg.compat.function
        def train_step(val: torch.Tensor) -> torch.Tensor:
            return val + 1

        for x in dist_dataset:
            results.append(run_of(strategy, run)(train_step, args=(x,)))

    assert [r.tolist() for r in results] == [[1, 2], [3, 4], [5]]


def test_distributed_batches_hold_the_values_in_order(central: sg.CentralStorageStrategy) -> None:
    """000, 001, 002: ``range(10).batch(2)`` prints PerReplica values [0, 1], [2, 3], …"""
    dataset = sg.data.Dataset.range(10).batch(2)
    printed = []
    for x in central.experimental_distribute_dataset(dataset):
        assert isinstance(x, sg.PerReplica)
        printed.append(torch.cat(central.experimental_local_results(x)).tolist())
    assert printed == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@RUN
def test_reduce_over_replicas_and_over_the_batch(
    central: sg.CentralStorageStrategy, run: str
) -> None:
    """000, 001, 002: [0..3] and [4..7] reduce to [4, 6, 8, 10] without an axis, to 28 with axis 0."""
    ds = sg.data.Dataset.range(8).batch(8)
    dist_dataset = central.experimental_distribute_dataset(ds)

    with central.scope():

        @sg.compat.function
        def train_step(val: torch.Tensor) -> torch.Tensor:
            return val

        for x in dist_dataset:
            result = run_of(central, run)(train_step, args=(x,))

    assert central.reduce(sg.ReduceOp.SUM, result, axis=None).numpy().tolist() == [4, 6, 8, 10]
    assert central.reduce(sg.ReduceOp.SUM, result, axis=0).numpy() == 28


def test_unbatched_elements_are_refused_with_the_remedy(central: sg.CentralStorageStrategy) -> None:
    """The pages' example forgets ``batch``; TF raises IndexError, we say what to do (INP-7, 13.1)."""
    with pytest.raises(ValueError, match="batch"):
        for _ in central.experimental_distribute_dataset(sg.data.Dataset.range(10)):
            pass


def test_partial_batch_needs_an_axis(central: sg.CentralStorageStrategy) -> None:
    """000, 001, 002, 004: sizes 4 and 2: no axis is a mismatch, MEAN with axis 0 divides by 6."""
    uneven = sg.PerReplica([torch.tensor([0.0, 1, 2, 3]), torch.tensor([4.0, 5])])
    with pytest.raises(ValueError, match="axis=0"):
        central.reduce(sg.ReduceOp.SUM, uneven, axis=None)
    assert central.reduce(sg.ReduceOp.MEAN, uneven, axis=0).item() == 15 / 6


@RUN
@pytest.mark.parametrize(
    "spelling",
    ["distribute_datasets_from_function", "experimental_distribute_datasets_from_function"],
)
def test_datasets_from_a_function(
    central: sg.CentralStorageStrategy, spelling: str, run: str
) -> None:
    """001, 002: a dataset function that batches and shards by its InputContext."""
    global_batch_size = 4
    seen = []

    def dataset_fn(input_context: sg.InputContext) -> sg.data.Dataset:
        seen.append(input_context)
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        d = sg.data.Dataset.from_tensors([[1.0]]).repeat().batch(batch_size)
        return d.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    def replica_fn(batch: torch.Tensor) -> torch.Tensor:
        return batch.sum()

    inputs = getattr(central, spelling)(dataset_fn)
    for steps, batch in enumerate(inputs):
        assert [tuple(part.shape) for part in central.local_results(batch)] == [(2, 1, 1)] * 2
        replica_results = run_of(central, run)(replica_fn, args=(batch,))
        assert central.reduce("sum", replica_results, axis=None).item() == global_batch_size
        if steps == 2:  # the dataset repeats for ever
            break
    assert [(c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync) for c in seen] == [
        (1, 0, 2)
    ]


def test_numpy_datasets() -> None:
    """001, 002, 004: ten ones, made into a dataset and distributed."""
    for strategy in (sg.CentralStorageStrategy(), sg.compat.v1.OneDeviceStrategy("/cpu:0")):
        numpy_input = np.ones([10], dtype=np.float32)
        dataset = strategy.experimental_make_numpy_dataset(numpy_input)
        dist_dataset = strategy.experimental_distribute_dataset(dataset)
        assert [x.item() for x in dist_dataset] == [1.0] * 10


def test_deepcopy_gives_an_independent_strategy(central: sg.CentralStorageStrategy) -> None:
    """002 lists ``__deepcopy__``."""
    with copy.deepcopy(central) as twin:
        assert twin is not central
        assert twin.extended.worker_devices == central.extended.worker_devices
        assert twin.run(lambda: sg.get_strategy() is twin)


def test_single_machine_strategies_have_no_resolver(
    central: sg.CentralStorageStrategy, mirrored: sg.MirroredStrategy
) -> None:
    """000, 004: ``cluster_resolver`` is None for a strategy of one machine."""
    assert central.cluster_resolver is None
    assert mirrored.cluster_resolver is None
    assert sg.compat.v1.OneDeviceStrategy("/cpu:0").cluster_resolver is None


def test_task_type_from_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """000, 003, 004: TF_CONFIG says that this task is worker 0."""
    monkeypatch.setenv(
        "TF_CONFIG",
        json.dumps(
            {
                "cluster": {
                    "worker": ["localhost:12345", "localhost:23456"],
                    "ps": ["localhost:34567"],
                },
                "task": {"type": "worker", "index": 0},
            }
        ),
    )
    resolver = sg.cluster_resolver.TFConfigClusterResolver()
    assert resolver.task_type == "worker"
    assert resolver.task_id == 0
    assert resolver.cluster_spec().num_tasks("ps") == 1


# ------------------------------------------------------------------ logical devices (001)


def test_assign_to_a_logical_device(central: sg.CentralStorageStrategy) -> None:
    """001: the annotated tensor has the value of the tensor (13.9: ids beyond 0 do not exist)."""

    def step_fn(inputs: torch.Tensor) -> torch.Tensor:
        output = torch.add(inputs, inputs)
        return central.experimental_assign_to_logical_device(output, 0)

    inputs = central.experimental_distribute_dataset(sg.data.Dataset.range(4).batch(4))
    result = central.run(step_fn, args=(next(iter(inputs)),))
    assert central.gather(result, axis=0).tolist() == [0, 2, 4, 6]
    with pytest.raises(ValueError, match="logical_device_id=1"):
        central.experimental_assign_to_logical_device(torch.ones(1), 1)


def test_split_and_replicate_to_logical_devices(central: sg.CentralStorageStrategy) -> None:
    """001: images split, labels and output replicated; the values stay what they were."""
    images, labels = torch.rand(2, 4, 8, 3), torch.tensor([0, 1])

    def step_fn(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        images = central.experimental_split_to_logical_devices(images, [1, 1, 1, 1])
        output = images.mean(dim=(1, 2, 3))
        labels = central.experimental_replicate_to_logical_devices(labels)
        output = central.experimental_replicate_to_logical_devices(output)
        return (output - labels).square()

    expected = (images.mean(dim=(1, 2, 3)) - labels).square()
    result = central.run(step_fn, args=(images, labels))
    for component in central.local_results(result):
        torch.testing.assert_close(component, expected)


@pytest.mark.parametrize("parts", [[1, 1], [1, 2, 4, 1], [1, 1, 1, 0]])
def test_bad_splits_are_refused(central: sg.CentralStorageStrategy, parts: list[int]) -> None:
    """001: the size is not the rank; the product is not the number of logical devices."""
    with pytest.raises(ValueError, match=r"expected \[1, 1, 1, 1\]"):
        central.experimental_split_to_logical_devices(torch.rand(2, 4, 8, 3), parts)


# ------------------------------------------------------------------ values from a function


def test_constant_value_per_replica(mirrored: sg.MirroredStrategy) -> None:
    """000, 003: two tensors 1.0; 001: one, on one device."""

    def value_fn(ctx: sg.ValueContext) -> torch.Tensor:
        return torch.tensor(1.0)

    for strategy, count in ((mirrored, 2), (sg.MirroredStrategy(), 1)):
        distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
        local_result = strategy.experimental_local_results(distributed_values)
        assert local_result == (torch.tensor(1.0),) * count


def test_values_by_replica_id(mirrored: sg.MirroredStrategy) -> None:
    """000, 003: (3.0, 2.0); 001: (3.0,)."""
    array_value = np.array([3.0, 2.0, 1.0])

    def value_fn(ctx: sg.ValueContext) -> float:
        return float(array_value[ctx.replica_id_in_sync_group])

    for strategy, expected in ((mirrored, (3.0, 2.0)), (sg.MirroredStrategy(), (3.0,))):
        distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
        assert strategy.experimental_local_results(distributed_values) == expected


def test_values_by_number_of_replicas(mirrored: sg.MirroredStrategy) -> None:
    """000, 003: (2, 2); 001: (1,)."""

    def value_fn(ctx: sg.ValueContext) -> int:
        return ctx.num_replicas_in_sync

    for strategy, expected in ((mirrored, (2, 2)), (sg.MirroredStrategy(), (1,))):
        distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
        assert strategy.experimental_local_results(distributed_values) == expected


def test_values_placed_on_devices(mirrored: sg.MirroredStrategy) -> None:
    """000, 001, 003: one value made on each worker device, then distributed as it is."""
    worker_devices = mirrored.extended.worker_devices
    multiple_values = []
    for i in range(mirrored.num_replicas_in_sync):
        assert worker_devices[i] == f"/job:localhost/replica:0/task:0/device:CPU:{i}"
        multiple_values.append(torch.tensor(1.0, device="cpu"))

    def value_fn(ctx: sg.ValueContext) -> torch.Tensor:
        return multiple_values[ctx.replica_id_in_sync_group]

    distributed_values = mirrored.experimental_distribute_values_from_function(value_fn)
    for made, got in zip(multiple_values, distributed_values.values, strict=True):
        assert made is got


# ------------------------------------------------------------------ gather


def test_gather_two_columns(mirrored: sg.MirroredStrategy) -> None:
    """000, 003: components of shape (2, 1) join to [[1], [2], [1], [2]]."""
    distributed_values = mirrored.experimental_distribute_values_from_function(
        lambda _: torch.tensor([[1], [2]])
    )

    @sg.compat.function
    def run() -> torch.Tensor:
        return mirrored.gather(distributed_values, axis=0)

    assert run().tolist() == [[1], [2], [1], [2]]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_gather_along_each_axis(axis: int) -> None:
    """000, 003: four replicas of shape (1, 2, 3) along axis 0, 1 and 2."""
    with sg.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2", "CPU:3"]) as strategy:
        single_tensor = torch.arange(6).reshape(1, 2, 3)
        distributed_values = strategy.experimental_distribute_values_from_function(
            lambda _: single_tensor.clone()
        )
        rows = [[0, 1, 2], [3, 4, 5]]
        expected = {
            0: [rows] * 4,
            1: [rows * 4],
            2: [[[0, 1, 2] * 4, [3, 4, 5] * 4]],
        }
        assert strategy.gather(distributed_values, axis=axis).tolist() == expected[axis]


def test_gather_only_along_the_axis_that_differs(mirrored: sg.MirroredStrategy) -> None:
    """000, 003: shapes (1, 2, 3) and (1, 3, 3) gather along axis 1, not 0 or 2; scalars never."""
    value = sg.PerReplica([torch.zeros(1, 2, 3), torch.zeros(1, 3, 3)])
    assert mirrored.gather(value, axis=1).shape == (1, 5, 3)
    for axis in (0, 2):
        with pytest.raises(ValueError, match="shapes"):
            mirrored.gather(value, axis=axis)
    with pytest.raises(ValueError, match="unsqueeze"):
        mirrored.gather(sg.PerReplica([torch.tensor(1), torch.tensor(2)]), axis=0)


# ------------------------------------------------------------------ run and reduce


def test_distributed_dataset_times_two(mirrored: sg.MirroredStrategy) -> None:
    """003, 004: PerReplica {0, 2} and {4, 6}."""
    global_batch_size = 2
    dataset = sg.data.Dataset.range(4).batch(global_batch_size)
    dist_dataset = mirrored.experimental_distribute_dataset(dataset)

    @sg.compat.function
    def replica_fn(input: torch.Tensor) -> torch.Tensor:
        return input * 2

    result = []
    for x in dist_dataset:
        result.append(mirrored.run(replica_fn, args=(x,)))
    assert [[part.tolist() for part in r.values] for r in result] == [[[0], [2]], [[4], [6]]]
    assert "PerReplica:{" in repr(result[0])


def test_sum_of_replica_ids(mirrored: sg.MirroredStrategy) -> None:
    """003, 004: replica ids 0 and 1 add up to 1, also where the results are."""

    def step_fn() -> torch.Tensor:
        i = sg.get_replica_context().replica_id_in_sync_group
        return torch.as_tensor(i).clone()

    per_replica_result = mirrored.run(step_fn)
    for component in mirrored.experimental_local_results(per_replica_result):
        assert component.device == torch.device("cpu")
    total = mirrored.reduce("SUM", per_replica_result, axis=None)
    assert total.item() == 1
    assert total.dtype == torch.int32
    assert total.device == torch.device("cpu")


def test_device_of_each_replica(mirrored: sg.MirroredStrategy) -> None:
    """003, 004: results are on their replica's device, in the canonical form."""
    devices = mirrored.run(lambda: sg.get_replica_context().devices)
    assert [[part[0] for part in d] for d in mirrored.local_results(devices)] == [
        ["/job:localhost/replica:0/task:0/device:CPU:0"],
        ["/job:localhost/replica:0/task:0/device:CPU:1"],
    ]


def test_reduce_with_and_without_axis(mirrored: sg.MirroredStrategy) -> None:
    """003, 004: ``[0+4, 1+5, 2+6, 3+7]``, and the scalar of all."""
    per_replica_result = sg.PerReplica([torch.arange(4), torch.arange(4, 8)])
    assert mirrored.reduce("sum", per_replica_result, axis=None).tolist() == [4, 6, 8, 10]
    assert mirrored.reduce("sum", per_replica_result, axis=0).item() == 28


def test_constant_tensor_input(mirrored: sg.MirroredStrategy) -> None:
    """003, 004: 3.0 * 2.0 on each of two replicas."""
    tensor_input = torch.tensor(3.0)

    @sg.compat.function
    def replica_fn(input: torch.Tensor) -> torch.Tensor:
        return input * 2.0

    result = mirrored.run(replica_fn, args=(tensor_input,))
    assert isinstance(result, sg.PerReplica)
    assert [part.item() for part in result.values] == [6.0, 6.0]


def test_distributed_values_input(mirrored: sg.MirroredStrategy) -> None:
    """003, 004: the number of replicas, doubled, is 4 and comes back once (RUN-6.2, 13.5)."""

    @sg.compat.function
    def run() -> Any:
        def value_fn(value_context: sg.ValueContext) -> int:
            return value_context.num_replicas_in_sync

        distributed_values = mirrored.experimental_distribute_values_from_function(value_fn)

        def replica_fn2(input: int) -> int:
            return input * 2

        return mirrored.run(replica_fn2, args=(distributed_values,))

    assert run() == 4


def test_all_reduce_in_a_replica(mirrored: sg.MirroredStrategy) -> None:
    """003, 004: 0 + 1 on every replica."""

    @sg.compat.function
    def run() -> Any:
        def value_fn(value_context: sg.ValueContext) -> torch.Tensor:
            return torch.tensor(value_context.replica_id_in_sync_group)

        distributed_values = mirrored.experimental_distribute_values_from_function(value_fn)

        def replica_fn(input: torch.Tensor) -> torch.Tensor:
            return sg.get_replica_context().all_reduce("sum", input)

        return mirrored.run(replica_fn, args=(distributed_values,))

    result = run()
    assert [part.item() for part in mirrored.local_results(result)] == [1, 1]


def test_variables_made_inside_and_outside_the_scope(mirrored: sg.MirroredStrategy) -> None:
    """000, 003, 004: mirrored inside (``Variable`` and ``Variable/replica_1``), plain outside."""
    with mirrored.scope():
        mirrored_variable = sg.Variable(1.0)
    components = mirrored.local_results(mirrored_variable)
    assert [c.name for c in components] == ["Variable", "Variable/replica_1"]
    assert [float(c.numpy()) for c in components] == [1.0, 1.0]
    assert repr(mirrored_variable).startswith("MirroredVariable:{")

    regular_variable = sg.Variable(1.0)
    assert mirrored.local_results(regular_variable) == (regular_variable,)
    assert "MirroredVariable" not in repr(regular_variable)
    assert not mirrored.extended.variable_created_in_scope(regular_variable)
    assert mirrored.extended.variable_created_in_scope(mirrored_variable)


# ------------------------------------------------------------------ V1 (004)


@pytest.mark.parametrize("kind", [sg.OneDeviceStrategy, sg.compat.v1.OneDeviceStrategy])
def test_one_device_example(kind: type[sg.Strategy]) -> None:
    """004: the variable's device in canonical form, and 90."""
    strategy = kind(device="/cpu:0")  # type: ignore[call-arg]
    with strategy.scope() as entered:
        v = sg.Variable(1.0)
        assert v.device == "/job:localhost/replica:0/task:0/device:CPU:0"
        assert entered is strategy is sg.get_strategy()

    def step_fn(x: int) -> int:
        return x * 2

    result = 0
    for i in range(10):
        result += strategy.run(step_fn, args=(i,))
    assert result == 90


def test_v1_input_function_iterator() -> None:
    """004: ``make_input_fn_iterator`` and ``experimental_run`` inside the scope."""
    strategy = sg.compat.v1.OneDeviceStrategy("/cpu:0")
    global_batch_size = 4

    def input_fn(input_context: sg.InputContext) -> sg.data.Dataset:
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        d = sg.data.Dataset.from_tensors([[1.0]]).repeat().batch(batch_size)
        return d.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    def replica_fn(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    with strategy.scope():
        iterator = strategy.make_input_fn_iterator(input_fn)
        iterator.initialize()
        replica_results = strategy.experimental_run(replica_fn, iterator)
    assert replica_results.item() == 4.0
