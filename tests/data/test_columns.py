"""Columnar readers and steps, against plain pyarrow and Python."""

from __future__ import annotations

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem.data import Dataset, Ragged
from tests.data.columnar_files import (
    FORMATS,
    columns_of,
    make_files,
    plain,
    ranges_of,
    rows_of,
    table_of,
    write_csv,
    write_parquet,
)


def read(kind, paths, **options):
    return FORMATS[kind][1](paths, **options)


@pytest.mark.parametrize("kind", sorted(FORMATS))
@pytest.mark.parametrize("threads", [0, 3])
def test_every_format_gives_the_rows_of_its_files(tmp_path, kind, threads):
    paths, rows = make_files(tmp_path, kind, [7, 0, 5, 11])
    batches = list(read(kind, paths, batch_size=4, num_parallel_reads=threads))
    assert [len(batch["n"]) for batch in batches] == [4, 4, 4, 4, 4, 3]
    assert rows_of(batches) == rows
    assert list(batches[0]) == columns_of(kind)
    types = {
        name: leaf.dtype for name, leaf in batches[0].items() if isinstance(leaf, torch.Tensor)
    }
    assert types["n"] is torch.int64
    assert types["x"] is torch.float32
    dropped = read(kind, paths, batch_size=4, drop_remainder=True)
    assert sum(len(batch["n"]) for batch in dropped) == 20
    assert list(read(kind, paths[1:2], batch_size=4)) == []


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(sorted(FORMATS)),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    batch=st.integers(1, 12),
    again=st.integers(1, 12),
)
def test_any_sizes(tmp_path_factory, kind, sizes, batch, again):
    """Batches have exactly the asked number of rows, wherever files and ranges end."""
    paths, rows = make_files(tmp_path_factory.mktemp("files"), kind, sizes)
    dataset = read(kind, paths, batch_size=batch)
    assert rows_of(dataset) == rows
    for other in (dataset.batch(again), dataset.map(lambda b: b).batch(again)):
        lengths = [len(b["n"]) for b in other]
        assert lengths == [again] * (len(rows) // again) + [len(rows) % again] * (
            len(rows) % again > 0
        )
        assert rows_of(other) == rows
    whole = dataset.map(lambda b: b).batch(again, drop_remainder=True)
    assert rows_of(whole) == rows[: len(rows) // again * again]


def test_number_of_batches_is_known_from_the_files(tmp_path):
    paths, _ = make_files(tmp_path, "parquet", [7, 5])
    dataset = Dataset.from_parquet(paths, batch_size=5)
    assert len(dataset) == 3
    assert len(dataset.batch(4)) == 3
    assert len(dataset.repeat(2)) == 6
    assert len(dataset.shuffle(4)) == 3
    filtered = Dataset.from_parquet(paths, filters=[("n", ">", 3)])
    assert filtered.cardinality() == sg.data.UNKNOWN
    assert repr(dataset) == "<Dataset Range>" or "Range" in repr(dataset)


def test_a_projection_reads_and_groups_columns(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", table_of(6))
    (some,) = Dataset.from_parquet(path, ["x", "n"])
    assert list(some) == ["x", "n"]
    (named,) = Dataset.from_parquet(
        path, {"both": ["n", "x"], "number": "n"}, dtypes={"n": torch.float32, "x": torch.float32}
    )
    assert named["both"].shape == (6, 2)
    assert named["both"].tolist() == [[float(i), i / 4] for i in range(6)]
    assert named["number"].dtype is torch.float32


FILTERS = [
    [("n", ">=", 4)],
    [("n", ">=", 4), ("x", "<", 2.0)],
    [[("n", "<", 2)], [("name", "=", "name 4"), ("flag", "==", True)]],
    [("name", "in", ["name 1", "name 3"])],
    [("name", "not in", ["name 1"])],
    [("n", "!=", 100)],
    [("n", ">", 100)],
]


@pytest.mark.parametrize("filters", FILTERS)
def test_filters_give_what_pyarrow_gives(tmp_path, filters):
    path = write_parquet(tmp_path / "a.parquet", table_of(20))
    expected = pq.read_table(path, filters=filters)
    dataset = Dataset.from_parquet(path, ["n", "tags"], 3, filters=filters)
    assert rows_of(dataset) == expected.select(["n", "tags"]).to_pylist()
    csv = write_csv(tmp_path / "a.csv", table_of(20))
    assert (
        rows_of(Dataset.from_csv(csv, ["n"], 3, filters=filters))
        == expected.select(["n"]).to_pylist()
    )


def test_filters_skip_row_groups_by_their_statistics(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", table_of(20), group=4)
    ranges = ranges_of(Dataset.from_parquet(path, filters=[("n", ">=", 13)]))
    assert [(each.index, each.start, each.stop) for each in ranges] == [(3, 12, 16), (4, 16, 20)]


def test_missing_values_need_a_fill_value(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table(
        {
            "age": pa.array([1, None, 3], pa.int32()),
            "name": ["a", None, "b"],
            "tags": pa.array([[1, None], None, [2]], pa.list_(pa.int64())),
        }
    )
    pq.write_table(table, path)
    for column, rows in (("age", 3), ("name", 3), ("tags", 3)):
        with pytest.raises(
            sg.errors.ColumnError,
            match=rf"column '{column}' .*a.parquet.* missing value\(s\) in {rows} rows",
        ) as caught:
            list(Dataset.from_parquet(path, [column]))
        assert (caught.value.path, caught.value.column) == (str(path), column)
    (batch,) = Dataset.from_parquet(path, fill={"age": -1, "name": "?", "tags": 9})
    assert plain(batch) == {"age": [1, -1, 3], "name": ["a", "?", "b"], "tags": [[1, 9], [], [2]]}
    assert batch["age"].dtype is torch.int32


def test_fill_values_have_the_type_of_the_tensor(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": pa.array([1, None, 300], pa.int16())}), path)
    (batch,) = Dataset.from_parquet(path, fill={"n": 0.5}, dtypes={"n": torch.float32})
    assert plain(batch) == {"n": [1.0, 0.5, 300.0]}
    (batch,) = Dataset.from_parquet(path, fill={"n": 10**6}, dtypes={"n": torch.int64})
    assert plain(batch) == {"n": [1, 10**6, 300]}
    for value in (0.5, float("nan")):
        with pytest.raises(
            sg.errors.ColumnError, match=r"fill=.*is int16, which cannot hold"
        ) as caught:
            list(Dataset.from_parquet(path, fill={"n": value}))
        assert (caught.value.path, caught.value.column) == (str(path), "n")


def test_types_become_the_nearest_tensor(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {
        "i8": pa.array([1, 2], pa.int8()), "u8": pa.array([1, 2], pa.uint8()), "u16": pa.array([1, 2], pa.uint16()),
        "u32": pa.array([1, 2**32 - 1], pa.uint32()), "u64": pa.array([1, 2], pa.uint64()),
        "f16": pa.array(np.array([1, 2], np.float16)), "f64": pa.array([1.5, 2.5], pa.float64()), "b": [True, False],
        "fixed": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)), "large": pa.array([[1], []], pa.large_list(pa.int16())),
        "dictionary": pa.array(["x", "y"]).dictionary_encode(), "bytes": pa.array([b"a", b"b"]),
    }  # fmt: skip
    pq.write_table(pa.table(columns), path)
    (batch,) = Dataset.from_parquet(path)
    types = {name: leaf.dtype for name, leaf in batch.items() if isinstance(leaf, torch.Tensor)}
    assert types == {
        "i8": torch.int8, "u8": torch.uint8, "u16": torch.int32, "u32": torch.int64, "u64": torch.int64,
        "f16": torch.float16, "f64": torch.float64, "b": torch.bool, "fixed": torch.int32,
    }  # fmt: skip
    assert batch["u32"].tolist() == [1, 2**32 - 1]
    assert batch["fixed"].tolist() == [[1, 2], [3, 4]]
    assert isinstance(batch["large"], Ragged)
    assert plain(batch["large"]) == [[1], []]
    assert batch["dictionary"].tolist() == ["x", "y"]
    assert batch["bytes"].tolist() == [b"a", b"b"]


def test_dtypes_convert(tmp_path):
    path = tmp_path / "a.parquet"
    times = pa.array([0, 10**6], pa.timestamp("us"))
    pq.write_table(pa.table({"t": times, "x": [1.5, 2.0], "n": ["3", "4"]}), path)
    (batch,) = Dataset.from_parquet(
        path, dtypes={"t": torch.int64, "x": torch.bfloat16, "n": torch.int64}
    )
    assert batch["t"].tolist() == [0, 10**6]
    assert batch["x"].dtype is torch.bfloat16
    assert batch["n"].tolist() == [3, 4]
    with pytest.raises(sg.errors.ColumnError, match=r"column 'x' .*cannot be converted"):
        list(Dataset.from_parquet(path, ["x"], dtypes={"x": torch.int64}))


def test_numpy_files_follow_the_rules_of_other_columns(tmp_path):
    path = tmp_path / "a.npz"
    arrays = {
        "small": np.array([65535, 1], np.uint16),
        "large": np.array([7, 2**40], np.uint64),
        "byte": np.array([255, 0], np.uint8),
        "x": np.array([1.5, 2.0]),
        "day": np.array(["2020-01-02", "2020-01-03"], "M8[D]"),
        "text": np.array(["a", "b"]),
    }
    np.savez(path, **arrays)
    names = {"s": "small", "l": "large", "b": "byte", "d": "day"}
    (batch,) = Dataset.from_numpy(path, names, 2, dtypes={"day": torch.int64, "byte": torch.int16})
    assert {name: each.dtype for name, each in batch.items()} == {
        "s": torch.int32,
        "l": torch.int64,
        "b": torch.int16,
        "d": torch.int64,
    }
    assert plain(batch) == {"s": [65535, 1], "l": [7, 2**40], "b": [255, 0], "d": [18263, 18264]}
    for options, text in (
        (
            {"columns": ["x"], "dtypes": {"x": torch.int64}},
            "column 'x' .* cannot be converted: .*1.5",
        ),
        (
            {"columns": ["large"], "dtypes": {"large": torch.int8}},
            "cannot be converted: .*not in range",
        ),
        ({"columns": ["day"]}, "cannot become a tensor"),
        ({"columns": ["text"], "dtypes": {"text": torch.int64}}, "cannot be converted: .*'[ab]'"),
        ({"columns": ["x"], "hash_buckets": {"x": 5}}, "cannot be hashed"),
        ({"columns": ["x"], "dtypes": {"small": torch.int64}}, "dtypes names column 'small'"),
    ):
        with pytest.raises(sg.errors.ColumnError, match=text):
            list(Dataset.from_numpy(path, batch_size=2, **options))
    np.save(tmp_path / "b.npy", np.arange(3))
    with pytest.raises(
        sg.errors.ColumnError, match=r"which is not read; the columns are '<array>'"
    ):
        list(Dataset.from_numpy(tmp_path / "b.npy", dtypes={"x": torch.float32}))


def test_numpy_arrays_of_several_dimensions_are_filtered_by_another_array(tmp_path):
    path = tmp_path / "a.npz"
    images = np.arange(2 * 3 * 4, dtype=">f4").reshape(2, 3, 4)
    np.savez(path, image=images, day=np.array([1, 2]), unused=np.ones(2, np.complex64))
    (batch,) = Dataset.from_numpy(path, ["image"], filters=[("day", ">", 1)])
    assert batch["image"].dtype is torch.float32
    assert torch.equal(batch["image"], torch.arange(12.0, 24.0).reshape(1, 3, 4))
    with pytest.raises(sg.errors.ColumnError, match=r"array 'unused' .*complex64.* cannot become"):
        list(Dataset.from_numpy(path))
    with pytest.raises(sg.errors.ColumnError, match=r"'z' does not exist .*'image', 'day', 'un"):
        list(Dataset.from_numpy(path, ["z", "image", "day"]))


def test_batches_own_their_memory(tmp_path):
    """Writing into a batch changes neither the file, nor other batches."""
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(path, pa.schema([("n", pa.int64())])) as file:
        file.write(pa.table({"n": list(range(6))}))
    for batch in Dataset.from_arrow(path, batch_size=3):
        batch["n"].fill_(7)
    assert rows_of(Dataset.from_arrow(path, batch_size=3)) == [{"n": i} for i in range(6)]


def test_arrow_streams_and_tables(tmp_path):
    table = table_of(7)
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as file:
        for batch in table.to_batches(max_chunksize=3):
            file.write_batch(batch)
    assert (
        rows_of(Dataset.from_arrow(tmp_path / "a.arrow", ["n", "tags"], 2))
        == table.select(["n", "tags"]).to_pylist()
    )
    memory = Dataset.from_arrow(table, batch_size=2)
    assert rows_of(memory) == table.to_pylist()
    assert len(memory) == 4
    import cloudpickle

    assert rows_of(cloudpickle.loads(cloudpickle.dumps(memory))) == table.to_pylist()


def test_csv_details(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('id;score;name\n1;0.5;"x; y"\n2;;\n')
    (batch,) = Dataset.from_csv(path, delimiter=";", fill={"score": -1.0})
    assert plain(batch) == {"id": [1, 2], "score": [0.5, -1.0], "name": ["x; y", ""]}
    assert batch["score"].dtype is torch.float32
    bare = tmp_path / "b.csv"
    bare.write_text("1,a\n2,b\n")
    (named,) = Dataset.from_csv(bare, column_names=["n", "t"], dtypes={"n": torch.int32})
    assert plain(named) == {"n": [1, 2], "t": ["a", "b"]}
    assert named["n"].dtype is torch.int32
    with gzip.open(tmp_path / "c.csv.gz", "wt") as file:
        file.write("n\n1\n2\n")
    assert rows_of(Dataset.from_csv(tmp_path / "c.csv.gz")) == [{"n": 1}, {"n": 2}]
    quoted = tmp_path / "d.csv"
    quoted.write_text('n,t\n1,"a\nb"\n2,c\n')
    assert rows_of(Dataset.from_csv(quoted, newlines_in_values=True)) == [
        {"n": 1, "t": "a\nb"},
        {"n": 2, "t": "c"},
    ]
    dates = tmp_path / "e.csv"
    dates.write_text("d\n2024-01-01\n")
    assert rows_of(Dataset.from_csv(dates)) == [{"d": "2024-01-01"}]
    other_order = tmp_path / "f.csv"
    other_order.write_text("name,id\nz,9\n")
    both = Dataset.from_csv([bare.with_name("a.csv"), other_order], ["id"], delimiter=";")
    with pytest.raises(sg.errors.ColumnError, match=r"column 'id' does not exist in file .*f.csv"):
        list(both)


def test_text_of_csv_files_that_looks_like_a_missing_number_stays_text(tmp_path):
    lines = 'land,n,x\nNA,1,2.5\n,NA,\n"",3,N/A\nNone,4,null\nDE,5,1\n'
    (tmp_path / "a.csv").write_text(lines)
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        file.write(lines)
    missing = {"n": -1, "x": 0.0}
    for name in ("a.csv", "a.csv.gz"):
        path = tmp_path / name
        (batch,) = Dataset.from_csv(path, fill=missing)
        assert batch["land"].tolist() == ["NA", "", "", "None", "DE"]
        assert plain(batch)["n"] == [1, -1, 3, 4, 5]
        assert plain(batch)["x"] == [2.5, 0.0, 0.0, 0.0, 1.0]
        (batch,) = Dataset.from_csv(path, ["land"], fill={"land": "?"})
        assert batch["land"].tolist() == ["NA", "?", "?", "None", "DE"]
        (batch,) = Dataset.from_csv(path, ["land"], hash_buckets={"land": 1000})
        expected = sg.data.hash_bucket(["NA", "", "", "None", "DE"], 1000)
        assert torch.equal(batch["land"], expected)
        (batch,) = Dataset.from_csv(path, ["land"], filters=[("land", "!=", "DE")])
        assert batch["land"].tolist() == ["NA", "", "", "None"]


def test_csv_ranges_are_whole_lines(tmp_path, monkeypatch):
    from stratagem._data import csv_format

    monkeypatch.setattr(csv_format, "_RANGE_BYTES", 40)
    path = write_csv(tmp_path / "a.csv", table_of(50))
    dataset = Dataset.from_csv(path, batch_size=7)
    assert len(ranges_of(dataset)) > 10
    assert rows_of(dataset) == table_of(50).select(["n", "x", "flag", "name"]).to_pylist()
    monkeypatch.setattr(csv_format, "_BLOCK_BYTES", 16)  # shorter than a line
    assert len(rows_of(Dataset.from_csv(path))) == 50


def test_the_steps_on_batches(tmp_path):
    paths, rows = make_files(tmp_path, "parquet", [9, 8])
    dataset = Dataset.from_parquet(paths, batch_size=4)
    kept = dataset.filter(lambda b: b["n"] % 3 == 0)
    assert rows_of(kept) == [row for row in rows if row["n"] % 3 == 0]
    assert all(len(b["n"]) for b in dataset.filter(lambda b: b["n"] > 10))
    mapped = dataset.map(lambda b: {"double": b["n"] * 2, "tags": b["tags"]}, 2)
    assert rows_of(mapped) == [{"double": row["n"] * 2, "tags": row["tags"]} for row in rows]
    assert rows_of(dataset.take(2)) == rows[:8]
    assert rows_of(dataset.skip(3)) == rows[12:]
    assert rows_of(dataset.shard(2, 1)) == rows[4:8] + rows[12:16]
    assert rows_of(dataset.repeat(2)) == rows * 2
    cached = dataset.cache()
    assert rows_of(cached) == rows_of(cached) == rows
    assert rows_of(dataset.prefetch(2)) == rows
    assert rows_of(dataset.concatenate(dataset)) == rows * 2
    assert [len(b["n"]) for b in dataset.concatenate(dataset).batch(30)] == [30, 4]
    single = list(dataset.unbatch())
    assert [plain(row) for row in single] == rows
    assert single[3]["tags"].tolist() == [0, 1, 2]
    assert [
        x["n"].tolist() for x in dataset.unbatch().take(3).map(lambda r: {"n": r["n"]}).batch(2)
    ] == [[0, 1], [2]]
    pairs = dataset.map(lambda b: (b["x"], b["n"])).batch(5)
    assert [len(x) for x, _ in pairs] == [5, 5, 5, 2]


def test_shuffle_mixes_rows_within_windows(tmp_path):
    paths, rows = make_files(tmp_path, "parquet", [40, 60])
    dataset = Dataset.from_parquet(paths, ["n", "tags"], 10).shuffle(30, seed=1)
    found = rows_of(dataset)
    assert [len(b["n"]) for b in dataset] == [10] * 10
    assert sorted(row["n"] for row in found) == list(range(100))
    by_number = {row["n"]: row["tags"] for row in rows}
    assert all(row["tags"] == by_number[row["n"]] for row in found), "columns must stay together"
    windows = [[row["n"] for row in found[i : i + 30]] for i in range(0, 100, 30)]
    assert [sorted(window) for window in windows] == [
        list(range(i, min(i + 30, 100))) for i in range(0, 100, 30)
    ]
    assert windows[0] != sorted(windows[0])
    assert rows_of(dataset) != found, "another epoch has another order"
    again = Dataset.from_parquet(paths, ["n", "tags"], 10).shuffle(30, seed=1)
    assert rows_of(again) == found
    full = [row["n"] for row in rows_of(Dataset.from_parquet(paths, ["n"], 10).shuffle(seed=2))]
    assert sorted(full) == list(range(100))
    assert max(full[:30]) > 60
    fixed = Dataset.from_parquet(paths, ["n"], 10).shuffle(seed=2, reshuffle_each_iteration=False)
    assert rows_of(fixed) == rows_of(fixed)


def test_shuffle_fills_batches_after_a_filter(tmp_path):
    paths, _ = make_files(tmp_path, "parquet", [40])
    dataset = (
        Dataset.from_parquet(paths, ["n"], 8).filter(lambda b: b["n"] % 3 > 0).shuffle(10, seed=1)
    )
    assert [len(b["n"]) for b in dataset] == [8, 8, 8, 2]
    assert sorted(row["n"] for row in rows_of(dataset)) == [i for i in range(40) if i % 3]


def test_filter_functions_answer_for_each_row(tmp_path):
    paths, _ = make_files(tmp_path, "parquet", [5])
    dataset = Dataset.from_parquet(paths, ["n"])
    for answer in (True, torch.ones(4, dtype=torch.bool), torch.ones(5)):
        with pytest.raises(
            ValueError, match=r"expected one True or False per row: tensor\[5\] bool"
        ):
            list(dataset.filter(lambda b, answer=answer: answer))
    assert rows_of(dataset.filter(lambda b: (b["n"] > 2).numpy())) == [{"n": 3}, {"n": 4}]


def test_a_map_must_keep_rows_together(tmp_path):
    paths, _ = make_files(tmp_path, "parquet", [5])
    broken = Dataset.from_parquet(paths, ["n"]).map(lambda b: {"n": b["n"], "first": b["n"][:2]})
    with pytest.raises(sg.errors.UnequalRows, match="disagree in length"):
        list(broken.shuffle(3))
    with pytest.raises(sg.errors.UnequalRows, match="has no first dimension"):
        list(Dataset.from_parquet(paths, ["n"]).map(lambda b: b["n"].sum()).batch(2))


def test_batches_of_columns_are_distributed(tmp_path):
    paths, _ = make_files(tmp_path, "parquet", [7])
    dataset = Dataset.from_parquet(paths, ["n", "tags", "name"], 5)
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        steps = list(strategy.distribute_dataset(dataset))
        parts = [[plain(part) for part in strategy.local_results(step["tags"])] for step in steps]
        assert parts == [[[[], [0], [0, 1]], [[0, 1, 2], []]], [[[0]], [[0, 1]]]]
        bag = torch.nn.EmbeddingBag(4, 2, mode="sum", include_last_offset=True)
        sums = strategy.run(lambda batch: bag(*batch["tags"]).shape[0], args=(steps[0],))
        assert strategy.local_results(sums) == (3, 2)
        assert [list(part) for part in strategy.local_results(steps[1]["name"])] == [
            ["name 0"],
            ["name 1"],
        ]


def test_element_spec(tmp_path):
    paths, _ = make_files(tmp_path, "parquet", [7])
    spec = Dataset.from_parquet(paths, ["n", "tags"], 5).element_spec
    assert spec["n"] == sg.data.TensorSpec((None,), torch.int64)
    assert spec["tags"] == sg.data.ObjectSpec((None,), "ragged torch.int64")


def test_random_tables_equal_pyarrow(tmp_path):
    """Every column of a larger table, over several chunks and row groups."""
    random = np.random.default_rng(0)
    rows = 150_000
    table = pa.table(
        {
            "a": random.integers(0, 1000, rows),
            "b": random.standard_normal(rows).astype(np.float32),
            "c": pa.array(random.integers(0, 50, rows)).cast(pa.string()).dictionary_encode(),
        }
    )
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=100_000)
    dataset = Dataset.from_parquet(path, batch_size=4096, hash_buckets={"c": 997})
    batches = list(dataset)
    assert torch.cat([b["a"] for b in batches]).tolist() == table.column("a").to_pylist()
    assert np.array_equal(
        torch.cat([b["b"] for b in batches]).numpy(), table.column("b").to_numpy()
    )
    hashed = sg.data.hash_bucket(pc.cast(table.column("c"), pa.string()), 997)
    assert torch.equal(torch.cat([b["c"] for b in batches]), hashed)
