"""The manager: when it saves, what it keeps, what it says when something goes wrong."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from warm_start import Program, run_program

import stratagem as sg
from stratagem import metrics
from stratagem._checkpoint import checkpoint_writer
from stratagem._checkpoint.checkpoint import ObjectSnapshot
from stratagem._checkpoint.directory import CheckpointDirectory, DirectoryLock
from stratagem._checkpoint.server_group import ServerGroup
from stratagem._checkpoint.sigterm import SigtermNote
from stratagem.errors import (
    CheckpointBusy,
    CheckpointError,
    CheckpointMismatch,
    CheckpointTimeout,
    ParameterServerLost,
)

LIMIT_S = 150.0


def steps_in(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir() if each.name.startswith("step_"))


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(3, 2)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Saves wait until the gate is opened."""
    opened, arrived = threading.Event(), threading.Event()
    real = checkpoint_writer.LocalWriter.write

    def write(self: Any, path: Path, progress: Any) -> Any:
        arrived.set()
        assert opened.wait(LIMIT_S)
        return real(self, path, progress)

    monkeypatch.setattr(checkpoint_writer.LocalWriter, "write", write)
    opened.arrived = arrived  # type: ignore[attr-defined]
    return opened


def test_a_save_is_on_disk_when_it_was_waited_for(tmp_path: Path, model: nn.Module) -> None:
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path) as manager:
        handle = manager.save(7, {"loss": 0.25}, wait=True)
        assert handle.done
        assert handle.path == tmp_path / "step_00000007"
        assert handle.bytes == manager.latest.bytes > 0
        assert handle.seconds > handle.paused_s > 0
        handle = manager.save(8)
        saved = handle.wait(LIMIT_S)
        assert (saved.step, saved.metrics) == (8, {})
        assert [one.step for one in manager.all()] == [7, 8]
        assert manager.all()[0].metrics == {"loss": 0.25}
    assert steps_in(tmp_path) == ["step_00000007", "step_00000008"]


def test_training_goes_on_while_a_save_is_written(
    tmp_path: Path, model: nn.Module, gate: Any
) -> None:
    """What is saved is the state at the call of `save`, whatever happens to the model meanwhile."""
    before = model.weight.detach().clone()
    notes = [1]
    with sg.CheckpointManager(sg.Checkpoint(model=model, notes=notes), tmp_path) as manager:
        handle = manager.save(1)
        assert gate.arrived.wait(LIMIT_S)
        with torch.no_grad():
            model.weight.zero_()
        notes.append(2)
        assert not handle.done
        assert handle.path is None
        with pytest.raises(CheckpointTimeout, match="step 1 has not ended"):
            handle.wait(0.01)
        gate.set()
        handle.wait(LIMIT_S)
        manager.restore_or_initialize()
    assert torch.equal(model.weight, before)
    assert notes == [1]


def test_saves_never_overlap_and_step_never_waits(
    tmp_path: Path, model: nn.Module, gate: Any
) -> None:
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path, every_steps=1) as manager:
        first = manager.step(1)
        assert first is not None
        assert gate.arrived.wait(LIMIT_S)
        assert [manager.step(n) for n in (2, 3, 4)] == [None, None, None]
        gate.set()
        first.wait(LIMIT_S)
        later = manager.step(5)
        assert later is not None
        later.wait(LIMIT_S)
        assert [one.step for one in manager.all()] == [1, 5]


def test_the_end_of_the_block_finishes_the_save(tmp_path: Path, model: nn.Module) -> None:
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path) as manager:
        handle = manager.save(1)
    assert handle.done
    assert steps_in(tmp_path) == ["step_00000001"]
    manager.close()
    with pytest.raises(CheckpointError, match="is closed"):
        manager.save(2)


def test_saves_come_when_they_are_due(tmp_path: Path, model: nn.Module) -> None:
    checkpoint = sg.Checkpoint(model=model)
    with sg.CheckpointManager(
        checkpoint, tmp_path / "a", every_steps=3, max_to_keep=None
    ) as manager:
        for step in range(1, 11):
            handle = manager.step(step)
            if handle is not None:
                handle.wait(LIMIT_S)
        assert [one.step for one in manager.all()] == [3, 6, 9]
    with sg.CheckpointManager(checkpoint, tmp_path / "b", every_s=1e-9) as manager:
        handle = manager.step(1)
        assert handle is not None
        handle.wait(LIMIT_S)
    with sg.CheckpointManager(checkpoint, tmp_path / "c") as manager:
        assert [manager.step(step) for step in range(100)] == [None] * 100


def test_a_step_may_be_a_number_of_numpy_or_torch(tmp_path: Path, model: nn.Module) -> None:
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path, every_steps=2) as manager:
        handle = manager.step(np.int64(2))  # type: ignore[arg-type]
        assert handle is not None
        assert type(handle.wait(LIMIT_S).step) is int
        assert manager.save(torch.tensor(3), wait=True).step == 3  # type: ignore[arg-type]
        for wrong in (True, "3", 2.0, -1, torch.tensor(-1)):
            with pytest.raises(ValueError, match="a whole number ≥ 0"):
                manager.step(wrong)  # type: ignore[arg-type]


def test_the_number_of_a_save_without_a_step(tmp_path: Path, model: nn.Module) -> None:
    """As page 003 has it: `manager.save()` once an epoch counts epochs."""
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path) as manager:
        assert [manager.save(wait=True).step for _ in range(3)] == [1, 2, 3]
        manager.step(40)
        assert manager.save(wait=True).step == 40
        assert manager.save(wait=True).step == 41
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path) as manager:
        assert manager.restore_or_initialize() == 41
        assert manager.save(wait=True).step == 42


def test_the_newest_and_the_best_are_kept(tmp_path: Path, model: nn.Module) -> None:
    with sg.CheckpointManager(
        sg.Checkpoint(model=model), tmp_path, max_to_keep=2, keep_best="auc"
    ) as manager:
        assert manager.best is None
        for step, auc in enumerate([0.1, 0.9, 0.3, 0.4, 0.2], start=1):
            manager.save(step, {"auc": auc}, wait=True)
        assert [one.step for one in manager.all()] == [2, 4, 5]
        assert manager.best is not None
        assert manager.best.step == 2


def test_the_same_step_again_replaces_the_earlier_save(tmp_path: Path) -> None:
    counter = {"n": 0}
    with sg.CheckpointManager(sg.Checkpoint(counter=counter), tmp_path) as manager:
        for number in (1, 2, 3):
            counter["n"] = number
            manager.save(5, wait=True)
        assert [one.step for one in manager.all()] == [5]
        manager.restore_or_initialize()
    assert counter["n"] == 3


def test_the_latest_is_the_last_save_not_the_largest_step(tmp_path: Path) -> None:
    counter = {"n": 0}
    with sg.CheckpointManager(sg.Checkpoint(counter=counter), tmp_path) as manager:
        for step in (100, 50):
            counter["n"] = step
            manager.save(step, wait=True)
        assert manager.restore_or_initialize() == 50


# ------------------------------------------------------------------ failures


def fail_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def write(self: Any, path: Path, progress: Any) -> Any:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(checkpoint_writer.LocalWriter, "write", write)


def test_a_save_that_a_lost_server_ends_is_no_error_because_the_next_save_follows(
    tmp_path: Path,
    model: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    advice = "create a new strategy"
    lost = ParameterServerLost(f"a long history; {advice}", task="/job:ps/task:0")
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(
                ObjectSnapshot,
                "write",
                Mock(side_effect=ServerGroup.lost(Mock(connections=()), lost)),
            )
            manager.save(1)._ended.wait(LIMIT_S)
        assert manager.save(2, wait=True).done
    (record,) = (one for one in caplog.records if one.levelno >= logging.WARNING)
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "step 1 is not saved: parameter server /job:ps/task:0 does not answer; the next save follows"
    )


def test_a_failed_save_is_counted_logged_raised_once_and_changes_nothing(
    tmp_path: Path,
    model: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path, every_steps=1) as manager:
        manager.save(1, wait=True)
        failed = metrics.counter("checkpoint.failed").value
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "stratagem.checkpoint"):
            fail_with(patch, OSError(28, "No space left on device"))
            manager.save(2)._ended.wait(LIMIT_S)
            with pytest.raises(CheckpointError, match=r"step 2 failed: .*No space left"):
                manager.step(3)
            assert metrics.counter("checkpoint.failed").value == failed + 1
            assert "the save of step 2 failed: a checkpoint of about" in caplog.text
            assert "Traceback" not in caplog.text  # the sentence says everything
            handle = manager.save(3)
            with pytest.raises(CheckpointError, match="Checkpoints saved before are untouched"):
                handle.wait(LIMIT_S)
            # Seen by `wait`: not raised again.
        later = manager.step(4)
        assert later is not None
        later.wait(LIMIT_S)
        assert sorted(os.listdir(tmp_path))[:2] == [".lock", "step_00000001"]
    assert steps_in(tmp_path) == ["step_00000001", "step_00000004"]


@pytest.mark.parametrize("how", ["error", "interrupt"])
def test_files_of_a_save_that_failed_are_not_written_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """After Ctrl-C, or an error of one writer, the threads of the others end at their next piece."""
    begun, given_up = threading.Event(), threading.Event()

    class Endless:
        """A server that writes a large file."""

        tensors: dict[str, Any] = {}
        bytes = 0

        def write(self, path: Path, progress: Any) -> Any:
            begun.set()
            deadline = time.monotonic() + LIMIT_S
            while time.monotonic() < deadline:
                try:
                    progress(1)
                except CheckpointError:
                    given_up.set()
                    raise
            return None

    class Failing(Endless):
        def write(self, path: Path, progress: Any) -> Any:
            assert begun.wait(LIMIT_S)
            raise KeyboardInterrupt if how == "interrupt" else CheckpointError("disk full")

    ended = KeyboardInterrupt if how == "interrupt" else CheckpointError
    with pytest.raises(ended) as caught:
        checkpoint_writer.write_checkpoint(
            CheckpointDirectory(tmp_path),
            checkpoint_writer.SaveOrder(step=1, serial=1),
            writers=[Failing(), Endless()],
            coordinator=b"",
            paths={},
        )
    assert str(caught.value) == ("" if how == "interrupt" else "disk full")
    assert given_up.is_set()
    assert os.listdir(tmp_path) == []


def test_a_failure_that_was_not_raised_yet_is_raised_by_close(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, ValueError("broken"))
    manager = sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path)
    manager.save(1)
    with pytest.raises(CheckpointError, match="step 1 failed: broken"):
        manager.close()
    manager.close()
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path):
        assert os.listdir(tmp_path) == [".lock"]


def test_directories_that_cannot_be_used(tmp_path: Path, model: nn.Module) -> None:
    (tmp_path / "file").write_text("mine")
    checkpoint = sg.Checkpoint(model=model)
    with pytest.raises(CheckpointError, match="cannot be used for checkpoints"):
        sg.CheckpointManager(checkpoint, tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be used for checkpoints"):
        sg.CheckpointManager(checkpoint, "/proc/no/such")
    checkpoint.save(tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"one is a checkpoint\. Give the directory it is in"):
        sg.CheckpointManager(checkpoint, tmp_path / "one")
    assert (tmp_path / "file").read_text() == "mine"


def test_bad_arguments(tmp_path: Path, model: nn.Module) -> None:
    checkpoint = sg.Checkpoint(model=model)
    for options in (
        {"max_to_keep": 0},
        {"every_s": -1},
        {"every_steps": 0},
        {"best_to_keep": 0},
        {"max_to_keep": 2.5},
        {"every_s": "60"},
        {"keep_best": 5},
        {"keep_best": "-"},
        {"on_server_loss": "ignore"},
    ):
        with pytest.raises((TypeError, ValueError), match="expected"):
            sg.CheckpointManager(checkpoint, tmp_path, **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected an sg\.Checkpoint"):
        sg.CheckpointManager(model, tmp_path)  # type: ignore[arg-type]
    for directory in ("", None, 3):
        with pytest.raises((TypeError, ValueError), match="expected a path"):
            sg.CheckpointManager(checkpoint, directory)  # type: ignore[arg-type]
    with sg.CheckpointManager(checkpoint, tmp_path) as manager:
        for step in (-1, 1.5, True, "3"):
            with pytest.raises(ValueError, match="a whole number"):
                manager.step(step)  # type: ignore[arg-type]
        for metrics in (0.5, {"auc": "high"}):
            with pytest.raises(TypeError, match="expected"):
                manager.save(1, metrics)  # type: ignore[arg-type]
        assert manager.all() == []


def test_foreign_files_and_directories_are_left_alone(tmp_path: Path, model: nn.Module) -> None:
    """Another framework's `step_100` is no checkpoint of ours: neither read nor deleted."""
    (tmp_path / "step_00000001").mkdir()
    (tmp_path / "step_00000001" / ".metadata").write_bytes(b"theirs")
    (tmp_path / "log.txt").write_text("mine")
    (tmp_path / ".writing-0123").mkdir()
    (tmp_path / ".probe-0123").touch()
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path, max_to_keep=1) as manager:
        assert manager.restore_or_initialize() == 0
        for _ in range(3):
            manager.save(wait=True)
        assert manager.all()[0].step == 3
    assert sorted(os.listdir(tmp_path)) == [".lock", "log.txt", "step_00000001", "step_00000003"]
    assert os.listdir(tmp_path / "step_00000001") == [".metadata"]


# ------------------------------------------------------------------ whose directory it is


@pytest.mark.process
def test_two_managers_on_one_directory(tmp_path: Path, model: nn.Module) -> None:
    checkpoint = sg.Checkpoint(model=model)
    with sg.CheckpointManager(checkpoint, tmp_path) as manager:
        with pytest.raises(CheckpointBusy, match="in use by this process, <Checkpoint of model>"):
            sg.CheckpointManager(checkpoint, tmp_path / ".." / tmp_path.name)
        code = f"import stratagem as sg; sg.CheckpointManager(sg.Checkpoint(), {str(tmp_path)!r})"
        done = run_program(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S
        )
        assert f"CheckpointBusy: {tmp_path} is in use by process {os.getpid()} on" in done.stderr
        manager.save(1, wait=True)
    with sg.CheckpointManager(checkpoint, tmp_path):
        pass


def test_a_dropped_manager_releases_its_directory(tmp_path: Path, model: nn.Module) -> None:
    """Without close(); also as part of a cycle, and with a handler of SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    checkpoint = sg.Checkpoint(model=model)
    manager = sg.CheckpointManager(checkpoint, tmp_path, save_on_sigterm=True)
    manager.save(1).wait(LIMIT_S)
    holder = [manager]
    holder.append(holder)  # type: ignore[arg-type]
    gc.disable()
    try:
        del manager, holder
        with sg.CheckpointManager(checkpoint, tmp_path) as following:
            assert following.restore_or_initialize() == 1
            following.save(2, wait=True)
    finally:
        gc.enable()
    arrived: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: arrived.append(number))
    dropped = SigtermNote()
    del dropped
    signal.raise_signal(signal.SIGTERM)
    assert arrived == [signal.SIGTERM]  # not noted for nobody
    signal.signal(signal.SIGTERM, before)


REPLACED = """
import sys
import stratagem as sg
import torch
with sg.CheckpointManager(sg.Checkpoint(model=torch.nn.Linear(3, 2)), sys.argv[1]) as manager:
    manager.save(1, wait=True)
    print("saved", flush=True)
    sys.stdin.readline()
    try:
        manager.save(2, wait=True)
    except sg.errors.CheckpointBusy as error:
        print(error, flush=True)
"""


@pytest.mark.process
def test_a_replaced_coordinator_cannot_save(tmp_path: Path, model: nn.Module) -> None:
    """Its successor takes the directory over while it still runs; other processes cannot."""
    with Program(
        [sys.executable, "-c", REPLACED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as old:
        assert old.stdin is not None
        assert old.stdout is not None
        assert old.stdout.readline() == "saved\n"
        with pytest.raises(CheckpointBusy, match=f"process {old.pid} on"):
            DirectoryLock(tmp_path, "other", replaced="process 1 on nowhere")
        replaced = f"process {old.pid} on {platform.node()}"
        with DirectoryLock(tmp_path, "successor", replaced=replaced):
            old.stdin.write("go\n")
            old.stdin.flush()
            assert "in use by the coordinator that has replaced this one" in old.stdout.readline()
            assert old.wait(LIMIT_S) == 0
    assert steps_in(tmp_path) == ["step_00000001"]


@pytest.mark.process
def test_a_child_may_use_the_directory_after_its_parent(tmp_path: Path, model: nn.Module) -> None:
    """A forked process remembers the lock of its parent, which it does not hold."""
    checkpoint = sg.Checkpoint(model=model)
    manager = sg.CheckpointManager(checkpoint, tmp_path)
    ours, theirs = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(CheckpointBusy, match=f"in use by process {os.getppid()} on"):
                sg.CheckpointManager(checkpoint, tmp_path)
            os.write(theirs[1], b"busy")
            os.read(ours[0], 1)
            sg.CheckpointManager(checkpoint, tmp_path).close()
            code = 0
        finally:
            os._exit(code)
    assert os.read(theirs[0], 10) == b"busy"
    manager.close()
    os.write(ours[1], b".")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for one in (*ours, *theirs):
        os.close(one)


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lockf(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", lockf)
        with pytest.raises(CheckpointError, match=r"cannot be locked: .*No locks available"):
            sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path)
    sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path).close()


@pytest.mark.process
def test_children_do_not_inherit_the_lock(tmp_path: Path, model: nn.Module) -> None:
    """A data loader's worker that survives its parent does not keep the next run out."""
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        manager = sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path)
        child = os.fork()
        if child == 0:
            signal.pause()
        os.write(writer, str(child).encode())
        os.kill(os.getpid(), signal.SIGKILL)
        manager.close()
    os.waitpid(parent, 0)
    child = int(os.read(reader, 100))
    os.close(reader)
    os.close(writer)
    try:
        with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_saving_beside_an_earlier_run_needs_a_restore(tmp_path: Path, model: nn.Module) -> None:
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path) as manager:
        manager.save(120, wait=True)
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path, max_to_keep=1) as manager:
        with pytest.raises(CheckpointError, match=r"of step 120\), and this run has not restored"):
            manager.save(1)
        assert manager.restore_or_initialize() == 120
        manager.save(121, wait=True)
    assert steps_in(tmp_path) == ["step_00000121"]


def test_another_jobs_directory_is_refused_and_kept(tmp_path: Path, model: nn.Module) -> None:
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path) as manager:
        manager.save(120, wait=True)
    other = sg.Checkpoint(net=nn.Linear(9, 9))
    with sg.CheckpointManager(other, tmp_path, max_to_keep=1) as manager:
        with pytest.raises(CheckpointMismatch, match="Missing in the checkpoint: net"):
            manager.restore_or_initialize()
        with pytest.raises(CheckpointError, match="this run has not restored one"):
            manager.save(1)
    assert steps_in(tmp_path) == ["step_00000120"]


# ------------------------------------------------------------------ SIGTERM

SIGTERM_PROGRAM = """
import os, signal, sys
import stratagem as sg
import torch
model = torch.nn.Linear(2, 1)
mode = sys.argv[2]
with sg.CheckpointManager(sg.Checkpoint(model=model), sys.argv[1], save_on_sigterm=True) as manager:
    for step in range(1, 10):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            print("still here", flush=True)
            if mode == "twice":
                os.kill(os.getpid(), signal.SIGTERM)
        if mode == "after" and step == 4:
            break
        manager.step(step)
print("not reached")
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("mode", "code", "steps"),
    [
        ("once", 143, ["step_00000004"]),
        ("twice", -signal.SIGTERM, []),
        ("after", 143, []),
    ],
)
def test_sigterm_saves_at_the_next_step_and_ends(
    tmp_path: Path, mode: str, code: int, steps: list[str]
) -> None:
    """A second SIGTERM ends the program at once; one after the last step ends it at `close`."""
    done = run_program(
        [sys.executable, "-c", SIGTERM_PROGRAM, str(tmp_path), mode],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stdout) == (code, "still here\n"), done.stderr
    assert steps_in(tmp_path) == steps


def test_sigterm_is_handled_as_before_after_close(tmp_path: Path, model: nn.Module) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path, save_on_sigterm=True):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_needs_the_main_thread(tmp_path: Path, model: nn.Module) -> None:
    found: list[BaseException] = []

    def make() -> None:
        try:
            sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path, save_on_sigterm=True)
        except CheckpointError as error:
            found.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join(LIMIT_S)
    assert "main thread" in str(found[0])
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path):
        pass  # the lock was given back


def test_progress_is_shown_on_a_terminal_only(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a pseudo-terminal a save that takes long shows a bar; a pipe gets nothing."""
    import pty

    from stratagem._checkpoint import progress

    monkeypatch.setattr(progress, "_PATIENCE_S", -1.0)
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path) as manager:
        ours, theirs = pty.openpty()
        with os.fdopen(theirs, "w") as terminal:
            monkeypatch.setattr(sys, "stderr", terminal)
            manager.save(7, wait=True)
            manager.restore_or_initialize()
        shown = b""
        while b"restoring step 7" not in shown:
            shown += os.read(ours, 10_000)
        os.close(ours)
        assert b"saving step 7" in shown
        monkeypatch.undo()
        reader, writer = os.pipe()
        with os.fdopen(writer, "w") as pipe:
            monkeypatch.setattr(sys, "stderr", pipe)
            manager.save(8, wait=True)
        assert os.read(reader, 100) == b""
        os.close(reader)
