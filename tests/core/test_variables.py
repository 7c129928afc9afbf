"""Variables: placement, reading, writing, aggregation (VAR-*, spec section 4)."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from meeting import me

import stratagem as sg
from stratagem._core.context import Replica
from stratagem._core.devices import Device
from stratagem._core.replicas import ReplicaGroup

T = torch.tensor
NONE, SUM, MEAN, FIRST = sg.VariableAggregation
CPU0 = "/job:localhost/replica:0/task:0/device:CPU:0"
CPU1 = "/job:localhost/replica:0/task:0/device:CPU:1"


def make(kind):
    return {
        "one": lambda: sg.OneDeviceStrategy("cpu:0"),
        "central": lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"]),
        "central1": lambda: sg.CentralStorageStrategy(["cpu:0"]),
        "mirrored": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    }[kind]()


@pytest.fixture(params=["one", "central", "central1", "mirrored"])
def strategy(request):
    with make(request.param) as made:
        yield made


@pytest.fixture
def central():
    with make("central") as made:
        yield made


@pytest.fixture
def mirrored():
    with make("mirrored") as made:
        yield made


def variable(strategy, value=10.0, **options):
    with strategy.scope():
        return sg.Variable(value, **options)


def sparse(ids, rows, size=3):
    rows = torch.as_tensor(rows)
    return torch.sparse_coo_tensor([ids], rows, (size, *rows.shape[1:]), check_invariants=False)


# ------------------------------------------------------------------ what a variable is


def test_initial_values():
    """Numbers, arrays, tensors, functions; type and shape as asked."""
    assert sg.Variable(1).dtype is torch.int64
    assert sg.Variable([1.0, 2.0]).shape == (2,)
    assert sg.Variable(np.ones(2, np.float32)).dtype is torch.float32
    assert sg.Variable(lambda: torch.ones(3)).shape == (3,)
    assert sg.Variable(1, dtype=torch.float64).dtype is torch.float64
    source = torch.ones(2)
    made = sg.Variable(source)
    source += 1
    assert made.numpy().tolist() == [1, 1], "the variable has its own memory"
    other = sg.Variable(made)
    made.assign_add([1.0, 1.0])
    assert other.numpy().tolist() == [1, 1]
    with pytest.raises(ValueError, match="no initial value"):
        sg.Variable()
    with pytest.raises(ValueError, match="shape"):
        sg.Variable([1.0], shape=(2,))


def test_names_and_flags(strategy):
    """name, trainable, aggregation, synchronization."""
    made = variable(
        strategy, name="w", aggregation="sum", synchronization="on_read", trainable=False
    )
    assert (made.name, made.trainable, made.aggregation) == ("w", False, SUM)
    plain = variable(strategy)
    assert (plain.name, plain.trainable, plain.aggregation) == ("Variable", True, NONE)
    assert plain.distribute_strategy is strategy


@pytest.mark.parametrize("argument", ["aggregation", "synchronization"])
def test_unknown_settings(strategy, argument):
    """VAR-1."""
    for bad in ("median", 7, object()):
        with pytest.raises(ValueError, match=f"{argument}=.* is not known"):
            variable(strategy, **{argument: bad})


def test_devices():
    """The table of section 4; VAR-1: a device scope never wins over the strategy's placement."""
    with torch.device("meta"):
        assert variable(sg.OneDeviceStrategy("cpu:3")).device.endswith("CPU:3")
        with sg.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:1") as central:
            made = variable(central)
            assert made.device == CPU1
            assert made.value().device.type == "cpu"
            assert central.run(lambda: made.device) == CPU1
    with make("mirrored") as mirrored:
        made = variable(mirrored, name="m")
        assert made.device == CPU0
        assert mirrored.run(lambda: made.device).values == (CPU0, CPU1)
        assert [part.device for part in made.values] == [CPU0, CPU1]
        assert [part.name for part in made.values] == ["m", "m/replica_1"]
    assert sg.Variable(1.0).device == CPU0


def test_synchronization_of_mirrored_variables(mirrored):
    """AUTO becomes ON_WRITE; NONE is refused; ON_READ stays."""
    sync = sg.VariableSynchronization
    assert variable(mirrored).synchronization is sync.ON_WRITE
    assert variable(mirrored, synchronization=sync.ON_READ).synchronization is sync.ON_READ
    with pytest.raises(ValueError, match="synchronization NONE"):
        variable(mirrored, synchronization=sync.NONE)


def test_mean_needs_a_float(mirrored, central):
    """VAR-2: mirrored refuses at creation, central storage when a replica assigns."""
    with pytest.raises(ValueError, match="floating point"):
        variable(mirrored, 1, aggregation=MEAN)
    made = variable(central, 1, aggregation=MEAN)
    with pytest.raises(ValueError, match=r"expected torch\.int64"):
        central.run(lambda: made.assign(T(me())))
    assert int(made) == 1


# ------------------------------------------------------------------ reading


def test_operators_and_torch_functions(strategy):
    """VAR-17: everything acts on the value."""
    v = variable(strategy, [1.0, 2.0, 3.0])
    for context in (lambda fn: fn(), strategy.run):
        assert context(lambda: (v + 1).tolist()) == [2, 3, 4]
        assert context(lambda: (1 - v).tolist()) == [0, -1, -2]
        assert context(lambda: (v * v).tolist()) == [1, 4, 9]
        assert context(lambda: (2 / v)[0].item()) == 2
        assert context(lambda: (v @ v).item()) == 14
        assert context(lambda: (v**2)[1].item()) == 4
        assert context(lambda: (-v).sum().item()) == -6
        assert context(lambda: (v > 1).tolist()) == [False, True, True]
        assert context(lambda: v[1:].tolist()) == [2, 3]
        assert context(lambda: torch.sum(v).item()) == 6
        assert context(lambda: torch.stack([v, torch.ones(3)]).shape) == torch.Size([2, 3])
        assert context(lambda: torch.nn.functional.relu(v).tolist()) == [1, 2, 3]
        assert context(lambda: (torch.ones(3) + v).tolist()) == [2, 3, 4]
        assert context(lambda: np.asarray(v).tolist()) == [1, 2, 3]
        assert context(lambda: sg.convert_to_tensor(v).tolist()) == [1, 2, 3]
    assert len(v) == 3
    assert len({v, v}) == 1
    scalar = variable(strategy, 2.0)
    assert (float(scalar), int(scalar), bool(scalar)) == (2.0, 2, True)
    assert scalar == 2
    assert scalar != 3


def test_read_value_is_a_copy(strategy):
    """value() may show later writes, read_value() and numpy() do not."""
    v = variable(strategy, 1.0)
    kept, array = v.read_value(), v.numpy()
    v.assign(5.0)
    assert (float(kept), float(array), float(v)) == (1, 1, 5)
    kept += 1
    assert float(v) == 5


def test_the_inner_variable(central, mirrored):
    """VAR-17: get() gives what is behind."""
    v = variable(central, name="w", aggregation=SUM)
    inner = v.get()
    assert inner is not v
    assert isinstance(inner, sg.Variable)
    assert (inner.name, inner.device) == ("w", v.device)
    inner.assign(3.0)
    assert float(v) == 3
    m = variable(mirrored)
    assert mirrored.run(lambda: m.get().name).values == ("Variable", "Variable/replica_1")


def test_run_returns_a_variable_unwrapped(strategy):
    """RUN-7."""
    v = variable(strategy)
    assert strategy.run(lambda: v) is v
    assert strategy.run(lambda x: x, args=(v,)) is v


def test_handle(central, mirrored):
    """VAR-22."""
    m = variable(mirrored)
    with pytest.raises(ValueError, match="copies"):
        _ = m.handle
    assert mirrored.run(lambda: float(m.handle)) == 10.0
    assert float(variable(central).handle) == 10.0


def test_gradients_are_the_replicas_own(strategy):
    """VAR-17: a tracked variable gives each replica a gradient of its own."""
    v = variable(strategy, 2.0, trainable=True)

    def step():
        (v * (me() + 1.0)).backward()
        return v.grad.clone()

    result = strategy.run(step)
    expected = [float(i + 1) for i in range(strategy.num_replicas_in_sync)]
    assert [float(g) for g in strategy.local_results(result)] == expected
    (grad,) = torch.autograd.grad(v.value() ** 2, [v.value()])
    assert float(grad) == 4.0


def test_gradients_are_not_tracked_unless_asked():
    """A counter does not grow a graph."""
    v = sg.Variable(1.0)
    assert not (v + 1).requires_grad
    assert (sg.Variable(torch.ones(1, requires_grad=True)) + 1).requires_grad
    assert (sg.Variable(1.0, trainable=True) + 1).requires_grad


def test_variables_made_under_inference_mode_can_be_written(strategy):
    """A variable outlives the block it is made in."""
    with torch.inference_mode():
        v = variable(strategy, 1.0, trainable=True)
    v.assign_add(1.0)
    (v * 2).backward()
    assert float(v) == 2.0


# ------------------------------------------------------------------ writing outside replicas


def test_writing_outside(strategy):
    """VAR-14: in scope or not."""
    v = variable(strategy, [1.0, 2.0])
    assert v.assign([3.0, 4.0]).tolist() == [3, 4]
    with strategy.scope():
        assert v.assign_add(T([1.0, 1.0])).tolist() == [4, 5]
    assert v.assign_sub(np.ones(2, np.float32)).tolist() == [3, 4]
    assert v.assign([0.0, 0.0], read_value=False) is None
    assert [part.numpy().tolist() for part in v.values] == [[0, 0]] * len(v.values)
    assert strategy.run(lambda: v.numpy().tolist()) == [0, 0]


@pytest.mark.parametrize("how", ["assign", "assign_add", "assign_sub"])
def test_values_that_do_not_fit(strategy, how):
    """Wrong shape or type: refused, nothing changed."""
    v = variable(strategy, [1.0, 2.0])
    for bad in ([1.0], 1.0, [[1.0, 2.0]], T([1, 2]), T([1.0, 2.0], dtype=torch.float64)):
        with pytest.raises(ValueError, match="expected"):
            getattr(v, how)(bad)
    whole = variable(strategy, 1)
    with pytest.raises(ValueError, match=r"got torch.float32: expected torch\.int64"):
        getattr(whole, how)(1.5)
    assert v.numpy().tolist() == [1, 2]


def test_writing_under_another_strategy(central, mirrored):
    """VAR-14: distributed variables refuse; ordinary ones allow it."""
    other = sg.OneDeviceStrategy("cpu")
    distributed = [variable(central, aggregation=SUM), variable(mirrored, aggregation=SUM)]
    with make("central1") as single:
        ordinary = [variable(sg.OneDeviceStrategy("cpu")), variable(single), sg.Variable(1.0)]
    for context in (lambda fn: fn(), other.run):
        with other.scope() if context is not other.run else torch.no_grad():
            for v in distributed:
                with pytest.raises(RuntimeError, match="mixing different strategy objects"):
                    context(lambda v=v: v.assign(1.0))
            for v in ordinary:
                context(lambda v=v: v.assign(4.0))
                assert float(v) == 4
    assert [float(v) for v in distributed] == [10, 10]


def test_assigning_a_per_replica_value_outside(central, mirrored):
    """VAR-15."""
    value = sg.PerReplica([T(1.0), T(2.0)])
    v = variable(central)
    v.assign(value)
    assert float(v) == 1
    m = variable(mirrored)
    m.assign(value)
    assert [float(part) for part in m.values] == [1, 2]
    with make("central1") as single, pytest.raises(AttributeError, match="PerReplica"):
        variable(single).assign(sg.PerReplica([T(1.0)]))


# ------------------------------------------------------------------ writing in replicas

ERROR = "error"
TABLE = {
    # strategy, how: NONE, SUM, MEAN, ONLY_FIRST_REPLICA (start 10, replica i supplies i + 1)
    ("one", "assign"): ([1], [1], [1], [1]),
    ("central1", "assign"): ([1], [1], [1], [1]),
    ("central", "assign"): (ERROR, [3], [1.5], [1]),
    ("central", "assign_add"): (ERROR, [13], [11.5], [11]),
    ("central", "assign_sub"): (ERROR, [7], [8.5], [9]),
    ("mirrored", "assign"): ([1, 2], [3, 3], [1.5, 1.5], [1, 1]),
    ("mirrored", "assign_add"): ([11, 12], [13, 13], [11.5, 11.5], [11, 11]),
}


@pytest.mark.parametrize("aggregation", sg.VariableAggregation)
@pytest.mark.parametrize(("kind", "how"), TABLE)
def test_aggregation_table(kind, how, aggregation):
    """The table of section 4, and VAR-12: every replica gets the value after aggregation."""
    expected = TABLE[kind, how][aggregation.value]
    with make(kind) as strategy:
        v = variable(strategy, aggregation=aggregation)

        def step():
            return getattr(v, how)(T(me() + 1.0))

        if expected == ERROR:
            with pytest.raises(ValueError, match="aggregation SUM, MEAN or ONLY_FIRST_REPLICA"):
                strategy.run(step)
            assert float(v) == 10
            return
        result = strategy.run(step)
        assert [float(part) for part in v.values] == expected
        returned = [float(r) for r in strategy.local_results(result)]
        assert returned == (expected if len(returned) > 1 else expected[:1])
        nothing = strategy.run(lambda: getattr(v, how)(T(1.0 + me()), read_value=False))
        assert nothing is None


@pytest.mark.parametrize(
    ("aggregation", "outside"), [(NONE, ERROR), (SUM, 3.0), (MEAN, 1.5), (FIRST, 1.0)]
)
def test_synchronized_on_read(mirrored, aggregation, outside):
    """The table's last row: each copy its own, put together when read outside."""
    v = variable(mirrored, aggregation=aggregation, synchronization="ON_READ")
    mirrored.run(lambda: v.assign(T(me() + 1.0)))
    assert [float(part) for part in v.values] == [1, 2]
    assert [float(x) for x in mirrored.run(lambda: v.value()).values] == [1, 2]
    if outside == ERROR:
        with pytest.raises(ValueError, match="aggregation NONE"):
            float(v)
        assert "SyncOnReadVariable" in repr(v)
    else:
        assert float(v) == outside
        assert float(v + 1) == outside + 1


def test_synchronized_on_read_under_central_storage(central):
    """VAR-10: as AUTO: one variable, aggregated at once."""
    v = variable(central, 0.0, aggregation=SUM, synchronization="ON_READ")
    for _ in range(3):
        central.run(lambda: v.assign_add(T(me() + 1.0)))
    assert float(v) == 9


def test_writing_on_read_variables_outside(mirrored):
    """VAR-20."""
    summed = variable(mirrored, aggregation=SUM, synchronization="ON_READ")
    summed.assign(6.0)
    assert [float(part) for part in summed.values] == [3, 3]
    assert float(summed) == 6
    for how in ("assign_add", "assign_sub"):
        with pytest.raises(ValueError, match="summed when read"):
            getattr(summed, how)(1.0)
    mean = variable(mirrored, aggregation=MEAN, synchronization="ON_READ")
    mean.assign_add(2.0)
    assert [float(part) for part in mean.values] == [12, 12]
    rows = variable(mirrored, [1.0, 2.0, 3.0], aggregation=SUM, synchronization="ON_READ")
    with pytest.raises(NotImplementedError, match="synchronized on read"):
        rows.scatter_add(sparse([0], [1.0]))
    with pytest.raises(NotImplementedError, match="synchronized on read"):
        mirrored.run(lambda: rows.scatter_add(sparse([0], [1.0])))


@pytest.mark.parametrize("kind", ["central", "mirrored"])
def test_constants(kind):
    """VAR-11: the same number from all replicas: refused for SUM, once for the others."""
    with make(kind) as strategy:
        v = variable(strategy, aggregation=SUM)
        with pytest.raises(ValueError, match="not one per replica"):
            strategy.run(lambda: v.assign_add(1.0))
        assert [float(part) for part in v.values] == [10.0] * len(v.values)
        mean = variable(strategy, aggregation=MEAN)
        strategy.run(lambda: mean.assign(4.0))
        assert float(mean) == 4
        first = variable(strategy, aggregation=FIRST)
        strategy.run(lambda: first.assign_add(1.0))
        assert float(first) == 11


def test_copies_stay_equal_over_many_steps(mirrored):
    """ON_WRITE copies do not drift."""
    v = variable(mirrored, torch.zeros(3), aggregation=MEAN)
    for step in range(20):
        mirrored.run(lambda s=step: v.assign_add(torch.full((3,), me() + s + 0.1)))
    assert torch.equal(v.values[0].value(), v.values[1].value())


# ------------------------------------------------------------------ rows


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("add", [[3, 3], [2, 2], [4, 4]]),
        ("sub", [[-1, -1], [2, 2], [2, 2]]),
        ("mul", [[2, 2], [2, 2], [3, 3]]),
        ("div", [[0.5, 0.5], [2, 2], [3, 3]]),
        ("min", [[1, 1], [2, 2], [1, 1]]),
        ("max", [[2, 2], [2, 2], [3, 3]]),
        ("update", [[2, 2], [2, 2], [1, 1]]),
    ],
)
def test_scatter(strategy, how, expected):
    """scatter_*: rows by number, other rows untouched."""
    start = T([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    v = variable(strategy, start)
    result = getattr(v, f"scatter_{how}")(sparse([0, 2], [[2.0, 2.0], [1.0, 1.0]]))
    assert result.tolist() == expected
    assert v.numpy().tolist() == expected


def test_scatter_with_repeated_rows():
    """Duplicates accumulate; an update keeps the last; division and whole numbers too."""
    v = sg.Variable([1.0, 1.0, 8.0])
    v.scatter_add(sparse([1, 1], [2.0, 3.0]))
    assert v.numpy().tolist() == [1, 6, 8]
    v.scatter_mul(sparse([1, 1], [2.0, 3.0]))
    assert v.numpy().tolist() == [1, 36, 8]
    v.scatter_update(sparse([0, 0], [5.0, 7.0]))
    assert v.numpy().tolist() == [7, 36, 8]
    v.scatter_div(sparse([2, 2], [2.0, 4.0]))
    assert v.numpy().tolist() == [7, 36, 1]
    v.batch_scatter_update(sparse([], torch.zeros(0)))
    whole = sg.Variable([1, 5])
    whole.scatter_max(sparse([0, 1], T([3, 2]), size=2))
    assert whole.numpy().tolist() == [3, 5]


def test_scatter_refuses(strategy):
    """Dense, out of range, negative, wrong rows: nothing changes."""
    v = variable(strategy, [1.0, 2.0, 3.0])
    with pytest.raises(TypeError, match="sparse_coo_tensor"):
        v.scatter_add(T([1.0]))
    for ids in ([3], [-1]):
        with pytest.raises(ValueError, match="out of range"):
            v.scatter_add(sparse(ids, [1.0]))
    with pytest.raises(ValueError, match="rows of shape"):
        v.scatter_add(sparse([0], [[1.0]]))
    with pytest.raises(ValueError, match="rows of shape"):
        v.scatter_add(sparse([0], T([1])))
    with pytest.raises(ValueError, match="axes of indices"):
        v.scatter_add(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="scalar"):
        variable(strategy, 1.0).scatter_add(sparse([0], [1.0]))
    assert v.numpy().tolist() == [1, 2, 3]


def test_scatter_in_replicas_of_central_storage(central):
    """VAR-13: not aggregated; each replica's update in replica order."""
    v = variable(central, [0.0, 0.0, 0.0])
    central.run(lambda: v.scatter_add(sparse([1], [1.0])))
    assert v.numpy().tolist() == [0, 2, 0]
    for _ in range(10):
        central.run(lambda: v.scatter_update(sparse([0], [me() + 1.0])))
        assert v.numpy().tolist() == [2, 2, 0], "the last replica's stays"


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [(NONE, [[1, 0], [2, 0]]), (SUM, [[3, 0]] * 2), (MEAN, [[1.5, 0]] * 2), (FIRST, [[1, 0]] * 2)],
)
def test_scatter_in_replicas_of_mirrored(mirrored, aggregation, expected):
    """VAR-21: rows are aggregated; minimum, maximum and update cannot be."""
    v = variable(mirrored, [0.0, 0.0], aggregation=aggregation)
    mirrored.run(lambda: v.scatter_add(sparse([0], [me() + 1.0], size=2)))
    assert [part.numpy().tolist() for part in v.values] == expected
    for how in ("min", "max", "update"):
        method = getattr(v, f"scatter_{how}")
        if aggregation in (SUM, MEAN):
            with pytest.raises(NotImplementedError, match="rows cannot be combined"):
                mirrored.run(lambda m=method: m(sparse([0], [1.0], size=2)))
        else:
            mirrored.run(lambda m=method: m(sparse([0], [1.0], size=2)))


def test_sparse_read(strategy):
    """Rows in the order asked."""
    v = variable(strategy, torch.arange(6.0).reshape(3, 2))
    assert v.sparse_read([2, 0, 2]).tolist() == [[4, 5], [0, 1], [4, 5]]
    assert v.sparse_read(T([[1]])).shape == (1, 1, 2)
    with pytest.raises(ValueError, match="out of range"):
        v.sparse_read([3])
    with pytest.raises(TypeError, match="expected integers"):
        v.sparse_read([0.5])


# ------------------------------------------------------------------ creation in replicas, copying


@pytest.mark.parametrize("kind", ["central", "mirrored"])
def test_variables_made_in_a_replica_are_shared(kind):
    """RUN-9: replica 0 creates, the others receive the same."""
    with make(kind) as strategy:
        result = strategy.run(
            lambda: (sg.Variable(5.0 + me(), name="a"), sg.Variable(7.0, name="b"))
        )
        first, second = result
        assert isinstance(first, sg.Variable)
        assert float(first) == 5.0, "replica 0's initial value"
        assert float(second) == 7.0
        with pytest.raises(RuntimeError, match="creation of variable"):
            strategy.run(lambda: sg.Variable(1.0, name=f"name{me()}"))


def test_deepcopy(strategy):
    """VAR-18."""
    v = variable(strategy, [1.0, 2.0], name="w", aggregation=SUM)
    twin = copy.deepcopy(v)
    assert (twin.name, twin.aggregation, twin.device) == ("w", SUM, v.device)
    assert twin.distribute_strategy is strategy
    twin.assign([5.0, 5.0])
    assert v.numpy().tolist() == [1, 2]
    assert twin.numpy().tolist() == [5, 5]
    assert len(twin.values) == len(v.values)
    with strategy.scope():
        copy.deepcopy(v)
    with sg.OneDeviceStrategy("cpu").scope(), pytest.raises(RuntimeError, match="mixing"):
        copy.deepcopy(v)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.copy(v)


def test_deepcopy_of_copies_keeps_each(mirrored):
    """A variable synchronized on read is copied copy by copy."""
    v = variable(mirrored, aggregation=SUM, synchronization="ON_READ")
    mirrored.run(lambda: v.assign(T(me() + 1.0)))
    twin = copy.deepcopy(v)
    assert [float(part) for part in twin.values] == [1, 2]
    assert float(twin) == 3


def test_pickling_is_refused_with_the_remedy(strategy):
    """A variable lives with its strategy; its value can be saved."""
    v = variable(strategy, [1.0])
    with pytest.raises(TypeError, match="Save its value"):
        pickle.dumps(v)
    assert pickle.loads(pickle.dumps(v.read_value())).tolist() == [1]


def test_a_replica_elsewhere_reads_a_copy_made_once():
    """A leaf on another device is copied when the variable moved on, and only then."""
    with torch.device("cpu"):
        v = sg.Variable([1.0], trainable=True)
    replica = Replica(1, ReplicaGroup(None, [Device()]), Device(), None)
    replica.device = torch.device("meta")
    leaf = v._storage.read_from(replica)
    assert leaf.device.type == "meta"
    assert leaf.requires_grad
    version = leaf._version
    assert v._storage.read_from(replica) is leaf
    assert leaf._version == version, "what autograd saved stays valid"
    v.assign([2.0])
    assert v._storage.read_from(replica) is leaf
    assert leaf._version > version


def test_repr_shows_state(strategy):
    """repr names the variable, its shape, type, device and value."""
    text = repr(variable(strategy, [1.5], name="w"))
    assert "'w'" in text
    assert "(1,)" in text
    assert "CPU:0" in text
    assert "1.5" in text


def test_per_replica_local_results_of_variables(central, mirrored):
    """LOC-2."""
    assert central.local_results(v := variable(central)) == (v,)
    m = variable(mirrored)
    parts = mirrored.local_results(m)
    assert len(parts) == 2
    assert all(isinstance(part, sg.Variable) for part in parts)


@pytest.mark.parametrize("ask", [lambda v: v.numpy(), np.asarray], ids=["numpy", "asarray"])
def test_a_type_numpy_does_not_have_is_named_with_the_remedy(ask, strategy):
    with strategy.scope():
        v = sg.Variable(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"torch\.bfloat16 .*\.float\(\)\.numpy\(\)"):
        ask(v)
    assert torch.as_tensor(v).float().numpy().tolist() == [1.5, -2.0]
