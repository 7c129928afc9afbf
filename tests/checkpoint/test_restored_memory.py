"""Large tensors are verified first and then read straight into their place; checksums are those of zlib."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem._checkpoint.matching import LEAST_BYTES
from stratagem._ps.blocks import checksums
from stratagem._ps.blocks.block_reader import BlockReader, RowsWanted
from stratagem.errors import CheckpointCorrupt

ROWS = LEAST_BYTES // 16 + 1


class Model(nn.Module):
    """A large table, a large buffer, and a small layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4)
        self.register_buffer("seen", torch.rand(ROWS, 4))
        self.out = nn.Linear(4, 1)


def trained() -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.out(model.table(torch.arange(ROWS))).square().mean().backward()
    optimizer.step()
    return model, optimizer


def memory_of(model: Model, optimizer: torch.optim.Optimizer) -> list[int]:
    state = optimizer.state[model.table.weight]
    tensors = [model.table.weight, model.seen, state["exp_avg"], state["exp_avg_sq"]]
    return [one.data_ptr() for one in tensors]


def values_of(model: Model, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    found = [
        *model.state_dict().values(),
        *(one for each in state.values() for one in each.values()),
    ]
    return [one.clone() for one in found]


def test_large_tensors_are_read_into_their_place(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint = sg.Checkpoint(model=model, optimizer=optimizer)
    path = checkpoint.save(tmp_path / "one").path
    expected, places = values_of(model, optimizer), memory_of(model, optimizer)
    model.out(model.table(torch.arange(ROWS))).square().mean().backward()
    optimizer.step()
    model.seen.zero_()
    version = model.table.weight._version
    checkpoint.restore(path)
    assert all(map(torch.equal, values_of(model, optimizer), expected))
    assert memory_of(model, optimizer) == places
    assert model.table.weight._version > version  # autograd knows


def test_a_damaged_file_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """Also tensors that are before the damage in the file."""
    model, optimizer = trained()
    checkpoint = sg.Checkpoint(model=model, optimizer=optimizer)
    path = checkpoint.save(tmp_path / "one").path
    [file] = path.glob("*.distcp")
    with file.open("r+b") as opened:
        opened.seek(-(LEAST_BYTES // 2), os.SEEK_END)  # in the rows of the last large tensor
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 1]))
    with torch.no_grad():
        for one in model.parameters():
            one.add_(1.0)
    before = values_of(model, optimizer)
    with pytest.raises(
        CheckpointCorrupt, match=r"does not match .* objects are unchanged"
    ) as caught:
        checkpoint.restore(path)
    assert not caught.value.objects_changed
    assert all(map(torch.equal, values_of(model, optimizer), before))


@pytest.mark.parametrize("by_manager", [False, True])
def test_a_file_damaged_after_it_was_verified_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_manager: bool
) -> None:
    """The second read overwrites objects: the error does not say that they are unchanged."""
    model, optimizer = trained()
    checkpoint = sg.Checkpoint(model=model, optimizer=optimizer)
    read, reads = BlockReader.read, []

    def damaged_later(self: BlockReader, rows: Sequence[RowsWanted]) -> None:
        reads.append(len(rows))
        if len(reads) == 2:
            raise CheckpointCorrupt("a block does not match its checksum.", path=str(tmp_path))
        read(self, rows)

    with sg.CheckpointManager(checkpoint, tmp_path / "saves") as manager:
        path = manager.save(1, wait=True).path
        monkeypatch.setattr(BlockReader, "read", damaged_later)
        with pytest.raises(CheckpointCorrupt, match="The objects are partly restored") as caught:
            manager.restore_or_initialize() if by_manager else checkpoint.restore(path)
    assert "unchanged" not in str(caught.value)
    assert caught.value.objects_changed
    assert len(reads) == 2


def test_shared_memory_of_two_tensors_is_not_read_into(tmp_path: Path) -> None:
    """Tied weights, and a table that is a view of another: restored by copies, as torch loads them."""
    base = torch.rand(2 * ROWS, 4)
    model = nn.Module()
    model.one, model.two = nn.Embedding(ROWS, 4), nn.Embedding(ROWS, 4)
    model.two.weight = model.one.weight
    model.part = nn.Parameter(base[:ROWS])
    expected = {name: one.clone() for name, one in model.state_dict().items()}
    checkpoint = sg.Checkpoint(model=model)
    path = checkpoint.save(tmp_path / "one").path
    with torch.no_grad():
        model.one.weight.zero_()
        model.part.zero_()
    checkpoint.restore(path)
    assert all(torch.equal(one, expected[name]) for name, one in model.state_dict().items())
    assert model.one.weight is model.two.weight


@pytest.mark.parametrize("size", [0, 1, checksums.LARGE_BYTES - 1, checksums.LARGE_BYTES, 300_007])
def test_checksums_are_those_of_zlib(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    data = os.urandom(size)
    part = memoryview(bytearray(data))[size // 3 :]
    for _ in range(2):
        assert checksums.crc32(data) == zlib.crc32(data)
        assert checksums.crc32(part, 12345) == zlib.crc32(part, 12345)
        monkeypatch.setattr(checksums, "kernels", None)
