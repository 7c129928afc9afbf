"""Steps larger than one message: cut into several, each applied once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import stratagem as sg
from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.server_connection import Membership
from stratagem._ps.client.splitting import TooLargeError, size_of, split
from stratagem._ps.client.write_batch import PushedGradient, Sharing
from stratagem._ps.server.loop import ParameterServer, ServerOptions
from stratagem._ps.server.shard_optimizer import GroupSpec
from stratagem._wire.frames import Limits
from stratagem._wire.messages import Assign, AssignRows, GradientRef, Operation, Push, Scatter
from stratagem._wire.messages import TensorRef as Ref

ROWS = 1 << 10
LIMIT = 3 * 4 * ROWS
WORKER = "/job:worker/task:{}"


class Buffers:
    """Distinct buffers, so that a mix-up shows."""

    def __init__(self) -> None:
        self.made: list[bytes] = []

    def ref(self, size: int) -> Ref:
        self.made.append(bytes([len(self.made) % 256]) * size)
        return Ref("uint8", (size,), buffer=len(self.made) - 1)


def content(operations: Any, buffers: Any) -> list[Any]:
    """What a server would do, pushes variable by variable."""
    done: list[Any] = []
    for one in operations:
        if isinstance(one, Push):
            for gradient in one.gradients:
                ids = None if gradient.ids is None else buffers[gradient.ids.buffer]
                values = buffers[gradient.values.buffer]
                done.append((one.optimizer, one.settings, gradient.variable, values, ids))
        elif isinstance(one, Scatter):
            ids, values = buffers[one.ids.buffer], buffers[one.values.buffer]
            done.append((one.operation, one.variable, ids, values))
        elif isinstance(one, AssignRows):
            done.append((one.variable, one.start, buffers[one.value.buffer]))
        else:
            done.append((one.variable, one.operation, buffers[one.value.buffer]))
    return done


sizes = st.integers(0, 200)


@given(
    kinds=st.lists(st.tuples(st.sampled_from("ars"), sizes, sizes), max_size=12),
    pushed=st.lists(st.tuples(sizes, st.one_of(st.none(), sizes)), max_size=12),
    limit=st.integers(128, 1000),
)
def test_pieces_hold_the_same_writes_in_the_same_order(kinds: Any, pushed: Any, limit: int) -> None:
    buffers = Buffers()
    operations: list[Operation] = []
    for variable, (kind, first, second) in enumerate(kinds):
        if kind == "a":
            operations.append(Assign(variable, "add", buffers.ref(first)))
        elif kind == "r":
            operations.append(AssignRows(variable, 3, buffers.ref(first)))
        else:
            operations.append(Scatter(variable, "max", buffers.ref(first), buffers.ref(second)))
    gradients = tuple(
        GradientRef(
            100 + n, buffers.ref(values), None if ids is None else buffers.ref(ids), bool(n % 2)
        )
        for n, (values, ids) in enumerate(pushed)
    )
    if gradients:
        operations.insert(len(operations) // 2, Push(7, gradients, {0: {"lr": 0.5}}))
    refused = 0
    try:
        pieces = split(operations, buffers.made, limit)
    except TooLargeError as error:
        refused, pieces = error.size, []
    if refused:
        assert refused > limit
        return
    assert all(size_of(piece.buffers) <= limit for piece in pieces)
    together = [done for piece in pieces for done in content(*piece)]
    assert together == content(operations, buffers.made)
    # No more messages than needed: two neighbours never fit into one.
    for one, other in itertools.pairwise(pieces):
        assert size_of(one.buffers) + size_of(other.buffers) > limit


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
            PushedGradient(variable=place.variable, values=torch.full((ROWS,), float(number - 3)))
            for number, place in enumerate(places)
        ]
        batch.push(0, 1, gradients)
        client.send(batch)
        client.settle()
        client.outbox.end_closure()

    with client_of(server, "/job:chief/task:0") as chief:
        for place, value in zip(places, values, strict=True):
            chief.create(place, f"w{place.variable}", value=value)
        group = GroupSpec(
            variables=tuple(place.variable for place in places), hyperparameters={"lr": 0.1}
        )
        chief.create_optimizer(0, 1, "torch.optim.Adam", [group])
        with client_of(server, WORKER.format(0), shared=shares, incarnation=1) as first:
            assert (first.outbox.sharing == [Sharing.SLOTS]) == shares
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
        batch.assign(0, 2, "add", torch.ones(4 * ROWS))
        with pytest.raises(ValueError, match=r"'large' to /job:ps/task:0 .*STRATAGEM_FRAME_BYTES"):
            client.send(batch)
        assert client.settle() == {}
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
