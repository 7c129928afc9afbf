"""Shared memory between real processes: seen without a copy, never corrupted, never left behind."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest
import torch
from warm_start import Program

from stratagem._wire import messages, shm
from stratagem._wire.arenas import LARGEST_SHARED_BYTES, Arena, Budget
from stratagem._wire.messages import SegmentRef
from stratagem._wire.shm import MappedSegment, Segment, open_segment

# A process that maps the segment it is told about and does what each line asks.
PEER = """
import mmap, os, signal, sys
import torch
from stratagem._wire import messages, shm
segment = shm.open_segment(messages.SegmentRef(*eval(sys.argv[1])), shared=sys.argv[2] == "shared")
print("mapped" if segment else "refused", flush=True)
tensor = segment.tensor(int(sys.argv[3]), (4,), torch.float32) if segment else None
for line in sys.stdin:
    word = line.strip()
    if word == "read":
        print(tensor.tolist(), flush=True)
    elif word == "write":
        tensor.fill_(9.0)
        print("written", flush=True)
    elif word == "refresh":
        segment.refresh(int(sys.argv[3]), 16)
        print("refreshed", flush=True)
    elif word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
"""

# A process that makes a slot, says where it is, and waits.
OWNER = """
import sys, torch
from stratagem._wire.shm import Segment
segment = Segment(5, 1 << 16, writable_by_peers=True)
offset = segment.take(16)
segment.tensor(offset, (4,), torch.float32).fill_(6.0)
r = segment.ref()
print(repr((r.number, r.pid, r.fd, r.size, r.token)), offset, sep="|", flush=True)
sys.stdin.read()
"""


class Peer:
    """The other process."""

    def __init__(self, segment: Segment, mode: str, offset: int) -> None:
        ref = segment.ref()
        told = repr((ref.number, ref.pid, ref.fd, ref.size, ref.token))
        self.process = Program(
            [sys.executable, "-c", PEER, told, mode, str(offset)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first = self.answer()

    def answer(self) -> str:
        out: IO[str] | None = self.process.stdout
        assert out is not None
        return out.readline().strip()

    def ask(self, word: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.answer()


@pytest.fixture
def parameters() -> Iterator[tuple[Segment, int]]:
    """A sealed segment with one variable of four ones."""
    with Segment(1, 1 << 16, writable_by_peers=False) as segment:
        offset = segment.take(16)
        assert offset is not None
        segment.tensor(offset, (4,), torch.float32).fill_(1.0)
        yield segment, offset


def finish(peer: Peer) -> None:
    peer.process.communicate(timeout=120)


@pytest.mark.process
def test_a_reader_sees_writes_and_cannot_make_any(
    parameters: tuple[Segment, int],
) -> None:
    """Mapped privately: the owner's writes show, the reader's own stay its own until refreshed."""
    segment, offset = parameters
    mine = segment.tensor(offset, (4,), torch.float32)
    peer = Peer(segment, "private", offset)
    try:
        assert peer.first == "mapped"
        assert peer.ask("read") == "[1.0, 1.0, 1.0, 1.0]"
        mine.fill_(2.0)
        assert peer.ask("read") == "[2.0, 2.0, 2.0, 2.0]"
        assert peer.ask("write") == "written"
        assert mine.tolist() == [2.0] * 4
        mine.fill_(3.0)
        assert peer.ask("read") == "[9.0, 9.0, 9.0, 9.0]"
        assert peer.ask("refresh") == "refreshed"
        assert peer.ask("read") == "[3.0, 3.0, 3.0, 3.0]"
    finally:
        finish(peer)


def test_a_writing_mapping_of_parameters_is_impossible(
    parameters: tuple[Segment, int],
) -> None:
    """Sealed: even a process that tries is refused by the kernel, and cannot shrink it either."""
    segment, _ = parameters
    ref = segment.ref()
    assert open_segment(ref, shared=True) is None
    fd = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, ref.size)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


@pytest.mark.process
def test_slots_are_written_by_both_and_survive_the_death_of_their_owner() -> None:
    """A worker killed at any instant takes nothing away from the server that mapped its slot."""
    owner = Program(
        [
            sys.executable,
            "-c",
            OWNER,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        told, offset = owner.stdout.readline().rsplit("|", 1)
        mapped = open_segment(SegmentRef(*eval(told)), shared=True)
        assert mapped is not None
        with mapped:
            gradient = mapped.tensor(int(offset), (4,), torch.float32)
            owner.send_signal(signal.SIGKILL)
            owner.wait(120)
            assert gradient.tolist() == [6.0] * 4
            gradient.mul_(2.0)  # an optimizer may change the gradient it is given
            assert gradient.tolist() == [12.0] * 4
            del gradient
        assert open_segment(SegmentRef(*eval(told)), shared=True) is None
    finally:
        owner.kill()
        owner.communicate(timeout=120)


@pytest.mark.parametrize("field", ["token", "size", "pid", "fd"])
def test_only_the_segment_announced_is_mapped(parameters: tuple[Segment, int], field: str) -> None:
    """Another token, size, process or descriptor: refused, never mapped by mistake."""
    segment, _ = parameters
    ref = segment.ref()
    with open("/dev/null", "rb") as other:
        wrong: dict[str, int | bytes] = {
            "token": bytes(16),
            "size": ref.size + 4096,
            "pid": 2**22 + 1,
            "fd": other.fileno(),
        }
        facts = {name: getattr(ref, name) for name in ("number", "pid", "fd", "size", "token")}
        facts[field] = wrong[field]
        assert open_segment(SegmentRef(**facts), shared=False) is None


def test_memory_that_could_shrink_is_not_mapped() -> None:
    """A peer that truncates its slot could kill us by SIGBUS: without the seal it is refused."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 8192)
        os.pwrite(fd, shm._HEAD.pack(shm.MAGIC, 8192, bytes(16)), 0)
        assert open_segment(SegmentRef(1, os.getpid(), fd, 8192, bytes(16)), shared=True) is None
    finally:
        os.close(fd)


def test_tensors_outlive_the_close_of_their_segment() -> None:
    """The memory goes with the last tensor over it, and then it is really gone."""

    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum("memfd:stratagem" in line for line in maps)

    before = mappings()
    segment = Segment(1, 1 << 16, writable_by_peers=False)
    offset = segment.take(16)
    assert offset is not None
    tensor = segment.tensor(offset, (4,), torch.float32).fill_(5.0)
    segment.close()
    segment.close()
    del segment
    gc.collect()
    assert tensor.tolist() == [5.0] * 4
    assert mappings() == before + 1
    del tensor
    gc.collect()
    assert mappings() == before


def test_tensors_outside_the_segment_are_refused(
    parameters: tuple[Segment, int],
) -> None:
    """Offsets come from messages: all are checked."""
    segment, offset = parameters
    for wrong, shape in [
        (0, (1,)),
        (offset + 1, (1,)),
        (offset, (1 << 20,)),
        (1 << 40, (1,)),
        (-64, (1,)),
    ]:
        with pytest.raises(ValueError, match="does not lie within"):
            segment.tensor(wrong, shape, torch.float32)
    with pytest.raises(ValueError, match="negative"):
        segment.tensor(offset, (-1,), torch.float32)


def opened(segment: Segment) -> MappedSegment:
    mapped = open_segment(segment.ref(), shared=False)
    assert mapped is not None
    return mapped


def test_counters_show_versions_and_writes_in_progress(
    parameters: tuple[Segment, int],
) -> None:
    """Odd while written; a reader that wants a whole value gets none meanwhile."""
    segment, offset = parameters
    with opened(segment) as peer:
        live = peer.tensor(offset, (4,), torch.float32)
        segment.publish(offset, 7)
        assert peer.counter(offset) >> 1 == 7
        whole = peer.read_whole(live, offset)
        assert whole is not None
        assert whole.tolist() == [1.0] * 4
        assert whole.data_ptr() != live.data_ptr()
        segment.begin_write(offset)
        assert peer.counter(offset) >> 1 == 7
        assert peer.read_whole(live, offset) is None
        segment.publish(offset, 8)
        assert peer.counter(offset) >> 1 == 8
        del live


def test_entries_never_overlap_and_are_aligned() -> None:
    """Sizes of all kinds, over several segments."""
    with Arena(Budget(1 << 30)) as arena:
        seen: dict[int, list[tuple[int, int]]] = {}
        for size in [0, 1, 63, 64, 65, 4096, 1 << 21, 3 << 20, 5 << 20, 100] * 3:
            segment, offset = arena.place(size)
            assert offset % 64 == 0
            assert offset + size <= segment.size
            for start, end in seen.get(segment.number, []):
                assert offset - 64 >= end or offset + size <= start - 64
            seen.setdefault(segment.number, []).append((offset, offset + size))
        assert len(seen) > 1


def test_an_arena_has_a_limit_and_gives_memory_back() -> None:
    """MemoryError says how much is used; a large variable's memory goes when it is deleted."""
    large = LARGEST_SHARED_BYTES
    with Arena(Budget(2 * large)) as arena:
        segment, offset = arena.place(large)
        arena.place(100)
        held = (64 + large) + (64 + 128)  # each with its head, the small one padded
        with pytest.raises(MemoryError, match=f"{held} of {2 * large} bytes are in use"):
            arena.place(large)
        arena.free(segment, offset, large)
        assert arena.used_bytes == 192
        assert "in 1 segments" in repr(arena)
        arena.place(large)


def test_pages_cost_memory_only_when_written() -> None:
    """A segment's size is room, not memory."""
    with Segment(1, 1 << 32, writable_by_peers=False) as segment:
        blocks = os.stat(f"/proc/self/fd/{segment.ref().fd}").st_blocks
        assert blocks * 512 < 1 << 20


def test_segment_messages_survive_the_wire() -> None:
    """The reference a peer gets is the one the owner gave."""
    with Segment(1, 1 << 12, writable_by_peers=True) as segment:
        message = messages.OpenSegments(segments=(segment.ref(),))
        assert messages.decode(messages.encode(message)) == message


def test_own_pages_are_those_that_this_process_wrote() -> None:
    with Segment(1, 1 << 16, writable_by_peers=False) as segment, shm.OwnPages() as pages:
        offset = segment.take(1 << 14)
        assert offset is not None
        segment.tensor(offset, (1 << 12,), torch.float32).fill_(1.0)
        mapped = open_segment(segment.ref(), shared=False)
        assert mapped is not None
        with mapped:
            tensor = mapped.tensor(offset, (1 << 12,), torch.float32)
            middle = tensor.data_ptr() + tensor.nbytes // 2
            assert tensor[1 << 11] == 1.0
            assert not pages.has(middle)
            tensor[1 << 11] = 2.0
            assert pages.has(middle)
            mapped.refresh(offset, tensor.nbytes)
            assert not pages.has(middle)
            tensor[1 << 11] = 2.0
            pages.close()
            assert not pages.has(middle)
