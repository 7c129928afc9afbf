"""Waits for the recovery of a parameter server have a limit, and their errors say what was awaited."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_until

from stratagem._cluster.coordinator.server_recoveries import ServerRecoveries
from stratagem._ps.client.transfers import follow, read_stall_s
from stratagem._wire import messages
from stratagem.errors import CheckpointError, ParameterServerLost

LOST = ParameterServerLost(
    "it is gone. Create the strategy anew.", task="/job:ps/task:1", variables=("w",)
)


class HungServers:
    """Servers whose recovery does not end before the test does; `moves`: it makes progress."""

    def __init__(self, *, moves: bool) -> None:
        self.may_end = threading.Event()
        self._moves = moves

    def server_index(self, task: str) -> int:
        return 1

    def is_outdated(self, error: Exception) -> bool:
        return False

    def lack_backups(self) -> bool:
        return False

    def promote_backup(self, server: int) -> tuple[None, bool, str]:
        return None, False, ""

    def restore_server(
        self, server: int, *, progress: Callable[[], None], **_: object
    ) -> SimpleNamespace:
        while not self.may_end.wait(0.01):
            if self._moves:
                progress()
        return SimpleNamespace(task=LOST.task, step=4, lost_s=0.0)


@pytest.fixture(params=[False, True])
def servers(request: pytest.FixtureRequest) -> Iterator[HungServers]:
    found = HungServers(moves=request.param)
    yield found
    found.may_end.set()


def test_a_call_waits_for_a_recovery_only_while_it_makes_progress(
    servers: HungServers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STRATAGEM_SERVER_WAIT_S", "5.5" if servers._moves else "1.5")
    monkeypatch.setenv("STRATAGEM_WIRE_TIMEOUT_S", "0.1")
    engine: Any = SimpleNamespace(
        views=SimpleNamespace(servers=servers),
        links={},
        rounds=None,
        options=SimpleNamespace(close_timeout_s=60.0),
    )
    recoveries = ServerRecoveries(engine)
    if servers._moves:
        threading.Timer(8.0, servers.may_end.set).start()
        assert recoveries.await_recovery(LOST)
    else:
        with pytest.raises(ParameterServerLost, match="recovery of /job:ps/task:1") as caught:
            recoveries.await_recovery(LOST)
        assert "STRATAGEM_SERVER_WAIT_S + 5 × STRATAGEM_WIRE_TIMEOUT_S = 2 s" in str(caught.value)
        assert "run the script again" in str(caught.value)
        assert caught.value.variables == ("w",)
    servers.may_end.set()
    recoveries.close()
    assert "/job:ps/task:1 was lost: its variables are restored" in caplog.text
    assert "Create the strategy anew" not in caplog.text  # advice for a run that has ended


def test_a_server_that_waits_for_the_recovery_of_another_was_not_lost_later() -> None:
    """The report of the second one counts the seconds of training until its own loss."""
    both_lost = threading.Event()

    class TwoServers(HungServers):
        def server_index(self, task: str) -> int:
            return int(task[-1])

        def restore_server(self, server: int, *, lost_at: float, **_: object) -> SimpleNamespace:
            assert both_lost.wait(60)
            times.append((lost_at, time.monotonic()))
            return SimpleNamespace(task=f"/job:ps/task:{server}", step=4, lost_s=0.0)

    times: list[tuple[float, float]] = []
    engine: Any = SimpleNamespace(
        views=SimpleNamespace(servers=TwoServers(moves=False)),
        links={},
        rounds=None,
        options=SimpleNamespace(close_timeout_s=60.0),
    )
    recoveries = ServerRecoveries(engine)
    for index in range(2):
        assert recoveries.begin(ParameterServerLost("it is gone", task=f"/job:ps/task:{index}"))
    both_lost.set()
    wait_until(lambda: len(recoveries.done) == 2)
    recoveries.close()
    (_, first_done), (second_lost, _) = times
    assert second_lost < first_done


def test_a_server_whose_disk_hangs_is_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_WIRE_TIMEOUT_S", "0.02")
    answer = SimpleNamespace(message=messages.Transfer(moved=5))
    connection: Any = SimpleNamespace(task="/job:ps/task:1", request=lambda _: answer)
    with pytest.raises(
        CheckpointError, match=r"/job:ps/task:1 has transferred 5 bytes .* for 0\.1 s"
    ):
        follow(connection, stall_s=read_stall_s())
