"""Files of which the large parts are written past the page cache."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import torch
import written_checkpoints as written

from stratagem._ps.blocks import new_file
from stratagem._ps.blocks.new_file import ALIGNMENT, NewFile

BUFFER = 2 * ALIGNMENT


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_file, "BUFFER_BYTES", BUFFER)


@pytest.fixture
def direct_places(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Places and sizes of writes past the cache, as on a file system that takes only aligned ones."""
    places: list[tuple[int, int]] = []
    opened: set[int] = set()
    real_open, real_pwrite = os.open, os.pwrite

    def opening(path: str, flags: int, mode: int = 0o777) -> int:
        descriptor = real_open(path, flags & ~os.O_DIRECT, mode)
        (opened.add if flags & os.O_DIRECT else opened.discard)(descriptor)
        return descriptor

    def writing(descriptor: int, data: memoryview, place: int) -> int:
        if descriptor in opened:
            address = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
            if place % ALIGNMENT or len(data) % ALIGNMENT or address % ALIGNMENT:
                raise OSError(errno.EINVAL, "not aligned")
            places.append((place, len(data)))
        return real_pwrite(descriptor, data, place)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "pwrite", writing)
    return places


def write_areas(path: Path, seed: int) -> bytes:
    """Write areas at odd places, in pieces of odd sizes and in turns; return what the file should be."""
    chance = random.Random(seed)
    wanted = bytearray()
    with NewFile(path) as file:
        for number in range(4):
            areas = []
            for _ in range(chance.randrange(1, 4)):
                size = chance.choice([0, 1, 63, BUFFER - 1, BUFFER, chance.randrange(5 * BUFFER)])
                size = max(size, (3 * BUFFER + 7) * (number == 2))
                gap = chance.choice([0, 64, ALIGNMENT])
                file.put(b"frame".ljust(gap, b".")[:gap], len(wanted))
                wanted += b"frame".ljust(gap, b".")[:gap]
                areas.append((file.area(len(wanted), size), chance.randbytes(size)))
                wanted += areas[-1][1]
            rest = [(area, memoryview(data)) for area, data in areas]
            while rest:
                area, data = rest.pop(0)
                count = chance.randrange(1, 2 * BUFFER)
                area.add(data[:count])
                if len(data) > count:
                    rest.append((area, data[count:]))
            for area, _ in areas:
                area.end()
        file.flush()
    return bytes(wanted)


@pytest.mark.parametrize("seed", range(20))
def test_a_file_has_the_bytes_of_its_areas(
    tmp_path: Path, seed: int, direct_places: list[tuple[int, int]]
) -> None:
    assert write_areas(tmp_path / "file", seed) == (tmp_path / "file").read_bytes()
    assert direct_places


def test_the_file_system_of_the_tests(tmp_path: Path) -> None:
    """Without substitutes: whatever this file system can."""
    assert write_areas(tmp_path / "file", 1) == (tmp_path / "file").read_bytes()


def test_a_file_system_without_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    assert write_areas(tmp_path / "file", 2) == (tmp_path / "file").read_bytes()


def test_a_file_system_with_larger_blocks_gets_cached_writes(
    tmp_path: Path, direct_places: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.pwrite, []

    def refusing(descriptor: int, data: memoryview, place: int) -> int:
        before = len(direct_places)
        done = real(descriptor, data, place)
        if len(direct_places) > before and len(direct_places) > 2:
            refused.append(place)
            raise OSError(errno.EINVAL, "Invalid argument")
        return done

    monkeypatch.setattr(os, "pwrite", refusing)
    assert write_areas(tmp_path / "file", 3) == (tmp_path / "file").read_bytes()
    assert len(refused) == 1


def test_other_errors_are_not_hidden(
    tmp_path: Path, direct_places: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: memoryview, place: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with NewFile(tmp_path / "file") as file:
        area = file.area(0, BUFFER)
        with pytest.raises(OSError, match="No space left"):
            area.add(memoryview(bytes(BUFFER)))


def test_a_checkpoint_with_large_blocks(
    tmp_path: Path, direct_places: list[tuple[int, int]]
) -> None:
    """Rows that begin at multiples of 64 bytes and have an odd size; small tensors between them."""
    tensors = {
        "large": torch.randn(777, 33),
        "small": torch.randn(5),
        "other": torch.randint(0, 9, (9_001,), dtype=torch.int16),
    }
    parts = [written.rows_part(name, one, 0, len(one)) for name, one in tensors.items()]
    saved = written.write(tmp_path, [parts])
    saved.verify()
    read = written.read_by_torch(saved.path, tensors)
    for name, tensor in tensors.items():
        assert written.same_bits(written.read(saved, name, 0, len(tensor)), tensor)
        assert written.same_bits(read[name], tensor)
    assert len(direct_places) > 2
