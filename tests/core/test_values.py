"""Distributed values, and the walk through structures (VAL-*, RUN-2 … RUN-6)."""

from __future__ import annotations

import collections
import types
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem._core import values
from stratagem._core.values import merge, split, wrap


class Point(NamedTuple):
    x: object
    y: object


@pytest.fixture
def two():
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


# ------------------------------------------------------------------ PerReplica and Mirrored


def test_per_replica_holds_components(two):
    """VAL-1."""
    value = sg.PerReplica([torch.tensor(1.0), torch.tensor(2.0)])
    assert value.values == (torch.tensor(1.0), torch.tensor(2.0))
    assert isinstance(value, sg.DistributedValues)
    assert repr(value) == "PerReplica:{\n  0: tensor(1.),\n  1: tensor(2.)\n}"
    assert str(value) == repr(value)
    for wrong in (lambda: value[0], lambda: value + 1, lambda: 1 + value, lambda: -value):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match=r"strategy\.reduce"):
        sg.convert_to_tensor(value)
    with pytest.raises(ValueError, match="outside a replica"):
        torch.add(value, 1)
    with pytest.raises(ValueError, match="outside a replica"):
        np.asarray(value)

    def inside():
        return sg.convert_to_tensor(value) * 10, torch.add(value, 1), float(np.asarray(value))

    scaled, added, array = two.run(inside)
    assert [float(x) for x in scaled.values] == [10, 20]
    assert [float(x) for x in added.values] == [2, 3]
    assert array.values == (1, 2)


def test_mirrored_acts_as_its_value(two):
    """VAL-2."""
    value = sg.Mirrored([torch.tensor(3.0), torch.tensor(3.0)])
    assert value + 1 == 4.0
    assert 1 - value == -2.0
    assert value * value == 9.0
    assert -value == -3.0
    assert bool(value > 2)
    assert sg.convert_to_tensor(value) == 3.0
    assert torch.sqrt(sg.Mirrored([torch.tensor(4.0)])) == 2.0
    different = sg.Mirrored([1.0, 2.0])
    assert two.run(lambda: different + 1).values == (2.0, 3.0)
    assert sg.Mirrored([2, 2]) + torch.ones(1) == torch.tensor([3.0])
    assert len({value, different}) == 2, "hashable by identity"


def test_mirrored_prefers_the_current_device():
    """VAL-2: in cross-replica context the component on the current device, else the first."""
    value = sg.Mirrored([torch.ones(1, device="meta"), torch.ones(1)])
    assert sg.convert_to_tensor(value).device.type == "cpu"
    with torch.device("meta"):
        assert sg.convert_to_tensor(value).device.type == "meta"


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.asarray])
def test_torchs_own_makers_take_our_values(make, two):
    """They never ask __torch_function__: variables, mirrored values, and a replica's component."""
    with two.scope():
        variable, number = sg.Variable([1.0, 2.0]), sg.Variable(3.0)
    assert make(variable).tolist() == [1.0, 2.0]
    assert make(number).item() == 3.0
    component = sg.PerReplica([torch.tensor(4.0), torch.tensor(5.0)])
    assert two.run(lambda: make(component).item()).values == (4.0, 5.0)
    with pytest.raises(ValueError, match="PerReplica"):
        make(component)


def test_convert_to_tensor():
    """Numbers, arrays, lists and variables; no silent change of a tensor's type."""
    assert torch.equal(sg.convert_to_tensor([1, 2]), torch.tensor([1, 2]))
    assert torch.equal(sg.convert_to_tensor(np.ones(2)), torch.ones(2, dtype=torch.float64))
    assert sg.convert_to_tensor(1, dtype=torch.float32).dtype is torch.float32
    variable = sg.Variable([1.0])
    assert torch.equal(sg.convert_to_tensor(variable), torch.ones(1))
    with pytest.raises(ValueError, match="cannot convert"):
        sg.convert_to_tensor(variable, dtype=torch.int64)


def test_enums():
    """VAL-3."""
    assert {op.name for op in sg.ReduceOp} == {"SUM", "MEAN"}
    assert {a.name: a.value for a in sg.VariableAggregation} == {
        "NONE": 0,
        "SUM": 1,
        "MEAN": 2,
        "ONLY_FIRST_REPLICA": 3,
    }
    assert {s.name: s.value for s in sg.VariableSynchronization} == {
        "AUTO": 0,
        "NONE": 1,
        "ON_WRITE": 2,
        "ON_READ": 3,
    }
    assert sg.VariableAggregation.SUM.as_reduce_op() is sg.ReduceOp.SUM
    assert sg.VariableAggregation.MEAN.as_reduce_op() is sg.ReduceOp.MEAN
    for other in ("NONE", "ONLY_FIRST_REPLICA"):
        with pytest.raises(ValueError, match="expected SUM or MEAN"):
            sg.VariableAggregation[other].as_reduce_op()


# ------------------------------------------------------------------ slicing


def test_arguments_are_cut_by_a_walk(two):
    """RUN-2: lists, tuples, dicts, named tuples; the rest is the same object everywhere."""
    shared = object()
    tensor = torch.ones(2)
    args = (
        [sg.PerReplica([1, 2]), shared],
        {"a": (sg.Mirrored([3, 4]),), "b": tensor},
        Point(sg.PerReplica([5, 6]), shared),
    )
    seen = {}

    def step(*given, **named):
        seen[int(sg.get_replica_context().replica_id_in_sync_group)] = (given, named)

    two.run(step, args=args, kwargs={"k": sg.PerReplica(["x", "y"])})
    for i in (0, 1):
        (first, second, third), named = seen[i]
        assert first == [i + 1, shared]
        assert second["a"] == (i + 3,)
        assert second["b"] is tensor
        assert third == Point(i + 5, shared)
        assert type(third) is Point
        assert named == {"k": "xy"[i]}


def test_nests_without_distributed_values_are_not_rebuilt():
    """RUN-2: the same object on all replicas."""
    tree = {"a": [1, (2, 3)]}
    assert split(tree, 2) is None
    inner = [1, 2]
    parts = split((sg.PerReplica([1, 2]), inner), 2)
    assert parts[0][1] is inner
    assert parts[1][1] is inner


def test_variables_and_closures_are_not_cut(two):
    """RUN-2."""
    with two.scope():
        variable = sg.Variable(1.0)
    captured = sg.PerReplica([1, 2])
    assert two.run(lambda v: v is variable, args=(variable,))
    assert two.run(lambda: captured) is captured


def test_too_few_and_too_many_components(two):
    """RUN-3."""
    with pytest.raises(IndexError, match="replica 1 has no component"):
        two.run(lambda x: x, args=(sg.PerReplica([1]),))
    assert two.run(lambda x: x, args=(sg.PerReplica([1, 2, 3]),)).values == (1, 2)


def test_other_containers():
    """Whatever torch's pytree knows, and mappings it does not."""

    @dataclass
    class Pair:
        left: object
        right: object

    torch.utils._pytree.register_pytree_node(
        Pair, lambda pair: ([pair.left, pair.right], None), lambda parts, _: Pair(*parts)
    )
    ordered = collections.OrderedDict(b=sg.PerReplica([1, 2]), a=3)
    assert split(ordered, 2) == [
        collections.OrderedDict(b=1, a=3),
        collections.OrderedDict(b=2, a=3),
    ]
    default = collections.defaultdict(list, x=sg.PerReplica([1, 2]))
    part = split(default, 2)[1]
    assert part["x"] == 2
    assert part["missing"] == []
    queue = collections.deque([sg.PerReplica([1, 2])])
    assert split(queue, 2) == [collections.deque([1]), collections.deque([2])]
    pair = split(Pair(sg.PerReplica([1, 2]), 5), 2)[1]
    assert (pair.left, pair.right) == (2, 5)
    user = collections.UserDict(x=sg.PerReplica([1, 2]))
    assert split(user, 2)[0] == {"x": 1}

    class Rows(list):
        pass

    rows = split(Rows([sg.PerReplica([1, 2]), 7]), 2)[1]
    assert type(rows) is Rows
    assert rows == [2, 7]
    assert split(torch.Size([1, 2]), 2) is None
    largest = torch.max(torch.eye(2), dim=0)
    assert type(merge([largest, largest])) is type(largest)
    frozen = types.MappingProxyType({"x": sg.PerReplica([1, 2])})
    assert split(frozen, 2)[1]["x"] == 2


# ------------------------------------------------------------------ merging


def test_results_are_merged(two):
    """RUN-6: structure kept, the same object once, everything else per replica."""
    shared = torch.ones(1)

    def step():
        i = int(sg.get_replica_context().replica_id_in_sync_group)
        return {"t": [shared, None, torch.tensor(i)], "p": Point(i, np.ones(1)), "s": {1, 2}}

    result = two.run(step)
    assert result["t"][0] is shared
    assert result["t"][1] is None
    assert isinstance(result["t"][2], sg.PerReplica)
    assert result["p"].x.values == (0, 1)
    assert isinstance(result["p"].y, sg.PerReplica)
    assert isinstance(result["s"], sg.PerReplica), "a set is a leaf"


@pytest.mark.parametrize("value", [None, True, 100_000, 0.1, "text", b"bytes"])
def test_plain_values_are_compared_by_value(value):
    """Spec 13.5: small ints are no accident here."""
    kind = type(value)
    others = [value, value if value is None else kind(eval(repr(value)))]
    result = merge(others)
    assert result == value
    assert type(result) is kind


def test_plain_values_of_different_type_or_value_stay_apart():
    """Spec 13.5: 1, True and 1.0 are not the same result."""
    assert merge([1, True]).values == (1, True)
    assert merge([1, 1.0]).values == (1, 1.0)
    assert merge([1, 2]).values == (1, 2)
    assert merge([None, 3]).values == (None, 3)
    assert isinstance(merge([(), ()]), tuple)


def test_one_replica_wraps_nothing():
    """RUN-6: with R=1."""
    with sg.CentralStorageStrategy(["cpu:0"]) as strategy:
        result = strategy.run(lambda: [torch.ones(1), 5])
        assert isinstance(result[0], torch.Tensor)
        assert result[1] == 5


@pytest.mark.parametrize(
    "results",
    [([1], (1,)), ([1], [1, 2]), ({"a": 1}, {"b": 1}), ({"a": 1}, 1), (1, [1]), ((1, [2]), (1, 2))],
)
def test_different_structures_are_refused(two, results):
    """RUN-6.1."""

    def step():
        return results[int(sg.get_replica_context().replica_id_in_sync_group)]

    with pytest.raises(AssertionError, match="different structures"):
        two.run(step)


def test_keys_in_another_order_are_the_same_structure():
    """Dictionaries are equal whatever the order of their keys."""
    assert merge([{"a": 1, "b": 2}, {"b": 3, "a": 1}])["b"].values == (2, 3)


def test_containers_keep_their_type():
    """RUN-6.1: also those a plain call with a dict could not rebuild."""
    parts = [collections.defaultdict(int, a=i) for i in range(2)]
    merged = merge(parts)
    assert type(merged) is collections.defaultdict
    assert merged["a"].values == (0, 1)
    assert merged["nothing"] == 0


def test_wrap_always_wraps():
    """VFF-1: even identical objects, even one replica."""
    assert wrap([5, 5]).values == (5, 5)
    assert wrap([{"a": None}])["a"].values == (None,)
    with pytest.raises(AssertionError, match="different structures"):
        wrap([[1], [1, 2]])


_leaves = st.none() | st.integers() | st.text(max_size=2)
_trees = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(tree=_trees, size=st.integers(2, 4))
def test_wrapping_then_cutting_gives_the_parts_back(tree, size):
    """split undoes wrap, and merge of equal trees is the tree."""
    trees = [values.map_leaves(lambda leaf, i=i: (leaf, i), tree) for i in range(size)]
    marked = [values.map_leaves(str, t) for t in trees]
    wrapped = wrap(marked)
    parts = split(wrapped, size)
    assert parts == marked or (parts is None and not values.leaves(tree))
    assert merge([tree] * size) == tree


@pytest.mark.parametrize("value", ["x", None, object(), {"a": 1}])
def test_values_that_are_no_tensors_raise(value):
    with pytest.raises(TypeError, match=r"cannot be made a tensor .*: expected a tensor"):
        sg.convert_to_tensor(value)
    with sg.OneDeviceStrategy("cpu:0").scope():
        variable = sg.Variable(1.0)
    with pytest.raises(TypeError, match="cannot be made a tensor"):
        variable.assign(value)
    assert float(variable) == 1.0
