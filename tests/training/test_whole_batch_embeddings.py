"""Embeddings that need the ids of the whole batch: refused in replicas, with the remedy."""

import copy
import pickle

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import ReplicaError

IDS = torch.tensor([[1, 1], [2, 1], [3, 0], [1, 3]])


def loss_of(table, ids):
    found = table(ids)
    return found.square().sum(-1).mean()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("option", [{"scale_grad_by_freq": True}, {"max_norm": 0.5}])
def test_an_embedding_that_needs_the_whole_batch_is_refused(kind, option, pair):
    """Each replica would count, or shorten, the rows of its own ids."""
    with pair.scope():
        table = kind(5, 3, **option)
    (name,) = option
    parts = sg.PerReplica(list(IDS.chunk(2)))
    with pytest.raises(ReplicaError, match=rf"{kind.__name__}\({name}=.*part of the batch"):
        pair.run(lambda ids: loss_of(table, ids).backward(), args=(parts,))


@pytest.mark.parametrize("option", [{"scale_grad_by_freq": True}, {"max_norm": 0.5}])
def test_such_an_embedding_works_outside_replicas_and_on_one_device(option, make_strategy, pair):
    def gradient(table):
        table.zero_grad()
        loss_of(table, IDS).backward()
        return table.weight.grad

    torch.manual_seed(0)
    plain = nn.Embedding(5, 3, **option)
    wanted = gradient(plain)
    for strategy in (pair, make_strategy("one")):
        torch.manual_seed(0)
        with strategy.scope():
            table = nn.Embedding(5, 3, **option)
        for each in (table, copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
            torch.testing.assert_close(gradient(each), wanted)
    strategy.run(lambda ids: loss_of(table, ids).backward(), args=(IDS,))


def test_the_remedy_for_a_limited_norm_shortens_rows_once(pair):
    with pair.scope():
        table = nn.Embedding(5, 3)

    def step(ids):
        context = sg.get_replica_context()
        context.merge_call(lambda strategy: table.weight.data.renorm_(2, 0, 0.5))
        return table(ids).detach().norm(dim=-1).max()

    found = pair.run(step, args=(sg.PerReplica(list(IDS.chunk(2))),))
    assert all(float(each) <= 0.5 + 1e-6 for each in pair.local_results(found))
