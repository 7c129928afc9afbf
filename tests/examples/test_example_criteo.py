"""The Criteo example runs from files to an exported program."""

import subprocess
import sys

import pytest
import torch

import stratagem as sg
from examples.criteo import train

pytestmark = pytest.mark.soak


def test_criteo_trains_from_files_survives_a_kill_and_exports(tmp_path, capsys):
    """Dynamic embeddings, checkpoints, an evaluator; the exported program needs only PyTorch."""
    found = train.main(str(tmp_path), files=3, rows=4096, kill=True)
    assert "killed a worker" in capsys.readouterr().out
    assert found["steps"] == 24
    assert found["auc"] > 0.65
    again = train.main(str(tmp_path))
    assert again["steps"] == 24  # the epoch was complete
    batch = next(iter(train.data.read(tmp_path / "test", 50)))
    torch.save((batch["dense"], batch["ids"]), tmp_path / "rows.pt")
    code = (
        "import sys, torch\n"
        "program = torch.export.load(sys.argv[1]).module()\n"
        "torch.save(program(*torch.load(sys.argv[2])), sys.argv[2])\n"
        "assert not [name for name in sys.modules if name.startswith('stratagem')]\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "clicks.pt2"), str(tmp_path / "rows.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    model = train.DeepFM()
    sg.Checkpoint(model=model).restore(tmp_path / "checkpoints", strict=False)
    model.eval()
    known = torch.isin(batch["ids"], model.table.export()[0]).all(1)
    assert known.sum() >= 5
    expected = model(batch["dense"], batch["ids"]).detach()
    served = torch.load(tmp_path / "rows.pt")
    torch.testing.assert_close(served[known], expected[known])
