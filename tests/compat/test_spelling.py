"""Historical spellings answer on strategy objects, and the V1 class has what its page lists."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import stratagem as sg
from stratagem.compat import spelling
from stratagem.config import InputReplicationMode

STRATEGIES = {
    "one": lambda: sg.OneDeviceStrategy("cpu:0"),
    "central": lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "mirrored": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    "v1": lambda: sg.compat.v1.OneDeviceStrategy("cpu:0"),
}
each_strategy = pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)


@each_strategy
@pytest.mark.parametrize(("old", "new"), spelling.RENAMED.items())
def test_older_spellings_are_todays_methods(make, old: str, new: str) -> None:
    """Every older name is the method of today, bound to the strategy."""
    with make() as strategy:
        assert getattr(strategy, old) == getattr(strategy, new)


def test_every_release_of_the_central_storage_page_is_answered() -> None:
    """CSS-5: what r2.1, r2.2 and r2.4 each called things, on one object."""
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        assert strategy.experimental_run_v2(lambda x: x + 1, args=(1,)) == 2  # r2.0 and r2.1
        numbers = strategy.experimental_make_numpy_dataset(np.arange(4.0))  # r2.2
        (step,) = strategy.experimental_distribute_dataset(numbers.batch(4))
        assert strategy.gather(step, axis=0).tolist() == [0.0, 1.0, 2.0, 3.0]  # r2.4 and later
        assert strategy.run(lambda: 3, options=sg.compat.RunOptions()) == 3
        made = strategy.distribute_datasets_from_function(lambda context: numbers.batch(2))
        assert len(list(made)) == 1
        assert strategy.cluster_resolver is None


@each_strategy
def test_kept_names_are_methods(make) -> None:
    """Names that exist for TensorFlow's people only are callable on every strategy (DEV-1, 13.9)."""
    tensor = torch.arange(6.0).reshape(2, 3)
    with make() as strategy:
        assert strategy.experimental_assign_to_logical_device(tensor, 0) is tensor
        assert strategy.experimental_split_to_logical_devices(tensor, [1, 1]) is tensor
        assert strategy.experimental_replicate_to_logical_devices(tensor) is tensor
        for wrong in (-1, 1, "0"):
            with pytest.raises(ValueError, match="logical_device_id"):
                strategy.experimental_assign_to_logical_device(tensor, wrong)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("experimental", r"sg\.compat\.experimental"),
        ("coordinator", r"sg\.ClusterCoordinator"),
        ("function", r"sg\.compat\.function"),
        ("MultiWorkerMirroredStrategy", "DistributedDataParallel"),
    ],
)
def test_missing_names_of_tf_distribute_say_what_to_use(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=f"'stratagem' has no attribute '{name}'.*{instead}"):
        getattr(sg, name)
    assert name not in dir(sg)


def test_unknown_names_are_attribute_errors() -> None:
    """A misspelt name is an ordinary AttributeError; V1-only names say where they are."""
    strategy = sg.OneDeviceStrategy("cpu:0")
    with pytest.raises(AttributeError, match="'OneDeviceStrategy' object has no attribute 'runn'"):
        strategy.runn
    for name in ("experimental_run", "make_dataset_iterator", "update_config_proto"):
        with pytest.raises(AttributeError, match=r"compat\.v1"):
            getattr(strategy, name)


def test_set_strategy_under_its_old_name() -> None:
    """CTX-11."""
    strategy = sg.OneDeviceStrategy("cpu:0")
    sg.compat.experimental_set_strategy(strategy)
    try:
        assert sg.get_strategy() is strategy
    finally:
        sg.compat.experimental_set_strategy(None)
    assert not sg.has_strategy()


def test_experimental_holds_the_same_objects() -> None:
    """``tf.distribute.experimental``'s names are today's classes."""
    old = sg.compat.experimental
    assert old.CentralStorageStrategy is sg.CentralStorageStrategy
    assert old.ParameterServerStrategy is sg.ParameterServerStrategy
    assert old.coordinator.ClusterCoordinator is sg.ClusterCoordinator
    assert old.partitioners.FixedShardsPartitioner is sg.partitioners.FixedShardsPartitioner


# ------------------------------------------------------------------ numpy datasets (INP-43)


def test_numpy_datasets_keep_the_nest() -> None:
    """INP-43: arrays are cut along their first axis; the nest stays."""
    strategy = sg.CentralStorageStrategy()
    rows = {"x": np.arange(6).reshape(3, 2), "y": (np.array([1, 2, 3]),)}
    elements = list(strategy.experimental_make_numpy_dataset(rows))
    assert [e["x"].tolist() for e in elements] == [[0, 1], [2, 3], [4, 5]]
    assert [e["y"][0].item() for e in elements] == [1, 2, 3]


def test_a_list_of_arrays_is_stacked() -> None:
    """INP-43: a list is one array, as in tf.data."""
    strategy = sg.compat.v1.OneDeviceStrategy("cpu:0")
    dataset = strategy.experimental_make_numpy_dataset([np.zeros(4), np.ones(4)], session=None)
    assert [e.tolist() for e in dataset] == [[0.0] * 4, [1.0] * 4]


# ------------------------------------------------------------------ V1 (004; INP-40 … 44)


@pytest.fixture
def v1() -> sg.compat.v1.OneDeviceStrategy:
    return sg.compat.v1.OneDeviceStrategy(device="/cpu:0")


def test_v1_reduce_without_an_axis(v1) -> None:
    """ODS-4: the axis is optional on the V1 class, mandatory on today's."""
    assert v1.reduce("sum", 5) == 5
    assert v1.reduce("sum", torch.tensor([1.0, 2.0]), axis=0).item() == 3.0
    with pytest.raises(TypeError, match="axis"):
        sg.OneDeviceStrategy("cpu:0").reduce("sum", 5)


def test_dataset_iterator(v1) -> None:
    """INP-40: usable at once, initialize() goes back, the end stays the end."""
    iterator = v1.make_dataset_iterator(sg.data.Dataset.range(5).batch(2))
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3], [4]]
    for _ in range(2):
        with pytest.raises(StopIteration):
            iterator.get_next()
    assert "3 taken" in repr(iterator)
    iterator.initialize()
    assert iterator.get_next().tolist() == [0, 1]


def test_input_function_may_return_a_function(v1) -> None:
    """INP-41: a function without arguments is called for each input, until it stops."""
    left = [3, 2, 1]

    def input_fn(context: sg.InputContext):
        assert (context.num_input_pipelines, context.num_replicas_in_sync) == (1, 1)

        def next_input() -> torch.Tensor:
            if not left:
                raise StopIteration
            return torch.tensor(left.pop())

        return next_input

    iterator = v1.make_input_fn_iterator(input_fn)
    assert [x.item() for x in iterator] == [1, 2, 3]


def test_input_function_iterator_refuses(v1) -> None:
    """INP-41, LIM-21: other modes and other results."""
    with pytest.raises(ValueError, match="PER_WORKER"):
        v1.make_input_fn_iterator(lambda _: None, InputReplicationMode.PER_REPLICA)
    with pytest.raises(ValueError, match="input_fn returned 3"):
        v1.make_input_fn_iterator(lambda _: 3)


def test_experimental_run(v1) -> None:
    """INP-42: with an iterator its next element is the argument; without, there is none."""
    iterator = v1.make_dataset_iterator(sg.data.Dataset.range(4).batch(2))
    assert v1.experimental_run(lambda x: x.sum(), iterator).item() == 1
    assert v1.experimental_run(lambda x: x.sum(), iterator).item() == 5
    assert v1.experimental_run(lambda: "nothing") == "nothing"


def test_update_config_proto_is_a_deep_copy(v1) -> None:
    """INP-44, 13.9."""

    @dataclass
    class ConfigProto:
        devices: list[str] = field(default_factory=list)

    given = ConfigProto(["a"])
    got = v1.update_config_proto(given)
    assert got == given
    got.devices.append("b")
    assert given.devices == ["a"]


def test_v1_trains(v1) -> None:
    """The V1 class is a strategy like the others: an ordinary step runs under it."""
    with v1.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    dataset = sg.data.Dataset.from_tensor_slices(torch.randn(8, 2)).batch(4)
    iterator = v1.make_dataset_iterator(dataset)
    losses = [v1.experimental_run(step, iterator).item() for _ in range(2)]
    assert all(loss > 0 for loss in losses)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
