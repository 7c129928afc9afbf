"""A real parameter server and its clients: values, writes, optimizers, shared and over the socket."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.server_connection import Membership
from stratagem._ps.server.loop import ParameterServer
from stratagem._ps.server.server_options import ServerOptions
from stratagem._ps.types import Gradient, GroupSpec, InitOp, StateEntry
from stratagem._wire import messages
from stratagem.errors import NotFoundError, ProtocolError, UnsupportedOptimizer, WriteFenced

CHIEF = Membership(session="s", task="/job:chief/task:0", is_owner=True)
WORKER = Membership(session="s", task="/job:worker/task:0")


def place(
    server: int, variable: int, *shape: int, dtype: torch.dtype = torch.float32
) -> ShardLocation:
    return ShardLocation(server, variable, shape, dtype)


@pytest.fixture(params=[True, False], ids=["shared memory", "bytes"])
def shared(request: pytest.FixtureRequest) -> bool:
    """Every behaviour holds both ways."""
    assert isinstance(request.param, bool)
    return request.param


@pytest.fixture
def servers() -> Iterator[list[tuple[str, str]]]:
    """Two servers; gives their tasks and addresses."""
    with ParameterServer("127.0.0.1:0", task="/job:ps/task:0").start() as zero:
        with ParameterServer("127.0.0.1:0", task="/job:ps/task:1").start() as one:
            yield [(zero.task, zero.address), (one.task, one.address)]


@pytest.fixture
def chief(servers: list[tuple[str, str]], shared: bool) -> Iterator[PsClient]:
    """The coordinator's client."""
    with PsClient(servers, CHIEF, shared_memory=shared) as client:
        yield client


@pytest.fixture
def worker(servers: list[tuple[str, str]], chief: PsClient, shared: bool) -> Iterator[PsClient]:
    """A worker's client in the coordinator's session."""
    with PsClient(servers, WORKER, incarnation=1, shared_memory=shared) as client:
        yield client


def value_of(client: PsClient, *places: ShardLocation) -> list[list[float]]:
    return [tensor.tolist() for tensor, _ in client.read(places)]


def test_sharing_is_what_was_asked_for(worker: PsClient, shared: bool) -> None:
    """The parametrisation of this file is real: one half of it does not share memory."""
    assert worker._shares_reads[0] == shared
    assert [one.shares_memory for one in worker.outbox.destinations] == [shared] * 2


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).reshape(3, 4),
        torch.tensor(5, dtype=torch.int64),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.empty(0, 4),
        torch.arange(12.0).reshape(3, 4).t(),
    ],
    ids=["matrix", "scalar", "bfloat16", "bool", "empty", "transposed"],
)
def test_values_written_are_values_read(chief: PsClient, worker: PsClient, value: Tensor) -> None:
    """By the writer and by another task."""
    w = ShardLocation(1, 3, tuple(value.shape), value.dtype)
    chief.create(w, "w", value=value)
    for client in (chief, worker):
        ((back, version),) = client.read([w])
        assert back.dtype == value.dtype
        assert torch.equal(back, value)
        assert version == 1


def test_recipes_fill_variables_on_the_server(chief: PsClient) -> None:
    """The same seed gives the same numbers, as torch would."""
    recipe = [InitOp(name="normal", args=(1.0, 2.0), seed=7), InitOp(name="fill_row", args=(0, 0))]
    w = place(0, 1, 4, 3)
    chief.create(w, "w", recipe=recipe)
    expected = torch.empty(4, 3).normal_(1.0, 2.0, generator=torch.Generator().manual_seed(7))
    expected[0] = 0.0
    assert torch.equal(chief.read([w])[0][0], expected)


def test_one_batch_writes_to_several_servers_in_order(chief: PsClient, worker: PsClient) -> None:
    """Assignments, scatters and rows; versions count the writes of each variable."""
    a, b = place(0, 1, 3, 2), place(1, 2, 2)
    chief.create(a, "a", value=torch.zeros(3, 2))
    chief.create(b, "b", value=torch.zeros(2))
    batch = worker.batch()
    batch.assign(0, 1, "add", torch.ones(3, 2))
    batch.scatter(0, 1, "add", torch.tensor([2, 0, 2]), torch.ones(3, 2))
    batch.assign_rows(0, 1, 1, torch.full((1, 2), 9.0))
    batch.assign(1, 2, "sub", torch.ones(2))
    worker.send(batch)
    assert worker.wait_for_writes() == {(0, 1): 4, (1, 2): 2}
    expected = [[[2.0, 2.0], [9.0, 9.0], [3.0, 3.0]], [-1.0, -1.0]]
    assert value_of(worker, a, b) == expected
    assert value_of(chief, a, b) == expected


def test_reads_see_own_unacknowledged_writes(chief: PsClient) -> None:
    """A read waits for the acknowledgement of what this client sent before it."""
    w = place(0, 1, 2)
    chief.create(w, "w", value=torch.zeros(2))
    for step in range(20):
        batch = chief.batch()
        batch.assign(0, 1, "add", torch.ones(2))
        chief.send(batch)
        if step % 2:
            assert value_of(chief, w) == [[step + 1.0] * 2]
        rows, _ = chief.read_rows([(w, torch.tensor([1]))])[0]
        assert rows.tolist() == [step + 1.0]


def test_several_batches_may_be_under_way(chief: PsClient) -> None:
    """None overwrites the slots of another."""
    w = place(0, 1, 1000)
    chief.create(w, "w", value=torch.zeros(1000))
    for step in range(10):
        batch = chief.batch()
        batch.assign(0, 1, "add", torch.full((1000,), float(step)))
        chief.send(batch)
    chief.wait_for_writes()
    assert chief.read([w])[0][0].unique().tolist() == [45.0]


def test_rows_come_in_the_order_asked(chief: PsClient, worker: PsClient) -> None:
    """From several servers at once, with repetitions."""
    a, b = place(0, 1, 5, 2), place(1, 2, 3)
    chief.create(a, "a", value=torch.arange(10.0).reshape(5, 2))
    chief.create(b, "b", value=torch.arange(3.0))
    found = worker.read_rows([(b, torch.tensor([2, 0])), (a, torch.tensor([4, 4, 1]))])
    assert [rows.tolist() for rows, _ in found] == [
        [2.0, 0.0],
        [[8.0, 9.0], [8.0, 9.0], [2.0, 3.0]],
    ]
    assert [version for _, version in found] == [1, 1]


def test_optimizers_step_on_the_server_as_here(chief: PsClient, worker: PsClient) -> None:
    """Dense and row gradients, momentum, a learning rate changed by a push."""
    start = torch.arange(6.0).reshape(3, 2)
    w = place(1, 4, 3, 2)
    chief.create(w, "w", value=start)
    group = GroupSpec(variables=(4,), settings={"lr": 0.5, "momentum": 0.9})
    chief.create_optimizer(1, 8, "torch.optim.SGD", [group])
    here = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([here], lr=0.5, momentum=0.9)
    rows = torch.tensor([2, 0])
    for step, lr in enumerate([0.5, 0.5, 0.25]):
        values = torch.full((2, 2), 1.0 + step)
        here.grad = torch.zeros(3, 2).index_copy_(0, rows, values)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        batch = worker.batch()
        if step == 1:
            gradients = [Gradient(variable=4, values=here.grad)]
        else:
            gradients = [Gradient(variable=4, values=values, ids=rows)]
        batch.push(1, 8, gradients, {0: {"lr": lr}} if step == 2 else None)
        worker.send(batch)
    assert worker.wait_for_writes()[1, 4] == 4
    torch.testing.assert_close(worker.read([w])[0][0], here.detach())
    ((entry),) = chief.read_state(1, 8, [4])
    assert entry.key == "momentum_buffer"
    assert isinstance(entry.value, Tensor)
    torch.testing.assert_close(entry.value, optimizer.state[here]["momentum_buffer"])


def test_optimizer_state_can_be_written_back(chief: PsClient) -> None:
    """Tensors and plain values."""
    chief.create(place(0, 1, 2), "w", value=torch.zeros(2))
    group = GroupSpec(variables=(1,), settings={"lr": 0.1, "betas": (0.9, 0.99)})
    chief.create_optimizer(0, 1, "torch.optim.Adam", [group])
    entries = [
        StateEntry(variable=1, key="step", value=torch.tensor(3.0)),
        StateEntry(variable=1, key="exp_avg", value=torch.ones(2)),
        StateEntry(variable=1, key="exp_avg_sq", value=torch.full((2,), 2.0)),
    ]
    chief.write_state(0, 1, entries)
    back = {entry.key: entry.value for entry in chief.read_state(0, 1, [1])}
    assert {key: torch.as_tensor(value).tolist() for key, value in back.items()} == {
        "step": 3.0,
        "exp_avg": [1.0, 1.0],
        "exp_avg_sq": [2.0, 2.0],
    }


def test_large_values_travel_in_pieces(chief: PsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value larger than a piece comes and goes whole."""
    monkeypatch.setattr("stratagem._ps.types.TRANSFER_BYTES", 1000)
    w = place(0, 1, 100, 7)
    value = torch.arange(700.0).reshape(100, 7)
    assert len(w.pieces()) > 2
    chief.create(w, "w", value=value)
    back, version = chief.read([w])[0]
    assert torch.equal(back, value)
    assert version == len(w.pieces())


def test_fenced_writers_are_refused_and_others_are_not(
    chief: PsClient, worker: PsClient, servers: list[tuple[str, str]]
) -> None:
    """Contract 6: after a fence nothing of that life is applied; its next life may write."""
    w = place(0, 1, 1)
    chief.create(w, "w", value=torch.zeros(1))
    chief.fence(WORKER.task, 1)
    batch = worker.batch()
    batch.assign(0, 1, "add", torch.ones(1))
    worker.send(batch)
    with pytest.raises(WriteFenced, match="incarnation 1"):
        worker.wait_for_writes()
    assert value_of(chief, w) == [[0.0]]
    with PsClient(servers, WORKER, incarnation=2) as next_life:
        batch = next_life.batch()
        batch.assign(0, 1, "add", torch.ones(1))
        next_life.send(batch)
        next_life.wait_for_writes()
    assert value_of(chief, w) == [[1.0]]


def test_writes_of_an_exactly_once_closure_count_once(
    chief: PsClient, worker: PsClient, servers: list[tuple[str, str]]
) -> None:
    """The same closure run by two workers; then forgotten."""
    w = place(0, 1, 1)
    chief.create(w, "w", value=torch.zeros(1))
    other = Membership(session="s", task="/job:worker/task:1")
    with PsClient(servers, other, incarnation=1) as second:
        for client in (worker, second):
            client.outbox.begin_closure(77, exactly_once=True, gathers=False)
            for _ in range(2):
                batch = client.batch()
                batch.assign(0, 1, "add", torch.ones(1))
                client.send(batch)
            client.wait_for_writes()
            client.outbox.end_closure()
        assert value_of(second, w) == [[2.0]]
        assert (worker.outbox.duplicates, second.outbox.duplicates) == (0, 2)
        chief.finish_closures([77])


def test_two_clients_under_one_name_are_found_out(
    chief: PsClient, worker: PsClient, servers: list[tuple[str, str]]
) -> None:
    """Otherwise one's writes would be taken for repetitions of the other's, and lost in silence."""
    chief.create(place(0, 1, 1), "w", value=torch.zeros(1))

    def write(client: PsClient) -> None:
        batch = client.batch()
        batch.assign(0, 1, "add", torch.ones(1))
        client.send(batch)
        client.wait_for_writes()

    write(worker)
    with PsClient(servers, WORKER, incarnation=1) as twin:
        with pytest.raises(ProtocolError, match="another client writes under the same name"):
            write(twin)


def test_errors_of_the_server_leave_it_and_the_client_usable(
    chief: PsClient, worker: PsClient
) -> None:
    """Unknown variables, wrong shapes, forbidden optimizers: an exception here, no harm there."""
    w = place(0, 1, 2)
    chief.create(w, "w", value=torch.zeros(2))
    with pytest.raises(NotFoundError, match="variable 99"):
        worker.read_rows([(place(0, 99, 2), torch.tensor([0]))])
    batch = worker.batch()
    batch.assign(0, 1, "add", torch.ones(3))
    worker.send(batch)
    with pytest.raises(ValueError, match="expected shape"):
        worker.wait_for_writes()
    with pytest.raises(UnsupportedOptimizer, match="os"):
        chief.create_optimizer(0, 1, "os.system", [])
    with pytest.raises(ValueError, match="cannot create it again"):
        chief.create(place(0, 1, 3), "w")
    with pytest.raises(ValueError, match="shape"):
        chief.assign(w, torch.ones(3))
    batch = worker.batch()
    batch.assign(0, 1, "add", torch.ones(2))
    worker.send(batch)
    worker.wait_for_writes()
    assert value_of(chief, w) == [[1.0, 1.0]]


def test_deleted_variables_are_gone(chief: PsClient) -> None:
    """And their number may be used again."""
    w = place(0, 1, 2)
    chief.create(w, "w", value=torch.ones(2))
    chief.delete([w])
    with pytest.raises(NotFoundError):
        chief.read([w])
    chief.create(place(0, 1, 3), "v", value=torch.zeros(3))
    assert value_of(chief, place(0, 1, 3)) == [[0.0] * 3]


def test_versions_of_all_or_some(chief: PsClient) -> None:
    """Over the connection, without values."""
    for variable in (1, 2):
        chief.create(place(0, variable, 1), f"v{variable}", value=torch.zeros(1))
    assert chief.versions(0) == {1: 1, 2: 1}
    assert chief.versions(0, [2]) == {2: 1}


def served(client: PsClient, server: int) -> int:
    """Messages the server has worked on so far, asked on the data connection: exact."""
    stats = client._connections[server].request(messages.AskStats()).message
    assert isinstance(stats, messages.Stats)
    return int(stats.facts["served"])


def test_a_thousand_variables_are_one_message_per_server(chief: PsClient) -> None:
    """Requests per server are fused."""
    places = [place(variable % 2, variable, 3) for variable in range(1000)]
    chief.create_all([(one, f"v{one.variable}", [InitOp(name="zeros")]) for one in places])
    before = [served(chief, server) for server in (0, 1)]
    batch = chief.batch()
    for one in places:
        batch.assign(one.server, one.variable, "add", torch.full((3,), float(one.variable)))
    chief.send(batch)
    chief.wait_for_writes()
    chief.read(places)
    # The write, announcing new slots, locating or reading: a handful, not a thousand.
    after = [served(chief, server) for server in (0, 1)]
    assert all(0 < now - then <= 5 for now, then in zip(after, before, strict=True))
    assert [tensor[0].item() for tensor, _ in chief.read(places)] == [float(i) for i in range(1000)]


def test_memory_limit_is_an_error_with_numbers() -> None:
    """A variable that does not fit is refused; the server lives on."""
    options = ServerOptions(memory_limit_bytes=1 << 16)
    with ParameterServer("127.0.0.1:0", options=options).start() as server:
        with PsClient([("ps", server.address)], CHIEF) as client:
            with pytest.raises(MemoryError, match="65536"):
                client.create(place(0, 1, 1 << 20), "w")
            client.create(place(0, 2, 4), "v", value=torch.ones(4))


def test_a_server_may_refuse_to_share_memory() -> None:
    """Its own switch; clients go over the connection without being told."""
    options = ServerOptions(shared_memory=False)
    with ParameterServer("127.0.0.1:0", options=options).start() as server:
        with PsClient([("ps", server.address)], CHIEF) as client:
            assert not client._shares_reads[0]
            w = place(0, 1, 4)
            client.create(w, "w", value=torch.ones(4))
            assert client.map([w]) == [None]
            assert value_of(client, w) == [[1.0] * 4]


class Halving(torch.optim.Optimizer):
    """A user's optimizer, in a module the servers must be allowed to import."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Halves the parameter; the gradient only says that it is its turn."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(0.5)


def test_optimizers_of_users_need_their_module_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """STRATAGEM_OPTIMIZER_MODULES of the server decides; the default is torch.optim only."""
    monkeypatch.setitem(sys.modules, "lab_optimizers", sys.modules[__name__])
    w = place(0, 1, 2)
    group = GroupSpec(variables=(1,), settings={"lr": 1.0})
    for allowed in (False, True):
        if allowed:
            monkeypatch.setenv("STRATAGEM_OPTIMIZER_MODULES", "other, lab_optimizers")
        with ParameterServer("127.0.0.1:0").start() as server:
            with PsClient([("ps", server.address)], CHIEF) as client:
                client.create(w, "w", value=torch.ones(2))
                if not allowed:
                    with pytest.raises(UnsupportedOptimizer, match="lab_optimizers"):
                        client.create_optimizer(0, 1, "lab_optimizers.Halving", [group])
                    continue
                client.create_optimizer(0, 1, "lab_optimizers.Halving", [group])
                batch = client.batch()
                batch.push(0, 1, [Gradient(variable=1, values=torch.zeros(2))])
                client.send(batch)
                client.wait_for_writes()
                assert value_of(client, w) == [[0.5, 0.5]]


def test_names_that_are_no_modules_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start of the server, with the value."""
    monkeypatch.setenv("STRATAGEM_OPTIMIZER_MODULES", "a b")
    with pytest.raises(ValueError, match="'a b'"):
        ParameterServer("127.0.0.1:0")
