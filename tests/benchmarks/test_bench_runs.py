"""The harness at tiny size, with real processes; TensorFlow is not needed and shows as missing (issue 6.6)."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import plots, report, rows, runner, work
from benchmarks.checks import compare
from benchmarks.limits import side as limits
from benchmarks.ours import side
from benchmarks.peer import environment
from benchmarks.results import Measurement, Results
from benchmarks.row import Point, Row, tiny
from benchmarks.runner import Plan, run
from benchmarks.sides import SideFailed, SideProcess

ALL = {row.name: row for row in command.ALL}
MLP = {"inputs": 12, "hidden": 8, "classes": 3, "batch": 6, "batches": 4, "check_steps": 4}


def small(*names: str) -> tuple[Row, ...]:
    return tuple(tiny(ALL[name]) for name in names)


@pytest.mark.soak
def test_a_row_runs_and_does_the_plain_runs_work():
    """Ours and the limit give samples, the checks pass, and the peer that is not there is missing."""
    heard: list[str] = []
    plan = Plan(rows=small("mlp"), peer="no peer in the test suite", progress=heard.append)
    results = run(plan)
    by_kind = {m.kind: m for m in results.measurements}
    assert [len(by_kind[kind].samples) for kind in ("ours", "limit", "bound")] == [2, 2, 2]
    assert by_kind["ours"].missing is None
    assert all(check.passed for check in results.checks), results.checks
    assert by_kind["peer"].missing == "no peer in the test suite"
    assert by_kind["peer"].samples == []
    assert len(heard) == plan.ticks
    tasks = {"main", "worker 0", "worker 1", "ps 0", "ps 1"}
    assert set(by_kind["ours"].processor_per_1000()) == tasks
    assert set(by_kind["bound"].processor_per_1000()) == {"core 0", "core 1"}
    assert any("plain run" in check.text for check in results.checks)


@pytest.mark.parametrize(
    "name",
    # Importing Keras asks the system for its processor.
    ["one_device", "central", pytest.param("keras_fit", marks=pytest.mark.process)],
)
def test_a_single_machine_row_does_the_plain_runs_work(name):
    """The rows' own programs, ours and the limit's, end with the same parameters."""
    (row,) = small(name)
    ours, limit = (of.make(name, row.points[0].size) for of in (side, limits))
    try:
        facts = {"ours": ours.check(), "limit": limit.check()}
        assert ours.sample(0.01)["value"] > 0
    finally:
        ours.close()
    checks = compare(name, facts, facts["ours"])
    assert all(check.passed for check in checks), checks
    assert any("plain run" in check.text for check in checks)


def test_a_row_of_hot_rows_is_the_same_work_whatever_the_table():
    """The same number of different rows in every batch, spread over the whole table (issue 6.3)."""
    small_table, large_table = (
        work.embedding_batches({**work.HOT_SIZE, "rows": rows}) for rows in (10**4, 10**7)
    )
    for small_ids, large_ids in zip(small_table.inputs, large_table.inputs, strict=True):
        counts = {np.unique(ids).size for ids in (small_ids, large_ids)}
        assert len(counts) == 1
        assert 7500 < counts.pop() < 8192
    assert np.array_equal(small_table.labels, large_table.labels)
    used = np.unique(large_table.inputs)
    assert used.size == 8192
    assert set(np.diff(used)) == {1220, 1221}


def test_the_row_of_hot_rows_does_the_plain_runs_work():
    """Ours with one worker, and the limit, end with the same parameters."""
    (row,) = small("hot_table")
    size = {**row.points[0].size, "in_process": True, **(row.parity or {})}
    ours, limit = side.make("hot_table", size), limits.make("hot_table", size)
    try:
        facts = {"ours": ours.check(), "limit": limit.check()}
    finally:
        ours.close()
    checks = compare("hot_table", facts, facts["ours"])
    assert all(check.passed for check in checks), checks
    assert any("plain run" in check.text for check in checks)


class EverySecond(limits.Embedding):
    """Forgets every second update."""

    def steps(self, count: int) -> None:
        update = self.optimizer.step
        for number in range(count):
            self.optimizer.step = update if number % 2 else lambda: None
            super().steps(1)


class Twice(limits.Embedding):
    """Applies every update twice."""

    def steps(self, count: int) -> None:
        update = self.optimizer.step
        self.optimizer.step = lambda: (update(), update())
        super().steps(count)


class Slower(limits.Embedding):
    """Learns half as fast."""

    def __init__(self, size):
        super().__init__(size)
        self.optimizer.param_groups[0]["lr"] /= 2


@pytest.mark.soak
def test_the_row_of_hot_rows_notices_who_trains_wrongly():
    """At full size, as it is measured: such a side's last loss is not within the row's bounds."""
    row = ALL["hot_table"]
    sides = {"limit": limits.Embedding, "slower": Slower, "every second": EverySecond}
    facts = {label: side(row.points[0].size).check() for label, side in sides.items()}
    facts["twice"] = Twice(row.points[0].size).check()
    facts["right"] = facts["limit"]
    verdicts = {
        check.text.partition(":")[0]: check.passed
        for check in compare("hot_table", facts, None, within=row.last_loss)
        if "last loss" in check.text
    }
    assert verdicts == {"slower": False, "every second": False, "twice": False, "right": True}


@pytest.mark.parametrize("name", ["empty", "embedding", "hot_table", "read", "add", "variables"])
def test_a_cluster_row_does_what_it_says(name):
    """The row's own program, with threads for processes: its steps run and its facts compare well."""
    (row,) = small(name)
    size = {**row.points[0].size, "in_process": True}
    made = side.make(name, size)
    try:
        facts = made.check()
        assert made.sample(0.02)["value"] > 0
    finally:
        made.close()
    assert all(check.passed for check in compare(name, {"ours": facts}, None))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "counts"), [("mlp", 2.0), ("central", 1.0), ("add", 2 * 2**17 / 1e9)]
)
def test_the_bound_counts_what_all_cores_do(name, counts):
    """Workers' steps add up; replicas share one step."""
    (row,) = small(name)
    size = {**row.points[0].size, **rows.BOUND.size}
    with SideProcess("bound") as process:
        process.ask("setup", timeout_s=120, row=name, size=size)
        answer = process.ask("sample", timeout_s=60, seconds=0.01)
        assert set(process.processor_seconds()) == {"core 0", "core 1"}
    per_step = answer["value"] * answer["seconds"] / answer["steps"]
    assert per_step == pytest.approx(counts)


def test_quality_compares_the_same_examples():
    """One worker sees what one device sees: the same AUC at every point of the curve."""
    (row,) = small("quality")
    alone, one_worker = (
        side.make("quality", {**row.points[0].size, "workers": n, "in_process": True}).sample(0.0)
        for n in (0, 1)
    )
    assert len(alone["curve"]) == 3
    assert [p["auc"] for p in alone["curve"]] == pytest.approx(
        [p["auc"] for p in one_worker["curve"]], abs=1e-6
    )


@pytest.mark.process
def test_a_side_that_cannot_do_a_row_says_why():
    with (
        SideProcess("limit") as process,
        pytest.raises(SideFailed, match="row 'no such' has no limit"),
    ):
        process.ask("setup", timeout_s=60, row="no such", size={})


@pytest.mark.process
def test_a_side_that_is_killed_is_noticed_and_named():
    with SideProcess("limit") as process:
        process.ask("setup", timeout_s=60, row="mlp", size=MLP)
        os.kill(process._process.pid, 9)
        with pytest.raises(SideFailed, match="limit ended with -9 at 'sample'"):
            process.ask("sample", timeout_s=60, seconds=0.01)


@pytest.mark.process
def test_a_silent_side_is_not_waited_for_longer_than_told():
    with SideProcess("limit") as process:
        process.ask("setup", timeout_s=60, row="mlp", size=MLP)
        with pytest.raises(SideFailed, match=r"no answer to 'sample' in 0.2 s"):
            process.ask("sample", timeout_s=0.2, seconds=30.0)


@pytest.mark.process
def test_a_side_that_breaks_down_while_measured_loses_its_samples():
    """Half a measurement is shown as missing: here the peer's Python is one without TensorFlow."""
    row = replace(small("one_device")[0], sides=(rows.TRACED, rows.EAGER), parity=None)
    peers = run(Plan(rows=(row,), peer=Path(sys.executable))).measurements
    assert [m.samples for m in peers] == [[], []]
    assert all("tensorflow" in (m.missing or "") for m in peers)


def test_when_time_is_over_the_rest_is_missing():
    results = run(Plan(rows=small("one_device"), peer="no peer", budget_s=-1.0))
    assert all("were over" in (m.missing or "") for m in results.measurements)


@pytest.mark.process
def test_a_peer_that_cannot_be_installed_is_a_reason_not_a_crash(tmp_path: Path):
    in_the_way = tmp_path / "venv"
    in_the_way.write_text("a file where the environment should be")
    with pytest.raises(environment.PeerMissing, match=r"the peer cannot be installed: .*venv"):
        environment.prepare(in_the_way)


@pytest.mark.process
def test_the_command_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--only", "input", "--tiny", "--no-peer", "--results", str(tmp_path)]
    assert command.main(arguments) == 0
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md"]
    assert all("-part-" in path.name for path in tmp_path.iterdir())
    assert "missing: input, TensorFlow: left out by --no-peer" in capsys.readouterr().out


@pytest.fixture
def three_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Three tiny rows are all there are, and measuring them takes no processes; the folder of results."""
    made = small("read", "add", "input")
    monkeypatch.setattr(command, "ALL", made)
    monkeypatch.setattr(rows, "TABLE", made)
    monkeypatch.setattr(plots, "CURVES", ())
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "find_peer", lambda console, wanted: "no peer in the test suite")
    (tmp_path / "README.md").write_text(f"{report.BEGIN}\nold\n{report.END}\n")
    return tmp_path / "results"


def measured(plan: Plan, row: Row, point: Point, results: Results) -> None:
    results.measurements.append(
        Measurement(row=row.name, point=point.label, kind="ours", label="x", samples=[1.0])
    )


def test_a_full_run_replaces_a_full_one_and_a_part_replaces_nothing(
    three_rows: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nor does a part draw pictures or change README."""
    monkeypatch.setattr(runner, "_run_point", measured)
    readme = three_rows.parent / "README.md"
    before = readme.read_text()
    for part in (["--only", "read"], ["--tiny"], ["--no-peer"]):
        assert command.main(["--results", str(three_rows), *part]) == 0
    parts = sorted(three_rows.iterdir())
    assert all("-part-" in path.name for path in parts)
    assert readme.read_text() == before
    for _ in range(2):
        assert command.main(["--results", str(three_rows)]) == 0
        full = sorted(set(three_rows.iterdir()) - set(parts))
        assert [path.suffix for path in full] == [".json", ".md"]
    assert len(report.load(full[0]).measurements) == 3
    assert "old" not in readme.read_text()
    assert command.main(["--results", str(three_rows), "--only", "read"]) == 0
    assert len(report.load(full[0]).measurements) == 3


def test_an_interrupted_run_keeps_the_rows_that_were_done(
    three_rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Ctrl-C in the third row: the first two are in a file of their own, the last full run stays."""
    monkeypatch.setattr(runner, "_run_point", measured)
    assert command.main(["--results", str(three_rows)]) == 0
    readme = (three_rows.parent / "README.md").read_text()

    def interrupted(plan: Plan, row: Row, point: Point, results: Results) -> None:
        if row.name == "input":
            raise KeyboardInterrupt
        measured(plan, row, point, results)

    monkeypatch.setattr(runner, "_run_point", interrupted)
    capsys.readouterr()
    assert command.main(["--results", str(three_rows)]) == 130
    (unfinished,) = three_rows.glob("*-unfinished.json")
    (full,) = set(three_rows.glob("*.json")) - {unfinished}
    assert len(report.load(full).measurements) == 3
    assert unfinished.name in capsys.readouterr().out.replace("\n", "")
    assert [m.row for m in report.load(unfinished).measurements] == ["read", "add"]
    assert (three_rows.parent / "README.md").read_text() == readme
    monkeypatch.setattr(runner, "_run_point", measured)
    assert command.main(["--results", str(three_rows)]) == 0
    assert not unfinished.exists()


def test_an_unknown_row_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        command.main(["--only", "nonsense"])
    words = capsys.readouterr().err
    assert "'nonsense'" in words
    assert "one_device" in words


@pytest.mark.parametrize("name", ["save", "save_disk", "restore"])
def test_a_checkpoint_row_gives_samples_and_leaves_nothing(name, tmp_path):
    """Ours and the limit save, write, restore and read at tiny size."""
    (row,) = small(name)
    forms = [other.size for other in row.sides if other.kind in ("limit", "bound")]
    for make, extra in [(side.make, {}), *((limits.make, form) for form in forms)]:
        made = make(name, {**row.points[0].size, **extra, "place": str(tmp_path)})
        try:
            assert made.sample(0.01)["value"] > 0
        finally:
            made.close()
            made.close()
    assert list(tmp_path.iterdir()) == []
