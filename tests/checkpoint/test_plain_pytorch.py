"""Plain PyTorch reads our checkpoints, in a process that cannot import Stratagem."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stratagem as sg

READER = """
import sys, warnings
sys.modules["stratagem"] = None  # `import stratagem` raises ImportError
warnings.simplefilter("ignore")
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

folder = sys.argv[1]
torch.manual_seed(99)
model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(8, 1))
optimizer = torch.optim.{optimizer}
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

# 1. into an ordinary module and optimizer
state = {{"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "scheduler": scheduler}}
dcp.load(state, checkpoint_id=f"{{folder}}/checkpoint")
set_optimizer_state_dict(model, optimizer, state["optimizer"])
model.load_state_dict(state["model"])
torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], f"{{folder}}/loaded.pt")

# 2. to one file
dcp_to_torch_save(f"{{folder}}/checkpoint", f"{{folder}}/one_file.pt")
found = torch.load(f"{{folder}}/one_file.pt", weights_only=True)
assert found["epoch"] == 7 and found["notes"]["words"] == ["a", "b"], found
assert sorted(found["optimizer"]["param_groups"][0]["params"]) == ["0.weight", "2.bias", "2.weight"]
again = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(8, 1))
again.load_state_dict(found["model"])
assert torch.equal(again[2].weight, model[2].weight)
print("read")
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "optimizer",
    [
        "Adam(model.parameters(), lr=0.5)",
        pytest.param("Adagrad(model.parameters(), lr=0.5)", marks=pytest.mark.slow),
    ],
)
def test_a_process_without_stratagem_loads_model_optimizer_and_scheduler(
    tmp_path: Path, optimizer: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(8, 1))
    made = eval(f"torch.optim.{optimizer}", {"torch": torch, "model": model})
    scheduler = torch.optim.lr_scheduler.StepLR(made, 2)
    for _ in range(3):
        made.zero_grad()
        model(torch.randint(0, 9, (5, 2))).pow(2).mean().backward()
        made.step()
        scheduler.step()
    sg.Checkpoint(
        model=model,
        optimizer=made,
        scheduler=scheduler,
        epoch=7,
        notes={"words": ["a", "b"], "tensor": torch.ones(3)},
    ).save(tmp_path / "checkpoint")
    done = subprocess.run(
        [sys.executable, "-c", READER.format(optimizer=optimizer), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.stdout == "read\n", done.stderr
    states = torch.load(tmp_path / "loaded.pt", weights_only=True)
    assert_same_nest(states, [model.state_dict(), made.state_dict(), scheduler.state_dict()])


def assert_same_nest(got: object, expected: object) -> None:
    """Equal, tensors bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert isinstance(got, dict)
        assert got.keys() == expected.keys()
        for key in expected:
            assert_same_nest(got[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert isinstance(got, list | tuple)
        for one, other in zip(got, expected, strict=True):
            assert_same_nest(one, other)
    else:
        assert got == expected


def test_coordinator_pt_is_an_ordinary_file_of_weights_only(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    saved = sg.Checkpoint(model=model, epoch=1).save(tmp_path / "one")
    content = torch.load(saved.path / "coordinator.pt", weights_only=True)
    assert content["objects"]["epoch"] == 1
    assert content["objects"]["model"]["state"]["weight"] == {"$tensor": "model.weight"}


@pytest.mark.parametrize(
    "make", [lambda: sg.OneDeviceStrategy("cpu:0"), lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"])]
)
def test_torch_save_of_a_state_dict_keeps_working(tmp_path: Path, make: object) -> None:
    with make() as strategy:  # type: ignore[operator]
        with strategy.scope():
            model = torch.nn.Linear(3, 2)
            optimizer = torch.optim.Adam(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

        strategy.run(step)
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "plain.pt")
        loaded = torch.load(tmp_path / "plain.pt", weights_only=True)
        assert_same_nest(loaded, [model.state_dict(), optimizer.state_dict()])
        plain = torch.nn.Linear(3, 2)
        plain.load_state_dict(loaded[0])
        assert torch.equal(plain.weight, model.weight)


def test_flattened_names_are_those_of_torch(tmp_path: Path) -> None:
    """So that `dcp.load` finds what it looks for, in every nest of dictionaries and lists."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    from stratagem._checkpoint.encoding import TakenApart

    nests = [
        {"a": 1, "b": {"c": torch.ones(1), "d": [1, 2]}},
        {"groups": [{"lr": 0.1, "params": ["x"], "betas": (0.9, 0.99)}, {"lr": torch.ones(())}]},
        {"list": [torch.ones(1), 2, [3, {"deep": "x"}]], 5: "number", "empty": {}, "none": None},
    ]
    for nest in nests:
        apart = TakenApart()
        apart.encode(nest, ("top",))
        flat, paths = flatten_state_dict({"top": nest})
        assert {**apart.tensors, **apart.plain}.keys() == flat.keys()
        assert apart.paths == paths
