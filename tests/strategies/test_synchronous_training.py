"""`staleness=0`: the numbers of one device with the global batch, also when workers and servers are lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scheduling import WAIT_S, workers_up
from torch import Tensor, nn
from waiting import Gate, pass_gate, wait_until

import stratagem as sg
from stratagem.errors import MisuseError

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}
ROWS = 6


class Clicks(nn.Module):
    """A dense network over two tables: one that sums, one of single ids; and a layer that half of the batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 4, mode="sum")
        self.single = nn.Embedding(12, 4)
        self.dense = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.extra = nn.Linear(8, 1, bias=False)
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: Tensor, uses_extra: bool) -> Tensor:
        features = torch.cat([self.bag(ids), self.single(ids[:, 0] % 12)], dim=1)
        logits = self.dense(features)
        return (logits + self.extra(features) if uses_extra else logits).squeeze(1)


Batch = tuple[Tensor, Tensor, bool]


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(20, (ROWS, 3), generator=generator),
            torch.rand(ROWS, generator=generator),
            number % 2 == 0,
        )
        for number in range(count)
    ]


def model_of(seed: int = 5) -> Clicks:
    torch.manual_seed(seed)
    return Clicks()


def plain(optimizer: str, data: list[Batch], workers: int) -> dict[str, Tensor]:
    """Train on one device; each step has the batches of one round."""
    model = model_of()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for start in range(0, len(data), workers):
        together = data[start : start + workers]
        stepper.zero_grad()
        rows = sum(ids.shape[0] for ids, _, _ in together)
        for ids, labels, uses_extra in together:
            loss = F.mse_loss(model(ids, uses_extra), labels, reduction="sum") / rows
            loss.backward()
        stepper.step()
    return dict(model.state_dict())


def step_of(model: Any, optimizer: Any) -> Callable[..., float]:
    def step(ids: Tensor, labels: Tensor, uses_extra: bool) -> float:
        optimizer.zero_grad()
        loss = F.mse_loss(model(ids, uses_extra), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def trained(resolver: Any, optimizer: str, data: list[Batch], **options: Any) -> dict[str, Tensor]:
    """Train in rounds; return the weights."""
    with (
        sg.ParameterServerStrategy(resolver, staleness=0, **options) as strategy,
        sg.ClusterCoordinator(strategy) as coordinator,
    ):
        with strategy.scope():
            model = model_of()
            stepper = OPTIMIZERS[optimizer](model.parameters())
        step = step_of(model, stepper)
        for batch in data:
            coordinator.schedule(step, args=batch)
        coordinator.join(timeout_s=WAIT_S)
        return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def shared(*, workers: int, memory: bool, soak: bool = False) -> Any:
    marks = [pytest.mark.soak if soak else pytest.mark.process]
    return pytest.param(
        workers, memory, id=f"{workers}-{'memory' if memory else 'sockets'}", marks=marks
    )


@pytest.mark.parametrize(
    ("workers", "memory"),
    [
        shared(workers=1, memory=True, soak=True),
        shared(workers=2, memory=True),
        shared(workers=3, memory=True, soak=True),
        shared(workers=1, memory=False, soak=True),
        shared(workers=2, memory=False, soak=True),
        shared(workers=3, memory=False),
    ],
)
def test_the_numbers_of_one_device_with_the_global_batch(
    workers: int, memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every optimizer, tables whole and cut, and a last round with fewer closures than workers."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "1" if memory else "0")
    data = batches(4 * workers + workers - 1)
    cut = sg.partitioners.FixedShardsPartitioner(2)
    with sg.LocalCluster(workers=workers, ps=2) as cluster:
        for optimizer in OPTIMIZERS:
            expected = plain(optimizer, data, workers)
            for partitioner in (None, cut):
                found = trained(cluster.resolver, optimizer, data, variable_partitioner=partitioner)
                assert_same(found, expected)


@pytest.fixture(scope="module")
def cluster() -> Iterator[sg.LocalCluster]:
    """Two workers and two servers in this process."""
    with sg.LocalCluster(workers=2, ps=2, in_process=True) as made:
        yield made


@pytest.fixture
def strategy(cluster: sg.LocalCluster) -> Iterator[Any]:
    with sg.ParameterServerStrategy(cluster.resolver, staleness=0) as made:
        yield made


@pytest.fixture
def coordinator(strategy: Any) -> Iterator[sg.ClusterCoordinator]:
    with sg.ClusterCoordinator(strategy) as made:
        yield made


def test_runs_are_equal_bit_for_bit(cluster: sg.LocalCluster) -> None:
    """Gradients are added in the order of the closures, whichever worker is faster."""
    data = batches(8)
    one, two = (trained(cluster.resolver, "adam", data) for _ in range(2))
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


def test_gradients_are_summed_if_the_strategy_says_so(cluster: sg.LocalCluster) -> None:
    data = batches(4)
    found = trained(cluster.resolver, "sgd", data, gradient_aggregation="sum")
    model = model_of()
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in (0, 2):
        stepper.zero_grad()
        for ids, labels, uses_extra in data[start : start + 2]:
            F.mse_loss(model(ids, uses_extra), labels).backward()
        stepper.step()
    assert_same(found, dict(model.state_dict()))


def test_functions_without_a_step_do_not_change_the_mean(strategy: Any, coordinator: Any) -> None:
    """A round of one training step and one evaluation makes the step of the first alone."""
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.item()

    def train() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    coordinator.schedule(train)
    coordinator.schedule(lambda: model(torch.ones(1, 1)).item())
    coordinator.join(timeout_s=WAIT_S)
    assert model.weight.item() == pytest.approx(before - 1.0)


def test_a_function_that_raises_contributes_nothing(strategy: Any, coordinator: Any) -> None:
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.item()

    def train(factor: float, fails: bool) -> None:
        optimizer.zero_grad()
        (factor * model(torch.ones(1, 1))).sum().backward()
        optimizer.step()
        if fails:
            raise KeyError("mine")

    coordinator.schedule(train, args=(2.0, False))
    coordinator.schedule(train, args=(100.0, True))
    with pytest.raises(KeyError):
        coordinator.join(timeout_s=WAIT_S)
    assert model.weight.item() == pytest.approx(before - 2.0)
    for _ in range(2):
        coordinator.schedule(train, args=(1.0, False))
    coordinator.join(timeout_s=WAIT_S)
    assert model.weight.item() == pytest.approx(before - 3.0), "later rounds are whole"


def test_results_show_steps_and_parameters_stay_inside_a_round(
    strategy: Any, coordinator: Any
) -> None:
    """`get` returns when the step is made. Inside the round the parameters are those of its start."""
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        count = sg.Variable(0, dtype=torch.int64)

    def train() -> float:
        count.assign_add(1)
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        return model.weight.item()

    start = model.weight.item()
    for round_number in range(3):
        values = [coordinator.schedule(train) for _ in range(2)]
        for value in values:
            assert value.get(WAIT_S) == pytest.approx(start - round_number)
        assert model.weight.item() == pytest.approx(start - round_number - 1)
    assert count.read_value().item() == 6, "writes of variables do not wait"
    assert strategy.staleness == 0


def test_two_optimizers_step_after_one_backward_pass(strategy: Any, coordinator: Any) -> None:
    with strategy.scope():
        model = model_of()
        tables = torch.optim.Adagrad([*model.bag.parameters(), *model.single.parameters()], lr=0.1)
        layers = [*model.dense.parameters(), *model.extra.parameters(), *model.unused.parameters()]
        others = torch.optim.SGD(layers, lr=0.1)

    def train(ids: Tensor, labels: Tensor, uses_extra: bool) -> None:
        tables.zero_grad()
        others.zero_grad()
        F.mse_loss(model(ids, uses_extra), labels).backward()
        tables.step()
        others.step()

    data = batches(4)
    for batch in data:
        coordinator.schedule(train, args=batch)
    coordinator.join(timeout_s=WAIT_S)
    adagrad, sgd = plain("adagrad", data, 2), plain("sgd", data, 2)
    # Both depend on each other after the first step, so only a joint run gives all numbers.
    reference = model_of()
    both = (
        torch.optim.Adagrad([*reference.bag.parameters(), *reference.single.parameters()], lr=0.1),
        torch.optim.SGD([*reference.dense.parameters(), *reference.extra.parameters()], lr=0.1),
    )
    for start in (0, 2):
        reference.zero_grad()
        for ids, labels, uses_extra in data[start : start + 2]:
            (F.mse_loss(reference(ids, uses_extra), labels) / 2).backward()
        for one in both:
            one.step()
    found = dict(model.state_dict())
    assert_same(found, dict(reference.state_dict()))
    assert not torch.allclose(found["bag.weight"], sgd["bag.weight"])
    assert not torch.allclose(found["dense.0.weight"], adagrad["dense.0.weight"])


def test_steps_that_would_need_the_step_before_are_refused(strategy: Any, coordinator: Any) -> None:
    """A second step of an optimizer, or a second backward pass after another optimizer's step."""
    with strategy.scope():
        one, two = nn.Linear(1, 1), nn.Linear(1, 1)
        first = torch.optim.SGD(one.parameters(), lr=0.1)
        second = torch.optim.SGD(two.parameters(), lr=0.1)
    before = one.weight.item()

    def twice() -> None:
        for _ in range(2):
            first.zero_grad()
            one(torch.ones(1, 1)).sum().backward()
            first.step()

    def adversarial() -> None:
        one(torch.ones(1, 1)).sum().backward()
        first.step()
        two.zero_grad()
        two(one(torch.ones(1, 1))).sum().backward()
        second.step()

    for wrong in (twice, adversarial):
        coordinator.schedule(wrong)
        with pytest.raises(MisuseError, match="staleness=1 or more"):
            coordinator.join(timeout_s=WAIT_S)
    assert one.weight.item() == before


def test_options_that_rounds_cannot_have_raise(cluster: sg.LocalCluster, coordinator: Any) -> None:
    with pytest.raises(ValueError, match="exactly_once"):
        coordinator.schedule(len, args=((),), exactly_once=False)
    with pytest.raises(ValueError, match="backups"):
        sg.ParameterServerStrategy(cluster.resolver, staleness=0, backups=1)


def test_dynamic_tables_train_in_rounds(strategy: Any, coordinator: Any) -> None:
    """Rows of any id, made in the round, get the mean gradient."""
    with strategy.scope():
        table = sg.nn.DynamicEmbedding(2, max_rows=64)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)

    def train(ids: Tensor, factor: float) -> Tensor:
        optimizer.zero_grad()
        rows = table(ids)
        (factor * rows).sum().backward()
        optimizer.step()
        return rows.detach()

    ids = torch.tensor([10**12, 7])
    values = [coordinator.schedule(train, args=(ids, factor)) for factor in (1.0, 3.0)]
    before, _ = (value.get(WAIT_S) for value in values)
    after = coordinator.schedule(lambda: table(ids).detach()).get(WAIT_S)
    torch.testing.assert_close(after, before - 2.0)


@pytest.mark.process
@pytest.mark.parametrize("pushed", [True, False], ids=["after-the-push", "before-the-push"])
def test_a_worker_killed_in_a_round_changes_no_number(
    pushed: bool, gate: Gate, tmp_path: Path
) -> None:
    """Its closure runs again in the same round; gradients that it had sent count once."""
    data, marker, path = batches(7), tmp_path / "killed", gate.path
    with (
        sg.LocalCluster(workers=2, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, staleness=0) as strategy,
        sg.ClusterCoordinator(strategy) as coordinator,
    ):
        with strategy.scope():
            model = model_of()
            optimizer = OPTIMIZERS["adam"](model.parameters())

        def step(number: int, ids: Tensor, labels: Tensor, uses_extra: bool) -> None:
            optimizer.zero_grad()
            F.mse_loss(model(ids, uses_extra), labels).backward()
            if pushed:
                optimizer.step()
            if number == 2 and not marker.exists():
                marker.write_text(str(os.getpid()))
                pass_gate(path)
            if not pushed:
                optimizer.step()

        for number, batch in enumerate(data[:4]):
            coordinator.schedule(step, args=(number, *batch))
        wait_until(lambda: marker.exists() and marker.read_text(), WAIT_S)
        repeated = sg.metrics.snapshot().counters.get("coordinator.closures_repeated", 0)
        os.kill(int(marker.read_text()), signal.SIGKILL)
        coordinator.join(timeout_s=WAIT_S)
        assert sg.metrics.snapshot().counters["coordinator.closures_repeated"] == repeated + 1
        # Rounds are as large as the number of workers: while one is away, they would be smaller.
        wait_until(lambda: workers_up(coordinator) == 2, WAIT_S)
        for number, batch in enumerate(data[4:], 4):
            coordinator.schedule(step, args=(number, *batch))
        coordinator.join(timeout_s=WAIT_S)
        assert_same(dict(model.state_dict()), plain("adam", data, 2))


class Pair(nn.Module):
    """Two weights, on two servers, with equal gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(1))
        self.two = nn.Parameter(torch.zeros(1))

    def values(self) -> tuple[float, float]:
        return self.one.item(), self.two.item()


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_round_runs_again_if_a_server_is_restored_in_it(gate: Gate, tmp_path: Path) -> None:
    """The restored server has lost gradients that it held: all closures of the round send theirs again."""
    path, marker = gate.path, tmp_path / "waiting"
    with (
        sg.LocalCluster(workers=2, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, staleness=0) as strategy,
        sg.ClusterCoordinator(strategy) as coordinator,
    ):
        with strategy.scope():
            model = Pair()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def step(factor: float, waits: bool) -> None:
            optimizer.zero_grad()
            (factor * (model.one + model.two)).sum().backward()
            optimizer.step()
            if waits:
                marker.touch()
                pass_gate(path)

        def train(*, waits: bool) -> list[sg.RemoteValue]:
            return [coordinator.schedule(step, args=(f, waits and f == 3.0)) for f in (1.0, 3.0)]

        checkpoint = sg.Checkpoint(model=model, optimizer=optimizer)
        with sg.CheckpointManager(checkpoint, tmp_path / "saved") as manager:
            train(waits=False)
            coordinator.join(timeout_s=WAIT_S)
            assert model.values() == (-2.0, -2.0)
            manager.save(1, wait=True)
            train(waits=True)
            # One closure has ended, the other has sent its gradients.
            wait_until(lambda: marker.exists() and _one_result_is_held(coordinator), WAIT_S)
            cluster.kill_ps(1)
            wait_until(lambda: coordinator.recoveries, WAIT_S)
            gate.open()
            coordinator.join(timeout_s=WAIT_S)
            assert model.values() == (-4.0, -4.0)
            train(waits=False)
            coordinator.join(timeout_s=WAIT_S)
            assert model.values() == (-6.0, -6.0)


def _one_result_is_held(coordinator: sg.ClusterCoordinator) -> bool:
    """Return whether one of two closures has finished; its result waits for the other's."""
    return "[0 queued, 1 in flight" in repr(coordinator)


@pytest.mark.process
def test_checkpoints_are_made_between_rounds(tmp_path: Path) -> None:
    """Saved while rounds run: all servers have the same number of steps, and it is whole."""
    with (
        sg.LocalCluster(workers=2, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, staleness=0) as strategy,
        sg.ClusterCoordinator(strategy) as coordinator,
    ):
        with strategy.scope():
            model = Pair()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def step(factor: float) -> None:
            optimizer.zero_grad()
            (factor * (model.one + model.two)).sum().backward()
            optimizer.step()

        checkpoint = sg.Checkpoint(model=model, optimizer=optimizer)
        with sg.CheckpointManager(checkpoint, tmp_path, max_to_keep=None) as manager:
            for number in range(8):
                for _ in range(15):
                    for factor in (1.0, 3.0):
                        coordinator.schedule(step, args=(factor,))
                manager.save(number + 1)
            coordinator.join(timeout_s=WAIT_S)
            manager.save(99, wait=True)
        assert model.values() == (-240.0, -240.0)
    seen = []
    for found in sorted(tmp_path.glob("step_*")):
        plain_model = Pair()
        sg.Checkpoint(model=plain_model).restore(found, strict=False)
        one, two = plain_model.values()
        assert one == two
        assert one % 2 == 0
        seen.append(one)
    assert len(seen) == 9
    assert seen[-1] == -240.0
    assert seen == sorted(seen, reverse=True)
