"""`stratagem checkpoint`: what it prints, writes and returns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import written_checkpoints as written
from torch import nn

import stratagem as sg
from stratagem.cli import main


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two checkpoints of a small model."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    checkpoint = sg.Checkpoint(model=model, optimizer=optimizer, notes={"epoch": 1})
    with sg.CheckpointManager(checkpoint, tmp_path / "run") as manager:
        manager.save(1, {"auc": 0.5}, wait=True)
        with torch.no_grad():
            model.bias += 0.25
        checkpoint["notes"]["epoch"] = 2
        manager.save(2, {"auc": 0.75}, wait=True, final=True)
    return tmp_path / "run"


def test_ls(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", str(directory)]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "STEP", "KIND", "SIZE", "SAVED", "METRICS"]
    assert re.fullmatch(r"step_00000001  1     full +[\d.]+ kB  \S+ \S+  auc=0.5", first)
    assert re.fullmatch(r"step_00000002  2     full, final +[\d.]+ kB  \S+ \S+  auc=0.75", second)


def test_show(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(directory)]) == 0
    shown = capsys.readouterr().out
    assert "step:     2 (final)" in shown
    assert re.search(r"__0_0\.distcp +[\d.]+ kB +2", shown)
    assert re.search(r"model\.weight +float32 +\[1, 2\] +8 B +1", shown)


def test_verify(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(directory)]) == 0
    assert capsys.readouterr().out.count(": good") == 2
    file = directory / "step_00000002" / "coordinator.pt"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    assert main(["checkpoint", "verify", str(directory)]) == 1
    good, bad = capsys.readouterr().out.splitlines()
    assert good.startswith("step_00000001: good")
    assert bad.startswith(f"step_00000002: DAMAGED: {file} is damaged")
    assert main(["checkpoint", "verify", str(directory / "step_00000001")]) == 0
    (directory / "step_00000001" / "manifest.json").write_text("{}")
    assert main(["checkpoint", "ls", str(directory)]) == 1
    assert "damaged: " in capsys.readouterr().out


def test_to_torch(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "one.pt"
    assert main(["checkpoint", "to-torch", str(directory), str(output)]) == 0
    assert "wrote step 2" in capsys.readouterr().out
    found = torch.load(output, weights_only=True)
    nn.Linear(2, 1).load_state_dict(found["model"])
    assert found["notes"] == {"epoch": 2}
    assert found["optimizer"]["param_groups"][0]["params"] == ["weight", "bias"]
    assert main(["checkpoint", "to-torch", str(directory), str(output)]) == 1
    assert "one.pt exists" in capsys.readouterr().err


def test_damage_is_named_and_nothing_is_written(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any byte of any file: `to-torch` and `diff` read no value that was not verified."""
    output, newest = tmp_path / "one.pt", directory / "step_00000002"
    for name in ("__0_0.distcp", "coordinator.pt", ".metadata", "manifest.json"):
        good = (newest / name).read_bytes()
        for place in range(0, len(good), len(good) // 7):
            bad = bytearray(good)
            bad[place] ^= 0x10
            (newest / name).write_bytes(bad)
            assert main(["checkpoint", "to-torch", str(newest), str(output)]) == 1
            said = capsys.readouterr().err
            assert f"{newest / name} is damaged" in said
            assert f"`stratagem checkpoint verify {directory}` says which ones are good" in said
            assert main(["checkpoint", "diff", str(newest), str(newest)]) == 1
            assert f"{newest / name} is damaged" in capsys.readouterr().err
        (newest / name).write_bytes(good)
    assert not output.exists()


def test_a_damaged_manifest_is_not_skipped_silently(
    directory: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The newest intact one is used, and a log line names the other."""
    damaged = directory / "step_00000002" / "manifest.json"
    damaged.write_bytes(damaged.read_bytes()[:-5])
    assert main(["checkpoint", "show", str(directory)]) == 0
    assert "step:     1" in capsys.readouterr().out
    assert f"skipping a checkpoint: {damaged} is damaged" in caplog.text
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    checkpoint = sg.Checkpoint(model=model, optimizer=optimizer, notes={})
    caplog.clear()
    assert checkpoint.restore(directory).step == 1
    assert f"skipping a checkpoint: {damaged} is damaged" in caplog.text


def test_to_torch_says_why_a_file_cannot_be_written(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "no such directory" / "one.pt"
    assert main(["checkpoint", "to-torch", str(directory), str(output)]) == 1
    error = capsys.readouterr().err
    assert f"{output} cannot be written" in error
    assert ".. " not in error


def test_diff(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = str(directory / "step_00000001"), str(directory / "step_00000002")
    assert main(["checkpoint", "diff", first, second]) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "  model.bias: 1 of 1 numbers differ, by at most 0.25",
        "  notes.epoch: 1 -> 2",
    ]
    assert main(["checkpoint", "diff", second, str(directory)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no difference"


def test_deltas_are_shown_and_compared_as_what_they_stand_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = torch.zeros(10, 2)
    full = written.write(tmp_path, [[written.rows_part("t", table, 0, 10)]])
    table[3] = 5.0
    delta = written.write(
        tmp_path, [[written.touched_part("t", table, [3])]], parent=full, step=2, serial=2
    )
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert "delta of step_00000001" in capsys.readouterr().out
    assert main(["checkpoint", "diff", str(full.path), str(delta.path)]) == 1
    assert "t: 2 of 20 numbers differ, by at most 5" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(delta.path)]) == 0
    (full.path / "__0_0.distcp").unlink()
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(delta.path)]) == 1
    assert f"{full.path}/__0_0.distcp is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["ls", "/nonexistent"], 1, "/nonexistent holds no checkpoint"),
        (["show", "/nonexistent"], 1, "is not a complete checkpoint"),
        (["diff", "/nonexistent"], 2, "diff takes two paths"),
        (["ls", "a", "b"], 2, "ls takes one path"),
        (["unknown", "a"], 2, "invalid choice"),
    ],
)
def test_wrong_words(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        got = main(["checkpoint", *words])
    except SystemExit as error:
        got = int(str(error.code))
    assert got == code
    assert said in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["checkpoint", "--help"])
    shown = capsys.readouterr().out
    assert "stratagem checkpoint to-torch runs/ctr-v3 model.pt" in shown
    assert "exit code 1" in shown
