"""Large writes of workers are read by servers where they lie: same numbers, nothing shared by mistake."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg

NUMBERS = 1 << 19  # 2 MB: lent; smaller assignments of scheduled functions are copied

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.01, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[sg.LocalCluster]:
    with sg.LocalCluster(workers=1, ps=2) as made:
        yield made


@pytest.fixture
def strategy(cluster: sg.LocalCluster) -> Iterator[sg.ParameterServerStrategy]:
    with sg.ParameterServerStrategy(cluster.resolver) as made:
        yield made


def lent_so_far() -> int:
    """How many tensors this worker has lent; counted from the first call on."""
    from stratagem._ps.client import write_batch

    plain = write_batch.WriteBatch.take_lent
    if not hasattr(plain, "count"):

        def counted(self: Any) -> Any:
            lent = plain(self)
            counted.count += len(lent)
            return lent

        counted.count = 0
        write_batch.WriteBatch.take_lent = counted
    return write_batch.WriteBatch.take_lent.count


def test_what_was_written_may_be_changed_at_once(strategy: Any) -> None:
    """The server has read it when the write returns; whole, in pieces and rows alike."""
    with strategy.scope():
        v, table = sg.Variable(torch.zeros(NUMBERS)), sg.Variable(torch.zeros(1 << 12, 1 << 8))

    def step() -> int:
        before = lent_so_far()
        delta = torch.ones(NUMBERS)
        ids, rows = torch.arange(1 << 12), torch.full((1 << 12, 1 << 8), 2.0)
        for _ in range(5):
            v.assign_add(delta)
            delta.fill_(100.0)
            delta.fill_(1.0)
            table.scatter_add(torch.sparse_coo_tensor(ids[None], rows, table.shape))
            rows.fill_(50.0)
            rows.fill_(2.0)
        v.assign_sub(delta[:].view(NUMBERS))
        return lent_so_far() - before

    with sg.ClusterCoordinator(strategy) as coordinator:
        assert coordinator.schedule(step).fetch(timeout_s=60) >= 10
        assert torch.equal(v.read_value(), torch.full((NUMBERS,), 4.0))
        assert torch.equal(table.read_value(), torch.full((1 << 12, 1 << 8), 10.0))


def test_what_cannot_be_lent_is_copied(strategy: Any) -> None:
    """Transposed, with gaps, at an odd place, another kind of number, or made elsewhere."""
    with strategy.scope():
        v = sg.Variable(torch.zeros(1 << 9, 1 << 10))
    elsewhere = torch.full((1 << 9, 1 << 10), 16.0)

    def step() -> None:
        square = torch.arange(float(NUMBERS)).view(1 << 10, 1 << 9)
        v.assign_add(square.t())
        v.assign_add(torch.ones(1 << 9, 1 << 11)[:, ::2])
        v.assign_add(torch.ones(NUMBERS + 1)[1:].view(1 << 9, 1 << 10))
        v.assign_add(torch.ones(1, 1 << 10).expand(1 << 9, 1 << 10))
        v.assign_add(elsewhere)

    with sg.ClusterCoordinator(strategy) as coordinator:
        coordinator.schedule(step).fetch(timeout_s=60)
        wanted = torch.arange(float(NUMBERS)).view(1 << 10, 1 << 9).t() + 19.0
        assert torch.equal(v.read_value(), wanted)


def test_what_is_conjugated_or_negated_lazily_arrives_as_it_reads(strategy: Any) -> None:
    """Its memory holds something else; the gradient of ``z.conj()`` is such a tensor."""
    with strategy.scope():
        z = sg.Variable(torch.zeros(NUMBERS, dtype=torch.complex64))
        v = sg.Variable(torch.zeros(NUMBERS))
        model = nn.Linear(NUMBERS, 1, bias=False, dtype=torch.complex64)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> list[bool]:
        z.assign_add(torch.full((NUMBERS,), 1 + 2j).conj())
        v.assign_add(torch._neg_view(torch.ones(NUMBERS)))
        weight, found = model.weight, []
        for used in (weight, weight.conj(), weight, weight.conj()):
            optimizer.zero_grad()
            (used * torch.full((1, NUMBERS), 1 + 2j)).real.sum().backward()
            found.append(weight.grad is not None and weight.grad.is_conj())
            optimizer.step()
        return found

    with sg.ClusterCoordinator(strategy) as coordinator:
        assert True in coordinator.schedule(step).fetch(timeout_s=60)
        assert torch.equal(z.read_value(), torch.full((NUMBERS,), 1 - 2j))
        assert torch.equal(v.read_value(), torch.full((NUMBERS,), -1.0))
        # Each of four steps takes away 1 - 2j, or with the conjugate 1 + 2j.
        assert torch.equal(model.weight.detach(), torch.full((1, NUMBERS), -4 + 0j))


class Net(nn.Module):
    """Weights of 256 KB to 1 MB, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 512)
        self.norm = nn.LayerNorm(512)
        self.second = nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.norm(self.first(x))))
        return out


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_gives_plain_pytorchs_numbers(
    cluster: sg.LocalCluster, name: str, shards: int
) -> None:
    """One worker; gradients that are lent stay what they were, and lie in turns at several places."""
    torch.manual_seed(3)
    plain = Net()
    batches = [torch.randn(16 + 16 * (index % 3), 256) for index in range(9)]
    partitioner = sg.partitioners.FixedShardsPartitioner(shards)
    with sg.ParameterServerStrategy(cluster.resolver, partitioner) as strategy:
        with strategy.scope():
            model = Net()
            model.load_state_dict(plain.state_dict())
            optimizer = OPTIMIZERS[name](model.parameters())

        def step(x: torch.Tensor) -> tuple[float, int]:
            before = lent_so_far()
            x = torch.cat([x] * 8)  # large, and of another size than last time
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            kept = [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            for parameter, grad in zip(model.parameters(), kept, strict=True):
                assert torch.equal(parameter.grad, grad)
            return float(loss.detach()), lent_so_far() - before

        with sg.ClusterCoordinator(strategy) as coordinator:
            found = [coordinator.schedule(step, args=(x,)).fetch(timeout_s=60) for x in batches]
            optimizer = OPTIMIZERS[name](plain.parameters())
            losses = []
            for x in batches:
                optimizer.zero_grad()
                loss = plain(torch.cat([x] * 8)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-4)
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-3, atol=1e-4)
            assert min(lent for _, lent in found) >= 2


def test_gradients_that_grow_over_several_passes(strategy: Any) -> None:
    """Memory that was lent is written again: zeroed in place, added to."""
    torch.manual_seed(4)
    plain = nn.Linear(512, 512)
    with strategy.scope():
        model = nn.Linear(512, 512)
        model.load_state_dict(plain.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(32, 512)

    def train(model: nn.Module, optimizer: Any) -> None:
        for _ in range(4):
            optimizer.zero_grad(set_to_none=False)
            model(x).square().mean().backward()
            model(x + 1).square().mean().backward()
            optimizer.step()

    with sg.ClusterCoordinator(strategy) as coordinator:
        coordinator.schedule(train, args=(model, optimizer)).fetch(timeout_s=60)
        reference = copy.deepcopy(plain)
        train(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
        torch.testing.assert_close(model.weight.detach(), reference.weight.detach())


def test_workers_that_die_while_their_memory_is_read() -> None:
    """FLT-5: exactly once is exactly once for 2 MB, too."""
    with (
        sg.LocalCluster(workers=2, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
    ):
        with strategy.scope():
            variables = [sg.Variable(torch.zeros(NUMBERS)) for _ in range(2)]

        def step() -> None:
            for variable in variables:
                variable.assign_add(torch.ones(NUMBERS))

        with sg.ClusterCoordinator(strategy) as coordinator:
            for round_ in range(6):
                for _ in range(25):
                    coordinator.schedule(step, exactly_once=True)
                cluster.kill_worker(round_ % 2)
            coordinator.join(timeout_s=120)
            for variable in variables:
                assert torch.equal(variable.read_value(), torch.full((NUMBERS,), 150.0))


def test_without_the_heap_everything_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_SHARED_HEAP", "0")
    with (
        sg.LocalCluster(workers=1, ps=1) as cluster,
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
    ):
        with strategy.scope():
            v = sg.Variable(torch.zeros(NUMBERS))

        def step() -> int:
            before = lent_so_far()
            v.assign_add(torch.ones(NUMBERS))
            return lent_so_far() - before

        with sg.ClusterCoordinator(strategy) as coordinator:
            assert coordinator.schedule(step).fetch(timeout_s=60) == 0
            assert float(v.read_value().sum()) == NUMBERS


def test_a_function_may_fork_with_tensors_alive(strategy: Any) -> None:
    """A loader's children inherit what lies in shared memory as a copy; the worker goes on."""
    with strategy.scope():
        v = sg.Variable(torch.zeros(NUMBERS))

    def step() -> float:
        from torch.utils.data import DataLoader, TensorDataset

        rows = torch.arange(float(NUMBERS)).view(-1, 256)
        loader = DataLoader(
            TensorDataset(rows), batch_size=512, num_workers=1, multiprocessing_context="fork"
        )
        total = 0.0
        for (batch,) in loader:
            v.assign_add(torch.ones(NUMBERS))
            total += float(batch.double().sum())
        return total

    with sg.ClusterCoordinator(strategy) as coordinator:
        total = coordinator.schedule(step).fetch(timeout_s=120)
        assert total == NUMBERS * (NUMBERS - 1) / 2
        assert torch.equal(v.read_value(), torch.full((NUMBERS,), 4.0))


def test_data_sets_lie_in_private_memory(strategy: Any) -> None:
    """A loader's children would have to copy them; what functions make of them is lent all the same."""

    def rows() -> sg.data.Dataset:
        from stratagem._wire import shared_heap

        made = torch.ones(4, NUMBERS)
        heap = shared_heap.installed()
        assert heap is not None
        assert heap.offset_of(made) is None
        return sg.data.Dataset.from_tensor_slices(made).repeat()

    def step(iterator: Any) -> bool:
        from stratagem._wire import shared_heap

        heap = shared_heap.installed()
        return heap is not None and heap.offset_of(next(iterator)) is not None

    with sg.ClusterCoordinator(strategy) as coordinator:
        iterator = iter(coordinator.create_per_worker_dataset(rows))
        assert coordinator.schedule(step, args=(iterator,)).fetch(timeout_s=60)


REFUSING = """
import torch
from stratagem._ps import sessions
from stratagem._ps.client.write_batch import Sharing
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.server_connection import Membership
from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.server.loop import ParameterServer
from stratagem._wire import shared_heap, shm

class Door:
    def __getattr__(self, name):
        return getattr(shm, name)
    def open_segment(self, ref, *, shared):
        return None if ref.number == shared_heap.NUMBER and refuses else shm.open_segment(ref, shared=shared)

sessions.shm = Door()
heap = shared_heap.install()
w = ShardLocation(0, 1, (1 << 19,), torch.float32)
for refuses in (False, True):
    who = Membership(session="s", task="/job:chief/task:0", is_owner=True)
    with ParameterServer("127.0.0.1:0").start() as server:
        with PsClient([("/job:ps/task:0", server.address)], who) as client:
            client.create(w, "w", value=torch.zeros(1 << 19))
            heap.enter()
            batch = client.batch(lends_from=1)
            batch.assign(0, 1, "add", torch.ones(1 << 19))
            heap.leave()
            client.send(batch)
            client.settle()
            (value, _), = client.read([w])
            print(client.outbox.sharing, batch.lends, float(value.sum()) == 1 << 19)
"""


def test_a_server_that_cannot_map_the_heap_still_reads_the_slots() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REFUSING)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[<Sharing.HEAP: 3>] True True",
        "[<Sharing.SLOTS: 2>] False True",
    ]


HALF_SENT = """
import torch
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.server_connection import Membership
from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.server.loop import ParameterServer
from stratagem._wire import shared_heap
from stratagem.errors import ParameterServerLost

heap = shared_heap.install()
places = [ShardLocation(server, 1, (1 << 22,), torch.float32) for server in (0, 1)]
who = Membership(session="s", task="/job:chief/task:0", is_owner=True)
with ParameterServer("127.0.0.1:0").start() as one, ParameterServer("127.0.0.1:0").start() as two:
    servers = [("/job:ps/task:0", one.address), ("/job:ps/task:1", two.address)]
    with PsClient(servers, who) as client:
        for place in places:
            client.create(place, f"w{place.server}", value=torch.zeros(1 << 22))
        heap.enter()
        delta = torch.ones(1 << 22)
        heap.leave()
        client.outbox.begin_closure(1, exactly_once=False, gathers=True)
        batch = client.batch(lends_from=1)
        for place in places:
            batch.assign(place.server, 1, "add", delta)
        client._links[1].declare_lost("is gone")  # as who looks after servers does
        try:
            client.send(batch)
            client.settle()
        except ParameterServerLost as error:
            print(error.task, client.outbox.is_settled)
        delta.fill_(100.0)  # nobody reads it any more
        client.outbox.end_closure()
        (value, _), = client.read(places[:1])
        print(batch.lends, set(value.tolist()))
"""


def test_what_one_server_was_lent_is_read_before_another_ones_loss_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HALF_SENT)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["/job:ps/task:1 True", "True {1.0}"]
