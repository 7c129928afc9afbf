"""The evaluator: beside a training program, on its checkpoints, without a cluster."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from warm_start import Program

import stratagem as sg
from stratagem.errors import CheckpointError, CheckpointMismatch, CheckpointTimeout

LIMIT_S = 150.0


def build() -> nn.Module:
    return nn.Linear(2, 1)


def bias(model: nn.Module) -> dict[str, float]:
    assert not model.training
    assert not torch.is_grad_enabled()
    return {"bias": model.bias.item()}


def save(manager: sg.CheckpointManager, model: nn.Module, step: int, **options: Any) -> None:
    with torch.no_grad():
        model.bias.fill_(step)
    manager.save(step, wait=True, **options)


TRAINER = """
import sys
import torch
import stratagem as sg
with sg.OneDeviceStrategy("cpu:0") as strategy:
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
    checkpoint = sg.Checkpoint(model=model, optimizer=optimizer, losses=[1.0])
    with sg.CheckpointManager(checkpoint, sys.argv[1], max_to_keep=1) as manager:
        for step in range(1, 31):
            with torch.no_grad():
                model.bias.fill_(step)
            manager.save(step, final=step == 30)
"""


@pytest.mark.process
def test_beside_a_training_program(tmp_path: Path) -> None:
    """Checkpoints come and go quickly; what is evaluated is always whole, and the last one is."""
    with Program([sys.executable, "-c", TRAINER, str(tmp_path)]) as trainer:
        evaluator = sg.Evaluator(tmp_path, build, bias, poll_s=0.001, timeout_s=LIMIT_S)
        results = evaluator.run()
        assert trainer.wait(LIMIT_S) == 0
    assert results[-1].step == 30
    assert all(one.metrics == {"bias": float(one.step)} for one in results)
    steps = [one.step for one in results]
    assert steps == sorted(set(steps))
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == steps
    assert lines[-1]["metrics"] == {"bias": 30.0}
    # Started again, there is nothing left to do.
    assert sg.Evaluator(tmp_path, build, bias).run() == []


def test_it_tells_the_manager_which_checkpoint_is_best(tmp_path: Path) -> None:
    model = build()
    with sg.CheckpointManager(
        sg.Checkpoint(model=model), tmp_path, max_to_keep=1, keep_best="score"
    ) as manager:
        scores = iter([0.1, 0.9, 0.5, 0.3])
        evaluator = sg.Evaluator(
            tmp_path, build, lambda model: {"score": next(scores)}, max_evaluations=1
        )
        for step in range(1, 5):
            save(manager, model, step)
            evaluator.run()
        assert manager.best is not None
        assert manager.best.step == 2
        assert [one.step for one in manager.all()] == [2, 4]


def test_it_stops_after_so_many_and_goes_on_where_it_was(tmp_path: Path) -> None:
    model = build()
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path) as manager:
        save(manager, model, 1)
        save(manager, model, 2)
        # Only the newest: step 1 has been overtaken.
        assert [
            one.step for one in sg.Evaluator(tmp_path, build, bias, max_evaluations=1).run()
        ] == [2]
        save(manager, model, 3)
        assert [
            one.step for one in sg.Evaluator(tmp_path, build, bias, max_evaluations=1).run()
        ] == [3]
        with pytest.raises(
            CheckpointTimeout, match=r"no new checkpoint appeared .* within 0\.05 s"
        ):
            sg.Evaluator(tmp_path, build, bias, poll_s=0.01, timeout_s=0.05).run()


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    model = build()
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path) as manager:
        save(manager, model, 1)
        with (tmp_path / "step_00000001" / "coordinator.pt").open("ab") as file:
            file.write(b"x")
        evaluator = sg.Evaluator(tmp_path, build, bias, poll_s=0.01, timeout_s=LIMIT_S)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(evaluator.run()))
        thread.start()
        save(manager, model, 2, final=True)
        thread.join(LIMIT_S)
        assert [one.step for one in found] == [2]


def test_closing_ends_a_run_in_another_thread(tmp_path: Path) -> None:
    with sg.Evaluator(tmp_path, build, bias, poll_s=1000.0) as evaluator:
        thread = threading.Thread(target=evaluator.run)
        thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_which_of_several_modules_is_meant(tmp_path: Path) -> None:
    generator, critic = build(), nn.Linear(3, 3)
    with sg.CheckpointManager(
        sg.Checkpoint(generator=generator, critic=critic), tmp_path
    ) as manager:
        save(manager, generator, 5, final=True)
    with pytest.raises(CheckpointMismatch, match=r"modules \['generator', 'critic'\].*dictionary"):
        sg.Evaluator(tmp_path, build, bias).run()
    [result] = sg.Evaluator(
        tmp_path, lambda: {"generator": build()}, lambda built: bias(built["generator"])
    ).run()
    assert result.metrics == {"bias": 5.0}


def test_another_model_is_refused(tmp_path: Path) -> None:
    with sg.CheckpointManager(sg.Checkpoint(model=build()), tmp_path) as manager:
        manager.save(1)
    with pytest.raises(CheckpointMismatch, match=r"model\.weight \(shape \(1, 2\)"):
        sg.Evaluator(tmp_path, lambda: nn.Linear(3, 1), bias).run()


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"checkpoint_directory": None}, TypeError, "checkpoint_directory=None has type NoneType"),
        ({"checkpoint_directory": ""}, ValueError, "checkpoint_directory='': expected a path"),
        ({"build": nn.Linear(2, 1)}, TypeError, "build has type Linear: expected a function"),
        ({"evaluate": None}, TypeError, "evaluate has type NoneType: expected a function"),
        ({"max_evaluations": "3"}, TypeError, "max_evaluations='3' has type str"),
        ({"max_evaluations": 0}, ValueError, "max_evaluations=0: expected a whole number ≥ 1"),
        ({"poll_s": -1}, ValueError, "poll_s=-1: expected a positive number of seconds"),
        ({"timeout_s": None}, TypeError, "timeout_s=None: expected a positive number of seconds"),
    ],
)
def test_bad_arguments(
    tmp_path: Path, wrong: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        sg.Evaluator(
            **{"checkpoint_directory": tmp_path, "build": build, "evaluate": bias, **wrong}
        )


def test_results_that_are_no_numbers(tmp_path: Path) -> None:
    with sg.CheckpointManager(sg.Checkpoint(model=build()), tmp_path) as manager:
        manager.save(1)
    with pytest.raises(TypeError, match="metric 'auc' is 'high': expected a number"):
        sg.Evaluator(tmp_path, build, lambda _: {"auc": "high"}).run()  # type: ignore[dict-item]


def test_the_random_streams_are_left_alone(tmp_path: Path) -> None:
    with sg.CheckpointManager(sg.Checkpoint(model=build()), tmp_path) as manager:
        manager.save(1, final=True)
    evaluator = sg.Evaluator(tmp_path, build, bias)
    torch.manual_seed(5)
    build()
    before = torch.get_rng_state()
    torch.manual_seed(5)
    evaluator.run()
    assert torch.equal(torch.get_rng_state(), before)


def test_scalars_for_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with sg.CheckpointManager(sg.Checkpoint(model=build()), tmp_path) as manager:
        manager.save(7, final=True)
    sg.Evaluator(tmp_path, build, lambda model: {"auc": 0.5}, tensorboard=True).run()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in events.Scalars("evaluation/auc")] == [(7, 0.5)]


def test_a_directory_that_cannot_be_written_is_refused_before_the_evaluation(
    tmp_path: Path,
) -> None:
    model = build()
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path) as manager:
        save(manager, model, 1, final=True)
    # It can be read (there is none) and not be written; file modes would not stop a test that runs as root.
    (tmp_path / "evaluations.jsonl").symlink_to(tmp_path / "absent" / "file")
    evaluated: list[nn.Module] = []
    evaluator = sg.Evaluator(tmp_path, build, lambda model: evaluated.append(model) or {})
    with pytest.raises(
        CheckpointError, match=r"evaluations\.jsonl: .*let it write to this directory"
    ):
        evaluator.run()
    assert not evaluated


def test_a_result_after_a_line_that_was_cut_off_counts(tmp_path: Path) -> None:
    """The evaluator was killed while it wrote; the next one continues on a line of its own."""
    model = build()
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path, keep_best="bias") as manager:
        save(manager, model, 1)
        (tmp_path / "evaluations.jsonl").write_text('{"identity": "0", "st')
        sg.Evaluator(tmp_path, build, bias, max_evaluations=1).run()
        assert manager.best.step == 1
    with pytest.raises(CheckpointTimeout):  # it knows that it has evaluated this one
        sg.Evaluator(tmp_path, build, bias, poll_s=0.01, timeout_s=0.1).run()
