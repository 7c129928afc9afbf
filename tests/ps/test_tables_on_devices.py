"""Tables used by replicas on a device that is not the host: rows come over, gradients go back.

No such device is needed: a tensor that says it is on ``meta`` holds numbers in host memory, and refuses to be used
together with tensors of the host, as a GPU's tensors do.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from stratagem._ps.tables.replicated_table import ReplicatedTable
from stratagem._ps.tables.table_parameter import TableParameter

DEVICE = torch.device("meta")
ROWS, WIDTH = 10, 3
COPY = torch.ops.aten._to_copy.default


class Elsewhere(torch.Tensor):
    """A tensor on the pretended device."""

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=DEVICE
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        target = kwargs.pop("device", DEVICE)
        for one in tree_flatten((args, kwargs))[0]:
            if isinstance(one, torch.Tensor) and not isinstance(one, Elsewhere) and one.dim():
                raise RuntimeError("Expected all tensors to be on the same device")
        args, kwargs = tree_map(
            lambda one: one.held if isinstance(one, Elsewhere) else one, (args, kwargs)
        )
        found = func(*args, **kwargs)
        if func is COPY and torch.device(target or DEVICE).type == "cpu":
            return found
        return tree_map(lambda one: Elsewhere(one) if isinstance(one, torch.Tensor) else one, found)


class MirroredStorage(TorchDispatchMode):
    """Copies from the host to the pretended device, counted in numbers."""

    def __init__(self):
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = kwargs.get("device")
        is_here = not isinstance(args[0], Elsewhere) if args else False
        if func is COPY and is_here and target is not None and torch.device(target) == DEVICE:
            if args[0].is_floating_point():
                self.moved += args[0].numel()
            return Elsewhere(args[0].clone())
        return func(*args, **kwargs)


class InMemory:
    name = "table"
    shape, dtype = (ROWS, WIDTH), torch.float32

    def __init__(self):
        self.data = torch.linspace(-2, 2, ROWS * WIDTH).reshape(ROWS, WIDTH).clone()

    def rows(self, ids):
        return self.data[ids]

    def whole(self):
        return self.data

    def rows_as_asked(self, ids):
        return None

    def update_rows(self, ids, values):
        self.data[ids] = values


IDS = torch.tensor([[3, 0, 3], [7, 7, 1]])
BAG = torch.tensor([1, 2, 4, 2, 9, 0])
OFFSETS = torch.tensor([0, 2, 2, 4])

LOOKUPS = {
    "embedding": lambda w, on: F.embedding(on(IDS), w),
    "padding": lambda w, on: F.embedding(on(IDS), w, padding_idx=7),
    "max norm": lambda w, on: F.embedding(on(IDS), w, max_norm=1.0),
    "bag": lambda w, on: F.embedding_bag(on(BAG), w, on(OFFSETS), mode="sum"),
    "bag mean": lambda w, on: F.embedding_bag(on(BAG), w, on(OFFSETS)),
    "index": lambda w, on: w[on(IDS)],
    "index in order": lambda w, on: w[on(torch.tensor([1, 2, 8]))],
    "index rest": lambda w, on: w[on(IDS), 1],
    "index_select": lambda w, on: w.index_select(0, on(BAG)),
    "index slice": lambda w, on: w[2:8:3],
    "index int": lambda w, on: w[-2],
    "host ids": lambda w, on: w[IDS],
}
WHOLES = {
    "linear": lambda w, on: F.linear(on(torch.ones(2, WIDTH)), w),
    "tied": lambda w, on: F.embedding(on(IDS[0]), w) @ w.t(),
}


@pytest.fixture
def replica(monkeypatch):
    """The calling code is a replica on the pretended device."""
    me = SimpleNamespace(device=DEVICE)
    monkeypatch.setattr("stratagem._ps.tables.table_parameter.current_replica", lambda: me)
    return me


def train(operation, table):
    """The operator's value and the table's gradient, both in host memory; numbers moved there."""
    with MirroredStorage() as copies:
        got = operation(table, lambda tensor: tensor.to(DEVICE))
        assert got.device == DEVICE
        weights = torch.linspace(0.5, 1.5, got.numel()).reshape(got.shape)
        (got * Elsewhere(weights)).sum().backward()
        value = got.detach().cpu()
    assert table.grad.device.type == "cpu"
    return value, table.grad + 0, copies.moved


def plainly(operation):
    weight = nn.Parameter(InMemory().data)
    got = operation(weight, lambda tensor: tensor)
    (got * torch.linspace(0.5, 1.5, got.numel()).reshape(got.shape)).sum().backward()
    return got.detach(), weight.grad


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_on_a_device_moves_its_rows_only(name, replica):
    """Issue 4: no copy of a table, whatever device the replica computes on."""
    source = InMemory()
    value, gradient, moved = train(LOOKUPS[name], TableParameter.over(source))
    expected = plainly(LOOKUPS[name])
    torch.testing.assert_close((value, gradient), expected)
    assert 0 < moved <= 6 * WIDTH


@pytest.mark.parametrize("name", WHOLES)
def test_another_operator_gets_the_whole_table_on_its_device(name, replica):
    value, gradient, _ = train(WHOLES[name], TableParameter.over(InMemory()))
    torch.testing.assert_close((value, gradient), plainly(WHOLES[name]))


def test_ids_on_a_device_suffice_outside_replicas():
    """A worker's only device is used without `run` too."""
    value, gradient, _ = train(LOOKUPS["embedding"], TableParameter.over(InMemory()))
    torch.testing.assert_close((value, gradient), plainly(LOOKUPS["embedding"]))


def test_gradients_of_rows_meet_in_host_memory(replica):
    """Where rows come from and go to; nothing of them is sent to the replicas' devices."""

    class Strategy:
        gradient_aggregation = "mean"

    strategy = Strategy()
    managed = ReplicatedTable(TableParameter.over(InMemory()), strategy, "table")
    assert managed.gradient_device(replica) == torch.device("cpu")
