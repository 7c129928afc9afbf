"""``strategy.extended``: EXT-1 … EXT-11 and the contexts it may be used in (CTX-12)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import stratagem as sg

CPU = "/job:localhost/replica:0/task:0/device:CPU:{}"


@pytest.fixture
def one() -> Iterator[sg.OneDeviceStrategy]:
    with sg.OneDeviceStrategy("cpu:0") as strategy:
        yield strategy


@pytest.fixture
def central() -> Iterator[sg.CentralStorageStrategy]:
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0") as strategy:
        yield strategy


@pytest.fixture
def mirrored() -> Iterator[sg.MirroredStrategy]:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


def pair(first: object, second: object) -> sg.PerReplica:
    return sg.PerReplica([first, second])


ONE_AND_TWO = (torch.tensor(1.0), torch.tensor(2.0))


# ------------------------------------------------------------------ EXT-1, EXT-2, EXT-3


@pytest.mark.parametrize("op", ["sum", "MEAN", sg.ReduceOp.SUM])
def test_reduce_to_one_device(central: sg.CentralStorageStrategy, op: object) -> None:
    """EXT-1: one destination device gives a bare tensor there."""
    value = pair(*ONE_AND_TWO)
    expected = 1.5 if op == "MEAN" else 3.0
    for destination in ("cpu:0", torch.zeros(2), "/device:CPU:0"):
        result = central.extended.reduce_to(op, value, destination)
        assert isinstance(result, torch.Tensor)
        assert result.item() == expected


def test_reduce_to_itself_is_an_all_reduce(mirrored: sg.MirroredStrategy) -> None:
    """EXT-1: several destination devices give a Mirrored whose copies are apart."""
    value = pair(*ONE_AND_TWO)
    result = mirrored.extended.reduce_to("sum", value, value)
    assert isinstance(result, sg.Mirrored)
    assert [part.item() for part in result.values] == [3.0, 3.0]
    result.values[0].zero_()
    assert result.values[1].item() == 3.0


def test_reduce_to_a_variable(
    central: sg.CentralStorageStrategy, mirrored: sg.MirroredStrategy
) -> None:
    """EXT-1: near a central variable one tensor, near a mirrored one a copy for each replica."""
    for strategy, kind in ((central, torch.Tensor), (mirrored, sg.Mirrored)):
        with strategy.scope():
            v = sg.Variable(0.0)
        assert isinstance(strategy.extended.reduce_to("sum", pair(*ONE_AND_TWO), v), kind)


def test_reduce_to_is_an_identity_on_one_device(one: sg.OneDeviceStrategy) -> None:
    """EXT-1: one device and the default strategy hand the value back, whatever it is."""
    value = object()
    assert one.extended.reduce_to("sum", value, "cpu:0") is value
    assert sg.get_strategy().extended.reduce_to("sum", value, "cpu:0") is value


@pytest.mark.parametrize(
    ("op", "destination", "error"),
    [
        ("sum", ["cpu:0"], AssertionError),
        ("sum", ("cpu:0",), AssertionError),
        (sg.VariableAggregation.SUM, "cpu:0", AssertionError),
        ("sum", "", ValueError),
        ("sum", None, ValueError),
        ("sum", 3.0, ValueError),
        ("sum", "cuda:99", ValueError),
        ("product", "cpu:0", ValueError),
    ],
)
def test_reduce_to_refuses(
    central: sg.CentralStorageStrategy, op: object, destination: object, error: type[Exception]
) -> None:
    """EXT-1: the errors of bad operations and destinations."""
    with pytest.raises(error):
        central.extended.reduce_to(op, pair(*ONE_AND_TWO), destination)


def test_sums_are_made_in_replica_order() -> None:
    """EXT-2: floating-point sums do not depend on anything but the order of replicas."""
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        parts = [torch.tensor(x) for x in (1e8, 1.0, -1e8)]
        expected = (parts[0] + parts[1]) + parts[2]
        assert strategy.extended.reduce_to("sum", sg.PerReplica(parts), "cpu:0") == expected


def test_batch_reduce_to(central: sg.CentralStorageStrategy) -> None:
    """EXT-3: one result per pair; what is not a pair is refused."""
    value = pair(*ONE_AND_TWO)
    results = central.extended.batch_reduce_to("sum", [(value, "cpu:0"), (value, value)])
    assert results[0].item() == 3.0
    assert [part.item() for part in results[1].values] == [3.0, 3.0]
    with pytest.raises(ValueError, match="pairs"):
        central.extended.batch_reduce_to("sum", [(value, "cpu:0", 1)])


# ------------------------------------------------------------------ EXT-4, EXT-5


def test_update_of_a_central_variable_runs_once(central: sg.CentralStorageStrategy) -> None:
    """EXT-4: once, on the inner variable, with the first component of distributed arguments."""
    with central.scope():
        v = sg.Variable(1.0, aggregation="SUM")
    calls = []

    def fn(inner: sg.Variable, x: torch.Tensor, *, y: torch.Tensor) -> torch.Tensor:
        calls.append(inner)
        return inner.assign_add(x + y)

    result = central.extended.update(
        v, fn, args=(pair(*ONE_AND_TWO),), kwargs={"y": ONE_AND_TWO[1]}
    )
    assert result.item() == float(v) == 4.0
    assert calls == [v.get()]


def test_update_of_a_mirrored_variable_reaches_every_copy(mirrored: sg.MirroredStrategy) -> None:
    """EXT-4: once per copy, with its component; the results are Mirrored, or tuples."""
    with mirrored.scope():
        v = sg.Variable(1.0)
    result = mirrored.extended.update(v, lambda c, x: c.assign(x), args=(pair(*ONE_AND_TWO),))
    assert isinstance(result, sg.Mirrored)
    assert [float(copy) for copy in v.values] == [1.0, 2.0]
    result = mirrored.extended.update(v, lambda c: c.assign(7.0), group=False)
    assert isinstance(result, tuple)
    assert [part.item() for part in result] == [7.0, 7.0]


def test_update_in_a_replica_meets_first(central: sg.CentralStorageStrategy) -> None:
    """EXT-4: in a replica the arguments are merged, and the function runs once."""
    with central.scope():
        v = sg.Variable(0.0)
    calls = []

    def step() -> torch.Tensor:
        mine = torch.tensor(float(sg.get_replica_context().replica_id_in_sync_group) + 1)

        def fn(inner: sg.Variable, x: torch.Tensor) -> torch.Tensor:
            calls.append(x.item())
            return inner.assign_add(x)

        return central.extended.update(v, fn, args=(mine,))

    result = central.run(step)
    assert calls == [1.0]
    assert float(v) == 1.0
    assert {part.item() for part in central.local_results(result)} == {1.0}


@pytest.mark.parametrize("group", [True, False])
def test_update_results_are_grouped(one: sg.OneDeviceStrategy, group: bool) -> None:
    """EXT-4: group=False wraps results in tuples."""
    with one.scope():
        v = sg.Variable(1.0)
    result = one.extended.update(v, lambda v: {"now": v.assign(2.0)}, group=group)
    expected = {"now": torch.tensor(2.0)}
    assert result == (expected if group else (expected,))


def test_update_of_something_else(
    one: sg.OneDeviceStrategy,
    central: sg.CentralStorageStrategy,
    mirrored: sg.MirroredStrategy,
) -> None:
    """EXT-4: ValueError (central storage), AssertionError (mirrored), accepted (one device)."""
    with pytest.raises(ValueError, match="expected a variable"):
        central.extended.update(3, lambda v: v)
    with pytest.raises(AssertionError, match="expected a variable"):
        mirrored.extended.update(3, lambda v: v)
    assert one.extended.update(3, lambda v: v + 1) == 4


def test_non_slot_devices_and_updates_there(
    one: sg.OneDeviceStrategy,
    central: sg.CentralStorageStrategy,
    mirrored: sg.MirroredStrategy,
) -> None:
    """EXT-5: the device; the variable with the smallest name; all devices."""
    assert one.extended.non_slot_devices([]) == (CPU.format(0),)
    assert mirrored.extended.non_slot_devices([]) == (CPU.format(0), CPU.format(1))
    with central.scope():
        variables = [sg.Variable(0.0, name=name) for name in ("b", "a", "c")]
    beside = central.extended.non_slot_devices(variables)
    assert beside is variables[1]
    assert central.extended.update_non_slot(beside, lambda x: x * 2, args=(4,)) == 8
    result = mirrored.extended.update_non_slot(
        mirrored.extended.non_slot_devices([]), lambda x: x * 2, args=(pair(1, 2),)
    )
    assert result.values == (2, 4)
    assert one.extended.update_non_slot((CPU.format(0),), lambda: 5, group=False) == (5,)


# ------------------------------------------------------------------ EXT-6, EXT-7, EXT-8


def test_colocation_needs_a_variable_of_the_scope(central: sg.CentralStorageStrategy) -> None:
    """EXT-6, CTX-12: inside the scope, with a variable made in it; new ones go to its device."""
    outside = sg.Variable(0.0)
    with central.scope():
        v = sg.Variable(0.0)
        with central.extended.colocate_vars_with(v):
            beside = sg.Variable(1.0, aggregation="SUM")
        assert beside.device == v.device
        assert beside.get() is not beside
        for wrong in (outside, 3):
            with pytest.raises(ValueError, match="created under"):
                central.extended.colocate_vars_with(wrong).__enter__()
    with pytest.raises(RuntimeError, match="scope"):
        central.extended.colocate_vars_with(v).__enter__()


def test_broadcast(central: sg.CentralStorageStrategy, one: sg.OneDeviceStrategy) -> None:
    """EXT-7: tensors are copied, numbers pass, no destination is an error."""
    value = pair(*ONE_AND_TWO)
    result = central.extended.broadcast_to(torch.tensor(5.0), value)
    assert [part.item() for part in result.values] == [5.0, 5.0]
    assert central.extended.broadcast_to(torch.tensor(5.0), "cpu:0").item() == 5.0
    assert central.extended.broadcast_to(3, "cpu:0") == 3
    with pytest.raises(AssertionError):
        central.extended.broadcast_to(torch.tensor(5.0), None)
    assert one.extended.broadcast_to(3.5, "cpu:0") == 3.5


def test_reading_and_owning(
    central: sg.CentralStorageStrategy, mirrored: sg.MirroredStrategy
) -> None:
    """EXT-8: a copy of the value; whether a variable is of this strategy."""
    outside = sg.Variable(1.0)
    with central.scope():
        v = sg.Variable(2.0)
    read = central.extended.read_var(v)
    v.assign(3.0)
    assert read.item() == 2.0
    assert central.extended.variable_created_in_scope(v)
    assert not mirrored.extended.variable_created_in_scope(v)
    assert not central.extended.variable_created_in_scope(outside)
    assert sg.get_strategy().extended.variable_created_in_scope(outside)
    assert not central.extended.variable_created_in_scope(3)


# ------------------------------------------------------------------ EXT-9, EXT-10, EXT-11, contexts


def test_flags_and_devices(
    one: sg.OneDeviceStrategy,
    central: sg.CentralStorageStrategy,
    mirrored: sg.MirroredStrategy,
) -> None:
    """EXT-9: what each strategy says of itself; CSS-3: where it computes and keeps variables."""
    for strategy, between in ((one, False), (central, True), (mirrored, False)):
        extended = strategy.extended
        assert extended.should_checkpoint
        assert extended.should_save_summary
        assert extended.experimental_should_init
        assert not extended.experimental_require_static_shapes
        assert extended.experimental_between_graph is between
    assert one.extended.worker_devices == one.extended.parameter_devices == (CPU.format(0),)
    assert central.extended.worker_devices == [CPU.format(0), CPU.format(1)]
    assert central.extended.parameter_devices == ("cpu:0",)
    assert mirrored.extended.worker_devices == (CPU.format(0), CPU.format(1))
    assert "CentralStorageStrategy" in repr(central.extended)


def test_the_default_strategy_has_no_devices() -> None:
    """EXT-10."""
    extended = sg.get_strategy().extended
    for name in ("worker_devices", "parameter_devices"):
        with pytest.raises(RuntimeError, match="places nothing"):
            getattr(extended, name)


def test_communication_options() -> None:
    """EXT-11: checked when made, ignored when used."""
    assert sg.compat.CommunicationOptions().bytes_per_pack == 0
    assert sg.compat.CommunicationOptions(implementation="nccl").implementation.value == "NCCL"
    with pytest.raises(ValueError, match="bytes_per_pack=-1"):
        sg.compat.CommunicationOptions(bytes_per_pack=-1)
    with pytest.raises(ValueError, match="carrier pigeon"):
        sg.compat.CommunicationOptions(implementation="carrier pigeon")


def test_calling_each_replica(central: sg.CentralStorageStrategy) -> None:
    """RUN-11: run without the check of args; in a replica it is an error (CTX-7)."""
    result = central.extended.call_for_each_replica(lambda x: x + 1, args=[pair(1, 2)])
    assert result.values == (2, 3)

    def again() -> object:
        return central.extended.call_for_each_replica(lambda: 1)

    with pytest.raises(RuntimeError, match="merge_call"):
        central.run(again)


@pytest.mark.parametrize(
    "use",
    [
        lambda e, v: e.reduce_to("sum", 1, "cpu:0"),
        lambda e, v: e.batch_reduce_to("sum", [(1, "cpu:0")]),
        lambda e, v: e.broadcast_to(1, "cpu:0"),
        lambda e, v: e.update_non_slot("cpu:0", lambda: 1),
        lambda e, v: e.update(v, lambda v: v),
    ],
)
def test_not_under_another_strategy(
    central: sg.CentralStorageStrategy, mirrored: sg.MirroredStrategy, use: object
) -> None:
    """CTX-6, CTX-12: methods that need the own context refuse another strategy's scope."""
    with central.scope():
        v = sg.Variable(0.0)
    with mirrored.scope(), pytest.raises(RuntimeError, match="mixing different strategy objects"):
        use(central.extended, v)  # type: ignore[operator]


# ------------------------------------------------------------------ several steps in one call


@pytest.mark.parametrize("kind", ["one", "central", "mirrored"])
def test_run_steps_on_iterator_keeps_what_the_last_step_set(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """CTX-12: as many steps as asked, from any context that may run; outputs reduced as asked."""
    strategy = request.getfixturevalue(kind)
    size = strategy.num_replicas_in_sync
    batches = iter(strategy.distribute_dataset([torch.arange(4.0) + 10 * k for k in range(5)]))

    def in_replica(steps: object, x: torch.Tensor) -> torch.Tensor:
        steps.set_last_step_output("largest", x.max(), reduce_op="mean")
        steps.set_non_tensor_output("rows", f"{len(x)} rows")
        return x.sum()

    def step(steps: object, batch: object) -> None:
        assert sg.in_cross_replica_context()
        sums = strategy.run(in_replica, args=(steps, batch))
        steps.set_last_step_output("sum", sums, reduce_op="sum")
        steps.set_last_step_output("kept", "as it is")

    run = strategy.extended.experimental_run_steps_on_iterator
    steps = run(step, batches, iterations=3, initial_loop_values={"before": 1})
    assert float(steps.last_step_outputs["sum"]) == 4 * 20 + 6  # the third batch
    assert float(steps.last_step_outputs["largest"]) == (23 if size == 1 else 22)
    assert steps.last_step_outputs["kept"] == "as it is"
    assert steps.last_step_outputs["before"] == 1
    assert steps.non_tensor_outputs["rows"] == (f"{4 // size} rows",)
    with strategy.scope():
        assert float(run(step, batches).last_step_outputs["sum"]) == 4 * 30 + 6
    with pytest.raises(StopIteration):
        run(step, batches, iterations=2)


def test_run_steps_on_iterator_refuses(central: sg.CentralStorageStrategy) -> None:
    run = central.extended.experimental_run_steps_on_iterator
    with pytest.raises(ValueError, match="iterations=-1"):
        run(lambda steps, batch: None, iter([1]), iterations=-1)
    with pytest.raises(TypeError, match="not callable"):
        run(None, iter([1]))
    with pytest.raises(RuntimeError, match="merge_call"):
        central.run(lambda: run(lambda steps, batch: None, iter([1])))
    with pytest.raises(ValueError, match="needs a reduce_op"):
        run(
            lambda steps, batch: central.run(steps.set_last_step_output, args=("x", batch)),
            iter([torch.tensor(1.0)]),
        )
