"""Modules under a scope: dicts that answer by context, homes, and modules with tensors elsewhere."""

import copy

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem._core.managed import ManagedParameter, find_managed
from stratagem._core.torch_patches.module_members import BuffersByReplica, ParametersByReplica


@pytest.fixture
def two():
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


def replica_id():
    return int(sg.get_replica_context().replica_id_in_sync_group)


def test_lookups_give_each_replica_a_leaf_over_the_central_memory(two):
    with two.scope():
        linear = nn.Linear(3, 2)
    assert isinstance(linear._parameters, ParametersByReplica)
    leaves = two.local_results(two.run(lambda: linear.weight))
    assert len({id(leaf) for leaf in leaves}) == 2
    for leaf in leaves:
        assert type(leaf) is nn.Parameter
        assert leaf is not linear.weight
        assert leaf.data_ptr() == linear.weight.data_ptr()
        assert find_managed(leaf) is find_managed(linear.weight)
    again = two.local_results(two.run(lambda: linear.weight))
    assert all(a is b for a, b in zip(leaves, again, strict=True))


def test_every_way_to_get_a_parameter_agrees(two):
    """attribute, getattr, [], get, items, values, parameters(): the same leaf."""
    with two.scope():
        linear = nn.Linear(3, 2)

    def look():
        held = linear._parameters
        found = [
            linear.weight, held["weight"], held.get("weight"), dict(held.items())["weight"],
            next(iter(held.values())), next(linear.parameters()), held.copy()["weight"],
            dict(linear.named_parameters())["weight"],
        ]  # fmt: skip
        return all(each is linear.weight for each in found), held.get("none", 7), len(held)

    assert two.run(look) == (True, 7, 2)
    assert look() == (True, 7, 2)


def test_tied_weights_share_one_variable(two):
    """Tied in the constructor's way and by assignment after the scope has closed."""
    with two.scope():
        a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.weight = a.weight
    assert find_managed(a.weight) is find_managed(b.weight)
    assert two.run(lambda: a.weight is b.weight) is True
    twin = copy.deepcopy(nn.ModuleList([a, b]))
    assert twin[0].weight is twin[1].weight
    assert find_managed(twin[0].weight) is not find_managed(a.weight)
    assert two.run(lambda: twin[0].weight is twin[1].weight) is True


def test_a_swap_in_one_replica_is_not_seen_by_the_other(two):
    """torch.func.functional_call puts tensors in parameters' places for the length of a call."""
    with two.scope():
        linear = nn.Linear(1, 1, bias=False)
        nn.init.ones_(linear.weight)
    context = sg.get_replica_context

    def look():
        mine = torch.full((1, 1), 10.0 + replica_id())
        before = linear.weight
        linear._parameters["weight"] = mine
        context().all_reduce("sum", torch.zeros(1))  # both have swapped now
        seen = linear.weight is mine
        linear._parameters["weight"] = before
        return seen, float(linear.weight.detach())

    assert two.run(look) == (True, 1.0)
    assert float(linear.weight.detach()) == 1.0


def test_requires_grad_follows_in_both_directions(two):
    with two.scope():
        linear = nn.Linear(2, 2)
    linear.weight.requires_grad_(False)
    assert two.run(lambda: linear.weight.requires_grad) is False
    two.run(lambda: id(linear.requires_grad_(True)))
    assert linear.weight.requires_grad
    two.run(lambda: id(linear.bias.requires_grad_(False)))
    assert not linear.bias.requires_grad


def test_marks_on_parameters_reach_the_leaves(two):
    with two.scope():
        linear = nn.Linear(2, 2)
    linear.weight.decay = 0.5
    assert two.run(lambda: linear.weight.decay) == 0.5


def test_recurrent_modules_keep_their_class(two):
    with two.scope():
        lstm = nn.LSTM(2, 3)
    assert isinstance(lstm, nn.LSTM)
    assert repr(lstm) == "LSTM(2, 3)"
    flat = two.local_results(two.run(lambda: list(lstm._flat_weights)))
    for weights in flat:
        assert all(
            find_managed(w) is find_managed(c)
            for w, c in zip(weights, lstm.parameters(), strict=True)
        )
    assert not {id(w) for w in flat[0]} & {id(w) for w in flat[1]}


def test_code_that_asks_for_the_type_of_a_module_finds_it(two):
    """`type(m) == nn.GRU` in a function given to apply(), as programs that initialise weights write it."""

    def initialise(module):
        if type(module) == nn.GRU:  # noqa: E721 - as programs write it
            for name in module._flat_weights_names:
                nn.init.ones_(module._parameters[name])

    with two.scope():
        gru, lazy = nn.Sequential(nn.GRU(2, 3)).apply(initialise)[0], nn.LazyLinear(2)
    assert all(bool((weight == 1).all()) for weight in gru.parameters())
    for module, plain in ((gru, nn.GRU), (lazy, nn.LazyLinear)):
        kind = type(module)
        assert kind == plain
        assert plain == kind
        assert kind in (nn.LSTM, plain)
        assert {plain: "found"}[kind] == "found"
        assert {kind: "found"}[plain] == "found"
        assert kind != nn.LSTM
        copied = type(copy.deepcopy(module))
        assert copied == plain


def test_lazy_modules_are_initialised_once_with_pytorchs_numbers(two):
    torch.manual_seed(3)
    plain = nn.LazyLinear(2)
    plain(torch.ones(1, 4))
    with two.scope():
        lazy = nn.LazyLinear(2)
    torch.manual_seed(3)
    two.run(lazy, args=(sg.PerReplica([torch.ones(2, 4), torch.ones(1, 4)]),))
    assert type(lazy) is nn.Linear
    assert torch.equal(lazy.weight, plain.weight)


def test_embeddings_with_max_norm_are_refused(two):
    """Their forward writes the weight in place, once per replica."""
    with two.scope():
        table = nn.Embedding(4, 2, max_norm=1.0)
    with torch.no_grad():
        table.weight.fill_(3.0)
    ids = torch.tensor([0, 1, 1, 2])
    parts = sg.PerReplica([ids, ids])
    with pytest.raises(sg.errors.ReplicaError, match=r"Embedding\(max_norm=1.0\).*part of the"):
        two.run(table, args=(parts,))
    parts = sg.PerReplica([ids[:2], ids[2:]])
    with pytest.raises(sg.errors.ReplicaError, match=r"'weight'(.|\n)*replica 1 has another value"):
        two.run(lambda ids: nn.functional.embedding(ids, table.weight, max_norm=1.0), args=(parts,))


def test_deepcopy_inside_a_replica_is_the_replicas_own(two):
    with two.scope():
        linear = nn.Linear(2, 2)

    def copied():
        mine = copy.deepcopy(linear)
        with torch.no_grad():
            mine.weight.fill_(replica_id())
        return type(mine._parameters) is dict, float(mine.weight.detach().sum())

    plain, sums = two.run(copied)
    assert plain is True
    assert two.local_results(sums) == (0.0, 4.0)


def test_another_kind_of_managed_parameter_answers_lookups(two):
    """Contract 3: parameter servers bring homes of their own."""

    class Counting(ManagedParameter):
        asked = 0

        def resolve(self):
            Counting.asked += 1
            return self.central

        def adopt_copy(self, parameter):
            return None

    linear = nn.Linear(2, 2)
    managed = Counting(linear.weight)
    assert find_managed(linear.weight) is managed
    held = ParametersByReplica(dict(linear._parameters))
    linear._parameters = held
    assert linear.weight is managed.central
    assert Counting.asked == 1
    assert type(copy.deepcopy(linear)._parameters) is ParametersByReplica
    assert find_managed(copy.deepcopy(linear).weight) is None


def test_buffers_dict_answers_and_deletes(two):
    with two.scope():
        norm = nn.BatchNorm1d(2)
    assert isinstance(norm._buffers, BuffersByReplica)
    assert list(norm._buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    del norm.running_mean
    assert "running_mean" not in norm._buffers
    assert norm._buffers.pop("running_mean", None) is None
    norm.register_buffer("running_mean", torch.zeros(2))
    assert torch.equal(norm.running_mean, torch.zeros(2))


def test_models_may_be_made_without_memory_first(two):
    """torch.device("meta") and to_empty(), as large models are built."""
    with two.scope():
        with torch.device("meta"):
            linear = nn.Linear(3, 2)
    linear.to_empty(device="cpu")
    nn.init.ones_(linear.weight)
    nn.init.zeros_(linear.bias)
    found = two.run(linear, args=(sg.PerReplica([torch.ones(2, 3), torch.ones(1, 3)]),))
    assert torch.equal(two.gather(found, axis=0), torch.full((3, 2), 3.0))
    leaves = two.local_results(two.run(lambda: linear.weight))
    assert leaves[0] is not leaves[1]
