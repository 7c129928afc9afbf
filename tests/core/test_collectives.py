"""all_reduce and all_gather: values and gradients (AR-*, AG-*)."""

from __future__ import annotations

import pytest
import torch
from meeting import me

import stratagem as sg

T = torch.tensor


@pytest.fixture(params=[sg.CentralStorageStrategy, sg.MirroredStrategy])
def two(request):
    with request.param(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


def all_reduce(op, value):
    return sg.get_replica_context().all_reduce(op, value)


def all_gather(value, axis):
    return sg.get_replica_context().all_gather(value, axis)


@pytest.mark.parametrize(("op", "expected"), [("sum", 3.0), ("MEAN", 1.5), (sg.ReduceOp.SUM, 3.0)])
def test_all_reduce_of_a_nest(two, op, expected):
    """AR-1."""
    result = two.run(lambda: all_reduce(op, {"a": [T(me() + 1.0)], "b": (T([me() + 1.0]),)}))
    assert result["a"][0].values == (T(expected), T(expected))
    assert [t.tolist() for t in result["b"][0].values] == [[expected], [expected]]


def test_unknown_operation(two):
    """AR-1: on one device too."""
    for strategy in (two, sg.OneDeviceStrategy("cpu"), sg.get_strategy()):
        with pytest.raises(ValueError, match="'max' is not known"):
            strategy.run(lambda: all_reduce("max", T(1.0)))


def test_mean_of_integers(two):
    """AR-2 with 13.6."""
    result = two.run(lambda: all_reduce("mean", T(me())))
    assert [float(v) for v in result.values] == [0.5, 0.5]
    assert result.values[0].dtype is torch.get_default_dtype()


def test_numbers_are_refused(two):
    """AR-3."""
    with pytest.raises(ValueError, match="expected tensors"):
        two.run(lambda: all_reduce("sum", 1.0))
    with pytest.raises(ValueError, match="expected tensors"):
        two.run(lambda: all_gather([1.0], 0))


@pytest.mark.parametrize("value", [5, None, "x", T([1.0])])
def test_alone_the_value_is_returned(value):
    """AR-3, AG-2: on one device and in the default context, the axis not even checked."""
    with sg.CentralStorageStrategy(["cpu:0"]) as single:
        for strategy in (sg.OneDeviceStrategy("cpu"), sg.get_strategy(), single):
            assert strategy.run(lambda: all_reduce("sum", value)) is value
            assert strategy.run(lambda: all_gather(value, 77)) is value


def test_gradient_of_all_reduce(two):
    """AR-4: all-sum of the upstream gradients; all-mean for the mean."""

    def step(op):
        x = torch.ones((), requires_grad=True)
        (all_reduce(op, x) * (me() + 1)).backward()
        return x.grad

    assert [float(g) for g in two.run(step, args=("sum",)).values] == [3, 3]
    assert [float(g) for g in two.run(step, args=("mean",)).values] == [1.5, 1.5]


def test_gradient_of_a_nest_with_unused_and_integer_parts(two):
    """Parts no gradient flows through count as zero; integers take none."""

    def step():
        x = torch.ones(2, requires_grad=True)
        y = torch.ones(2, requires_grad=True)
        reduced = all_reduce("sum", {"x": x, "y": y, "n": T([1, 2])})
        (reduced["x"] * (me() + 1)).sum().backward()
        return x.grad, y.grad, reduced["n"]

    x, y, n = two.run(step)
    assert [g.tolist() for g in x.values] == [[3, 3]] * 2
    assert [g.tolist() for g in y.values] == [[0, 0]] * 2
    assert [v.tolist() for v in n.values] == [[2, 4]] * 2


def test_all_reduce_of_sparse_tensors(two):
    """AR-5: forward works, the gradient is an error."""

    def step(*, backward):
        leaf = torch.ones(1, requires_grad=True)
        value = torch.sparse_coo_tensor([[me()]], leaf, (2,))
        total = all_reduce("sum", value if backward else value.detach())
        if backward:
            total.to_dense().sum().backward()
        return total.to_dense().tolist()

    assert two.run(step, kwargs={"backward": False}) == [1.0, 1.0]
    with pytest.raises(NotImplementedError, match="sparse"):
        two.run(step, kwargs={"backward": True})


def test_results_belong_to_their_replica(two):
    """Writing into one replica's result does not show in another's."""

    def step():
        total = all_reduce("sum", torch.ones(2))
        joined = all_gather(torch.ones(1), 0)
        sg.get_replica_context().merge_call(lambda _: None)
        total += me()
        joined += me()
        sg.get_replica_context().merge_call(lambda _: None)
        return total, joined

    total, joined = two.run(step)
    assert [t.tolist() for t in total.values] == [[2, 2], [3, 3]]
    assert [t.tolist() for t in joined.values] == [[1, 1], [2, 2]]


def test_all_gather(two):
    """AG-1."""

    def step():
        rows = torch.full((me() + 1, 2), float(me()))
        return all_gather({"a": rows, "b": [torch.full((1,), float(me()))]}, axis=0)

    result = two.run(step)
    assert [t.tolist() for t in result["a"].values] == [[[0, 0], [1, 1], [1, 1]]] * 2
    assert [t.tolist() for t in result["b"][0].values] == [[0, 1]] * 2
    columns = two.run(lambda: all_gather(torch.full((2, me() + 1), float(me())), axis=1))
    assert columns.values[0].tolist() == [[0, 1, 1], [0, 1, 1]]
    assert two.run(lambda: all_gather(torch.ones(1, 2), axis=-1)).values[1].shape == (1, 4)


def test_all_gather_refuses(two):
    """AG-1."""
    with pytest.raises(ValueError, match="scalars cannot be gathered"):
        two.run(lambda: all_gather(T(1.0), 0))
    with pytest.raises(ValueError, match="out of range"):
        two.run(lambda: all_gather(torch.ones(1), 1))
    with pytest.raises(ValueError, match="cannot be joined"):
        two.run(lambda: all_gather(torch.ones(1, me() + 1), 0))
    for strategy in (two, sg.OneDeviceStrategy("cpu"), sg.get_strategy()):
        with pytest.raises(NotImplementedError, match="sparse"):
            strategy.run(lambda: all_gather(torch.eye(2).to_sparse(), 0))


@pytest.mark.parametrize("axis", [0, -1])
def test_gradient_of_all_gather(two, axis):
    """AG-3."""
    weights = T([1.0, 2.0, 3.0])

    def step():
        x = torch.ones(me() + 1, requires_grad=True)
        (all_gather(x, axis) * weights).sum().backward()
        return x.grad

    assert [g.tolist() for g in two.run(step).values] == [[2], [4, 6]]


def test_collectives_under_no_grad(two):
    """No graph is built, nothing waits for a backward pass."""

    def step():
        x = torch.ones(1, requires_grad=True)
        with torch.no_grad():
            return all_reduce("sum", x).requires_grad, all_gather(x, 0).requires_grad

    assert two.run(step) == (False, False)


def test_second_derivatives_agree_with_one_device(two):
    """A whole computation through collectives equals the same one on the joined data."""
    data = torch.arange(6.0)

    def step(part):
        x = part.clone().requires_grad_()
        mean = all_reduce("sum", x.sum()) / 6
        variance = all_reduce("sum", ((x - mean) ** 2).sum()) / 6
        (variance / sg.get_replica_context().num_replicas_in_sync).backward()
        return x.grad

    whole = data.clone().requires_grad_()
    whole.var(correction=0).backward()
    parts = two.run(step, args=(sg.PerReplica([data[:4], data[4:]]),))
    assert torch.allclose(torch.cat(parts.values), whole.grad, atol=1e-6)
