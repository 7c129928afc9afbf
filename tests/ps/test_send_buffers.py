"""Memory that a client shares with servers: placed, used again, replaced."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from stratagem._ps.client.send_buffers import SMALLEST_SEGMENT_BYTES, SendBuffers
from stratagem._wire import shm

MEGABYTE = 1 << 20


@pytest.fixture
def buffers() -> Iterator[SendBuffers]:
    made = SendBuffers()
    yield made
    made.close()


def place(buffers: SendBuffers, size: int) -> tuple[int, int]:
    ref = buffers.place((size,), torch.uint8).ref
    return ref.segment, ref.offset


@pytest.mark.parametrize("size", [100, 3 * MEGABYTE, 2 * SMALLEST_SEGMENT_BYTES])
def test_steps_of_the_same_size_use_the_same_memory(buffers: SendBuffers, size: int) -> None:
    """After the first ones: no new segment, so no new pages and nothing to announce."""
    seen = []
    for _ in range(4):
        buffers.reset()
        seen.append([place(buffers, size) for _ in range(3)])
        refs = buffers.refs()
    assert seen[-1] == seen[-2]
    assert buffers.refs() is refs
    assert len(refs) == 1


def test_the_halves_are_used_in_turns(buffers: SendBuffers) -> None:
    first = place(buffers, 100)
    buffers.switch()
    second = place(buffers, 100)
    buffers.switch()
    assert place(buffers, 100) == first
    assert second[0] != first[0]


def test_a_peer_reads_what_was_placed(buffers: SendBuffers) -> None:
    view, ref, memory = buffers.place((3,), torch.float32)
    view.fill_(7.0)
    assert torch.frombuffer(memory, dtype=torch.float32).tolist() == [7.0] * 3
    slot = buffers.new_slot((2,), torch.float64)
    slot.view.fill_(5.0)
    peers = {one.number: shm.open_segment(one, shared=True) for one in buffers.refs()}
    for place_, dtype, value in ((ref, torch.float32, 7.0), (slot.ref, torch.float64, 5.0)):
        peer = peers[place_.segment]
        assert peer is not None
        assert peer.tensor(place_.offset, place_.shape, dtype).unique().tolist() == [value]
    for peer in peers.values():
        assert peer is not None
        peer.close()


def test_a_slot_knows_whether_its_memory_is_in_use(buffers: SendBuffers) -> None:
    """Also by views, arrays and storages of the tensor that was taken."""
    slot = buffers.new_slot((4,), torch.float32)
    assert slot.is_free
    for derive in (
        lambda tensor: tensor,
        lambda tensor: tensor[1:3],
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: tensor.view(torch.int32),
    ):
        taken = slot.take()
        assert slot.holds(taken)
        kept = derive(taken)
        del taken
        gc.collect()
        assert not slot.is_free
        del kept
        gc.collect()
        assert slot.is_free
    assert not slot.holds(torch.zeros(4))


def test_a_slot_that_was_given_back_serves_another_of_its_size(buffers: SendBuffers) -> None:
    slot = buffers.new_slot((4, 8), torch.float32)
    buffers.free_slot(slot)
    assert buffers.new_slot((32,), torch.int32).ref.offset == slot.ref.offset
    assert buffers.new_slot((32,), torch.int32).ref.offset != slot.ref.offset


def test_a_slot_in_use_is_not_given_to_another(buffers: SendBuffers) -> None:
    slot = buffers.new_slot((4,), torch.float32)
    kept = slot.take()
    buffers.free_slot(slot)
    assert buffers.new_slot((4,), torch.float32).ref.offset != slot.ref.offset
    del kept


def test_retired_memory_is_announced_until_it_is_released(buffers: SendBuffers) -> None:
    """Writes may have to be repeated from it; nothing new is placed in it."""
    old_place, old_slot = place(buffers, 100), buffers.new_slot((4,), torch.float32)
    before = {ref.number for ref in buffers.refs()}
    buffers.retire()
    assert buffers.generation == 1
    new_place, new_slot = place(buffers, 100), buffers.new_slot((4,), torch.float32)
    assert {old_place[0], old_slot.ref.segment} == before
    assert not {new_place[0], new_slot.ref.segment} & before
    assert {ref.number for ref in buffers.refs()} > before
    buffers.free_slot(old_slot)  # its memory does not come back
    assert buffers.new_slot((4,), torch.float32).ref.segment not in before
    buffers.release_retired()
    assert not {ref.number for ref in buffers.refs()} & before
    assert old_slot.view.fill_(1.0).tolist() == [1.0] * 4  # tensors over it stay valid


def test_unused_memory_is_not_replaced(buffers: SendBuffers) -> None:
    buffers.prepare()
    refs = buffers.refs()
    buffers.retire()
    assert buffers.generation == 0
    assert buffers.refs() is refs
