"""What we ask of torch's private side is there; where it is not, something else does the same or a sentence says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from stratagem._core.torch_patches import private_api

pytestmark = pytest.mark.process


def test_this_torch_has_everything() -> None:
    """Also the first thing to fail with a torch that moved something: it names what, and what for."""
    assert list(private_api.missing()) == []


def test_a_missing_name_of_torch_is_reported_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name, this torch, what for, and what to do."""
    monkeypatch.setattr(private_api, "MISSING", {})
    gone = private_api._find("torch._C._no_such_thing", "a test")
    with pytest.raises(
        NotImplementedError, match=r"has no torch\._C\._no_such_thing.* a test"
    ) as told:
        gone(1, two=2)
    assert torch.__version__ in str(told.value)
    assert "stratagem doctor" in str(told.value)
    assert list(private_api.missing()) == [("torch._C._no_such_thing", "a test", False)]


def program(*removed: str, then: str, first: str = "torch.nn.utils.parametrize") -> str:
    """Runs a program under a torch without these names; gives what it printed."""
    lines = [f"import torch, {first}"]
    lines += [f"del {name}" for name in removed]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines) + "\n" + then],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TRAIN = """
import stratagem as sg
torch.manual_seed(0)
with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        with torch.autocast("cpu", enabled=False):
            loss = model(x).square().sum() + model[0].weight.sum() + model[0].weight.sum()
        loss.backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step, args=(torch.randn(5, 3),))
    print([p.tolist() for p in model.state_dict().values()])
"""

REPLACED = (
    "torch._C._storage_Use_Count",
    "torch._C._is_any_autocast_enabled",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback",
    "torch._compile._disable_dynamo",
    "torch.autograd.profiler._is_profiler_enabled",
)


@pytest.mark.slow
def test_without_names_that_can_be_replaced_the_numbers_are_the_same() -> None:
    """Some of it slower; and the doctor says which."""
    plain = program(then=TRAIN)
    doctor = (
        "from stratagem._core.torch_patches import private_api\n"
        "print(sorted(path for path, _, replaced in private_api.missing() if replaced))\n"
    )
    # The compiler is loaded first: it needs some of the names itself.
    found = program(*REPLACED, then=TRAIN + doctor, first="torch._dynamo")
    assert found.startswith(plain)
    names = found.removeprefix(plain)
    assert all(name in names for name in REPLACED[:-1])


DOCTOR = """
from stratagem._commands.doctor import examine
for finding in examine():
    if finding.subject == "torch internals":
        print(finding.verdict.value, finding.found, finding.remedy)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_doctor_says_what_is_missing() -> None:
    """As a problem if nothing can stand in for it, else as a warning."""
    assert program(then=DOCTOR).startswith("ok")
    found = program("torch.nn.utils.parametrize._inject_property", then=DOCTOR)
    assert "torch.nn.utils.parametrize._inject_property (parametrized modules on workers)" in found
    assert found.startswith("problem")
    slower = program("torch._C._storage_Use_Count", then=DOCTOR)
    assert slower.startswith("warning")
