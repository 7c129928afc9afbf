"""MirroredStrategy: what sets it apart."""

from __future__ import annotations

import pytest
import torch

import stratagem as sg


def test_defaults():
    """All accelerators, else the CPU."""
    strategy = sg.MirroredStrategy()
    assert strategy.num_replicas_in_sync == max(1, torch.accelerator.device_count())


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        ([], ValueError, "names no device"),
        ("cpu:0", ValueError, "single string"),
        (["warp:0"], ValueError, "not a device name"),
        (["gpu:99"], ValueError, "does not exist"),
        (3, TypeError, "list of device names"),
    ],
)
def test_bad_devices(devices, error, message):
    """Issue 2.7."""
    with pytest.raises(error, match=message):
        sg.MirroredStrategy(devices)


def test_each_replica_has_its_copy():
    """A mirrored variable has one memory per replica."""
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            v = sg.Variable(torch.zeros(2), aggregation="mean")
        pointers = strategy.run(lambda: v.value().data_ptr()).values
        assert len(set(pointers)) == 2
        assert pointers == tuple(part.value().data_ptr() for part in v.values)


def test_one_device_is_allowed():
    """With one device it is still mirrored, and aggregation changes nothing."""
    strategy = sg.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        v = sg.Variable(10.0, aggregation="sum")
    assert strategy.run(lambda: v.assign_add(1.0)) == 11
    assert strategy.reduce("sum", sg.PerReplica([torch.tensor(2.0)]), axis=None) == 2
