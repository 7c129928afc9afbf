"""Parts of a dataset, and readers of leased elements: every process finds the same elements."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from orders import Events, orders

import stratagem as sg
from stratagem._data.shared_parts import LeasedReader, PartedDataset
from stratagem.data import Dataset
from stratagem.errors import DataError

ROWS = 1000


@pytest.fixture
def parquet(tmp_path: Path) -> str:
    """1,000 rows in two files, in row groups of 60."""
    for part in range(2):
        rows = list(range(500 * part, 500 * part + 500))
        pq.write_table(pa.table({"x": rows}), tmp_path / f"{part}.parquet", row_group_size=60)
    return str(tmp_path / "*.parquet")


def sizes(dataset: PartedDataset) -> list[int]:
    return [dataset.count(part) for part in range(len(dataset.parts))]


def read(
    dataset: PartedDataset, part: int, elements: range, *, epoch: int = 0, seed: int = 5
) -> list[Any]:
    """Read some elements of a part with a new reader."""
    reader = LeasedReader(dataset, keep_open=1)
    size = dataset.count(part)
    reader.begin(
        seed=seed, epoch=epoch, part=part, first=elements.start, count=len(elements), size=size
    )
    found = list(reader)
    assert reader.end()[0] == len(elements)
    reader.close()
    return found


def numbers(batches: list[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_small_row_groups_form_parts_of_some_batches(parquet: str) -> None:
    """A part has at least 16 batches, so few batches are smaller than the others."""
    columns = Dataset.from_parquet(parquet, batch_size=10)
    parted = PartedDataset.of(columns)
    assert [part.elements for part in parted.parts] == [18, 18, 20, 18, 18, 8]
    assert sum(sizes(parted)) == 100
    rows = [
        x
        for part, size in enumerate(sizes(parted))
        for batch in read(parted, part, range(size))
        for x in batch["x"].tolist()
    ]
    assert rows == list(range(ROWS))


@pytest.mark.parametrize("make", ["filter", "filters", "csv", "map", "unbatch"])
def test_sizes_that_are_not_known_are_counted(parquet: str, make: str, tmp_path: Path) -> None:
    made: Dataset
    if make == "filter":
        made = Dataset.from_parquet(parquet, batch_size=10).filter(lambda b: b["x"] % 3 == 0)
    elif make == "filters":
        made = Dataset.from_parquet(parquet, batch_size=10, filters=[("x", ">", 400)])
    elif make == "csv":
        (tmp_path / "a.csv").write_text("x\n" + "\n".join(map(str, range(333))))
        made = Dataset.from_csv(str(tmp_path / "a.csv"), batch_size=10)
    elif make == "map":
        made = Dataset.from_parquet(parquet, batch_size=10).map(lambda b: b["x"][:7]).batch(9)
    else:
        made = Dataset.from_parquet(parquet, batch_size=10).unbatch()
    parted = PartedDataset.of(made)
    found = [
        batch
        for part, size in enumerate(sizes(parted))
        for batch in read(parted, part, range(size))
    ]
    # In other batches, because a batch does not reach over the end of a part; the rows are the same.
    rows = lambda batches: sorted(
        x for b in batches for x in (b["x"] if isinstance(b, dict) else b).flatten().tolist()
    )
    assert rows(found) == rows(list(made))


@orders(400, events=30)
def test_any_element_can_be_read_at_any_time(events: Events) -> None:
    """Readers that jump forth and back find the elements of a reader that reads in order (INP-9)."""
    base = Dataset.from_tensor_slices(torch.arange(97)).shuffle(seed=3)
    if events.below(2):
        base = base.map(lambda x: x + torch.randint(0, 1000, ()), num_parallel_calls=2)
    made = base.batch(4).map(lambda b: b * 2).prefetch(2)
    parted = PartedDataset.of(made)
    assert len(parted.parts) == 1
    expected = numbers(read(parted, 0, range(25), epoch=1))
    reader = LeasedReader(parted, keep_open=2)
    while events.more:
        first = events.below(25)
        count = 1 + events.below(min(3, 25 - first))
        reader.begin(seed=5, epoch=1, part=0, first=first, count=count, size=25)
        assert numbers(list(reader)) == expected[first : first + count]
        assert reader.end()[0] == count
    reader.close()


def test_epochs_and_seeds_have_orders_of_their_own(parquet: str) -> None:
    parted = PartedDataset.of(Dataset.from_parquet(parquet, batch_size=10).shuffle(200))
    assert parted.shuffles
    a, b, c = (
        [x for batch in read(parted, 0, range(18), **of) for x in batch["x"].tolist()]
        for of in ({}, {"epoch": 1}, {"seed": 6})  # type: ignore[var-annotated]
    )
    assert sorted(a) == sorted(b) == sorted(c)
    assert len({tuple(a), tuple(b), tuple(c)}) == 3


def test_the_one_part_of_a_dataset_in_memory_is_the_dataset_itself() -> None:
    """With the same seed, a shared dataset has the order of `iter(dataset)`."""
    made = Dataset.range(20).shuffle().batch(6)
    torch.manual_seed(4)
    expected = numbers(list(made))
    torch.manual_seed(4)
    seed = sg._data.seeds.fresh_seed()  # type: ignore[attr-defined]
    assert numbers(read(PartedDataset.of(made), 0, range(4), seed=seed)) == expected


@pytest.mark.parametrize(
    ("made", "passes"),
    [
        (Dataset.range(6).batch(2).repeat(), None),
        (Dataset.range(6).repeat(3).batch(2), 3),
        (Dataset.range(6).batch(2), 1),
    ],
)
def test_repeat_becomes_passes(made: Dataset, passes: int | None) -> None:
    parted = PartedDataset.of(made)
    assert (parted.passes, sizes(parted)) == (passes, [3])


def test_files_of_records_are_parts(tmp_path: Path) -> None:
    for name, lines in (("a.txt", 5), ("b.txt", 0), ("c.txt", 2)):
        (tmp_path / name).write_text("".join(f"{name}{n}\n" for n in range(lines)))
    lines = PartedDataset.of(Dataset.from_files(str(tmp_path / "*.txt")))
    assert sizes(lines) == [5, 0, 2]
    assert read(lines, 2, range(2)) == ["c.txt0", "c.txt1"]
    made = Dataset.list_files(str(tmp_path / "*.txt")).flat_map(Dataset.from_files)
    assert sizes(PartedDataset.of(made)) == [5, 0, 2]
    paths = PartedDataset.of(Dataset.list_files(str(tmp_path / "*.txt")))
    assert sizes(paths) == [3]


@pytest.mark.parametrize("step", ["take", "drop_remainder", "zip"])
def test_steps_that_need_all_rows_leave_one_part(parquet: str, step: str) -> None:
    """Ten batches of every part would not be ten batches of the dataset."""
    columns = Dataset.from_parquet(parquet, batch_size=10)
    if step == "take":
        made, count = columns.take(7), 7
    elif step == "zip":
        made, count = Dataset.zip(columns, columns), 100
    else:
        made, count = Dataset.from_parquet(parquet, batch_size=64, drop_remainder=True), 15
    assert sizes(PartedDataset.of(made)) == [count]


def test_datasets_that_differ_between_processes_are_refused() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(4)), 2)
    for made, text in (
        (sg.data.as_dataset(loader), r"as_dataset\(loader.dataset\)"),
        (Dataset.range(4).cache(), "cache"),
        (sg.data.as_dataset(iter([1, 2])), "its own order"),
    ):
        with pytest.raises(DataError, match=text):
            PartedDataset.of(made)


def test_files_that_have_changed_are_an_error(tmp_path: Path) -> None:
    """With fewer and with more elements than the coordinator has counted."""
    path = tmp_path / "a.txt"
    path.write_text("a\nb\nc\n")
    parted = PartedDataset.of(Dataset.from_files(str(path)))
    reader = LeasedReader(parted, keep_open=1)
    for size, first, text in ((4, 3, "only 3"), (2, 1, "more than 2")):
        reader.begin(seed=0, epoch=0, part=0, first=first, count=1, size=size)
        with pytest.raises(DataError, match=text):
            next(reader)
    with pytest.raises(DataError, match="outside of a scheduled function"):
        reader.end()
        next(reader)


def test_a_dropped_reader_ends_its_threads(parquet: str) -> None:
    parted = PartedDataset.of(Dataset.from_parquet(parquet, batch_size=1).prefetch(2))
    reader = LeasedReader(parted, keep_open=3)
    for part in range(5):
        reader.begin(
            seed=0, epoch=0, part=part, first=0, count=1, size=parted.parts[part].elements or 0
        )
        next(reader)
    assert any("stratagem-" in thread.name for thread in threading.enumerate())
    del reader
    gc.collect()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("stratagem-")]
