"""A server does not wait without end for a transfer of a checkpoint whose disk hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import wait_until

from stratagem._ps.server import checkpoint_parts
from stratagem._ps.server.checkpoint_parts import CheckpointAccess, SessionCheckpoints
from stratagem._ps.server.store import VariableStore
from stratagem._wire import messages
from stratagem.errors import CheckpointError


class StuckDisk:
    """Does not answer until `repaired` is set."""

    def __init__(self) -> None:
        self.repaired = threading.Event()
        self.reads = 0

    def read_rows(self, chain: object, parts: object, progress: Callable[[int], None]) -> None:
        self.reads += 1
        self.repaired.wait(120.0)
        progress(1)


def test_a_restore_is_refused_while_the_one_before_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that hangs would write old rows into variables when the disk answers again."""
    monkeypatch.setattr(checkpoint_parts, "GIVE_UP_S", 0.05)
    disk = StuckDisk()
    monkeypatch.setattr(checkpoint_parts, "read_rows", disk.read_rows)
    checkpoints = SessionCheckpoints(VariableStore(), CheckpointAccess((str(tmp_path),)))
    order = messages.ReadParts(chain=((str(tmp_path), "a"),), parts=(), verify=True)
    try:
        checkpoints.begin_read(order)
        wait_until(lambda: disk.reads == 1)  # in a thread
        with pytest.raises(CheckpointError, match=r"not ended within 0.05 s.*Repair the disk"):
            checkpoints.begin_read(order)
        assert disk.reads == 1
        stuck = checkpoints._transfer
        assert stuck is not None
        checkpoints.close()  # returns, too
        assert not stuck.is_done
    finally:
        disk.repaired.set()
    stuck._thread.join(60.0)
    assert stuck.result().failure == "the coordinator gave the transfer up"
    checkpoints.begin_read(order)
    wait_until(lambda: disk.reads == 2)
    checkpoints.close()
