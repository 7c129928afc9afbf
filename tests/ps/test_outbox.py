"""Writes that nobody waits for: their order, their failures, their limits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from one_server import STEADY, WORKER, W, add_one, listed

from stratagem._ps.client import outbox as outbox_module
from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.server.loop import ParameterServer
from stratagem.errors import NotFoundError, WriteFenced


@pytest.fixture
def chief(server: ParameterServer) -> Iterator[PsClient]:
    with PsClient(listed(server), STEADY) as client:
        client.create(W, "w", value=torch.zeros(2))
        yield client


@pytest.fixture
def worker(server: ParameterServer, chief: PsClient) -> Iterator[PsClient]:
    with PsClient(listed(server), WORKER, incarnation=1) as client:
        yield client


def value_of(client: PsClient) -> list[float]:
    return client.read([W])[0][0].tolist()


@pytest.mark.parametrize("gathers", [False, True])
def test_own_reads_see_unacknowledged_writes(worker: PsClient, gathers: bool) -> None:
    outbox = worker.outbox
    for number in (1, 2, 3):
        outbox.begin_closure(number, exactly_once=False, gathers=gathers)
        add_one(worker)
        outbox.end_closure()
    assert (outbox.sent, outbox.acknowledged) == (3, 0)
    assert value_of(worker) == [3.0, 3.0]
    assert outbox.acknowledged == 3


def test_gathered_writes_are_sent_when_somebody_helps(worker: PsClient, chief: PsClient) -> None:
    worker.outbox.begin_closure(1, exactly_once=False, gathers=True)
    add_one(worker)
    assert value_of(chief) == [0.0, 0.0]  # not on its way yet
    while worker.outbox.acknowledged == 0:
        worker.progress()
    assert value_of(chief) == [1.0, 1.0]


def test_a_late_failure_belongs_to_the_closure_that_wrote(
    worker: PsClient, chief: PsClient
) -> None:
    outbox = worker.outbox
    outbox.begin_closure(1, exactly_once=False, gathers=False)
    add_one(worker)
    outbox.end_closure()
    worker.wait_for_writes()
    chief.fence("/job:worker/task:0", 1)
    outbox.begin_closure(2, exactly_once=False, gathers=True)
    add_one(worker)
    outbox.end_closure()
    outbox.begin_closure(3, exactly_once=False, gathers=True)
    assert value_of(worker) == [1.0, 1.0]  # closure 3 reads: the error is not its own
    outbox.end_closure()
    assert list(outbox.failures) == [2]
    assert isinstance(outbox.failures[2], WriteFenced)


def test_a_failure_of_its_own_is_raised_where_it_waits(worker: PsClient, chief: PsClient) -> None:
    chief.fence("/job:worker/task:0", 1)
    worker.outbox.begin_closure(2, exactly_once=False, gathers=True)
    add_one(worker)
    with pytest.raises(WriteFenced):
        worker.wait_for_writes()
    worker.outbox.end_closure()
    assert worker.outbox.failures == {}


def test_memory_is_not_used_again_before_the_server_has_read_it(
    worker: PsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "HALF_WRITES", 2)
    outbox = worker.outbox
    outbox.begin_closure(1, exactly_once=False, gathers=True)
    for count in range(1, 8):
        batch = worker.batch()
        batch.assign(0, 1, "add", torch.full((2,), float(count)))
        worker.send(batch)
        assert outbox.sent - outbox.acknowledged <= 4
    assert value_of(worker) == [28.0, 28.0]


def test_a_write_seen_before_still_finds_its_variable_where_it_is_now(
    worker: PsClient, chief: PsClient
) -> None:
    """Servers remember prepared writes by their bytes; creating and deleting makes them forget."""
    for _ in range(3):
        add_one(worker)
        worker.wait_for_writes()
    chief.delete([W])
    chief.create(ShardLocation(0, 2, (5000,), torch.float32), "other", value=torch.zeros(5000))
    chief.create(W, "w", value=torch.full((2,), 10.0))
    add_one(worker)
    worker.wait_for_writes()
    assert value_of(chief) == [11.0, 11.0]
    assert chief.read([ShardLocation(0, 2, (5000,), torch.float32)])[0][0].sum() == 0


def test_a_write_seen_before_of_a_variable_that_is_gone_is_refused(
    worker: PsClient, chief: PsClient
) -> None:
    add_one(worker)
    worker.wait_for_writes()
    chief.delete([W])
    add_one(worker)
    with pytest.raises(NotFoundError, match="not on this server"):
        worker.wait_for_writes()
