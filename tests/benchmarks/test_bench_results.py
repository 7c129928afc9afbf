"""Medians, ratios and verdicts; a missing side is shown as missing and never counts as a win."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import pages, plots, report, rows
from benchmarks.results import Check, Measurement, Results, lines, merged
from benchmarks.row import Row, Target

MACHINE = {"name": "here", "processor": "a processor", "cores": 2}


def results_with(*measurements: Measurement) -> Results:
    return Results(machine=MACHINE, began="2026-01-02T03:04:05+00:00", measurements=[*measurements])


def measured(
    kind: str, *samples: float, label: str = "", missing: str | None = None
) -> Measurement:
    return Measurement(
        row="empty", point="", kind=kind, label=label or kind, samples=[*samples], missing=missing
    )


EMPTY = next(row for row in rows.TABLE if row.name == "empty")


def line_of(*measurements: Measurement, row: Row = EMPTY):
    (line,) = lines((row,), results_with(*measurements))
    return line


def test_median_and_spread_are_of_all_samples():
    """The middle sample, and half the range as a part of it."""
    found = measured("ours", 90.0, 100.0, 130.0)
    assert found.median == 100.0
    assert found.spread == pytest.approx(0.2)
    assert measured("ours", -30.0, -10.0, -20.0).spread == pytest.approx(0.5)  # per cent lost


@pytest.mark.parametrize(
    ("ours", "verdict"), [(1500.0, "reached"), (1499.0, "missed"), (0.5, "missed")]
)
def test_the_target_is_a_multiple_of_the_peer(ours, verdict):
    line = line_of(measured("ours", ours), measured("peer", 100.0))
    assert line.ratio == pytest.approx(ours / 100)
    assert line.verdict(EMPTY.targets[0]) == verdict


def test_a_missing_peer_is_missing_and_never_a_win():
    """Ours alone, however fast, neither reaches the target nor gets a ratio."""
    line = line_of(measured("ours", 1e9), measured("peer", missing="cannot be installed"))
    assert line.ratio is None
    assert line.verdict(EMPTY.targets[0]) == "missing"
    texts = report.cells(line)
    assert texts[1] == "missing"
    assert "✓" not in texts[-1]
    assert "not measured" in texts[-1]


def test_our_own_failure_is_missing_too():
    line = line_of(measured("ours", missing="broke down"), measured("peer", 100.0))
    assert line.verdict(EMPTY.targets[0]) == "missing"
    assert report.cells(line)[5] == "missing"


def test_the_ratio_is_against_the_peers_faster_form():
    line = line_of(
        measured("ours", 1000.0),
        measured("peer", 10.0, label="TF, eager"),
        measured("peer", 200.0, label="TF, tf.function"),
    )
    assert line.ratio == pytest.approx(5.0)


def test_one_missing_form_of_the_peer_does_not_hide_the_other():
    line = line_of(
        measured("ours", 1000.0),
        measured("peer", missing="broke", label="TF, eager"),
        measured("peer", 200.0, label="TF, tf.function"),
    )
    assert line.ratio == pytest.approx(5.0)
    assert "missing eager" in report.cells(line)[1]


def test_where_less_is_better_the_ratio_turns_round():
    row = replace(EMPTY, better="less", targets=())
    line = line_of(measured("ours", 2.0), measured("peer", 10.0), measured("limit", 1.0), row=row)
    assert line.ratio == pytest.approx(5.0)
    assert line.fraction == pytest.approx(0.5)


def test_the_bound_is_shown_as_a_multiple_of_the_peer():
    """The bound shows whether this machine can reach the target; it is no result of any side."""
    line = line_of(measured("ours", 50.0), measured("peer", 10.0), measured("bound", 90.0))
    assert line.highest_ratio == pytest.approx(9.0)
    assert report.cells(line)[3] == "90.0 ±0% = 9.0 × TF"
    assert line.verdict(EMPTY.targets[0]) == "missed"
    assert report.cells(line_of(measured("ours", 50.0), measured("bound", 90.0)))[3] == "90.0 ±0%"


@pytest.mark.parametrize(
    ("against", "factor", "ours", "verdict"),
    [
        ("most", 20.0, 20.0, "reached"),
        ("most", 20.0, 20.1, "missed"),
        ("least", 20.0, 20.0, "reached"),
        ("least", 20.0, 19.9, "missed"),
        ("bound", 0.5, 45.0, "reached"),
        ("bound", 0.5, 44.0, "missed"),
        ("bare", 0.75, 60.0, "reached"),
        ("bare", 0.75, 59.0, "missed"),
        ("above", 0.5, 10.5, "reached"),
        ("above", 0.5, 10.6, "missed"),
    ],
)
def test_a_target_is_reached_at_its_value_and_missed_beyond(against, factor, ours, verdict):
    target = Target(against=against, factor=factor)
    line = line_of(
        measured("ours", ours),
        measured("limit", 10.0),
        measured("bound", 90.0),
        measured("bare", 80.0),
    )
    assert line.verdict(target) == verdict
    assert line_of(measured("ours", missing="broke")).verdict(target) == "missing"


def test_the_targets_are_those_of_the_design_page():
    """Design, Speed: a target that is missed is shown as missed, not lowered."""
    named = {row.name: [str(target) for target in row.targets] for row in rows.TABLE}
    assert named["empty"] == ["≥ 15 × TF"]
    assert named["mlp"] == ["≥ 7.5 × TF", "≥ 0.75 × bare"]
    assert named["embedding"] == ["≥ 6 × TF"]
    assert named["read"] == ["≥ 15 × TF"]
    assert named["add"] == ["≥ 4 × TF"]
    for name, factor in (("empty", 10), ("mlp", 4), ("embedding", 2.5), ("read", 2), ("add", 2)):
        assert named[f"{name}_sockets"] == [f"≥ {factor} × TF", "≥ 0.7 × bare"]
    assert named["one_device"] == ["≥ 0.97 × limit"]
    assert named["central"] == ["≥ 1 × TF", "≥ 0.85 × bare"]
    assert named["central_parallel"] == named["central"]
    assert named["replicas_empty"] == ["≤ 150"]
    assert named["replicas_layers"] == ["≤ limit + 1.5"]
    assert named["parquet"] == ["≥ 500", "≥ 3 × TF"]
    assert named["csv"] == ["≥ 250", "≥ 3 × TF"]
    assert named["save_gap"] == ["≤ 20"]
    assert named["coordinator_recovery"] == ["≤ limit + 0.5"]


def test_results_survive_the_file(tmp_path: Path):
    """Saved results are equal after they are loaded."""
    before = results_with(measured("ours", 1.0, 2.0), measured("peer", missing="no peer"))
    before.checks.append(Check(row="empty", text="alike", passed=True))
    path = tmp_path / "new folder" / "results.json"
    report.save(path, before)
    assert report.load(path) == before
    assert [found.name for found in path.parent.iterdir()] == ["results.json"]


def test_no_part_of_a_run_has_the_name_of_a_full_one():
    """Named by date and machine; parts by their time of day too, so that they replace nothing."""
    results = results_with()
    names = [
        report.path_of(Path(), results, part=part, unfinished=unfinished).name
        for part, unfinished in ((False, False), (False, True), (True, False), (True, True))
    ]
    assert names == [
        "2026-01-02-here.json",
        "2026-01-02-here-unfinished.json",
        "2026-01-02-here-part-030405.json",
        "2026-01-02-here-part-030405.json",
    ]


def named(row: str, kind: str, label: str, **more) -> Measurement:
    return Measurement(row=row, point=more.pop("point", ""), kind=kind, label=label, **more)


def page_with(path: Path, *names: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    blocks = [
        f"before {name}\n<!-- {name}:begin -->\nold {name}\n<!-- {name}:end -->" for name in names
    ]
    path.write_text("\n".join(blocks) + "\nafter\n")
    return path


def test_tables_go_between_their_markers_and_nothing_else_changes(tmp_path: Path):
    """README has the front rows; a block whose rows were not run keeps its figures."""
    readme = page_with(tmp_path / "README.md", "bench")
    page = page_with(
        tmp_path / "docs" / "performance.md", "bench", "processor", "torch", "narrow", "closures"
    )
    used = [{"main": 0.5, "worker 0": 1.0, "worker 1": 2.0, "ps 0": 4.0}]
    results = results_with(
        named("empty", "ours", "Stratagem", samples=[5.0], processor=used, wire=[321.0]),
        named("input", "ours", "Stratagem", samples=[7.0]),
        named("mlp_16", "ours", "float32", samples=[100.0], processor=used, wire=[2000.0]),
        named("mlp_16", "ours", "bfloat16", samples=[150.0], processor=used, wire=[1000.0]),
        named("quality_16", "ours", "float32", samples=[0.80, 0.82]),
        named("quality_16", "ours", "bfloat16", samples=[0.79, 0.80]),
        named("closures", "ours", "Stratagem", point="4", samples=[90.0], processor=used),
    )
    places = pages.write(tmp_path, results)
    assert places == [
        "README.md, bench",
        "docs/performance.md, bench",
        "docs/performance.md, processor",
        "docs/performance.md, narrow",
        "docs/performance.md, closures",
    ]
    front, text = readme.read_text(), page.read_text()
    assert "| empty step: add 1 to a variable (steps/s) | 5.00 ±0% |" in front
    assert "26 columns" not in front
    assert "| bound |" not in front
    assert "26 columns, shuffle, repeat, batch(1024) (M rows/s) | 7.00" in text
    assert "### Input\n" in text
    assert "Measured 2026-01-02 on 2 cores" in text
    assert "| empty | Stratagem | 0.5 | 3.00 | 4.00 | 7.50 | 321 |" in text
    assert "(steps/s) | bfloat16 | 150 ±0% | 1.50 | 7.50 | 1,000 |" in text
    assert "mean of 2 seeds) | bfloat16 | 0.7950 | -0.0150 ± 0.0050 | – | – |" in text
    assert "| 4 | 90.0 ±0% | 0.5 | 3.00 | 4.00 |" in text
    assert "old torch" in text  # not measured
    assert text.count("old ") == 1
    assert text.endswith("<!-- closures:end -->\nafter\n")
    assert pages.write(tmp_path, results) == places
    assert (readme.read_text(), page.read_text()) == (front, text)


def test_other_pytorch_programs_are_shown_beside_ours():
    """A program that could not run is missing and gets no ratio."""
    results = results_with(
        named("mlp_torch", "ours", "Stratagem", samples=[100.0]),
        named("mlp_torch", "torch", "Hogwild", samples=[400.0]),
        named("mlp_torch", "torch", "DDP, gloo", missing="broke"),
    )
    lines_of = pages.torch_programs(results).splitlines()
    assert [line.split(" | ")[1:4] for line in lines_of[2:]] == [
        ["Stratagem", "100 ±0%", "– |"],
        ["Hogwild", "400 ±0%", "0.25 |"],
        ["DDP, gloo", "missing", "– |"],
    ]


def test_columns_without_figures_are_left_out():
    head, body = ("work", "TF", "limit"), [("a", "–", "1"), ("b", "", "–")]
    assert (
        report.markdown_table(head, body) == "| work | limit |\n| --- | --: |\n| a | 1 |\n| b | – |"
    )


def test_every_block_of_the_pages_exists():
    """The command would leave a table out silently if its page had no place for it."""
    for block in pages.BLOCKS:
        text = (command.ROOT / block.page).read_text()
        assert f"<!-- {block.name}:begin -->" in text
        assert f"<!-- {block.name}:end -->" in text


def test_readme_shows_a_dozen_rows():
    assert 10 <= sum(row.front for row in rows.TABLE) <= 13


def test_a_page_without_markers_is_left_alone(tmp_path: Path):
    page = tmp_path / "README.md"
    page.write_text("nothing here\n")
    assert not report.include(page, "| table |", "bench")
    assert page.read_text() == "nothing here\n"


def test_every_row_of_the_design_page_is_there():
    names = {row.name for row in rows.TABLE}
    assert {"empty", "mlp", "embedding", "read", "add", "one_device", "central"} <= names
    assert all(row.section for row in rows.TABLE)


def test_every_curve_becomes_a_picture(tmp_path: Path):
    """A curve with points, and the quality row with its curve, are drawn; missing points are left out."""
    processor = [{"main": 0.1, "worker 0": 0.5, "ps 0": 0.2}]
    found = [
        Measurement(row="workers", point=str(n), kind="ours", label="o", samples=[1.0 * n, 2.0 * n])
        for n in (1, 2, 4)
    ]
    found[0].processor = processor
    curve = [{"examples": 10.0 * n, "seconds": n, "auc": 0.5 + n / 10} for n in range(3)]
    found.append(
        Measurement(
            row="quality",
            point="one device",
            kind="ours",
            label="o",
            samples=[0.7],
            extra=[{"curve": curve, "best_auc": 0.9}],
        )
    )
    found.append(Measurement(row="servers", point="1", kind="ours", label="o", missing="broke"))
    drawn = plots.draw(results_with(*found), tmp_path)
    assert [path.name for path in drawn] == ["workers.png", "quality.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_a_row_is_drawn_beside_another(tmp_path: Path):
    """Both rows about tables share one picture, twice as wide as either alone."""
    alone = [
        Measurement(row="table", point=p, kind="ours", label="o", samples=[1.0]) for p in ("1M",)
    ]
    beside = Measurement(row="hot_table", point="1M", kind="peer", label="p", samples=[2.0])
    widths = []
    for number, found in enumerate((alone, [*alone, beside])):
        (picture,) = plots.draw(results_with(*found), tmp_path / str(number))
        assert picture.name == "table.png"
        widths.append(int.from_bytes(picture.read_bytes()[16:20]))  # of the PNG's first chunk
    assert widths[1] > 1.5 * widths[0]


def test_rows_of_several_runs_make_one_result():
    def part(load: float, **medians: float) -> Results:
        found = [
            Measurement(row=name, point="", kind="ours", label="ours", samples=[value])
            for name, value in medians.items()
        ]
        machine = {"name": "vm", "processor": "one", "cores": 2, "load_before": load}
        checks = [Check(row=name, text=f"{value}", passed=True) for name, value in medians.items()]
        return Results(
            machine=machine,
            began="2026-11-18T10:00:00",
            measurements=found,
            checks=checks,
            seconds=2.0,
        )

    whole = merged([part(0.2, mlp=1.0, empty=2.0), part(0.5, mlp=3.0)])
    assert {m.row: m.median for m in whole.measurements} == {"empty": 2.0, "mlp": 3.0}
    assert {check.row: check.text for check in whole.checks} == {"empty": "2.0", "mlp": "3.0"}
    assert whole.machine["load_before"] == 0.5  # the page states the worst
    assert whole.seconds == 4.0

    other = part(0.1, read=1.0)
    other.machine["processor"] = "another"
    with pytest.raises(ValueError, match="'one' and 'another'"):
        merged([part(0.2, mlp=1.0), other])
