"""The Criteo example runs from files to an exported program."""

import subprocess
import sys

import pytest

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
    code = (
        "import sys, torch\n"
        "program = torch.export.load(sys.argv[1]).module()\n"
        "print(program(torch.ones(3, 13), torch.ones(3, 26, dtype=torch.int64)).shape)\n"
        "assert not [name for name in sys.modules if name.startswith('stratagem')]\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "clicks.pt2")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "torch.Size([3])\n", done.stderr
