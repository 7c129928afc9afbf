"""What servers and clients let go of when variables are deleted."""

from __future__ import annotations

import gc
import weakref

import torch

from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.server_connection import Membership
from stratagem._ps.server.loop import ParameterServer
from stratagem._ps.server.store import VariableStore
from stratagem._ps.types import Gradient, GroupSpec
from stratagem._wire.arenas import Arena, Budget
from stratagem.errors import NotFoundError


def adam(*variables: int) -> list[GroupSpec]:
    return [GroupSpec(variables=variables, settings={"lr": 0.1})]


def test_deleting_a_variable_frees_its_memory_and_its_optimizer_state() -> None:
    store = VariableStore()
    kept = store.create(1, "kept", (4,), torch.float32).zero_()
    gone = weakref.ref(store.create(2, "gone", (4,), torch.float32).zero_())
    store.create_optimizer(1, "torch.optim.Adam", adam(1, 2))
    push = [Gradient(variable=one, values=torch.ones(4)) for one in (1, 2)]
    store.push(1, push)
    assert {entry.variable for entry in store.optimizer_state(1)} == {1, 2}

    del push
    store.delete(2)
    gc.collect()

    assert gone() is None
    assert {entry.variable for entry in store.optimizer_state(1)} == {1}
    before = kept.clone()
    store.push(1, [Gradient(variable=1, values=torch.ones(4))])
    assert not torch.equal(kept, before)


def test_an_optimizer_goes_with_its_last_variable() -> None:
    store = VariableStore()
    store.create(1, "w", (4,), torch.float32).zero_()
    store.create_optimizer(1, "torch.optim.Adam", adam(1))
    store.delete(1)
    assert store.stats().optimizers == 0


def test_arena_gives_the_current_segment_back_when_it_is_empty() -> None:
    with Arena(Budget(1 << 24)) as arena:
        for _ in range(3):
            entries = [arena.place(1 << 20) for _ in range(3)]
            for segment, offset in entries:
                arena.free(segment, offset, 1 << 20)
            assert repr(arena) == "<Arena 0 bytes in 0 segments>"


def test_arena_keeps_a_segment_that_holds_an_entry_without_bytes() -> None:
    with Arena(Budget(1 << 24)) as arena:
        empty, offset = arena.place(0)
        other, place = arena.place(8)
        assert other is empty
        arena.free(other, place, 8)
        empty.publish(offset, 3)
        assert empty.counter(offset) == 6


def test_client_unmaps_what_it_deleted() -> None:
    who = Membership(session="s", task="/job:chief/task:0", is_owner=True)
    with (
        ParameterServer("127.0.0.1:0").start() as server,
        PsClient([("/job:ps/task:0", server.address)], who) as client,
    ):
        place = ShardLocation(0, 1, (1 << 10,), torch.float32)
        client.create(place, "w", value=torch.ones(1 << 10))
        (mapped,) = client.map([place])
        assert mapped is not None
        segment = weakref.ref(mapped.segment)
        del mapped
        client.delete([place])
        gc.collect()
        assert segment() is None
        try:
            client.versions(0, [1])
        except NotFoundError:
            pass
        else:
            raise AssertionError("the variable is still there")
