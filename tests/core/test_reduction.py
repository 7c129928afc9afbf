"""reduce and gather (RED-*, GAT-*), on every single-machine strategy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import stratagem as sg

T = torch.tensor


def central(size=2):
    return sg.CentralStorageStrategy([f"cpu:{i}" for i in range(size)])


def mirrored(size=2):
    return sg.MirroredStrategy([f"cpu:{i}" for i in range(size)])


@pytest.fixture(params=[central, mirrored], ids=["central", "mirrored"])
def two(request):
    with request.param() as strategy:
        yield strategy


@pytest.fixture
def one():
    return sg.OneDeviceStrategy("cpu:0")


def per(*parts):
    return sg.PerReplica(parts)


# ------------------------------------------------------------------ reduce


def test_axis_is_mandatory(two, one):
    """Section 3."""
    for strategy in (two, one):
        with pytest.raises(TypeError):
            strategy.reduce("sum", 1)


@pytest.mark.parametrize("op", ["sum", "SUM", "Sum", sg.ReduceOp.SUM])
def test_operations_by_name(two, op):
    """RED-1."""
    assert two.reduce(op, per(T(1.0), T(2.0)), axis=None) == 3.0


def test_unknown_operations(two, one):
    """RED-1."""
    for strategy in (two, one):
        with pytest.raises(ValueError, match="'product' is not known"):
            strategy.reduce("product", per(T(1.0), T(2.0)), axis=None)
        with pytest.raises(TypeError, match="expected ReduceOp"):
            strategy.reduce(3, per(T([1.0]), T([2.0])), axis=0)
        with pytest.raises(AssertionError, match="expected ReduceOp"):
            strategy.reduce(sg.VariableAggregation.SUM, per(T(1.0), T(2.0)), axis=None)


def test_elementwise(two):
    """RED-2."""
    value = per(torch.arange(4.0), torch.arange(4.0, 8.0))
    assert two.reduce("sum", value, axis=None).tolist() == [4, 6, 8, 10]
    assert two.reduce("mean", value, axis=None).tolist() == [2, 3, 4, 5]


def test_along_an_axis(two):
    """RED-3: the right denominator for uneven and empty parts."""
    assert two.reduce("sum", per(torch.arange(4), torch.arange(4, 8)), axis=0) == 28
    assert two.reduce("mean", per(T([1.0, 2.0]), torch.ones(0)), axis=0) == 1.5
    assert two.reduce("mean", per(torch.arange(4.0), T([4.0, 5.0])), axis=0) == 2.5
    assert two.reduce("mean", per(torch.arange(4.0), T([4.0, 5.0])), axis=-1) == 2.5


def test_several_axes(two):
    """RED-4: a tuple; a list too (the error in tf.distribute was a bug, 13.1)."""
    value = per(torch.ones(2, 3), torch.full((1, 3), 4.0))
    for axes in ((0, 1), [0, 1], (-1, 0)):
        assert two.reduce("sum", value, axis=axes) == 18
        assert two.reduce("mean", value, axis=axes) == 2


@pytest.mark.parametrize("axis", [1, -2, (0, 1)])
def test_axis_out_of_range(two, one, axis):
    """RED-4."""
    for strategy, value in ((two, per(T([1.0]), T([2.0]))), (one, T([1.0]))):
        with pytest.raises(ValueError, match="out of range"):
            strategy.reduce("sum", value, axis=axis)


@pytest.mark.parametrize("axis", [0.0, "0", True, (0, "1"), object()])
def test_axis_of_the_wrong_type(two, one, axis):
    """RED-4."""
    for strategy, value in ((two, per(T([1.0]), T([2.0]))), (one, T([1.0]))):
        with pytest.raises(TypeError, match="not a dimension"):
            strategy.reduce("sum", value, axis=axis)


def test_remaining_dimensions_stay(two):
    """RED-5."""
    value = per(T([[1.0, 2.0], [3.0, 4.0]]), T([[5.0, 6.0], [7.0, 8.0]]))
    assert two.reduce("mean", value, axis=1).tolist() == [3.5, 5.5]
    with pytest.raises(ValueError, match="different shapes"):
        two.reduce("sum", per(torch.ones(2, 2), torch.ones(2, 3)), axis=0)


def test_shapes_and_types_must_agree(two):
    """RED-6, LIM-19: the message says to give an axis."""
    with pytest.raises(ValueError, match=r"\(4,\), \(2,\).*axis=0"):
        two.reduce("sum", per(torch.ones(4), torch.ones(2)), axis=None)
    with pytest.raises(ValueError, match="different dtypes"):
        two.reduce("sum", per(torch.ones(2), torch.ones(2, dtype=torch.int64)), axis=None)


def test_mean_of_integers_is_floating_point(two, one):
    """RED-7 with 13.6: in torch's default type."""
    for value, axis in ((per(T(1), T(2)), None), (per(T([1]), T([2])), 0)):
        result = two.reduce("mean", value, axis=axis)
        assert result.dtype is torch.get_default_dtype()
        assert result == 1.5
    assert one.reduce("mean", T([1, 2]), axis=0) == 1.5


def test_sum_of_booleans_is_a_count(two):
    """torch adds booleans by "or"; a reduced sum of them must count."""
    assert two.reduce("sum", per(T([True, False]), T([True, True])), axis=None).tolist() == [2, 1]
    assert two.reduce("sum", per(T([True, False]), T([True, True])), axis=0) == 3
    assert two.reduce("mean", per(T(True), T(False)), axis=None) == 0.5


def test_plain_value_without_axis(two):
    """RED-8."""
    value = T([1.0, 2.0])
    assert two.reduce("mean", value, axis=None) is value
    for plain in (value, 5, "x", torch.zeros(2)):
        with pytest.raises(ValueError, match="not one per replica"):
            two.reduce("sum", plain, axis=None)
    zeros = two.reduce("sum", np.zeros((2, 3)), axis=None)
    assert zeros.shape == (2, 3)
    assert not zeros.any()
    assert two.reduce("sum", 0, axis=None) == 0


def test_plain_tensor_with_axis(two):
    """RED-9: as if every replica had it."""
    assert two.reduce("sum", T([1.0, 2.0]), axis=0) == 6
    assert two.reduce("mean", T([1.0, 2.0]), axis=0) == 1.5


def test_one_device_reduces_nothing(one):
    """RED-10, ODS-3."""
    foreign = per(1, 2)
    for value in (None, [1], 3, foreign, T([1.0])):
        assert one.reduce("sum", value, axis=None) is value
    assert one.reduce("sum", T([1.0, 2.0]), axis=0) == 3
    assert one.reduce("mean", T([[1.0, 2.0]]), axis=1).tolist() == [1.5]


def test_central_storage_with_one_replica():
    """RED-10."""
    with central(1) as strategy:
        assert strategy.reduce("sum", per(T(5.0)), axis=None) == 5.0
        assert strategy.reduce("sum", T(5.0), axis=None) == 5.0
        converted = strategy.reduce("sum", 5.0, axis=None)
        assert isinstance(converted, torch.Tensor)
        with pytest.raises(ValueError, match="None"):
            strategy.reduce("sum", None, axis=None)


def test_nested_values():
    """RED-11: central storage refuses a nest, mirrored maps over it."""
    nest = {"a": per(T(1.0), T(2.0)), "b": [per(T([1.0]), T([3.0]))]}
    with central() as strategy, pytest.raises(ValueError, match="Reduce each of its parts"):
        strategy.reduce("sum", nest, axis=None)
    with mirrored() as strategy:
        result = strategy.reduce("sum", nest, axis=None)
        assert result["a"] == 3
        assert result["b"][0].tolist() == [4]


def test_the_result_is_on_the_current_device(two):
    """RED-12."""
    value = per(torch.ones(1), torch.ones(1))
    assert two.reduce("sum", value, axis=None).device.type == "cpu"
    with torch.device("meta"):
        assert two.reduce("sum", value, axis=None).device.type == "meta"
        assert two.reduce("sum", value, axis=0).device.type == "meta"
        assert two.gather(value, axis=0).device.type == "meta"


def test_numbers_and_sparse_tensors(two):
    """RED-13: numbers are converted; sparse sums keep every entry, in replica order."""
    assert two.reduce("sum", per(5, 6), axis=None) == 11
    parts = [torch.sparse_coo_tensor([[1]], [[float(i + 1)]], (3, 1)) for i in range(2)]
    total = two.reduce("sum", per(*parts), axis=None)
    assert total._indices().tolist() == [[1, 1]]
    assert total._values().tolist() == [[1.0], [2.0]]
    assert two.reduce("mean", per(*parts), axis=None).to_dense().tolist() == [[0], [1.5], [0]]


def test_reduce_is_differentiable(two):
    """A loss reduced over replicas can be differentiated outside run."""
    x = torch.ones(2, requires_grad=True)
    total = two.reduce("mean", per(x[0] * 3, x[1] * 5), axis=None)
    total.backward()
    assert x.grad.tolist() == [1.5, 2.5]


def test_components_are_left_alone(two):
    """Summing three parts does not write into the first."""
    with mirrored(3) as three:
        parts = [torch.ones(2) for _ in range(3)]
        assert three.reduce("sum", per(*parts), axis=None).tolist() == [3, 3]
        assert all(part.tolist() == [1, 1] for part in parts)


def test_only_absent_components(two):
    """Nothing at all cannot be reduced."""
    with pytest.raises(ValueError, match="nothing to reduce"):
        two.reduce("sum", per(None, None), axis=None)


# ------------------------------------------------------------------ gather


def test_gather_joins_in_replica_order(two):
    """GAT-1."""
    assert two.gather(per(T([1, 2]), T([3])), axis=0).tolist() == [1, 2, 3]
    left, right = torch.zeros(2, 1), torch.ones(2, 3)
    assert two.gather(per(left, right), axis=1).tolist() == [[0, 1, 1, 1], [0, 1, 1, 1]]


@pytest.mark.parametrize(
    ("parts", "axis"),
    [
        ((torch.ones(2, 2), torch.ones(2, 3)), 0),
        ((torch.ones(2), torch.ones(2, 1)), 0),
        ((T(1.0), T(2.0)), 0),
        ((torch.ones(2), torch.ones(2)), 1),
        ((torch.ones(2), torch.ones(2)), -2),
        ((torch.ones(2), torch.ones(2, dtype=torch.int64)), 0),
    ],
    ids=["other dimension", "rank", "rank 0", "axis", "negative axis", "dtype"],
)
def test_gather_refuses(two, parts, axis):
    """GAT-1, LIM-18."""
    with pytest.raises(ValueError):
        two.gather(per(*parts), axis=axis)


def test_negative_axes():
    """GAT-1: counted from the end by central storage, refused by mirrored."""
    value = per(torch.zeros(1, 1), torch.ones(1, 1))
    with central() as strategy:
        assert strategy.gather(value, axis=-1).tolist() == [[0, 1]]
    with mirrored() as strategy, pytest.raises(ValueError, match="0 ≤ axis < 2"):
        strategy.gather(value, axis=-1)


def test_gather_of_sparse_tensors(two, one):
    """GAT-2."""
    sparse = torch.eye(2).to_sparse()
    for strategy in (two, one):
        for value in (sparse, per(sparse, sparse)):
            with pytest.raises(NotImplementedError, match="sparse"):
                strategy.gather(value, axis=0)


def test_gather_of_plain_values_and_nests(two, one):
    """GAT-3: plain values unchanged; a nest's parts are all gathered (13.1: nothing is dropped)."""
    value = T(1.0)
    for strategy in (two, one):
        assert strategy.gather(value, axis=5) is value
    nest = two.gather({"a": per(T([1]), T([2])), "b": 3}, axis=0)
    assert nest["a"].tolist() == [1, 2]
    assert nest["b"] == 3
