"""CentralStorageStrategy (CSS-*)."""

from __future__ import annotations

import pytest
import torch

import stratagem as sg

CPU0 = "/job:localhost/replica:0/task:0/device:CPU:0"
CPU1 = "/job:localhost/replica:0/task:0/device:CPU:1"


def names(strategy):
    return [each.name for each in strategy._compute_devices]


def test_defaults():
    """CSS-1: all accelerators, else the CPU; variables with a single device, else on the CPU."""
    strategy = sg.CentralStorageStrategy()
    if not torch.accelerator.is_available():
        assert names(strategy) == [CPU0]
    assert strategy.num_replicas_in_sync == max(1, torch.accelerator.device_count())
    assert sg.CentralStorageStrategy(["cpu:1"])._parameter_names == (CPU1,)
    assert sg.CentralStorageStrategy(["cpu:0", "cpu:1"])._parameter_names == ("/device:CPU:0",)


def test_devices():
    """CSS-2, CSS-3: any iterable, duplicates count; the parameter device as it was written."""
    strategy = sg.CentralStorageStrategy((f"/cpu:{i}" for i in range(2)), "/device:CPU:1")
    assert names(strategy) == [CPU0, CPU1]
    assert strategy._parameter_names == ("/device:CPU:1",)
    assert strategy.num_replicas_in_sync == 2
    with sg.CentralStorageStrategy(["cpu:0", "cpu:0"]) as twice:
        assert twice.run(lambda: int(sg.get_replica_context().replica_id_in_sync_group)).values == (
            0,
            1,
        )
    assert sg.CentralStorageStrategy(["cpu"], torch.device("cpu"))._parameter_names == (CPU0,)


def test_no_compute_device():
    """CSS-2: R=0: scope and variables work, run does not."""
    strategy = sg.CentralStorageStrategy([])
    assert strategy.num_replicas_in_sync == 0
    with strategy.scope():
        v = sg.Variable(3.0)
    assert float(v) == 3
    with pytest.raises(IndexError, match="no compute device"):
        strategy.run(lambda: None)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("cpu:0",), ValueError, "single string"),
        ((["warp:0"],), ValueError, "not a device name"),
        ((["gpu:99"],), ValueError, "does not exist"),
        ((3,), TypeError, "list of device names"),
        (([["cpu:0"]],), TypeError, "one device name"),
        ((["cpu:0"], ["cpu:0"]), ValueError, r"parameter_device=\['cpu:0'\] has type list"),
        ((["cpu:0"], 3), ValueError, "parameter_device=3 has type int"),
        ((["cpu:0"], "warp:0"), ValueError, "not a device name"),
        ((["cpu:0"], "gpu:99"), ValueError, "does not exist"),
    ],
)
def test_bad_devices(arguments, error, message):
    """CSS-2, issue 2.7: found at construction, with value and remedy."""
    with pytest.raises(error, match=message):
        sg.CentralStorageStrategy(*arguments)


def test_one_copy_of_every_variable():
    """CSS-4: replicas read the one value, and writes meet at it."""
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            v = sg.Variable(torch.zeros(4), aggregation="sum")
        pointers = strategy.run(lambda: v.value().data_ptr())
        assert pointers == v.value().data_ptr()
        strategy.run(lambda: v.assign_add(torch.ones(4)))
        assert v.numpy().tolist() == [2, 2, 2, 2]


def test_the_seed_pages_reduce_example():
    """Page 000: [0..3] and [4..7] reduce to [4, 6, 8, 10], and along the batch to 28."""
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0") as strategy:
        batch = sg.PerReplica([torch.arange(4), torch.arange(4, 8)])
        result = strategy.run(lambda value: value, args=(batch,))
        assert strategy.reduce(sg.ReduceOp.SUM, result, axis=None).tolist() == [4, 6, 8, 10]
        assert strategy.reduce(sg.ReduceOp.SUM, result, axis=0) == 28
