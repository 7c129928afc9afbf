"""Steps larger than one message: cut into several, each applied once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import stratagem as sg
from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.send_buffers import SendBuffers
from stratagem._ps.client.server_connection import Membership
from stratagem._ps.client.write_batch import Destination, ServerPart, WriteBatch
from stratagem._ps.server.loop import ParameterServer
from stratagem._ps.server.server_options import ServerOptions
from stratagem._ps.types import Gradient, GroupSpec
from stratagem._wire import messages
from stratagem._wire.frames import Limits, padded

ROWS = 1 << 10
LIMIT = 3 * 4 * ROWS
WORKER = "/job:worker/task:{}"


sizes = st.integers(0, 200)


def batch_for(limit: int, *, shares_memory: bool = False) -> WriteBatch:
    """An empty batch for one server that takes so many bytes in a message."""
    names = {number: f"v{number}" for number in range(200)}
    return WriteBatch(SendBuffers(), [Destination("ps", shares_memory, limit, names)])


def filled(batch: WriteBatch, kinds: Any, pushed: Any) -> list[Any]:
    """Fill the batch with distinct values; return what a server would do, pushes variable by variable."""
    expected: list[Any] = []

    def tensor(size: int) -> Tensor:
        return torch.full((size,), (len(expected) * 7 + size) % 251, dtype=torch.uint8)

    def push() -> None:
        gradients = []
        for number, (values, ids) in enumerate(pushed, 100):
            given, rows = tensor(values), None if ids is None else tensor(ids)
            expected.append((7, number, given.tolist(), None if rows is None else rows.tolist()))
            gradients.append(Gradient(variable=number, values=given, ids=rows))
        batch.push(0, 7, gradients, {0: {"lr": 0.5}})

    for variable, (kind, first, second) in enumerate(kinds):
        if variable == len(kinds) // 2:
            push()
        one, two = tensor(first), tensor(second)
        if kind == "a":
            batch.assign(0, variable, "add", one)
            expected.append(("add", variable, one.tolist()))
        elif kind == "r":
            batch.assign_rows(0, variable, 3, one)
            expected.append((3, variable, one.tolist()))
        else:
            batch.scatter(0, variable, "max", one, two)
            expected.append(("max", variable, one.tolist(), two.tolist()))
    batch.copy_in()
    return expected


def content(part: ServerPart) -> list[Any]:
    """What a server would do with one message."""
    done: list[Any] = []
    for one in messages.decode_operations(part.encoded()):
        if isinstance(one, messages.Push):
            for gradient in one.gradients:
                ids = None if gradient.ids is None else bytes_at(part, gradient.ids)
                done.append(
                    (one.optimizer, gradient.variable, bytes_at(part, gradient.values), ids)
                )
        elif isinstance(one, messages.Scatter):
            done.append(
                (one.operation, one.variable, bytes_at(part, one.ids), bytes_at(part, one.values))
            )
        elif isinstance(one, messages.AssignRows):
            done.append((one.start, one.variable, bytes_at(part, one.value)))
        else:
            done.append((one.operation, one.variable, bytes_at(part, one.value)))
    return done


def bytes_at(part: ServerPart, ref: messages.TensorRef) -> list[int]:
    return list(part.buffers[ref.buffer])


@settings(suppress_health_check=[HealthCheck.too_slow])  # a loaded machine draws slowly
@given(
    kinds=st.lists(st.tuples(st.sampled_from("ars"), sizes, sizes), max_size=12),
    pushed=st.lists(st.tuples(sizes, st.one_of(st.none(), sizes)), max_size=12),
    limit=st.integers(128, 1000),
)
def test_messages_hold_the_same_writes_in_the_same_order(
    kinds: Any, pushed: Any, limit: int
) -> None:
    batch = batch_for(limit)
    try:
        expected = filled(batch, kinds, pushed)
    except ValueError as error:
        assert f"takes at most {limit} at once" in str(error)  # noqa: PT017 - most examples raise nothing
        return
    finally:
        batch._buffers.close()
    parts = batch.parts.get(0, [])
    assert all(size_of(part) <= limit for part in parts)
    assert [done for part in parts for done in content(part)] == expected
    # The first operation of a message did not fit into the one before.
    for one, other in itertools.pairwise(parts):
        assert size_of(one) + size_of(other) > limit


def size_of(part: ServerPart) -> int:
    return sum(padded(memoryview(buffer).nbytes) for buffer in part.buffers)


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=12))
def test_a_batch_is_cut_in_the_same_places_whether_memory_is_shared_or_not(
    sizes: list[int],
) -> None:
    """A closure may be repeated by a worker of the other kind: its writes have the same numbers."""
    counts = []
    for shares_memory in (True, False):
        batch = batch_for(512, shares_memory=shares_memory)
        for number, size in enumerate(sizes):
            batch.assign(0, number, "set", torch.zeros(size, dtype=torch.uint8))
        counts.append([len(part.operations) for part in batch.parts[0]])
        batch._buffers.close()
    assert counts[0] == counts[1]


@pytest.fixture
def server() -> Iterator[ParameterServer]:
    options = ServerOptions(limits=Limits(frame_bytes=LIMIT))
    with ParameterServer("127.0.0.1:0", options=options).start() as made:
        yield made


def client_of(
    server: ParameterServer, task: str, *, shared: bool = False, **options: Any
) -> PsClient:
    who = Membership(session="s", task=task, is_owner=task.startswith("/job:chief"))
    return PsClient([("/job:ps/task:0", server.address)], who, shared_memory=shared, **options)


@pytest.mark.parametrize(
    ("shares", "repeats"),
    [(False, False), (True, False), (False, True), (True, True)],
    ids=["bytes twice", "shared memory, then bytes", "bytes, then shared memory", "shared twice"],
)
def test_a_large_step_comes_in_several_messages_and_counts_once(
    server: ParameterServer, shares: bool, repeats: bool
) -> None:
    """Numbered one by one: what another worker repeats of an exactly-once closure is recognised.

    Whether it shares memory with the server or not: it is cut in the same places.
    """
    places = [ShardLocation(0, number, (ROWS,), torch.float32) for number in range(1, 8)]
    values = [torch.randn(ROWS) for _ in places]
    plain = [nn.Parameter(value.clone()) for value in values]
    optimizer = torch.optim.Adam(plain, lr=0.1)
    for number, parameter in enumerate(plain):
        parameter.grad = torch.full((ROWS,), float(number - 3))
    optimizer.step()

    def push(client: PsClient, closure: int) -> None:
        client.outbox.begin_closure(closure, exactly_once=True, gathers=False)
        batch = client.batch()
        gradients = [
            Gradient(variable=place.variable, values=torch.full((ROWS,), float(number - 3)))
            for number, place in enumerate(places)
        ]
        batch.push(0, 1, gradients)
        client.send(batch)
        client.wait_for_writes()
        client.outbox.end_closure()

    with client_of(server, "/job:chief/task:0") as chief:
        for place, value in zip(places, values, strict=True):
            chief.create(place, f"w{place.variable}", value=value)
        group = GroupSpec(variables=tuple(place.variable for place in places), settings={"lr": 0.1})
        chief.create_optimizer(0, 1, "torch.optim.Adam", [group])
        with client_of(server, WORKER.format(0), shared=shares, incarnation=1) as first:
            assert [one.shares_memory for one in first.outbox.destinations] == [shares]
            push(first, 5)
            assert first.outbox.sent == 3  # three variables fit into a message
        with client_of(server, WORKER.format(1), shared=repeats, incarnation=1) as second:
            push(second, 5)
            assert second.outbox.duplicates == 3
        for (found, version), expected in zip(chief.read(places), plain, strict=True):
            torch.testing.assert_close(found, expected.detach())
            assert version == 2  # the first value, one step


def test_a_variable_too_large_by_itself_is_refused_before_anything_is_sent(
    server: ParameterServer,
) -> None:
    with client_of(server, "/job:chief/task:0") as client:
        small, large = (
            ShardLocation(0, 1, (ROWS,), torch.float32),
            ShardLocation(0, 2, (4 * ROWS,), torch.float32),
        )
        client.create_all([(small, "small", ()), (large, "large", ())])
        client.assign(small, torch.zeros(ROWS))
        batch = client.batch()
        batch.assign(0, 1, "add", torch.ones(ROWS))
        with pytest.raises(ValueError, match=r"'large' to /job:ps/task:0 .*STRATAGEM_FRAME_BYTES"):
            batch.assign(0, 2, "add", torch.ones(4 * ROWS))
        assert client.wait_for_writes() == {}
        assert float(client.read([small])[0][0].sum()) == 0.0


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_training_with_steps_larger_than_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit lowered by configuration: the same numbers as plain PyTorch."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "0")
    monkeypatch.setenv("STRATAGEM_FRAME_BYTES", str(1 << 16))

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(120, 120) for _ in range(4)))  # 57,600 bytes a matrix

    torch.manual_seed(2)
    plain, x = build(), torch.randn(5, 120)
    plain_optimizer = torch.optim.Adam(plain.parameters())
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        with sg.ParameterServerStrategy(cluster.resolver) as strategy:
            with strategy.scope():
                model = build()
                model.load_state_dict(plain.state_dict())
                optimizer = torch.optim.Adam(model.parameters())
            coordinator = sg.ClusterCoordinator(strategy)
            for _ in range(3):
                coordinator.schedule(step, args=(model, optimizer, x))
                coordinator.join(timeout_s=60)
                step(plain, plain_optimizer, x)
            trained = {key: value.clone() for key, value in model.state_dict().items()}
    torch.testing.assert_close(trained, dict(plain.state_dict()))
    monkeypatch.setenv("STRATAGEM_FRAME_BYTES", "7")
    with pytest.raises(ValueError, match="STRATAGEM_FRAME_BYTES='7'"):
        sg.config.frame_bytes()
