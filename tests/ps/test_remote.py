"""A variable on real servers, in pieces or not: reading, writing, several threads, no shared memory."""

import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.remote_storage import RETURNED_BYTES, ReadCache, RemoteStorage
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.client.server_connection import Membership
from stratagem._ps.placement import Placement
from stratagem._ps.server.loop import ParameterServer
from stratagem._ps.tables.table_parameter import TableParameter
from stratagem._ps.worker.worker_variables import WorkerVariables
from stratagem.errors import ForeignParameterError

VALUE = torch.arange(22.0).reshape(11, 2)


@pytest.fixture(params=[True, False], ids=["shared memory", "connection"])
def client(request):
    """A client of two servers that run in this process."""
    who = Membership(session="test", task="/job:chief/task:0", is_owner=True)
    with (
        ParameterServer("127.0.0.1:0").start() as one,
        ParameterServer("127.0.0.1:0").start() as two,
    ):
        servers = [("/job:ps/task:0", one.address), ("/job:ps/task:1", two.address)]
        with PsClient(servers, who, shared_memory=request.param) as made:
            yield made


@pytest.fixture(params=[1, 3], ids=["whole", "three shards"])
def remote(client, request):
    where = Placement(2).place("w", (11, 2), torch.float32, shards=request.param)
    made = RemoteVariable(where, client)
    client.create_all(made.wanted())
    made.put(VALUE)
    yield made
    made.release()


def test_a_server_is_replaced_during_a_read(remote, client, monkeypatch):
    """The memory that was being filled is not returned: the new server may give a version to another value."""
    remote.whole()
    called, replaced = "wait_for_writes" if remote.mapped else "read_newer", []
    call = getattr(client, called)

    def interrupted(*args, **limits):
        found = call(*args, **limits)
        if not replaced:
            replaced.append(called)
            remote.forget_memory()
        return found

    monkeypatch.setattr(client, called, interrupted)
    torch.testing.assert_close(remote.whole(), VALUE)
    assert replaced
    torch.testing.assert_close(remote.whole(), VALUE)


def test_reading_and_writing(remote):
    torch.testing.assert_close(remote.read(), VALUE)
    torch.testing.assert_close(remote.whole(), VALUE)
    ids = torch.tensor([0, 3, 4, 10])
    torch.testing.assert_close(remote.rows(ids), VALUE[ids])
    assert remote.rows(torch.tensor([], dtype=torch.int64)).shape == (0, 2)
    before = remote.versions()
    remote.assign("add", torch.ones(11, 2))
    assert all(now == then + 1 for now, then in zip(remote.versions(), before, strict=True))
    torch.testing.assert_close(remote.whole(), VALUE + 1)
    remote.scatter("update", torch.tensor([10, 0, 10]), torch.tensor([[1.0, 1], [2, 2], [3, 3]]))
    assert remote.rows(torch.tensor([0, 10])).tolist() == [[2, 2], [3, 3]]
    remote.update_rows(torch.tensor([5]), torch.tensor([[9.0, 9.0]]))
    assert remote.read()[5].tolist() == [9.0, 9.0]


@pytest.mark.parametrize("shape", [(11, 2), (), (0, 2)])
@pytest.mark.parametrize("client", [False], ids=["connection"], indirect=True)
def test_a_value_received_over_a_connection_is_used_where_it_was_received(
    client, monkeypatch, shape
):
    remote = RemoteVariable(Placement(2).place("w", shape, torch.float32, shards=1), client)
    client.create_all(remote.wanted())
    remote.put(torch.ones(shape))
    received = []
    read = client.read_newer
    monkeypatch.setattr(
        client, "read_newer", lambda wanted: received.append(read(wanted)) or received[-1]
    )
    first = remote.whole()
    assert remote.whole() is first
    remote.assign("add", torch.ones(shape))
    second = remote.whole()
    assert first.eq(1).all()
    assert second.eq(2).all()
    assert first.shape == second.shape == shape
    ((value, _),) = received[-1].values()
    if value is not None and len(value):
        assert torch.frombuffer(value, dtype=torch.float32).data_ptr() == second.data_ptr()
    remote.release()


@pytest.mark.parametrize("client", [False], ids=["connection"], indirect=True)
def test_the_leaf_of_a_large_variable_takes_the_received_memory(client):
    count = RETURNED_BYTES // 4 + 1
    remote = RemoteVariable(Placement(2).place("w", (count,), torch.float32, shards=1), client)
    client.create_all(remote.wanted())
    remote.put(torch.ones(count))
    storage = RemoteStorage(remote, tracks=True, strategy=None, cache=ReadCache())
    leaf = storage.read()
    before = (2 * leaf).sum()
    remote.assign("add", torch.ones(count))
    assert storage.read() is leaf
    assert leaf.detach().eq(2).all()
    assert leaf.data_ptr() == remote.whole().data_ptr()
    (before + leaf.sum()).backward()
    assert leaf.grad.eq(3).all()
    remote.release()


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ids=st.lists(st.integers(0, 10), max_size=12))
def test_scatter_is_that_of_a_plain_tensor(remote, ids):
    remote.put(VALUE)
    rows = torch.tensor(ids, dtype=torch.int64)
    remote.scatter("add", rows, torch.ones(len(ids), 2))
    torch.testing.assert_close(remote.read(), VALUE.index_add(0, rows, torch.ones(len(ids), 2)))


def test_several_threads_may_write(remote):
    """A batch is one thread's from its beginning to its acknowledgement."""

    def work(row):
        for _ in range(50):
            remote.assign("add", torch.ones(11, 2))
            remote.scatter("add", torch.tensor([row]), torch.full((1, 2), 2.0))

    threads = [threading.Thread(target=work, args=(row,)) for row in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    expected = VALUE + 150
    expected[:3] += 100
    torch.testing.assert_close(remote.read(), expected)


@pytest.mark.parametrize("pieces", [False, True], ids=["at once", "in pieces"])
def test_a_later_write_of_another_client_does_not_count_as_seen(
    remote, client, monkeypatch, pieces
):
    """Else the coordinator's copy would lack that write until the next one."""
    if pieces:
        monkeypatch.setattr("stratagem._ps.types.TRANSFER_BYTES", 16)
    remote.put(VALUE)
    assert remote.seen == remote.versions()  # alone, everything is known
    servers = [(link.task, link.last_address) for link in client._connections]
    who = Membership(session="test", task="/job:worker/task:0")
    wait = client.wait_for_writes
    turns = iter(range(100))
    with PsClient(servers, who, incarnation=1) as other:
        theirs = RemoteVariable(remote.description, other)

        def then_another_writes(**options):
            found = wait(**options)
            if next(turns) == 1:  # after the first write of ours; turn 0 has nothing to wait for
                theirs.assign("add", torch.full((11, 2), 100.0))
            return found

        monkeypatch.setattr(client, "wait_for_writes", then_another_writes)
        remote.put(VALUE)
        monkeypatch.undo()
        theirs.release()
    assert remote.seen != remote.versions()
    assert float(remote.read().max()) >= 100.0


class TestWorkerVariables:
    def test_a_leaf_in_one_piece_shows_the_servers_writes(self, client, remote):
        variables = WorkerVariables(client)
        leaf = variables.parameter(remote.description, requires_grad=True, as_table=False)
        with variables.closure():
            torch.testing.assert_close(leaf.detach(), VALUE)
        remote.assign("add", torch.ones(11, 2))
        with variables.closure():
            torch.testing.assert_close(leaf.detach(), VALUE + 1)
        variables.close()

    def test_writes_into_a_leaf_are_undone_and_reported(self, client, remote):
        variables = WorkerVariables(client)
        leaf = variables.parameter(remote.description, requires_grad=True, as_table=False)
        with pytest.raises(ForeignParameterError, match="'w'"):
            with variables.closure(), torch.no_grad():
                leaf.zero_()
        with variables.closure():
            torch.testing.assert_close(leaf.detach(), VALUE)
        assert "1 parameters" in repr(variables)
        variables.close()

    def test_buffers_send_what_changed_and_counts_add_up(self, client):
        place = Placement(2)
        where = [place.place(name, (), torch.int64) for name in ("count", "last")]
        for one in where:
            made = RemoteVariable(one, client)
            client.create_all(made.wanted())
            made.put(torch.tensor(5))
            made.release()
        one, two = WorkerVariables(client), WorkerVariables(client)
        counts = [w.buffer(where[0], counts=True) for w in (one, two)]
        lasts = [w.buffer(where[1], counts=False) for w in (one, two)]
        with one.closure(), two.closure(None):
            counts[0].add_(1)
            counts[1].add_(2)
            lasts[0].fill_(7)
        read = [RemoteVariable(one_, client).read() for one_ in where]
        assert [int(value) for value in read] == [8, 7]
        with two.closure():
            assert (int(counts[1]), int(lasts[1])) == (8, 7)
        one.close()
        two.close()


def test_a_table_used_whole_twice_while_others_write_has_a_gradient(remote):
    # Asynchronous training: another worker's step comes between two uses in one forward pass.
    table = TableParameter.over(remote)
    x = torch.ones(
        2, 3, requires_grad=True
    )  # so that the table itself is kept for the backward pass
    first = table @ x
    remote.assign("add", torch.ones(11, 2))
    second = table @ x
    (first.sum() + second.sum()).backward()
    assert table.grad.shape == (11, 2)
    assert table.grad.unique().tolist() == [6.0]
