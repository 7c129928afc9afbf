"""The state of a store, out and in again: bit for bit, for every optimizer of torch, in any ranges of rows."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import torch
from elementwise import ELEMENTWISE
from own_optimizer import GradientKeeper
from torch import Tensor

from stratagem._ps.server.ledger import Admission
from stratagem._ps.server.session import Session
from stratagem._ps.server.store import VariableStore
from stratagem._ps.server.store_state import Block, exported
from stratagem._ps.types import Gradient, GroupSpec, WriteId
from stratagem._wire.arenas import Budget
from stratagem._wire.messages import StoreManifest

OPTIMIZERS = [
    *ELEMENTWISE,
    ("SGD", {"lr": 0.1}),
    ("Adam", {"lr": 0.1}),
    ("AdamW", {"lr": 0.1, "amsgrad": True, "foreach": True}),
    ("RMSprop", {"lr": 0.1, "centered": True, "momentum": 0.5}),
    ("SparseAdam", {"lr": 0.1}),
    ("Adafactor", {"lr": 0.1}),
    ("Muon", {"lr": 0.1}),
]

SHAPES = {1: (7, 3), 2: (5, 2)}


def trained(name: str, options: dict[str, Any], module: str = "torch.optim") -> VariableStore:
    store = VariableStore(optimizer_modules=("own_optimizer",))
    generator = torch.Generator().manual_seed(1)
    for number, shape in SHAPES.items():
        tensor = store.create(number, f"v{number}", shape, torch.float32)
        tensor.copy_(torch.randn(shape, generator=generator))
    group = GroupSpec(variables=tuple(SHAPES), settings=options)
    store.create_optimizer(4, f"{module}.{name}", [group])
    step(store, name, range(3))
    return store


def step(store: VariableStore, name: str, numbers: Any) -> None:
    """Some steps, dense or by rows, whose gradients depend on their numbers only."""
    for number in numbers:
        generator = torch.Generator().manual_seed(100 + number)
        gradients = []
        for variable, shape in SHAPES.items():
            if name == "SparseAdam" or (number == 1 and name not in ("Adafactor", "Muon")):
                ids = torch.tensor([0, 2, 4])
                values = torch.randn((3, *shape[1:]), generator=generator)
                gradients.append(Gradient(variable=variable, values=values, ids=ids))
            else:
                values = torch.randn(shape, generator=generator)
                gradients.append(Gradient(variable=variable, values=values))
        settings = {0: {"lr": 0.05}} if number == 2 else None
        store.push(4, gradients, settings)


def fill(store: VariableStore, manifest: StoreManifest, blocks: Iterable[Block]) -> None:
    store.restore(manifest)
    for block in blocks:
        store.write_block(block)


def everything(store: VariableStore) -> tuple[StoreManifest, dict[tuple[Any, ...], Tensor]]:
    """The manifest, and all tensors by where they belong."""
    found: dict[tuple[Any, ...], list[Tensor]] = {}
    for block in exported(store):
        found.setdefault((block.variable, block.key, block.optimizer), []).append(block.rows)
    return store.describe(), {key: torch.cat(parts) for key, parts in found.items()}


def assert_same(one: VariableStore, other: VariableStore) -> None:
    (first, tensors), (second, others) = everything(one), everything(other)
    assert first == second
    assert tensors.keys() == others.keys()
    for key, tensor in tensors.items():
        assert tensor.dtype == others[key].dtype, key
        assert torch.equal(tensor, others[key]), key


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_a_restored_store_is_the_same_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    """And goes on to train to the same numbers."""
    store, restored = trained(name, options), VariableStore()
    fill(restored, store.describe(), exported(store))
    assert_same(store, restored)
    step(store, name, range(3, 6))
    step(restored, name, range(3, 6))
    assert_same(store, restored)


def test_every_optimizer_of_torch_is_tried() -> None:
    kinds = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert kinds - {name for name, _ in OPTIMIZERS} == {
        "Optimizer",
        "LBFGS",
    }  # no server steps LBFGS


def test_a_class_of_the_users_is_restored_too() -> None:
    store = trained(GradientKeeper.__name__, {"lr": 0.1}, module="own_optimizer")
    restored = VariableStore(optimizer_modules=("own_optimizer",))
    fill(restored, store.describe(), exported(store))
    assert_same(store, restored)


def rows_of(block: Block, start: int, stop: int) -> Block:
    """Return the rows of a block from `start` to `stop`."""
    return block._replace(start=start, rows=block.rows[start - block.start : stop - block.start])


def end_of(block: Block) -> int:
    return block.start + len(block.rows)


def test_blocks_may_have_any_ranges_and_come_in_any_order() -> None:
    """A stream of small blocks, cut again and shuffled."""
    store, restored = trained("Adam", {"lr": 0.1}), VariableStore()
    blocks = [copy.copy(block) for block in exported(store, block_bytes=24)]
    assert len(blocks) >= 20
    cut: list[Block] = []
    for block in blocks:
        middle = (block.start + end_of(block) + 1) // 2
        cut += [rows_of(block, block.start, middle), rows_of(block, middle, end_of(block))]
    random.Random(1).shuffle(cut)
    fill(restored, store.describe(), cut)
    assert_same(store, restored)


def test_one_store_becomes_two_and_two_become_one() -> None:
    """Another number of servers: each takes the rows it needs, whatever shards they came from."""
    whole = trained("Adagrad", {"lr": 0.1})
    at = 3  # rows of variable 1 below this go to the first server
    shards = [VariableStore(), VariableStore()]
    for shard, (start, stop) in zip(shards, ((0, at), (at, 7)), strict=True):
        shard.create(1, "v1", (stop - start, 3), torch.float32)
        shard.create_optimizer(4, "torch.optim.Adagrad", [GroupSpec((1,), {"lr": 0.1})])
        for block in exported(whole, block_bytes=24):
            if block.variable != 1:
                continue
            if block.key == "step":
                shard.write_block(block)
            elif max(block.start, start) < min(end_of(block), stop):
                mine = rows_of(block, max(block.start, start), min(end_of(block), stop))
                shard.write_block(mine._replace(start=mine.start - start))
    together = VariableStore()
    together.create(1, "v1", (7, 3), torch.float32)
    together.create_optimizer(4, "torch.optim.Adagrad", [GroupSpec((1,), {"lr": 0.1})])
    for shard, offset in zip(shards, (0, at), strict=True):
        for block in exported(shard):
            moved = 0 if block.key == "step" else offset
            together.write_block(block._replace(start=block.start + moved))
    for key, tensor in everything(together)[1].items():
        assert torch.equal(tensor, everything(whole)[1][key]), key


def test_the_ledger_is_restored_with_the_variables() -> None:
    """Writes that were applied before are recognised, and fenced workers stay fenced."""
    store = trained("SGD", {"lr": 0.1})
    writes = [
        WriteId("worker:0", 1, 1, closure=9, nth=0),
        WriteId("worker:0", 1, 2, closure=9, nth=2000),
        WriteId("worker:1", 2, 1),
    ]
    assert [store.admit(write) for write in writes] == [Admission.APPLY] * 3
    store.fence("worker:2", 5)
    store.finish_closures([(1, 4), (6, 8)])
    restored = VariableStore()
    fill(restored, store.describe(), exported(store))
    for one in (store, restored):
        assert [one.admit(write) for write in writes] == [Admission.DUPLICATE] * 3
        assert one.admit(WriteId("worker:3", 1, 1, closure=9, nth=2000)) is Admission.DUPLICATE
        assert one.admit(WriteId("worker:3", 1, 2, closure=7, nth=0)) is Admission.DUPLICATE
        assert one.admit(WriteId("worker:3", 1, 3, closure=5, nth=0)) is Admission.APPLY
        assert one.admit(WriteId("worker:2", 5, 1)) is Admission.FENCED
        assert one.admit(WriteId("worker:2", 6, 1)) is Admission.APPLY
    assert_same(store, restored)


def test_a_manifest_is_plain_data() -> None:
    """It can be written down and read without running code."""
    manifest = trained("NAdam", {"lr": 0.1}).describe()
    text = msgspec.json.encode(manifest)
    assert msgspec.json.decode(text, type=StoreManifest) == manifest


def test_a_sparse_momentum_comes_back_dense_and_steps_alike() -> None:
    """SGD keeps a sparse buffer for layers with sparse gradients."""

    def gradients(number: int) -> list[Gradient]:
        values = torch.full((2, 3), 1.0 + number)
        return [Gradient(variable=1, values=values, ids=torch.tensor([0, 4]), sparse=True)]

    store = VariableStore()
    store.create(1, "w", (7, 3), torch.float32).fill_(1.0)
    store.create_optimizer(4, "torch.optim.SGD", [GroupSpec((1,), {"lr": 0.1, "momentum": 0.9})])
    store.push(4, gradients(0))
    restored = VariableStore()
    fill(restored, store.describe(), exported(store))
    for one in (store, restored):
        one.push(4, gradients(1))
    assert torch.equal(store.read(1), restored.read(1))


def test_a_session_in_shared_memory_is_restored() -> None:
    """Versions show in shared memory, too."""
    store = trained("Adam", {"lr": 0.1})
    session = Session("s", budget=Budget(1 << 20))
    session.restore(store.describe())
    for block in exported(store):
        session.store.write_block(block)
    session.complete()
    assert_same(store, session.store)
    segment, offset, _ = session._places[1]
    assert segment.counter(offset) == 2 * store.version(1)
    session.close()
