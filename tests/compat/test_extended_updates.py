"""`strategy.extended`: reducing to a device, and updating a variable on its device (EXT-*)."""

from __future__ import annotations

import pytest
import torch

import stratagem as sg

T = torch.tensor


@pytest.fixture
def one():
    return sg.OneDeviceStrategy("cpu:0")


@pytest.fixture
def central():
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


@pytest.fixture
def mirrored():
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


def variable(strategy, value=1.0, **options):
    with strategy.scope():
        return sg.Variable(value, **options)


def per(*parts):
    return sg.PerReplica(parts)


def test_reduce_to(central, mirrored, one):
    """EXT-1, EXT-2."""
    value = per(T(1.0), T(2.0))
    for strategy in (central, mirrored):
        for where in ("cpu:0", T(0.0), variable(central)):
            result = strategy.extended.reduce_to("sum", value, where)
            assert isinstance(result, torch.Tensor)
            assert result == 3
        for where in (value, variable(mirrored)):
            result = strategy.extended.reduce_to("mean", value, where)
            assert isinstance(result, sg.Mirrored)
            assert [float(x) for x in result.values] == [1.5, 1.5]
            assert result.values[0] is not result.values[1]
        for bad, error in (
            (["cpu:0"], AssertionError),
            (("cpu:0",), AssertionError),
            ("", ValueError),
            (None, ValueError),
            (3, ValueError),
        ):
            with pytest.raises(error, match="destinations"):
                strategy.extended.reduce_to("sum", value, bad)
        with pytest.raises(AssertionError, match=r"expected ReduceOp\.SUM"):
            strategy.extended.reduce_to(sg.VariableAggregation.SUM, value, "cpu:0")
        with pytest.raises(ValueError, match="not one per replica"):
            strategy.extended.reduce_to("sum", T(1.0), "cpu:0")
    assert one.extended.reduce_to("sum", value, "cpu:0") is value


def test_batch_reduce_to(central):
    """EXT-3."""
    pairs = [(per(T(1.0), T(2.0)), "cpu:0"), (per(T(3.0), T(4.0)), "cpu:0")]
    assert central.extended.batch_reduce_to("sum", pairs) == [3, 7]
    for bad in ([(1, 2, 3)], [[1, 2]], [5]):
        with pytest.raises(ValueError, match="expected tuples"):
            central.extended.batch_reduce_to("sum", bad)


def test_broadcast_to(central, mirrored, one):
    """EXT-7."""
    value = T([1.0])
    assert central.extended.broadcast_to(value, "cpu:0").tolist() == [1]
    spread = mirrored.extended.broadcast_to(value, variable(mirrored))
    assert isinstance(spread, sg.Mirrored)
    assert [x.tolist() for x in spread.values] == [[1], [1]]
    assert central.extended.broadcast_to(5, "cpu:0") == 5
    assert central.extended.broadcast_to(5.5, "cpu:0") == 5.5
    assert one.extended.broadcast_to(value, "cpu:0") is value
    with pytest.raises(AssertionError, match="destinations=None"):
        central.extended.broadcast_to(value, None)


def add(v, delta):
    return v.assign_add(delta)


def test_update_under_central_storage(central):
    """EXT-4: once, with the inner variable and the first components; VAR-16: assign is direct."""
    v = variable(central, aggregation="sum")
    seen = []

    def fn(inner, delta, *, scale):
        seen.append(inner)
        return inner.assign_add(delta * scale)

    with central.scope():
        result = central.extended.update(v, fn, (per(T(2.0), T(5.0)),), {"scale": 10})
        assert result == 21
        assert central.extended.update(v, add, (T(1.0),), group=False) == (22,)
        with pytest.raises(ValueError, match="expected a variable"):
            central.extended.update(T(1.0), add, (1,))
    assert seen == [v.get()]
    assert float(v) == 22


def test_update_under_mirrored(mirrored):
    """EXT-4: once per copy, with the matching components."""
    v = variable(mirrored)
    with mirrored.scope():
        result = mirrored.extended.update(v, add, (sg.Mirrored([T(2.0), T(3.0)]),))
        assert isinstance(result, sg.Mirrored)
        assert [float(x) for x in result.values] == [3, 4]
        assert mirrored.extended.update(v, add, (T(1.0),), group=False) == (4, 5)
        with pytest.raises(AssertionError, match="expected a variable"):
            mirrored.extended.update(T(1.0), add, (1,))
    assert [float(part) for part in v.values] == [4, 5]


def test_update_on_one_device(one):
    """EXT-4: the variable itself; anything is accepted."""
    v = variable(one)
    with one.scope():
        assert one.extended.update(v, add, (T(1.0),)) == 2
        assert one.extended.update(T(1.0), lambda x, y: x + y, (T(1.0),)) == 2


def test_update_in_a_replica(central, mirrored):
    """EXT-4: a merge_call, then as outside."""
    for strategy, expected in ((central, [2]), (mirrored, [2, 3])):
        v = variable(strategy)

        def step(v=v, strategy=strategy):
            me = sg.get_replica_context().replica_id_in_sync_group
            strategy.extended.update(v, add, (me + 1.0,))

        strategy.run(step)
        assert [float(part) for part in v.values] == expected


def test_update_non_slot(one, central, mirrored):
    """EXT-5."""
    b, a = variable(central, name="b"), variable(central, name="a")
    assert central.extended.non_slot_devices([b, a]) is a
    assert one.extended.non_slot_devices([]) == ("/job:localhost/replica:0/task:0/device:CPU:0",)
    assert len(mirrored.extended.non_slot_devices([])) == 2
    calls = []

    def fn(x):
        calls.append((x, sg.in_cross_replica_context()))
        return x

    assert central.extended.update_non_slot(a, fn, (per(1, 2),)) == 1
    result = mirrored.extended.update_non_slot(
        mirrored.extended.non_slot_devices([]), fn, (per(1, 2),), group=False
    )
    assert result == (1, 2)
    assert calls == [(1, True), (1, True), (2, True)]


def test_colocation(one, central, mirrored):
    """EXT-6."""
    for strategy in (one, central, mirrored):
        v = variable(strategy)
        with strategy.scope():
            with strategy.extended.colocate_vars_with(v):
                w = sg.Variable(1.0)
            assert w.device == v.device
            assert len(w.values) == len(v.values)
            for foreign in (T(1.0), "cpu:0", variable_outside()):
                with pytest.raises(ValueError, match="created under the scope"):
                    strategy.extended.colocate_vars_with(foreign)
        with pytest.raises(RuntimeError, match="needs to be inside"):
            strategy.extended.colocate_vars_with(v)


def variable_outside():
    other = sg.OneDeviceStrategy("cpu")
    current = sg.get_strategy()
    assert current is not other
    from stratagem._core.variables import VariableRequest

    return other._create_variable(VariableRequest(initial_value=1.0))


def test_reading_and_belonging(central):
    """EXT-8."""
    v = variable(central, [1.0])
    copy = central.extended.read_var(v)
    copy += 5
    assert v.numpy().tolist() == [1]
    assert central.extended.variable_created_in_scope(v)
    assert not central.extended.variable_created_in_scope(sg.Variable(1.0))
    assert not central.extended.variable_created_in_scope(3)


def test_flags_and_device_names(one, central, mirrored):
    """EXT-9, EXT-10, CSS-3, ODS-3."""
    assert [s._between_graph for s in (one, central, mirrored)] == [False, True, False]
    assert isinstance(central.extended.worker_devices, list)
    assert isinstance(one.extended.worker_devices, tuple)
    assert len(mirrored.extended.worker_devices) == 2
    default = sg.get_strategy()
    with pytest.raises(RuntimeError, match="no worker devices"):
        _ = default.extended.worker_devices
    with pytest.raises(RuntimeError, match="places nothing"):
        _ = default._parameter_names
