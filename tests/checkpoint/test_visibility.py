"""A reader never sees an incomplete checkpoint, however often the writer is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from warm_start import Program

from stratagem._checkpoint.directory import CheckpointDirectory
from stratagem.errors import CheckpointCorrupt

KILLS = 25
LIMIT_S = 500.0

# Loads torch once; each line on its input starts a child that saves until it is killed.
WRITER = """
import os, sys
import torch, torch.distributed.checkpoint
import stratagem as sg
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        model = torch.nn.Linear(300, 200)
        checkpoint = sg.Checkpoint(model=model, epoch=0)
        manager = sg.CheckpointManager(checkpoint, sys.argv[1], max_to_keep=2)
        step = manager.restore_or_initialize()
        assert step == 0 or float(model.weight.detach()[0, 0]) == step == checkpoint["epoch"]
        print(os.getpid(), step, flush=True)
        while True:
            step += 1
            checkpoint["epoch"] = step
            with torch.no_grad():
                model.weight.fill_(step)
            manager.save(step, wait=step % 2 == 0)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_reader_sees_complete_checkpoints_only(tmp_path: Path) -> None:
    """SIGKILL at random moments of a save; beside it `latest(); verify()` without a pause."""
    chance = random.Random(13)
    deadline = time.monotonic() + LIMIT_S
    directory = CheckpointDirectory(tmp_path)
    read = deleted_meanwhile = 0
    began: list[int] = []
    with Program(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        for _ in range(KILLS):
            writer.stdin.write("go\n")
            writer.stdin.flush()
            child, step = map(int, writer.stdout.readline().split())
            began.append(step)
            # Until this child has saved, then a random while longer.
            verdicts = 0
            wanted = chance.randrange(1, 5)
            while verdicts < wanted and time.monotonic() < deadline:
                newest = directory.latest()
                assert directory.damaged == {}
                if newest is None or newest.step <= step:
                    continue
                try:
                    newest.verify()
                    read += 1
                except CheckpointCorrupt:
                    assert not newest.path.exists(), f"{newest} is visible but not complete"
                    deleted_meanwhile += 1
                verdicts += 1
            os.kill(child, signal.SIGKILL)
            assert writer.stdout.readline() == "gone\n"
            newest = directory.latest()
            assert newest is not None
            newest.verify()
            read += 1
        writer.stdin.close()
        assert writer.wait(120) == 0
    print(f"{KILLS} kills, {read} checkpoints verified, {deleted_meanwhile} deleted meanwhile")
    assert read >= KILLS
    # Every child went on from where the one before had come to.
    assert began == sorted(began)
    assert len(set(began)) == KILLS
    left = [name for name in os.listdir(tmp_path) if name.startswith(".writing")]
    assert len(left) <= 1, "only the last killed writer's remains are there"
