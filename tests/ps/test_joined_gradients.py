"""Gradients of several tables travel as one, and are those of each table by itself."""

from types import SimpleNamespace

import pytest
import torch

from stratagem._ps.partition import ShardLayout
from stratagem._ps.row_kernels import kernels
from stratagem._ps.worker.joined_gradients import JoinLayout, RawTable, join

# Shards of four tables: (server, rows) each.
LAYOUTS = [[(0, 7)], [(1, 5), (0, 4)], [(0, 3), (1, 3), (2, 2)], [(1, 6)]]


def new_memory(shape, dtype):
    return torch.empty(shape, dtype=dtype)


def tables_of(layouts, seed):
    random = torch.Generator().manual_seed(seed)
    tables = []
    for number, shards in enumerate(layouts):
        rows = sum(size for _, size in shards)
        places = tuple(
            SimpleNamespace(server=server, variable=10 * number + index, shape=(size, 3))
            for index, (server, size) in enumerate(shards)
        )
        layout = ShardLayout([size for _, size in shards])
        remote = SimpleNamespace(places=places, layout=layout, name=f"t{number}")
        pieces = []
        for _ in range(1 + number % 2):
            ids = torch.randint(0, rows, (9,), generator=random)
            pieces.append((ids, torch.randn(9, 3, generator=random)))
        table = SimpleNamespace(gradient=SimpleNamespace(sparse=True))
        tables.append(RawTable(table, remote, pieces))
    return tables


pytestmark = pytest.mark.skipif(kernels is None, reason="needs the C kernels")


@pytest.mark.parametrize("seed", range(5))
def test_every_shard_gets_its_rows_summed(seed):
    tables = tables_of(LAYOUTS, seed)
    found = {}
    for server, joined in join(tables, JoinLayout([one.remote for one in tables]), new_memory):
        assert joined.ids.numel() == sum(joined.counts)
        for gradient in joined.split():
            found[server, gradient.variable] = gradient
    for one in tables:
        whole = torch.zeros(one.remote.layout.rows, 3)
        asked = torch.zeros(one.remote.layout.rows, dtype=torch.bool)
        for ids, values in one.pieces:
            whole.index_add_(0, ids, values)
            asked[ids] = True
        for place, first in zip(one.remote.places, one.remote.layout.offsets, strict=True):
            gradient = found.pop((place.server, place.variable))
            mine = slice(first, first + place.shape[0])
            assert gradient.sparse
            assert torch.equal(gradient.ids, asked[mine].nonzero().flatten())
            torch.testing.assert_close(gradient.values, whole[mine][gradient.ids])
    assert not found


def test_one_table_alone():
    tables = tables_of([[(0, 4)]], 0)
    ((server, joined),) = join(tables, JoinLayout([one.remote for one in tables]), new_memory)
    assert server == 0
    assert joined.counts == (joined.ids.numel(),)
