"""Parameter servers and workers as real processes: training, many variables, a user's optimizer."""

import sys

import pytest
import torch
import torch.nn.functional as F
from own_optimizer import SignDescent
from torch import nn
from waiting import wait_until

import stratagem as sg
from stratagem._wire import messages
from stratagem.errors import UnsupportedOptimizer

pytestmark = pytest.mark.process

P = sg.partitioners


def served(client, server):
    """How many messages a server has worked off."""
    return client.ask(server, messages.AskStats()).message.facts["served"]


@pytest.fixture(scope="module")
def cluster():
    """Two workers and two parameter servers, each a process."""
    with sg.LocalCluster(workers=2, ps=2) as made:
        yield made


def training(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 10, generator=generator)
    return x, (x.sum(1) > 0).long()


@pytest.mark.parametrize("partitioner", [None, P.FixedShardsPartitioner(2)], ids=["whole", "cut"])
def test_two_workers_learn(cluster, partitioner):
    """Asynchronous, so no exact numbers; but the loss falls and all steps were applied."""
    torch.manual_seed(0)
    with sg.ParameterServerStrategy(cluster.resolver, partitioner) as strategy:
        with strategy.scope():
            model = nn.Sequential(
                nn.Linear(10, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 2)
            )
            optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
            steps = sg.Variable(0, dtype=torch.int64)
        step = training(model, optimizer)

        def counted(x, y):
            steps.assign_add(1)
            return step(x, y)

        with sg.ClusterCoordinator(strategy) as coordinator:
            values = [coordinator.schedule(counted, args=data(i)) for i in range(120)]
            coordinator.join(timeout_s=120)
            losses = coordinator.fetch(values)
            assert int(steps) == 120
            assert int(model[2].num_batches_tracked) == 120
            state = optimizer.state_dict()["state"]
            assert {float(one["step"]) for one in state.values()} == {120.0}
            x, y = data(999)
            with torch.no_grad():
                right = (model.eval()(x).argmax(1) == y).float().mean()
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])
    assert right > 0.85


@pytest.mark.slow
def test_a_thousand_variables_are_one_message_per_server(cluster):
    """Requests are fused: a step over many small variables sends as few messages as over one."""
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(1000)])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step():
            optimizer.zero_grad()
            torch.stack(list(model)).sum().backward()
            optimizer.step()

        with sg.ClusterCoordinator(strategy) as coordinator:
            client = strategy._variables.client
            coordinator.schedule(lambda: len(model)).fetch()
            before = [served(client, server) for server in (0, 1)]
            coordinator.schedule(step).fetch()
            coordinator.join(timeout_s=120)
            sent = [served(client, s) - b for s, b in zip((0, 1), before, strict=True)]
            assert all(float(p.detach().sum()) == 1.5 for p in model)
    # Per server: where are the variables (once per variable at first use), one write, one slot
    # announcement; never one write per variable.
    assert max(sent) < 600


def test_an_optimizer_of_the_users_own(cluster):
    """Imported by the servers from a module on their list; same numbers as here."""
    torch.manual_seed(0)
    plain = nn.Linear(10, 2)
    with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(2)) as strategy:
        with strategy.scope():
            model = nn.Linear(10, 2)
            model.load_state_dict(plain.state_dict())
            optimizer = SignDescent(model.parameters(), lr=0.01)
        with sg.ClusterCoordinator(strategy) as coordinator:
            for i in range(4):
                coordinator.schedule(training(model, optimizer), args=data(i)).fetch()
            trained = {name: value.clone() for name, value in model.state_dict().items()}
    step = training(plain, SignDescent(plain.parameters(), lr=0.01))
    for i in range(4):
        step(*data(i))
    torch.testing.assert_close(trained, dict(plain.state_dict()))


def test_an_optimizer_from_elsewhere_is_refused_by_name(cluster):
    class Local(torch.optim.SGD):
        pass

    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = nn.Linear(2, 1)
            optimizer = Local(model.parameters(), lr=0.1)
        with sg.ClusterCoordinator(strategy) as coordinator:
            with pytest.raises(UnsupportedOptimizer, match="cannot import"):
                coordinator.schedule(lambda: optimizer.zero_grad())


def test_metrics_of_workers_reach_the_coordinator(cluster):
    """Issue 4.3: read and push of every step and their staleness, from other processes."""
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            table = nn.Embedding(2_000, 4)
            optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)

        def step():
            optimizer.zero_grad()
            table(torch.tensor([0, 1_999])).sum().backward()
            optimizer.step()

        with sg.ClusterCoordinator(strategy) as coordinator:

            def counts() -> list[int]:
                seen = coordinator.worker_metrics
                found = [seen.timers.get(name) for name in ("ps.push", "ps.read")]
                found.append(seen.distributions.get("ps.staleness"))
                return [0 if one is None else one.count for one in found]

            wait_until(
                lambda: all(
                    "worker.steps" in each.counters
                    for each in coordinator.metrics_by_worker.values()
                )
            )
            before = counts()
            for _ in range(20):
                coordinator.schedule(step)
            coordinator.join(timeout_s=120)
            wait_until(lambda: counts()[0] == before[0] + 20)
            assert counts() == [count + 20 for count in before]


def test_lookups_move_only_their_rows(cluster):
    """A function that looks two rows up of a large table does not map or fetch the rest."""
    with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(2)) as strategy:
        with strategy.scope():
            table = nn.Embedding(1_000_000, 16)

        def resident():
            import resource

            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            found = table(torch.tensor([0, 999_999])).detach().clone()
            return found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

        with sg.ClusterCoordinator(strategy) as coordinator:
            coordinator.schedule(resident).fetch()
            value, grown = coordinator.schedule(resident).get()
            torch.testing.assert_close(value, table.weight[[0, 999_999]].detach())
    assert grown < 8 << 10  # kilobytes, of a table of 64 MB


def test_functions_have_the_default_dtype_of_the_program(cluster):
    """Tensors that a step makes itself fit a model of float64, and float32 returns with the program's."""

    def step():
        return model(torch.ones(2, 3)).dtype, torch.zeros(1).dtype

    usual = torch.get_default_dtype()
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        torch.set_default_dtype(torch.float64)
        try:
            with strategy.scope():
                model = nn.Linear(3, 1)
            with sg.ClusterCoordinator(strategy) as coordinator:
                assert coordinator.schedule(step).fetch() == (torch.float64, torch.float64)
                torch.set_default_dtype(torch.float32)
                assert coordinator.schedule(lambda: torch.zeros(1).dtype).fetch() == torch.float32
        finally:
            torch.set_default_dtype(usual)


class Layers(nn.Module):
    """Compares the names of its layers by identity, which works in one process only by chance."""

    def __init__(self, names):
        super().__init__()
        self.names = names
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        for name, _ in self.names:
            assert name is sys.intern("linear")
            x = x * self.weight
        return x


def test_names_are_the_same_objects_on_workers(cluster):
    """MAML-Pytorch: ``if name is 'linear'``. Both an attribute of a module and an argument."""
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = Layers([("linear", [2, 3])])

        def step(names):
            return [name is sys.intern("linear") for name in names], float(model(torch.ones(1)))

        with sg.ClusterCoordinator(strategy) as coordinator:
            found = coordinator.schedule(step, args=(["linear", "line" + "ar"],)).fetch()
    assert found == ([True, True], 1.0)
