"""Dynamic tables in files: the same numbers, clear errors, and nothing left behind."""

from __future__ import annotations

import errno
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from waiting import wait_until

import stratagem as sg
from stratagem._core.key_index import PROTECTED
from stratagem._wire.shm import Segment, open_segment

P = sg.partitioners
ROWS = 200_000  # each shard, and so its state, is larger than a large page


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sg.LocalCluster]:
    monkeypatch.setenv("STRATAGEM_TABLE_DIRECTORY", str(tmp_path))
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as made:
        yield made


def files_in(directory: Path) -> int:
    """Return how many files of a directory, all without a name, are mapped in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    inodes = {line.split()[4] for line in lines if f"{directory}/" in line and "(deleted)" in line}
    return len(inodes)


def trained(strategy: sg.Strategy, kind: type, **settings: object) -> dict[int, list[float]]:
    torch.manual_seed(0)
    with strategy.scope():
        table = sg.nn.DynamicEmbedding(8, max_rows=ROWS, seed=3, **settings)
        optimizer = kind([table.weight], lr=0.1)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        table(ids).pow(2).sum().backward()
        optimizer.step()

    pool = torch.randint(-(2**62), 2**62, (300,))
    list(strategy.run_steps(step, [pool[torch.randint(300, (64,))] for _ in range(5)]))
    ids, rows = table.export()
    assert len(table) == len(ids) > 100
    return dict(zip(ids.tolist(), rows.tolist(), strict=True))


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam, sg.optim.RowWiseAdagrad]
)
def test_rows_and_state_on_disk_have_the_numbers_of_rows_in_memory(
    cluster: sg.LocalCluster, tmp_path: Path, kind: type
) -> None:
    """On servers the optimizer's state is in files, too; no file has a name."""
    found = []
    for on_disk in (False, True):
        with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(2)) as strategy:
            before = files_in(tmp_path)
            found.append(trained(strategy, kind, on_disk=on_disk))
            states = {torch.optim.SGD: 0, torch.optim.SparseAdam: 2}.get(kind, 1)
            expected = 2 * (1 + states) if on_disk else 0
            assert files_in(tmp_path) - before == expected
        assert list(tmp_path.iterdir()) == []
    assert found[0] == found[1]
    wait_until(lambda: gc.collect() >= 0 and files_in(tmp_path) == 0)


def test_on_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_TABLE_DIRECTORY", str(tmp_path))
    one = trained(sg.OneDeviceStrategy("cpu:0"), torch.optim.Adagrad, on_disk=True)
    assert one == trained(sg.OneDeviceStrategy("cpu:0"), torch.optim.Adagrad)


def test_rows_leave_a_full_table_on_disk(cluster: sg.LocalCluster) -> None:
    """Eviction, and fresh values and optimizer state for the next id."""
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            table = sg.nn.DynamicEmbedding(2, max_rows=2, evict="age", init="zeros", on_disk=True)
            optimizer = torch.optim.Adagrad([table.weight], lr=0.1)

        def step(ids: torch.Tensor) -> None:
            optimizer.zero_grad()
            table(ids).sum().backward()
            optimizer.step()

        ids = [1] * 3 + [9] * (PROTECTED + 1) + [2]
        list(strategy.run_steps(step, [torch.tensor([one]) for one in ids]))
        left, rows = table.export()
        assert left.tolist() == [2, 9]
        torch.testing.assert_close(rows[0], torch.full((2,), -0.1))


def test_rows_on_disk_do_not_count_in_the_memory_of_a_server(
    cluster: sg.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table may be larger than the memory that a server may use."""
    monkeypatch.setenv("STRATAGEM_SERVER_MEMORY_BYTES", "100000")
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as small:
        with sg.ParameterServerStrategy(small.resolver) as strategy:
            assert trained(strategy, sg.optim.RowWiseAdagrad, on_disk=True)
        with sg.ParameterServerStrategy(small.resolver) as strategy:
            with strategy.scope():
                table = sg.nn.DynamicEmbedding(8, max_rows=ROWS)
            with pytest.raises(MemoryError, match="STRATAGEM_SERVER_MEMORY_BYTES"):
                list(strategy.run_steps(lambda ids: table(ids).sum(), [torch.arange(10_000)]))


def test_a_full_disk_is_an_error_with_numbers(cluster: sg.LocalCluster, tmp_path: Path) -> None:
    """The whole file is reserved at the start: training never stops in the middle for want of space."""
    rows = 1 << 40
    with pytest.raises(
        OSError, match=r"no space for a table of .* GB are free: lower max_rows"
    ) as one:
        sg.nn.DynamicEmbedding(8, max_rows=rows, on_disk=True)
    assert one.value.errno == errno.ENOSPC
    with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(2)) as strategy:
        with strategy.scope():
            table = sg.nn.DynamicEmbedding(8, max_rows=rows, on_disk=True)
        with pytest.raises(OSError, match=r"no space for a table of .*STRATAGEM_TABLE_DIRECTORY"):
            list(strategy.run_steps(lambda ids: table(ids).sum(), [torch.arange(3)]))
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: gc.collect() >= 0 and files_in(tmp_path) == 0)


@pytest.mark.parametrize(
    ("directory", "text"), [("/dev/shm", "are in memory"), ("/no/such/place", "is not a directory")]
)
def test_directories_that_cannot_hold_a_table(
    monkeypatch: pytest.MonkeyPatch, directory: str, text: str
) -> None:
    monkeypatch.setenv("STRATAGEM_TABLE_DIRECTORY", directory)
    with pytest.raises(ValueError, match=text):
        sg.nn.DynamicEmbedding(8, on_disk=True)


def test_another_process_maps_the_file_but_no_file_with_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment on disk is read through its owner's descriptor; a file that others can reach is refused."""
    monkeypatch.setenv("STRATAGEM_TABLE_DIRECTORY", str(tmp_path))
    with Segment(1, 1 << 16, writable_by_peers=False, on_disk=True) as segment:
        offset = segment.take(12)
        segment.tensor(offset, (3,), torch.float32).fill_(7.0)
        with open_segment(segment.ref(), shared=False) as peer:
            assert peer.tensor(offset, (3,), torch.float32).tolist() == [7.0] * 3
        assert open_segment(segment.ref(), shared=True) is None
        named = tmp_path / "named"
        named.write_bytes(bytes(segment._view))
        with named.open("rb") as file:
            ref = segment.ref()
            other = type(ref)(ref.number, ref.pid, file.fileno(), ref.size, ref.token)
            assert open_segment(other, shared=False) is None
