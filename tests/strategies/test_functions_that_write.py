"""Trained parameters that scheduled functions write beside the steps of optimizers: equal to plain PyTorch, or refused (issue 20)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from own_optimizer import Counting, SlowWeights, Uninitialised, WithoutDefaults, Wrapping
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from waiting import Gate, pass_gate

import stratagem as sg
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.tables import worker_rows
from stratagem.errors import ForeignParameterError, UnsupportedOptimizer

pytestmark = [
    pytest.mark.process,
    # Of plain PyTorch, if a scheduler steps after SAM's second_step.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]

WAIT_S = 150.0
Step = Callable[[Tensor], Tensor]
Program = Callable[[], tuple[Step, list[nn.Module]]]


class Words(nn.Module):
    """A table, a large layer and small ones, which share memory pages on the servers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.wide = nn.Linear(8, 300)
        self.head = nn.Linear(300, 2)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.wide(self.table(ids)).mean(1)))
        return out


def words() -> Words:
    torch.manual_seed(3)
    return Words().double()


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids), ids.sum(1) % 2)


BATCHES = [torch.randint(20, (6, 4), generator=torch.Generator().manual_seed(i)) for i in range(4)]


# ------------------------------------------------------------------ updates by hand


def through_data(p: nn.Parameter) -> None:
    p.data.add_(p.grad, alpha=-0.1)


def data_minus(p: nn.Parameter) -> None:
    p.data -= 0.1 * p.grad


def without_grad(p: nn.Parameter) -> None:
    with torch.no_grad():
        p -= 0.1 * p.grad


def without_grad_added(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.add_(p.grad, alpha=-0.1)


def by_hand(update: Callable[[nn.Parameter], None]) -> Program:
    def program() -> tuple[Step, list[nn.Module]]:
        model = words()

        def step(ids: Tensor) -> Tensor:
            model.zero_grad()
            loss = loss_of(model, ids)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                update(p)
            return loss.detach()

        return step, [model]

    return program


# ------------------------------------------------------------------ optimizers around others


def sam_in_two_steps() -> tuple[Step, list[nn.Module]]:
    model = words()
    optimizer = Wrapping(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    def step(ids: Tensor) -> Tensor:
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        loss_of(model, ids).backward()
        optimizer.second_step(zero_grad=True)
        scheduler.step()
        return loss.detach()

    return step, [model]


def sam_with_a_closure() -> tuple[Step, list[nn.Module]]:
    model = words()
    optimizer = Wrapping(model.parameters(), torch.optim.Adam, lr=0.01)

    def step(ids: Tensor) -> Tensor:
        def closure() -> Tensor:
            loss = loss_of(model, ids)
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(closure)
        optimizer.zero_grad()
        return loss.detach()

    return step, [model]


# ------------------------------------------------------------------ other writes in the step


def clipped_weights() -> tuple[Step, list[nn.Module]]:
    """WGAN: the critic's weights are clipped after its step, and the generator trains against them."""
    torch.manual_seed(0)
    generator, critic = (
        nn.Linear(4, 6).double(),
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double(),
    )
    first = torch.optim.RMSprop(critic.parameters(), lr=0.01)
    second = torch.optim.RMSprop(generator.parameters(), lr=0.01)

    def step(ids: Tensor) -> Tensor:
        z = ids.double()
        first.zero_grad()
        loss = critic(generator(z).detach()).mean() - critic(torch.ones(6, 6).double()).mean()
        loss.backward()
        first.step()
        for p in critic.parameters():
            p.data.clamp_(-0.1, 0.1)
        second.zero_grad()
        (-critic(generator(z)).mean()).backward()
        second.step()
        return loss.detach()

    return step, [generator, critic]


def target_network() -> tuple[Step, list[nn.Module]]:
    """DQN: a second network that follows the first one, with parameters that require gradients."""
    model, target = words(), words()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(ids: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = target(ids)
        loss = F.mse_loss(model(ids), wanted + 1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for theirs, mine in zip(target.parameters(), model.parameters(), strict=True):
            theirs.data.copy_(0.3 * mine.data + 0.7 * theirs.data)
        return loss.detach()

    return step, [model, target]


def moving_average() -> tuple[Step, list[nn.Module]]:
    model = words()
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.no_grad()
    def follow() -> None:
        for theirs, mine in zip(average.parameters(), model.parameters(), strict=True):
            theirs.mul_(0.9).add_(mine, alpha=0.1)

    def step(ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        follow()
        return loss.detach()

    return step, [model, average]


def optimizer_of_the_function() -> tuple[Step, list[nn.Module]]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    for p in model.parameters():
        nn.init.constant_(p, 0.1)

    def step(ids: Tensor) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss = F.cross_entropy(model(ids.double()), ids.sum(1) % 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [model]


def optimizer_of_the_function_with_a_table() -> tuple[Step, list[nn.Module]]:
    model = words()

    def step(ids: Tensor) -> Tensor:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
        loss = loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [model]


def averaged(average_of: Callable[[nn.Module], AveragedModel]) -> Program:
    """torch's class: it writes ``p.detach()``, and lists of such, with one call for all parameters."""

    def program() -> tuple[Step, list[nn.Module]]:
        model = words()
        average = average_of(model)
        average.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(ids: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, ids)
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            return loss.detach()

        return step, [model, average]

    return program


def parts_of_tables() -> tuple[Step, list[nn.Module]]:
    """Rows, columns and views: TransE divides ``weight.data[:-1]`` by its norm before every step."""
    model, frozen = words(), words()
    frozen.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(ids: Tensor) -> Tensor:
        entities = model.table.weight
        entities.data[:-1, :].div_(entities.data[:-1, :].norm(p=2, dim=1, keepdim=True))
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        entities.data[-1].fill_(1.0)
        with torch.no_grad():
            entities[0].fill_(0.5)
            entities[2:4, 1].mul_(2.0)
            entities.t()[1].add_(0.25)
            first, second, *_ = entities.split(7)
            second.copy_(first)
        average = frozen.table.weight.detach()
        average.view(-1)[3:5].add_(1.0)
        average *= 1.5
        torch._foreach_mul_([frozen.table.weight[1], frozen.head.bias, average], 0.5)
        return loss.detach()

    return step, [model, frozen]


def memory_of_tables() -> tuple[Step, list[nn.Module]]:
    """Writes that torch does not count, and views that the function keeps over a step."""
    model = words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(ids: Tensor) -> Tensor:
        weight = model.table.weight
        held = weight.data
        weight.data.numpy()[1] += 0.5
        weight.detach().data[2] *= 2.0
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        held[3:5] = held[0] * 0.5  # the values after the step
        return loss.detach() + F.embedding(ids, weight.detach()).sum()

    return step, [model]


def weight_decay_by_hand(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.add_(p.data, alpha=0.01)
    p.data = p.data - 0.1 * p.grad


PROGRAMS: dict[str, Program] = {
    **{
        one.__name__: by_hand(one)
        for one in (
            through_data,
            data_minus,
            without_grad,
            without_grad_added,
            weight_decay_by_hand,
        )
    },
    **{
        one.__name__: one
        for one in (
            sam_in_two_steps,
            sam_with_a_closure,
            clipped_weights,
            target_network,
            moving_average,
            optimizer_of_the_function,
            optimizer_of_the_function_with_a_table,
            parts_of_tables,
            memory_of_tables,
        )
    },
    "averaged": averaged(AveragedModel),
    "averaged_at_once": averaged(
        lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ),
}


def plainly(program: Program) -> tuple[list[Tensor], list[Tensor]]:
    step, modules = program()
    losses = [step(ids) for ids in BATCHES]
    return losses, [value for module in modules for value in module.state_dict().values()]


def remotely(
    coordinator: sg.ClusterCoordinator, program: Program
) -> tuple[list[Tensor], list[Tensor]]:
    """Two steps in each scheduled function."""
    with coordinator.strategy.scope():
        step, modules = program()

    def twice(first: Tensor, second: Tensor) -> list[Tensor]:
        return [step(first), step(second)]

    losses: list[Tensor] = []
    for first in (0, 2):
        pair = coordinator.schedule(twice, args=tuple(BATCHES[first : first + 2]))
        losses += pair.get(timeout_s=WAIT_S)
    return losses, [value for module in modules for value in module.state_dict().values()]


def assert_equal_to_plain(coordinator: sg.ClusterCoordinator, program: Program) -> None:
    found, expected = remotely(coordinator, program), plainly(program)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_sole_worker_gives_the_numbers_of_plain_pytorch(
    alone: sg.ClusterCoordinator, name: str
) -> None:
    assert_equal_to_plain(alone, PROGRAMS[name])


@pytest.fixture
def by_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[sg.ClusterCoordinator]:
    """One worker without shared memory."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "0")
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with sg.ClusterCoordinator(strategy) as made:
            yield made


@pytest.mark.parametrize(
    "name",
    [
        "through_data",
        "without_grad",
        "sam_in_two_steps",
        "clipped_weights",
        "moving_average",
        "parts_of_tables",
        "memory_of_tables",
        "averaged_at_once",
    ],
)
def test_a_sole_worker_without_shared_memory_does_too(
    by_bytes: sg.ClusterCoordinator, name: str
) -> None:
    assert_equal_to_plain(by_bytes, PROGRAMS[name])


def test_views_of_a_table_are_values_wherever_they_go(alone: sg.ClusterCoordinator) -> None:
    """Functions return them, copy them and compute with them; reading them writes nothing."""
    with alone.strategy.scope():
        model = words()
    expected = model.table.weight.detach().clone()

    def look(ids: Tensor) -> list[Tensor]:
        weight = model.table.weight
        with torch.no_grad():
            row, turned = weight[3], weight.t()
        data = weight.detach()
        found = [
            data,
            row,
            turned,
            data[1:3],
            copy.deepcopy(row),
            copy.deepcopy(data),
            turned @ data,
        ]
        assert not any(one.requires_grad for one in found)
        return [*found, F.embedding(ids, data), data.new_tensor([1.0]), row + turned[:, 3]]

    ids = torch.tensor([1, 1, 5])
    row, turned = expected[3], expected.t()
    found = alone.schedule(look, args=(ids,)).get(timeout_s=WAIT_S)
    wanted = [expected, row, turned, expected[1:3], row, expected, turned @ expected]
    wanted += [expected[ids], torch.ones(1).double(), 2 * row]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(model.table.weight.detach(), expected)


def test_a_table_that_inference_mode_read_can_be_written(either_way: sg.ClusterCoordinator) -> None:
    with either_way.strategy.scope():
        model = words()
    expected = 2.0 * model.table.weight.detach()

    def write(ids: Tensor) -> None:
        with torch.inference_mode():
            scores = model.table(ids) @ model.table.weight.t()
            assert scores.isfinite().all()
            assert model.table.weight[3].isfinite().all()
        with torch.no_grad():
            model.table.weight.mul_(2.0)
        loss_of(model, ids).backward()

    either_way.schedule(write, args=(BATCHES[0],)).get(timeout_s=WAIT_S)
    torch.testing.assert_close(model.table.weight.detach(), expected)


@pytest.mark.parametrize(
    "kind", ["table", "row", "list", "out", "numpy", "put back", "before a step"]
)
def test_several_workers_refuse_any_write_to_a_table(
    pair_either_way: sg.ClusterCoordinator, kind: str
) -> None:
    with pair_either_way.strategy.scope():
        model = words()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())

    def write() -> None:
        weight = model.table.weight
        if kind == "table":
            with torch.no_grad():
                weight.mul_(2.0)
        elif kind == "row":
            weight.data[0].zero_()
        elif kind == "list":
            torch._foreach_zero_([p.detach() for p in model.parameters()])
        elif kind == "out":
            torch.mul(torch.ones(20, 8).double(), 2.0, out=weight.data)
        elif kind == "numpy":
            weight.detach().numpy()[3] = 1.0
        elif kind == "put back":
            weight.data.mul_(2.0)
            weight.data.mul_(0.5)
        else:
            weight.data[3] = 1.0
            loss_of(model, BATCHES[0]).backward()
            optimizer.step()

    with pytest.raises(ForeignParameterError, match=r"a copy of table 'table.weight'"):
        pair_either_way.schedule(write).get(timeout_s=WAIT_S)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_a_view_made_with_gradients_must_not_be_written(alone: sg.ClusterCoordinator) -> None:
    """It is one of the servers' memory."""
    with alone.strategy.scope():
        model = words()
    before = copy.deepcopy(model.state_dict())

    def write() -> None:
        turned = model.table.weight.t()
        with torch.no_grad():
            turned[0].mul_(2.0)

    with pytest.raises(ForeignParameterError, match="made with gradients enabled"):
        alone.schedule(write).get(timeout_s=WAIT_S)
    found = alone.schedule(lambda: model.table(torch.arange(20)).detach()).get(timeout_s=WAIT_S)
    torch.testing.assert_close(found, before["table.weight"], rtol=0, atol=0)


def test_reading_rows_of_a_large_table_does_not_fetch_it(
    either_way: sg.ClusterCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row or slice is a copy of these rows, and a write to it is refused."""
    with either_way.strategy.scope():
        model = words()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = model.table.weight.detach().clone()

    @torch.no_grad()
    def look(ids: Tensor) -> list[Tensor]:
        weight = model.table.weight
        return [weight[3], weight[-2:], weight[1:3, 0], weight[ids], F.embedding(ids, weight)]

    def across_a_step(ids: Tensor) -> bool:
        with torch.no_grad():
            row = model.table.weight[1]
        before = row.clone()
        loss_of(model, ids).backward()
        optimizer.step()
        with torch.no_grad():
            return torch.equal(row, model.table.weight[1]) and not torch.equal(row, before)

    @torch.no_grad()
    def write() -> None:
        model.table.weight[3].zero_()

    either_way.schedule(lambda: None).get(timeout_s=WAIT_S)
    monkeypatch.setattr(worker_rows, "LARGE_BYTES", 0)
    monkeypatch.setattr(RemoteVariable, "whole", None)
    ids = torch.tensor([2, 2, 7])
    found = either_way.schedule(look, args=(ids,)).get(timeout_s=WAIT_S)
    wanted = [expected[3], expected[-2:], expected[1:3, 0], expected[ids], expected[ids]]
    torch.testing.assert_close(found, wanted)
    assert either_way.schedule(across_a_step, args=(torch.ones_like(BATCHES[0]),)).get(
        timeout_s=WAIT_S
    )
    with pytest.raises(ForeignParameterError, match=r"Write table\.data\[3\] instead"):
        either_way.schedule(write).get(timeout_s=WAIT_S)


def test_nothing_of_a_failed_function_is_kept(alone: sg.ClusterCoordinator) -> None:
    with alone.strategy.scope():
        model = words()
    before = copy.deepcopy(model.state_dict())

    def fail() -> None:
        for p in model.parameters():
            p.data.mul_(3.0)
        raise KeyError("on purpose")

    def look() -> list[Tensor]:
        return [model.table.weight.detach().clone(), model.head.bias.detach().clone()]

    alone.schedule(fail)
    with pytest.raises(KeyError, match="on purpose"):
        alone.join(timeout_s=WAIT_S)
    table, bias = alone.schedule(look).get(timeout_s=WAIT_S)
    torch.testing.assert_close(table, before["table.weight"], rtol=0, atol=0)
    torch.testing.assert_close(bias, before["head.bias"], rtol=0, atol=0)


def test_a_write_of_the_coordinator_in_between_is_not_lost_silently(
    alone: sg.ClusterCoordinator, gate: Gate
) -> None:
    with alone.strategy.scope():
        model = nn.Linear(2, 1)

    def write(path: str | None) -> None:
        held = model.weight.data
        if path is not None:
            pass_gate(path, WAIT_S)
        held.mul_(2.0)

    alone.schedule(write, args=(None,)).fetch(timeout_s=WAIT_S)
    waiting = alone.schedule(write, args=(gate.path,))
    gate.wait_for_arrival()  # it has read the weight
    with torch.no_grad():
        model.weight.fill_(1.0)
    alone.schedule(lambda: None)  # sends the coordinator's write
    gate.open()
    with pytest.raises(ForeignParameterError, match="while another task wrote it"):
        waiting.fetch(timeout_s=WAIT_S)


def test_a_batch_of_one_row_updates_this_row_alone(alone: sg.ClusterCoordinator) -> None:
    """The worker holds one row of the gradient, which torch would spread over the whole table."""
    with alone.strategy.scope():
        model = nn.Embedding(4, 2)
    expected = model.weight.detach().clone()
    expected[1] -= 0.1

    def update() -> None:
        model(torch.tensor([1])).sum().backward()
        weight = model.weight
        weight.data = weight.data - 0.1 * weight.grad

    alone.schedule(update)
    alone.join(timeout_s=WAIT_S)
    torch.testing.assert_close(model.weight.detach(), expected)


# ------------------------------------------------------------------ state of optimizers around others


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (SlowWeights, r"state\[parameter\]\['slow'\]"),
        (Uninitialised, r"state\[parameter\]\['slow'\]"),
        (WithoutDefaults, r"state\[parameter\]\['slow'\]"),
        (Counting, "values in its attributes"),
    ],
)
def test_an_optimizer_around_another_one_that_keeps_state_is_refused(
    alone: sg.ClusterCoordinator, make: Any, what: str
) -> None:
    with alone.strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = make(torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    alone.schedule(step)
    with pytest.raises(UnsupportedOptimizer, match=f"{make.__name__} keeps {what}"):
        alone.join(timeout_s=WAIT_S)


# ------------------------------------------------------------------ several workers


@pytest.fixture(scope="module")
def crowd() -> Iterator[sg.LocalCluster]:
    """Two workers."""
    with sg.LocalCluster(workers=2, ps=2) as made:
        yield made


@pytest.fixture
def several(crowd: sg.LocalCluster) -> Iterator[sg.ClusterCoordinator]:
    strategy = sg.ParameterServerStrategy(crowd.resolver)
    with sg.ClusterCoordinator(strategy) as made:
        yield made


@pytest.mark.parametrize(
    "update", [through_data, data_minus, without_grad], ids=lambda one: one.__name__
)
def test_several_workers_refuse_updates_by_hand_with_the_lines_to_write(
    several: sg.ClusterCoordinator, update: Callable[[nn.Parameter], None]
) -> None:
    with several.strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    before = copy.deepcopy(model.state_dict())

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        update(model[1].weight)

    several.schedule(step)
    with pytest.raises(ForeignParameterError, match="weight' was written in place") as raised:
        several.join(timeout_s=WAIT_S)
    for line in (
        "torch.optim.SGD(model.parameters(), lr=lr)",
        "loss.backward()",
        "optimizer.step()",
    ):
        assert line in str(raised.value)
    torch.testing.assert_close(dict(model.state_dict()), dict(before))


def test_several_workers_may_read_data(several: sg.ClusterCoordinator) -> None:
    with several.strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> float:
        optimizer.zero_grad()
        before = float(model.weight.data.sum())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return before - float(model.weight.data.sum())

    for _ in range(3):
        assert several.schedule(step).fetch(timeout_s=WAIT_S) == pytest.approx(2.0)


def test_reading_data_while_another_worker_trains_is_no_write(
    pair_either_way: sg.ClusterCoordinator, gate: Gate
) -> None:
    """The values differ at the function's end from those at its beginning, and the function did not write them."""
    with pair_either_way.strategy.scope():
        model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(300, 300), nn.Embedding(20, 8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def read(path: str) -> None:
        for p in model.parameters():
            p.data.sum()
            p.detach().numpy().sum()
        pass_gate(path, WAIT_S)

    def train() -> None:
        for p in model.parameters():
            p.sum().backward()
        optimizer.step()

    waiting = pair_either_way.schedule(read, args=(gate.path,))
    gate.wait_for_arrival()
    pair_either_way.schedule(train).get(timeout_s=WAIT_S)
    gate.open()
    waiting.get(timeout_s=WAIT_S)


def test_data_that_is_kept_over_a_step_may_be_written_after_it(
    either_way: sg.ClusterCoordinator,
) -> None:
    def program() -> tuple[Step, list[nn.Module]]:
        model = words()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(ids: Tensor) -> Tensor:
            held = [p.data for p in model.parameters()]
            loss = loss_of(model, ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for one in held:
                one.clamp_(-0.1, 0.1)
            return loss.detach()

        return step, [model]

    assert_equal_to_plain(either_way, program)


def test_sam_puts_weights_back_so_that_several_workers_may_use_it(
    several: sg.ClusterCoordinator,
) -> None:
    def program() -> tuple[Step, list[nn.Module]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        optimizer = Wrapping(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

        def step(ids: Tensor) -> Tensor:
            loss = F.cross_entropy(model(ids.double()), ids.sum(1) % 2)
            loss.backward()
            optimizer.first_step(zero_grad=True)
            F.cross_entropy(model(ids.double()), ids.sum(1) % 2).backward()
            optimizer.second_step(zero_grad=True)
            return loss.detach()

        return step, [model]

    assert_equal_to_plain(several, program)


def test_replicas_of_a_sole_worker_write_an_update_by_hand_once(cluster: sg.LocalCluster) -> None:
    strategy = sg.ParameterServerStrategy(cluster.resolver, worker_devices=["cpu:0", "cpu:1"])
    torch.manual_seed(0)
    plain = nn.Linear(4, 2)
    with sg.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            model = nn.Linear(4, 2)
            model.load_state_dict(plain.state_dict())

        def step(x: Tensor) -> None:
            model.zero_grad()
            model(x).square().mean().backward()
            for p in model.parameters():
                through_data(p)

        def both() -> None:
            x = torch.arange(16.0).view(4, 4)
            strategy.run(step, args=(sg.PerReplica([x[:2], x[2:]]),))

        for _ in range(2):
            coordinator.schedule(both).get(timeout_s=WAIT_S)
            plain.zero_grad()
            plain(torch.arange(16.0).view(4, 4)).square().mean().backward()
            for p in plain.parameters():
                through_data(p)
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
