"""Rows written by any number of writers come back into any other layout, bit for bit."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path

import pytest
import torch
import written_checkpoints as written
from hypothesis import given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem._checkpoint.directory import chain_of
from stratagem._ps.blocks import block_file, block_plan
from stratagem._ps.blocks.block_reader import BlockReader, check_frames
from stratagem._ps.partition import shard_sizes
from stratagem.errors import CheckpointError

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def ranges_of(rows: int, pieces: int) -> list[tuple[int, int]]:
    """Contiguous ranges: the shards of a variable; none for no pieces."""
    if not pieces:
        return [(0, rows)]
    found, start = [], 0
    for size in shard_sizes(rows, pieces):
        found.append((start, size))
        start += size
    return found


@pytest.mark.parametrize("writers", range(6))
def test_any_number_of_writers_to_any_number_of_readers(tmp_path: Path, writers: int) -> None:
    """P writers, Q readers, P and Q in 0…5 (0: no server, one process with everything)."""
    tensors = {
        "a": random_tensor((13, 3), torch.float32),
        "b": random_tensor((7,), torch.bfloat16, 1),
        "c": random_tensor((), torch.float64, 2),
        "d": random_tensor((0, 4), torch.float32),
    }
    parts: list[list[block_file.TensorPart]] = [[] for _ in range(max(1, writers))]
    for name, tensor in tensors.items():
        rows = tensor.shape[0] if tensor.dim() else 1
        if writers and rows >= writers:
            for place, (start, size) in enumerate(ranges_of(rows, writers)):
                parts[place].append(written.rows_part(name, tensor, start, size))
        else:
            parts[0].append(written.rows_part(name, tensor, 0, rows))
    saved = written.write(tmp_path, parts)
    assert len([name for name in saved.manifest.files if name.endswith(".distcp")]) == max(
        1, writers
    )
    for readers in range(6):
        for name, tensor in tensors.items():
            rows = tensor.shape[0] if tensor.dim() else 1
            pieces = readers if rows >= readers > 0 else 0
            got = [
                written.read(saved, name, start, size) for start, size in ranges_of(rows, pieces)
            ]
            whole = torch.cat(got) if tensor.dim() else got[0]
            assert written.same_bits(whole, tensor), (writers, readers, name)
    got_by_torch = written.read_by_torch(saved.path, tensors)
    assert all(written.same_bits(got_by_torch[name], tensors[name]) for name in tensors)
    saved.verify()


@pytest.mark.parametrize(
    "partitioner",
    [
        sg.partitioners.FixedShardsPartitioner(3),
        sg.partitioners.MinSizePartitioner(min_shard_bytes=400, max_shards=5),
        sg.partitioners.MaxSizePartitioner(max_shard_bytes=300),
    ],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize(
    "other",
    [
        sg.partitioners.FixedShardsPartitioner(4),
        sg.partitioners.MinSizePartitioner(min_shard_bytes=1000, max_shards=2),
        sg.partitioners.MaxSizePartitioner(max_shard_bytes=500),
        None,
    ],
    ids=lambda each: type(each).__name__,
)
def test_every_partitioner_to_every_other(
    tmp_path: Path, partitioner: object, other: object
) -> None:
    tensor = random_tensor((101, 4), torch.float32)

    def pieces(each: object) -> list[tuple[int, int]]:
        count = each(shape=tensor.shape, dtype=tensor.dtype)[0] if callable(each) else 1
        return ranges_of(101, count)

    assert len(pieces(partitioner)) > 1
    parts = [[written.rows_part("t", tensor, start, rows)] for start, rows in pieces(partitioner)]
    saved = written.write(tmp_path, parts)
    got = torch.cat([written.read(saved, "t", start, rows) for start, rows in pieces(other)])
    assert written.same_bits(got, tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0), (4, 3), (2, 3, 2)], ids=str)
def test_every_type_and_shape(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(shape, dtype)
    rows = shape[0] if shape else 1
    saved = written.write(tmp_path, [[written.rows_part("t", tensor, 0, rows)]])
    assert written.same_bits(written.read(saved, "t", 0, rows), tensor)
    assert written.same_bits(written.read_by_torch(saved.path, {"t": tensor})["t"], tensor)


def test_large_tensors_become_several_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks and pieces of a few bytes, so that every boundary is crossed; rows longer than a piece."""
    monkeypatch.setattr(block_file, "PIECE_BYTES", 16)
    monkeypatch.setattr(block_file, "FLUSH_BYTES", 32)
    monkeypatch.setattr(
        block_file, "cut_rows", lambda a, b, c, limit=100: block_plan.cut_rows(a, b, c, limit)
    )
    tensors = {
        "t": random_tensor((57, 3), torch.int16),
        "wide": random_tensor((3, 41), torch.int64),
    }
    parts = [written.rows_part(name, each, 0, len(each)) for name, each in tensors.items()]
    saved = written.write(tmp_path, [parts])
    assert len(saved.manifest.blocks_of["t"]) == 4
    assert len(saved.manifest.blocks_of["wide"]) == 3
    assert all(block.offset % 64 == 0 for block in saved.manifest.blocks)
    for name, tensor in tensors.items():
        assert written.same_bits(written.read(saved, name, 0, len(tensor)), tensor)
        assert written.same_bits(written.read(saved, name, 1, len(tensor) - 2), tensor[1:-1])
    assert written.same_bits(written.read_by_torch(saved.path, tensors)["t"], tensors["t"])
    saved.verify()


def test_raw_rows_can_be_read_at_the_offsets_of_the_manifest(tmp_path: Path) -> None:
    """What a parameter server does: `pread` into its memory, no unpickling."""
    tensor = random_tensor((6, 2), torch.float32)
    saved = written.write(tmp_path, [[written.rows_part("t", tensor, 0, 6)]])
    (block,) = saved.manifest.blocks
    data = (saved.path / block.file).read_bytes()[block.offset :][: 6 * 8]
    assert data == tensor.numpy().tobytes()
    assert block.offset % 64 == 0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_chain_of_deltas_reads_as_the_last_state(data: st.DataObject) -> None:
    """Deltas by ranges and by scattered rows, each upon the one before, read in any range."""
    rows = 29
    with tempfile.TemporaryDirectory() as folder:
        table = random_tensor((rows, 3), torch.int32)
        full = [written.rows_part("t", table, start, size) for start, size in ranges_of(rows, 3)]
        saved = written.write(Path(folder), [[part] for part in full])
        for number in range(2, 2 + data.draw(st.integers(0, 3))):
            touched = sorted(data.draw(st.sets(st.integers(0, rows - 1), max_size=12)))
            table[touched] = random_tensor((len(touched), 3), torch.int32, seed=number)
            if data.draw(st.booleans()):
                parts = [written.touched_part("t", table, touched)]
            else:
                parts = [written.rows_part("t", table, row, 1) for row in touched]
            saved = written.write(Path(folder), [parts], parent=saved, serial=number, step=number)
        start = data.draw(st.integers(0, rows - 1))
        count = data.draw(st.integers(0, rows - start))
        assert torch.equal(written.read(saved, "t", start, count), table[start : start + count])
        saved.verify()


def test_a_delta_is_no_checkpoint_for_plain_torch(tmp_path: Path) -> None:
    """It has no index, so torch refuses it; it would find a part of the rows."""
    tensor = random_tensor((4, 2), torch.float32)
    full = written.write(tmp_path, [[written.rows_part("t", tensor, 0, 4)]])
    delta = written.write(tmp_path, [[written.touched_part("t", tensor, [1])]], parent=full, step=2)
    assert (full.path / ".metadata").exists()
    assert not (delta.path / ".metadata").exists()


def test_a_delta_whose_parent_was_replaced_is_refused(tmp_path: Path) -> None:
    tensor = random_tensor((4, 2), torch.float32)
    parts = [[written.rows_part("t", tensor, 0, 4)]]
    full = written.write(tmp_path, parts)
    delta = written.write(tmp_path, [[written.touched_part("t", tensor, [1])]], parent=full, step=2)
    full.path.rename(tmp_path / "aside")
    with pytest.raises(sg.errors.CheckpointCorrupt, match="holds the changes since"):
        delta.verify()
    written.write(tmp_path, parts)
    with pytest.raises(sg.errors.CheckpointCorrupt, match="was built on checkpoint"):
        chain_of(delta)


def test_a_number_per_shard_restores_exactly_or_as_the_largest(tmp_path: Path) -> None:
    """Same layout: each shard its own number. Another layout, and plain torch: the largest."""
    parts = [
        [written.number_part("step", 3.0, 0, 5)],
        [written.number_part("step", 9.0, 5, 5)],
        [written.number_part("step", 4.0, 10, 2)],
    ]
    saved = written.write(tmp_path, parts)
    with BlockReader(chain_of(saved)) as reader:
        assert [
            float(reader.read_number("step", *place)) for place in ((0, 5), (5, 5), (10, 2))
        ] == [
            3.0,
            9.0,
            4.0,
        ]
        assert float(reader.read_number("step", 0, 6)) == 9.0
    assert float(written.read_by_torch(saved.path, {"step": torch.tensor(0.0)})["step"]) == 9.0
    saved.verify()
    check_frames(saved.path, saved.manifest)


def test_a_tensor_with_fewer_rows_than_announced_is_not_saved(tmp_path: Path) -> None:
    """A file that could not be restored is worse than a save that fails."""
    part = dataclasses.replace(block_file.part_of("w", torch.ones(3, 2)), rows=4)
    with block_file.BlockFileWriter(tmp_path / "file", lambda count: None) as writer:
        with pytest.raises(CheckpointError, match=r"rows 0 to 4 of 'w' have 24 bytes, expected 32"):
            writer.add(part)
