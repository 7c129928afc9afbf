"""Tables that further commands put into pages: staleness, many tables, the largest row gradients (issue 18)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import bench_tables, bench_top_rows, bench_wire, staleness
from benchmarks.sides import ROOT
from benchmarks.staleness import Result


def results() -> staleness.Found:
    return {
        setting: [
            Result(steps_per_s=100.0 / turn, mean=1.0, maximum=4.0 + turn, auc=0.82 + turn / 1000)
            for turn in (1, 2)
        ]
        for setting in staleness.SETTINGS
    }


@pytest.mark.process  # describing the machine asks a command
def test_the_staleness_command_fills_its_page_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """No figure on the page is written by hand: medians, ratios within a turn, and the AUC of every turn."""
    found = results()
    found[0] = [one._replace(steps_per_s=one.steps_per_s / 2, maximum=0.0) for one in found[0]]
    monkeypatch.setattr(staleness, "measure", lambda turns, steps: (found, 0.871))
    page, picture = tmp_path / "page.md", tmp_path / "staleness.png"
    page.write_text("a\n<!-- staleness:begin -->\nold\n<!-- staleness:end -->\nz\n")
    assert staleness.main(["--page", str(page), "--picture", str(picture)]) == 0
    text = page.read_text()
    assert "| `None` | 75 | 1.00 | 1.00 / 6 | 0.8210, 0.8220 |" in text
    assert "| `0` | 38 | 0.50 | 1.00 / 0 | 0.8210, 0.8220 |" in text
    assert "2 turns" in text
    assert "The best possible AUC is 0.8710" in text
    assert "old" not in text
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
def test_the_staleness_command_trains(tmp_path: Path):
    """Every setting, a few steps: a bounded setting stays below its bound."""
    found, best = staleness.measure(turns=1, steps=80)
    assert set(found) == set(staleness.SETTINGS)
    for setting, (one,) in found.items():
        assert one.steps_per_s > 0
        assert 0.4 < one.auc < best
        assert setting is None or one.maximum <= setting


def test_tables_are_compared_with_their_target():
    """1,024 rows in so many seconds of workers and servers; only the rows of the issue have a target."""
    found = {
        "one table": [(10.0, 0.010, 0.010)],
        "26 tables": [(9.0, 0.020, 0.020)],
        "DLRM 26 tables": [(8.0, 0.030, 0.020)],
    }
    lines = bench_tables.table(found).splitlines()
    assert lines[2:] == [
        "| one table | 10.0 | 10.0 | 10.0 | 51,200 | – |",
        "| 26 tables | 9.00 | 20.0 | 20.0 | 25,600 | ≥ 25,000 ✓ |",
        "| DLRM 26 tables | 8.00 | 30.0 | 20.0 | 20,480 | ≥ 25,000 missed |",
    ]


@pytest.mark.parametrize(
    ("page", "name"),
    [("performance", "tables"), ("performance", "namespaces"), ("parameter-servers", "staleness")],
)
def test_the_pages_have_places_for_these_tables(page: str, name: str):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert text.count(f"<!-- {name}:begin -->") == text.count(f"<!-- {name}:end -->") == 1


def test_gradients_left_out_are_added_to_the_next():
    """Error feedback: over the steps, the sum of what was sent and what is left is the sum of the gradients."""
    torch.manual_seed(0)
    select = bench_top_rows.Largest(0.5, rows=10, width=3, feedback=True)
    total, sent = torch.zeros(10, 3), torch.zeros(10, 3)
    for _ in range(5):
        ids = torch.randperm(10)[:6]
        gradients = torch.randn(6, 3)
        total.index_add_(0, ids, gradients)
        chosen, values = select(ids, gradients)
        assert len(chosen) == 3
        sent.index_add_(0, chosen, values)
    assert select.rest is not None
    torch.testing.assert_close(sent + select.rest, total)
    ids, gradients = torch.tensor([7, 2]), torch.tensor([[1.0, 0, 0], [0, 5.0, 0]])
    plain = bench_top_rows.Largest(0.5, rows=10, width=3, feedback=False)
    assert plain(ids, gradients)[0].tolist() == [2]


@pytest.mark.process
def test_the_wire_is_measured_between_two_processes():
    figures = bench_wire.measure(round_trips=20, transfers=4)
    assert set(figures) == {
        "round_trip_us", "pipelined_4_us", "upload_16MiB_GBps", "download_16MiB_GBps", "pack_small_us", "unpack_small_us",
    }  # fmt: skip
    assert all(value > 0 for value in figures.values())
