"""Kernels in C for rows of tables: the results of torch and NumPy, bit for bit, and memory that stays inside."""

import itertools
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest
import torch

from stratagem._ps import row_kernels, rows
from stratagem._ps.row_kernels import TableShards
from stratagem._ps.server import kept_rows, row_step
from stratagem._ps.server.shard_optimizer import ServerOptimizer
from stratagem._ps.types import Gradient, GroupSpec

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler, as building the kernels does"),
]
SOURCE = Path(row_kernels.__file__).with_suffix(".c")


def build(made, source=SOURCE):
    """Build the library in a folder, from the source."""
    library = made / "_row_kernels.so"
    command = [COMPILER, "-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library]
    subprocess.run([*command, source], check=True, timeout=120)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the library."""
    return build(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def built(folder):
    kernels = row_kernels.load(folder)
    assert kernels is not None
    return kernels


@pytest.mark.parametrize("count", [1, 2, 63, 5000])
@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 7), (-3, 9), (0, 1 << 20), (-(2**45), 2**45)]
)
def test_ids_are_sorted_as_by_numpy(built, count, low, high, monkeypatch):
    ids = torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(count))
    monkeypatch.setattr(rows, "kernels", None)
    expected = rows.sort_ids(ids)
    found = built.sort(ids)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_ids_that_are_too_far_apart_are_left_to_numpy(built, monkeypatch):
    ids = torch.tensor([2**63 - 1, -(2**63), 0, 2**63 - 1])
    assert built.sort(ids) is None
    monkeypatch.setattr(rows, "kernels", built)
    assert rows.sort_ids(ids).unique.tolist() == [-(2**63), 0, 2**63 - 1]


@pytest.mark.parametrize("width", [1, 8, 16, 20, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_rows_come_from_all_shards(built, width, dtype):
    table = torch.arange(90 * width).view(90, width).to(dtype)
    ids = torch.randint(0, 90, (500,), generator=torch.Generator().manual_seed(width))
    shards = TableShards([table[:10], table[10:40], table[40:]], (0, 10, 40))
    taken = built.take(shards, ids)
    assert torch.equal(taken, table[ids])


@pytest.mark.parametrize("bad", [-1, 6, 2**62, -(2**63)])
def test_an_id_that_changes_after_the_check_stays_inside_the_table(built, bad):
    """A server's ids lie in memory that a client can write: such an id counts as row 0."""
    memory = torch.zeros(8, 4)  # the table, and what lies around it
    table, ids = memory[1:7], torch.tensor([bad, 2])
    assert not built.in_range(ids, 6)
    assert built.in_range(ids[1:], 6)
    built.step_sgd(table, ids, torch.ones(2, 4), 1.0)
    built.step_adagrad(table, torch.ones(6, 4), ids, torch.ones(2, 4), 1.0, 1e-10)
    assert memory[[0, 2, 4, 5, 6, 7]].abs().sum() == 0
    assert (memory[[1, 3]] < -1).all()
    assert torch.equal(built.take(TableShards([table], (0,)), ids), table[[0, 2]])


@pytest.mark.parametrize("width", [1, 3, 8, 16, 33])
def test_rows_are_summed_in_the_order_of_index_add(built, width, monkeypatch):
    random = torch.Generator().manual_seed(width)
    found = rows.sort_ids(torch.randint(0, 200, (1500,), generator=random))
    values = torch.randn(1500, width, generator=random)
    expected = torch.zeros(found.unique.numel(), width).index_add_(0, found.places, values)
    monkeypatch.setattr(rows, "kernels", built)
    assert torch.equal(rows.sum_rows(values, found), expected)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "maximize": True}),
        ("Adagrad", {"lr": 0.05}),
        ("Adagrad", {"lr": 0.05, "maximize": True, "eps": 1e-3}),
        ("Adagrad", {"lr": 0.05, "lr_decay": 0.1}),
    ],
)
def test_steps_give_the_numbers_of_torch(built, name, settings, monkeypatch):
    """As torch's own class on the whole table with a sparse gradient's rows; more rows than fit in one part."""
    start = torch.randn(6000, 16, generator=torch.Generator().manual_seed(1))
    found = {}
    for kernels in (None, built):
        monkeypatch.setattr(row_step, "kernels", kernels)
        table = start.clone()
        group = GroupSpec(variables=(1,), settings=settings)
        stepper = ServerOptimizer(f"torch.optim.{name}", [group], {1: table}, defaults=settings)
        random = torch.Generator().manual_seed(2)
        for _ in range(3):
            ids = torch.randperm(6000, generator=random)[:4500].sort().values
            values = torch.randn(4500, 16, generator=random)
            stepper.step([Gradient(variable=1, ids=ids, values=values)])
        state = [one.value for one in stepper.state_entries()]
        found[kernels] = [table, *state]
    assert all(torch.equal(one, other) for one, other in zip(*found.values(), strict=True))
    assert not torch.equal(found[built][0], start)


@pytest.mark.parametrize("count", [1, 7, 5000])
@pytest.mark.parametrize(
    "edges", [[0, 5], [0, 0, 3, 3, 9], [0, 500_000, 1_000_000], [0, 10, 2**20, 2**40]]
)
@pytest.mark.parametrize("width", [1, 16, 33])
def test_rows_of_joined_tables_are_summed_as_by_numpy(built, count, edges, width, monkeypatch):
    random = torch.Generator().manual_seed(count)
    numbers = torch.randint(0, edges[-1], (count,), generator=random)
    numbers[count // 2 :] = numbers[: count - count // 2].flip(0)  # some twice
    values = torch.randn(count, width, generator=random)
    parts = len(edges) - 1
    monkeypatch.setattr(rows, "kernels", None)
    found = rows.sort_ids(numbers)
    expected, bounds = rows.sum_rows(values, found), torch.tensor(edges)
    ends = torch.searchsorted(found.unique, bounds).tolist()
    grouped = built.group(numbers, bounds)
    assert grouped is not None
    assert grouped.bounds[1].tolist() == [end - start for start, end in itertools.pairwise(ends)]
    for begin, end in [(0, 1), (1, parts), (0, parts)] if parts > 1 else [(0, 1)]:
        first, last = ends[begin], ends[end]
        to, ids = torch.empty(last - first, width), torch.empty(last - first, dtype=torch.int64)
        built.sum_groups(values, grouped, begin, end, to, ids)
        unique = found.unique[first:last]
        starts = bounds[torch.searchsorted(bounds, unique, right=True) - 1]
        assert torch.equal(to, expected[first:last])
        assert torch.equal(ids, unique - starts)


@pytest.mark.parametrize("bad", [-1, 9, 2**62])
def test_numbers_outside_the_joined_tables_are_not_grouped(built, bad):
    assert built.group(torch.tensor([0, bad, 3]), torch.tensor([0, 4, 9])) is None


@pytest.mark.parametrize("widths", [(16,), (16, 16), (1,), (3, 1, 5), (200, 8)])
@pytest.mark.parametrize("bad", [-1, 999, 2**62])
def test_rows_are_kept_once_and_put_back(built, widths, bad, monkeypatch):
    """As without kernels: copies before the first write, in blocks, some tensors read further than others."""
    monkeypatch.setattr(kept_rows, "BLOCK_BYTES", 5000)
    start = [torch.randn(999, width) for width in widths]
    found = []
    for kernels in (built, None):
        monkeypatch.setattr(kept_rows, "kernels", kernels)
        random = torch.Generator().manual_seed(len(widths))
        tensors = [one.clone() for one in start]
        kept = kept_rows.KeptRows(tensors)
        rooms = []
        for read in range(0, 900, 90):
            ids = torch.randperm(999, generator=random)[:200].sort().values
            left = kept.keep(ids, 10 * kept.unit_bytes)
            rooms.append(left.tolist())
            done = ids[: len(ids) - len(left)]
            for number, one in enumerate(tensors):
                one[done] += 1
                rows = one[read : read + 90].clone()
                kept.put_back(number, read, read + 90, rows)
                assert torch.equal(rows, start[number][read : read + 90])
                some = torch.arange(read + 1, read + 90, 3)
                rows = one[some]
                kept.put_back_ids(number, some, rows)
                assert torch.equal(rows, start[number][some])
                kept.advance(number, read + 90)
        assert any(rooms)
        assert kept.keep(torch.arange(980, 999), None).numel() == 0
        found.append((rooms, kept.nbytes))
    assert found[0] == found[1]
    changed = torch.tensor([bad])  # after the check, by a client: it counts as row 0
    monkeypatch.setattr(kept_rows, "kernels", built)
    assert kept_rows.KeptRows(tensors).keep(changed, None).numel() == 0


def test_a_library_of_another_version_is_not_used(tmp_path, caplog):
    other = tmp_path / "other.c"
    text = SOURCE.read_text()
    other.write_text(
        text.replace("sg_version(void) { return ", "sg_version(void) { return 1000 + ")
    )
    assert other.read_text() != text
    assert row_kernels.load(build(tmp_path, other)) is None
    assert "has version 100" in caplog.text


def test_a_library_that_cannot_be_loaded_counts_as_absent(tmp_path):
    assert row_kernels.load(tmp_path) is None
    (tmp_path / "_row_kernels.so").write_bytes(b"not a library")
    assert row_kernels.load(tmp_path) is None


@pytest.mark.parametrize("supports", ["avx512f", "pclmul"])
def test_checksums_are_those_of_zip_on_every_processor(folder, tmp_path, supports):
    """The widest instructions of this processor, then narrower ones, then none."""
    known = f'__builtin_cpu_supports("{supports}")'
    source = tmp_path / "narrower.c"
    source.write_text(SOURCE.read_text().replace(known, "0"))
    assert known in SOURCE.read_text()
    data = torch.randint(0, 256, (70_000,), dtype=torch.uint8).numpy()
    for made in (folder, build(tmp_path, source)):
        kernels = row_kernels.load(made)
        for size in (256, 257, 319, 320, 511, 512, 513, 575, 4096, 65_537, 70_000):
            for start in (0, 1, 3):
                part = data[start:size]
                found = kernels.crc32(part.ctypes.data, part.size, 0x89ABCDEF)
                if made is tmp_path and supports == "pclmul":
                    assert found == -1
                elif part.size >= 256:
                    assert found in (-1, zlib.crc32(part, 0x89ABCDEF))


def test_few_bytes_are_left_to_zlib(built):
    data = torch.zeros(255, dtype=torch.uint8)
    assert built.crc32(data.data_ptr(), 255, 0) == -1
