"""The harness at tiny size, with real processes; TensorFlow is not needed and shows as missing (issue 6.6)."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import plots, report, rows, runner, work
from benchmarks.checks import compare
from benchmarks.limits import bare_rows
from benchmarks.limits import side as limits
from benchmarks.ours import side
from benchmarks.peer import environment
from benchmarks.results import Measurement, Results, lines
from benchmarks.row import Point, Row, tiny
from benchmarks.runner import Plan, run
from benchmarks.scratch import remove_scratch
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
    assert set(by_kind["ours"].processor_ms()) == tasks
    assert set(by_kind["bound"].processor_ms()) == {"core 0", "core 1"}
    assert any("plain run" in check.text for check in results.checks)


@pytest.mark.parametrize(
    "name",
    # Importing Keras asks the system for its processor.
    [
        "one_device",
        "central",
        "central_parallel",
        "replicas_layers",
        pytest.param("keras_fit", marks=pytest.mark.process),
    ],
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


def test_the_bare_kernels_do_the_plain_runs_work(monkeypatch):
    """The bound of the embedding row computes what the limit does: gather, sums of repeated rows, Adagrad."""
    if bare_rows.kernels is None:
        pytest.skip("the kernels are not built")
    monkeypatch.setattr(bare_rows, "keep_freed_memory", lambda: None)  # for this process's sake
    (row,) = small("embedding")
    size = row.points[0].size
    bare, limit = bare_rows.BareRows(size), limits.Embedding(size)
    before = torch.cat(bare.tables)
    for one in (bare, limit):
        one.steps(9)
    table = torch.cat(bare.tables)
    assert not torch.equal(table, before)
    torch.testing.assert_close(table, limit.model.table.weight.detach())
    torch.testing.assert_close(bare.model.head.weight, limit.model.head.weight)


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
def test_the_row_of_hot_rows_detects_wrong_training():
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


CHECKPOINT_ROWS = ["save", "restore", "save_gap", "save_minutes", "delta", "restore_servers"]
KILL_ROWS = ["recovery", "server_recovery", "coordinator_recovery", "failover", "empty_recovery"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CHECKPOINT_ROWS + KILL_ROWS)
def test_a_row_of_checkpoints_or_kills_gives_a_figure(name):
    """Twice with the same processes, as in a run: after a kill the next sample waits for the replacement."""
    (row,) = small(name)
    made = side.make(name, row.points[0].size)
    try:
        found = [made.sample(0.2) for _ in range(2)]
    finally:
        made.close()
    assert all(isinstance(one["value"], float) for one in found)
    wanted = {"save_gap": {"slowdown_percent", "memory_percent"}}.get(name, set())
    assert all(wanted <= set(one.get("figures", ())) for one in found)


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
        process.ask("setup", timeout_s=200, row="no such", size={})


@pytest.mark.process
def test_a_side_that_is_killed_is_noticed_and_named():
    with SideProcess("limit") as process:
        process.ask("setup", timeout_s=200, row="mlp", size=MLP)
        os.kill(process._process.pid, 9)
        with pytest.raises(SideFailed, match="limit ended with -9 at 'sample'"):
            process.ask("sample", timeout_s=60, seconds=0.01)


@pytest.mark.process
def test_a_silent_side_is_killed_after_the_time_limit():
    with SideProcess("limit") as process:
        process.ask("setup", timeout_s=200, row="mlp", size=MLP)
        with pytest.raises(SideFailed, match=r"no answer to 'sample' in 0.2 s"):
            process.ask("sample", timeout_s=0.2, seconds=30.0)


@pytest.mark.process
def test_a_side_that_breaks_down_while_one_sampleloses_its_samples():
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
    (tmp_path / "README.md").write_text("<!-- bench:begin -->\nold\n<!-- bench:end -->\n")
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


def test_a_run_tells_after_each_row_how_far_it_is(
    three_rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(runner, "_run_point", measured)
    assert command.main(["--results", str(three_rows)]) == 0
    said = capsys.readouterr().out
    assert "[1 of 3] read (GB/s): 1.00 ±0%; 0 s, 0 min in all" in said
    assert "[3 of 3] input (M rows/s): 1.00 ±0%" in said


def test_all_rows_are_more_than_the_table(monkeypatch: pytest.MonkeyPatch, three_rows: Path):
    """`make bench` measures the table, `make bench-all` everything, into a file of its own."""
    monkeypatch.setattr(runner, "_run_point", measured)
    monkeypatch.setattr(rows, "TABLE", command.ALL[:2])
    assert [row.name for row in command.choose(None, every=False)] == ["read", "add"]
    assert [row.name for row in command.choose(None, every=True)] == ["read", "add", "input"]
    assert command.main(["--results", str(three_rows)]) == 0
    assert command.main(["--results", str(three_rows), "--all"]) == 0
    counts = {
        "-all" in path.name: len(report.load(path).measurements)
        for path in three_rows.glob("*.json")
    }
    assert counts == {False: 2, True: 3}


def test_pages_are_made_again_from_a_file(
    three_rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(runner, "_run_point", measured)
    assert command.main(["--results", str(three_rows)]) == 0
    readme = three_rows.parent / "README.md"
    written = readme.read_text()
    readme.write_text("<!-- bench:begin -->\nold\n<!-- bench:end -->\n")
    (file,) = three_rows.glob("*.json")
    capsys.readouterr()
    assert command.main(["--pages", str(file)]) == 0
    assert readme.read_text() == written
    assert "put into README.md, bench" in capsys.readouterr().out


def test_a_figure_of_another_rows_samples_is_not_one_sampleagain(monkeypatch: pytest.MonkeyPatch):
    """One save gives the gap, the slowdown and the memory; asked for alone, the row brings its source."""
    chosen = command.choose("save_memory,files_cpu", every=False)
    assert [row.name for row in chosen] == ["save_gap", "files", "save_memory", "files_cpu"]
    ran: list[str] = []

    def with_figures(plan: Plan, row: Row, point: Point, results: Results) -> None:
        ran.append(row.name)
        measured(plan, row, point, results)
        results.measurements[-1].label = rows.OURS.label
        results.measurements[-1].extra = [{"figures": {"memory_percent": 7.0}}]

    monkeypatch.setattr(runner, "_run_point", with_figures)
    found = run(Plan(rows=(chosen[0], chosen[2]), peer="no peer"))
    assert ran == ["save_gap"]
    assert [(m.row, m.samples) for m in found.measurements] == [
        ("save_gap", [1.0]),
        ("save_memory", [7.0]),
    ]
    alone = run(Plan(rows=(chosen[2],), peer="no peer"))
    assert [m.missing for m in alone.measurements] == ["row 'save_gap' was not run"]


def test_several_steps_in_one_function_are_counted_as_steps():
    """A sample has whole functions, and its rate is that of steps."""
    (row,) = small("closures")
    size = {**row.points[0].size, "in_process": True, "per_closure": 4, "workers": 1}
    made = side.make("closures", size)
    try:
        made.steps(6)
        assert made.scheduled == 8
        answer = made.sample(0.02)
        assert answer["steps"] % 4 == 0
        assert answer["value"] == pytest.approx(answer["steps"] / answer["seconds"])
        plain = limits.make("closures", size)
        plain.steps(made.scheduled)
        expected = [work.fingerprint(p.detach().numpy()) for p in plain.model.parameters()]
        found = [work.fingerprint(p.detach().numpy()) for p in made.model.parameters()]
        assert np.array(found) == pytest.approx(np.array(expected), rel=1e-3, abs=1e-4)
    finally:
        made.close()


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


@pytest.mark.process
def test_a_killed_side_leaves_no_files(tmp_path: Path):
    """Neither in memory nor on disk: the harness removes what a side that was killed has written."""
    process = SideProcess("limit")
    try:
        place = "/dev/shm"
        process.ask(
            "setup", timeout_s=120, row="save", size={"rows": 64, "width": 2, "place": place}
        )
        mine = f"stratagem-bench-{process.pid}-*"
        assert len(list(Path(place).glob(mine))) == 1
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.close()
    assert not list(Path(place).glob(mine))
    ended = process.pid
    (tmp_path / f"stratagem-bench-{ended}-x").mkdir()  # of a harness that was killed as well
    kept = tmp_path / f"stratagem-bench-{os.getpid()}-x"
    kept.mkdir()
    assert len(remove_scratch(places=(tmp_path,))) == 1
    assert list(tmp_path.iterdir()) == [kept]


def test_a_full_run_leaves_out_what_takes_minutes():
    """Asked for by name it runs."""
    assert "save_minutes" not in {row.name for row in command.choose(None, every=True)}
    (row,) = command.choose("save_minutes", every=False)
    one_sample = Measurement(row=row.name, point="", kind="ours", label="Stratagem", samples=[1.9])
    (line,) = lines((row,), Results(machine={}, began="", measurements=[one_sample]))
    assert [line.verdict(target) for target in row.targets] == ["reached"]
