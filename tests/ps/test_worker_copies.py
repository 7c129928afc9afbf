"""Copies on a worker whose servers are on another host: few requests, current values, no bytes for known values."""

import math
import time
from contextlib import contextmanager

import pytest
import torch

from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.client.server_connection import Membership, ServerConnection
from stratagem._ps.placement import Placement
from stratagem._ps.server.loop import ParameterServer
from stratagem._ps.types import Gradient, GroupSpec
from stratagem._ps.worker.worker_copies import FRESH_S
from stratagem._ps.worker.worker_variables import WorkerVariables

COUNT = 10


@contextmanager
def two_servers():
    who = Membership(session="test", task="/job:chief/task:0", is_owner=True)
    with (
        ParameterServer("127.0.0.1:0").start() as one,
        ParameterServer("127.0.0.1:0").start() as two,
    ):
        servers = [("/job:ps/task:0", one.address), ("/job:ps/task:1", two.address)]
        with PsClient(servers, who, shared_memory=False) as client:
            yield client, (one, two), servers


@pytest.fixture
def cluster():
    with two_servers() as made:
        yield made


def place(client, count=COUNT):
    """Create variables on both servers, with SGD."""
    placement = Placement(2)
    remotes = []
    for index in range(count):
        where = placement.place(f"w{index}", (3, 2), torch.float32)
        remotes.append(RemoteVariable(where, client))
        client.create_all(remotes[-1].wanted())
        remotes[-1].put(torch.full((3, 2), float(index)))
    for server in range(2):
        numbers = [one.places[0].variable for one in remotes if one.places[0].server == server]
        group = GroupSpec(variables=tuple(numbers), settings={"lr": 1.0})
        client.create_optimizer(server, 1, "torch.optim.sgd.SGD", [group])
    return remotes


@pytest.fixture
def sent(monkeypatch):
    """The requests that clients send from now on, by the names of their messages."""
    names = []
    send = ServerConnection.send

    def counted(self, pending, *, later=False):
        names.append(type(pending.message).__name__)
        send(self, pending, later=later)

    monkeypatch.setattr(ServerConnection, "send", counted)
    return names


def worker(client, remotes):
    variables = WorkerVariables(client)
    leaves = [
        variables.parameter(one.description, requires_grad=True, as_table=False) for one in remotes
    ]
    return variables, leaves, torch.optim.SGD(leaves, lr=1.0)


def train(variables, leaves, optimizer, arrived=math.inf):
    with variables.closure(1, arrived=arrived):
        seen = [leaf.detach().clone() for leaf in leaves]
        optimizer.zero_grad()
        sum(leaf.sum() for leaf in leaves).backward()
        variables.push(1, optimizer, {0: {"lr": 1.0}})
        after = [leaf.detach().clone() for leaf in leaves]
    return seen, after


def test_a_step_is_one_message_to_each_server(cluster, sent):
    """Its write reads the values after it, and the next closure uses these."""
    client, _, __ = cluster
    remotes = place(client)
    variables, leaves, optimizer = worker(client, remotes)
    train(variables, leaves, optimizer)
    sent.clear()
    scheduled = time.perf_counter()
    variables._copies._asked_at = scheduled  # as if the first step had been later
    variables._copies._received_at = math.inf  # and just now, however slow the machine
    seen, after = train(variables, leaves, optimizer, arrived=scheduled)
    assert sent == ["Write", "Write"]
    for index in range(COUNT):
        assert seen[index].tolist() == [[index - 1.0] * 2] * 3
        assert after[index].tolist() == [[index - 2.0] * 2] * 3
    variables.close()


def test_a_closure_scheduled_after_the_last_step_sees_all_finished_writes(cluster, sent):
    """Another task's write ended before the closure was scheduled."""
    client, _, addresses = cluster
    remotes = place(client)
    variables, leaves, optimizer = worker(client, remotes)
    train(variables, leaves, optimizer)
    who = Membership(session="test", task="/job:worker/task:1")
    with PsClient(addresses, who, incarnation=1, shared_memory=False) as other:
        theirs = RemoteVariable(remotes[3].description, other)
        theirs.assign("set", torch.full((3, 2), 50.0))
        theirs.release()
    sent.clear()
    seen, _ = train(variables, leaves, optimizer, arrived=time.perf_counter())
    assert sent == ["Read", "Read", "Write", "Write"]
    assert seen[3].tolist() == [[50.0] * 2] * 3
    assert seen[4].tolist() == [[3.0] * 2] * 3
    variables.close()


def test_copies_are_read_again_after_a_while_and_after_own_writes(cluster):
    client, _, __ = cluster
    remotes = place(client)
    variables, leaves, optimizer = worker(client, remotes)
    train(variables, leaves, optimizer)
    copies = variables._copies
    copies._received_at = math.inf
    assert copies.are_fresh(copies._asked_at)
    assert not copies.are_fresh(copies._asked_at + 1e-6)
    remotes[0].assign("set", torch.zeros(3, 2))  # a write of this client
    assert not copies.are_fresh(copies._asked_at)
    copies.refresh()
    copies._received_at = math.inf
    assert copies.are_fresh(copies._asked_at)
    copies._received_at = time.perf_counter() - 2 * FRESH_S
    assert not copies.are_fresh(copies._asked_at)
    copies._received_at = math.inf
    remotes_seen = variables._dense[id(leaves[0])].remote
    remotes_seen.forget_seen()  # the function wrote it
    assert not copies.are_fresh(copies._asked_at)
    variables.close()


def test_only_values_that_changed_are_sent(cluster):
    client, _, __ = cluster
    remotes = place(client)
    known = [(one.places[0], one.seen[0]) for one in remotes]
    assert all(value is None for value, _ in client.read_newer(known).values())
    remotes[5].assign("add", torch.ones(3, 2))
    found = client.read_newer(known)
    changed = [key for key, (value, _) in found.items() if value is not None]
    assert changed == [(remotes[5].places[0].server, remotes[5].places[0].variable)]
    value, version = found[changed[0]]
    assert torch.frombuffer(value, dtype=torch.float32).tolist() == [6.0] * 6
    assert version == remotes[5].versions()[0]
    for one in remotes:
        one.release()


def test_a_deleted_variable_is_no_error_of_a_step(cluster):
    """The write is applied and acknowledged; the copy that is gone is forgotten."""
    client, _, __ = cluster
    remotes = place(client)
    variables, leaves, optimizer = worker(client, remotes)
    train(variables, leaves, optimizer)
    client.delete(remotes[7].places)
    used = [leaf for index, leaf in enumerate(leaves) if index != 7]
    rest = torch.optim.SGD(used, lr=1.0)
    _, after = train(variables, used, rest)
    assert [float(one[0, 0]) for one in after] == [i - 2.0 for i in range(COUNT) if i != 7]
    assert len(variables._copies._copies) == COUNT - 1
    variables.close()


def test_a_deleted_buffer_is_forgotten_after_a_refresh_has_missed_it(cluster):
    """The deletion reaches the servers before the worker hears that it may forget the buffer."""
    client, _, __ = cluster
    remotes = place(client)
    variables, leaves, optimizer = worker(client, remotes[1:])
    buffer = variables.buffer(remotes[0].description, counts=False)
    client.delete(remotes[0].places)
    train(variables, leaves, optimizer)  # refreshes the copies
    variables.forget(buffer)
    train(variables, leaves, optimizer)
    variables.close()


def test_repeated_writes_do_not_depend_on_later_changes_of_the_callers_tensor(cluster):
    """Gradients are sent from where they are. After Ctrl-C their bytes are kept, and the tensor is the caller's again."""
    client, _, __ = cluster
    remotes = place(client)
    server, variable = remotes[0].places[0].server, remotes[0].places[0].variable
    gradient = torch.ones(3, 2)
    batch = client.batch()
    batch.push(server, 1, [Gradient(variable=variable, values=gradient)])
    client.send(batch)
    (write,) = client.outbox._unacknowledged
    assert write.pending.buffers[0] is not None
    client.outbox._interrupted()
    gradient.fill_(100.0)
    assert (
        torch.frombuffer(bytearray(write.pending.buffers[0]), dtype=torch.float32).tolist()
        == [1.0] * 6
    )
    client.wait_for_writes()  # connects again and repeats the write, which the server knows or applies
    assert remotes[0].read().tolist() == [[-1.0] * 2] * 3
    for one in remotes:
        one.release()
