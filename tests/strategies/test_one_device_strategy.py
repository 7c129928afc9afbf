"""OneDeviceStrategy (ODS-*)."""

from __future__ import annotations

import pytest
import torch

import stratagem as sg


def test_it_needs_a_device():
    """ODS-1."""
    with pytest.raises(TypeError):
        sg.OneDeviceStrategy()


@pytest.mark.parametrize("name", ["CPU:1", "/cpu:1", "cpu:1", "/device:CPU:1"])
def test_spellings(name):
    """ODS-1."""
    strategy = sg.OneDeviceStrategy(name)
    assert strategy._parameter_names == ("/job:localhost/replica:0/task:0/device:CPU:1",)
    assert strategy._compute_devices[0].name == strategy._parameter_names[0]
    assert strategy.num_replicas_in_sync == 1


@pytest.mark.parametrize(
    ("device", "error"),
    [("warp:0", ValueError), ("cpu:x", ValueError), ("gpu:99", ValueError), (["cpu:0"], TypeError)],
)
def test_bad_devices(device, error):
    """ODS-1, and 13.2 against ODS-2."""
    with pytest.raises(error):
        sg.OneDeviceStrategy(device)


def test_everything_is_an_identity():
    """ODS-3."""
    strategy = sg.OneDeviceStrategy("cpu")
    value = torch.ones(2)
    assert strategy.run(lambda: value) is value
    assert strategy.reduce("sum", value, axis=None) is value
    assert strategy.gather(value, axis=0) is value
    assert strategy.run(lambda: sg.get_replica_context().all_reduce("sum", value)) is value
    assert sum(strategy.run(lambda i: 2 * i, args=(i,)) for i in range(10)) == 90


def test_it_runs_on_the_calling_thread():
    """RUN-5, and no thread is ever started."""
    import threading

    strategy = sg.OneDeviceStrategy("cpu")
    before = threading.active_count()
    assert strategy.run(threading.get_ident) == threading.get_ident()
    assert threading.active_count() == before


def test_variables_are_ordinary():
    """The table of section 4: any synchronization mode, aggregation ignored."""
    strategy = sg.OneDeviceStrategy("cpu")
    for mode in sg.VariableSynchronization:
        for aggregation in sg.VariableAggregation:
            with strategy.scope():
                v = sg.Variable(10.0, synchronization=mode, aggregation=aggregation)
            assert strategy.run(lambda v=v: v.assign_add(1.0)) == 11
            assert v.values == (v,)
