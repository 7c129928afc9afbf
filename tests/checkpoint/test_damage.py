"""Damaged checkpoints are refused by name, and the newest good one is used."""

from __future__ import annotations

import logging
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from warm_start import run_program

import stratagem as sg
from stratagem._checkpoint.directory import load
from stratagem.errors import CheckpointCorrupt, CheckpointError

FILES = ["__0_0.distcp", ".metadata", "coordinator.pt", "manifest.json"]


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, sg.Checkpoint, nn.Module, Any]:
    """A directory with two checkpoints: step 1 has weights of one, step 2 of two."""
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 20)).sum().backward()
    optimizer.step()
    checkpoint = sg.Checkpoint(model=model, optimizer=optimizer, epoch=1)
    directory = tmp_path / "checkpoints"
    with sg.CheckpointManager(checkpoint, directory) as manager:
        for step in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step)
            manager.save(step, wait=True)
    return directory, checkpoint, model, optimizer


def assert_falls_back(
    two: tuple[Path, sg.Checkpoint, nn.Module, Any], file: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The damaged file is named, step 1 is restored, and nothing was touched before that."""
    directory, checkpoint, model, _ = two
    newest = directory / "step_00000002"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1.0)
    with pytest.raises(CheckpointCorrupt) as caught:
        checkpoint.restore(newest)
    assert caught.value.path == str(newest / file)
    assert str(newest / file) in str(caught.value)
    assert f"`stratagem checkpoint verify {directory}`" in str(caught.value)
    assert float(model[0].weight.detach()[0, 0]) == -1.0
    with pytest.raises(CheckpointCorrupt):
        load(newest).verify()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "stratagem.checkpoint"):
        with sg.CheckpointManager(checkpoint, directory) as manager:
            assert manager.restore_or_initialize() == 1
    assert str(newest / file) in caplog.text
    assert float(model[0].weight.detach()[0, 0]) == 1.0


@pytest.mark.parametrize("file", FILES)
def test_one_flipped_byte_in_any_file(
    two: Any, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At twenty random places of each file, and at the first and the last byte."""
    path = two[0] / "step_00000002" / file
    good = path.read_bytes()
    chosen = random.Random(file).sample(range(len(good)), 20)
    for place in [0, *chosen, len(good) - 1]:
        bad = bytearray(good)
        bad[place] ^= 0x40
        path.write_bytes(bad)
        with pytest.raises(CheckpointCorrupt) as caught:
            load(path.parent).verify()
        assert caught.value.path == str(path), place
    assert_falls_back(two, file, caplog)
    path.write_bytes(good)
    load(path.parent).verify()


@pytest.mark.parametrize("file", FILES)
def test_truncation_at_fifty_places(two: Any, file: str, caplog: pytest.LogCaptureFixture) -> None:
    path = two[0] / "step_00000002" / file
    good = path.read_bytes()
    for place in [0, *random.Random(file).sample(range(1, len(good)), 48), len(good) - 1]:
        path.write_bytes(good[:place])
        with pytest.raises(CheckpointCorrupt) as caught:
            load(path.parent).verify()
        assert caught.value.path == str(path), place
    assert_falls_back(two, file, caplog)


@pytest.mark.parametrize("file", FILES[:-1])
def test_a_missing_or_longer_file(two: Any, file: str, caplog: pytest.LogCaptureFixture) -> None:
    path = two[0] / "step_00000002" / file
    good = path.read_bytes()
    path.write_bytes(good + b"\0")
    assert_falls_back(two, file, caplog)
    path.unlink()
    assert_falls_back(two, file, caplog)


def test_without_its_manifest_a_checkpoint_does_not_exist(two: Any) -> None:
    directory, checkpoint, *_ = two
    (directory / "step_00000002" / "manifest.json").unlink()
    with sg.CheckpointManager(checkpoint, directory) as manager:
        assert manager.restore_or_initialize() == 1
        assert manager.save(2, wait=True).path == directory / "step_00000002-1"


def test_if_no_checkpoint_is_good_the_run_does_not_start_anew(two: Any) -> None:
    """Starting at step 0 by accident would lose the run without a word."""
    directory, checkpoint, *_ = two
    for name in ("step_00000001/coordinator.pt", "step_00000002/manifest.json"):
        with (directory / name).open("ab") as file:
            file.write(b"x")
    with sg.CheckpointManager(checkpoint, directory) as manager:
        with pytest.raises(CheckpointCorrupt, match=r"no checkpoint in .* can be read"):
            manager.restore_or_initialize()
        with pytest.raises(CheckpointError, match="this run has not restored one"):
            manager.save(3)
    assert len(list(directory.glob("step_*"))) == 2


def test_good_checkpoints_are_not_deleted_in_favour_of_damaged_ones(two: Any) -> None:
    directory, checkpoint, *_ = two
    with (directory / "step_00000002" / ".metadata").open("ab") as file:
        file.write(b"x")
    with sg.CheckpointManager(checkpoint, directory, max_to_keep=2) as manager:
        assert manager.restore_or_initialize() == 1
        manager.save(3, wait=True)
        assert [one.step for one in manager.all()] == [1, 2, 3]
        manager.save(4, wait=True)
        assert [one.step for one in manager.all()] == [3, 4]


# ------------------------------------------------------------------ full disks

FULL = """
import resource, sys
import torch
import stratagem as sg
model = torch.nn.Linear(1000, 250)
directory, limit = sys.argv[1], int(sys.argv[2])
with sg.CheckpointManager(sg.Checkpoint(model=model), directory) as manager:
    manager.save(1, wait=True)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    for how in (dict(wait=True), dict(wait=False)):
        try:
            handle = manager.save(2, **how)
            handle.wait(50)
        except sg.errors.CheckpointError as error:
            print(error, flush=True)
    assert [one.step for one in manager.all()] == [1], manager.all()
    manager.latest.verify()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
"""


@pytest.mark.process
@pytest.mark.parametrize("limit", [100, 10_000, 500_000, 1_000_000])
def test_a_file_that_cannot_grow(tmp_path: Path, limit: int) -> None:
    """The limit strikes in a frame, in the rows, in small files: the save fails, nothing is left."""
    done = run_program(
        [sys.executable, "-c", FULL, str(tmp_path), str(limit)],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("could not be written to") == 2, done.stdout
    assert done.stdout.count("File too large") == 2
    assert sorted(os.listdir(tmp_path)) == [".lock", "step_00000001"]


def _mounted(path: Path, size: int) -> bool:
    """Mount a small tmpfs; False where that is not allowed."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True
    )
    return done.returncode == 0


@pytest.mark.process
def test_a_full_disk(tmp_path: Path) -> None:
    """A disk with room for one checkpoint and a half: refused before writing, and while writing."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not _mounted(disk, 1_500_000):
        pytest.skip("mounting a tmpfs is not allowed here; test_a_file_that_cannot_grow is")
    try:
        model = nn.Linear(1000, 250)
        with sg.CheckpointManager(sg.Checkpoint(model=model), disk / "c") as manager:
            manager.save(1, wait=True)
            with pytest.raises(CheckpointError, match=r"does not fit on the disk of .* bytes free"):
                manager.save(2, wait=True)
            # Something else fills the disk while the save is written.
            free = shutil.disk_usage
            with pytest.MonkeyPatch.context() as patch:
                from types import SimpleNamespace

                patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
                with pytest.raises(CheckpointError, match=r"could not be written .*No space left"):
                    manager.save(2, wait=True)
            assert free(disk).free > 400_000
            assert [one.step for one in manager.all()] == [1]
            manager.latest.verify()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_resource_limits_of_this_process_are_untouched() -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
