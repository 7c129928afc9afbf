"""State between coordinator, workers and servers: what each sees of the others' changes."""

import copy
import gc
import time

import pytest
import torch
import torch.nn.functional as F
from scheduling import run
from server_probe import stats
from torch import nn

import stratagem as sg
from stratagem import metrics

P = sg.partitioners


@pytest.fixture(scope="module")
def cluster():
    """Two workers and two parameter servers, as threads of this process."""
    with sg.LocalCluster(workers=2, ps=2, in_process=True) as made:
        yield made


@pytest.fixture(params=[None, P.FixedShardsPartitioner(2)], ids=["whole", "sharded"])
def strategy(cluster, request):
    with sg.ParameterServerStrategy(cluster.resolver, request.param) as made:
        yield made


@pytest.fixture
def coordinator(strategy):
    with sg.ClusterCoordinator(strategy) as made:
        yield made


def make(strategy, build=lambda: nn.Linear(3, 2), optimizer=torch.optim.Adam, lr=0.1):
    torch.manual_seed(0)
    with strategy.scope():
        model = build()
        return model, optimizer(model.parameters(), lr=lr)


def stepping(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


X = torch.arange(12.0).reshape(4, 3) / 10


class TestModels:
    def test_the_coordinator_reads_what_workers_trained(self, strategy, coordinator):
        """state_dict(), model(x) and parameters() are current."""
        model, optimizer = make(strategy)
        before = copy.deepcopy(model.state_dict())
        run(coordinator, stepping(model, optimizer), X)
        after = model.state_dict()
        assert not torch.equal(before["weight"], after["weight"])
        on_worker = run(coordinator, lambda: model(X).detach())
        torch.testing.assert_close(model(X).detach(), on_worker)
        torch.testing.assert_close(next(model.parameters()).detach(), after["weight"])

    def test_workers_read_what_the_coordinator_wrote(self, strategy, coordinator):
        """load_state_dict, nn.init and in-place writes, before and after the first closure."""
        model, _ = make(strategy)
        nn.init.constant_(model.weight, 2.0)
        read = lambda: (model.weight.sum().item(), model.bias.sum().item())
        assert run(coordinator, read)[0] == 12.0
        model.load_state_dict({"weight": torch.full((2, 3), 3.0), "bias": torch.ones(2)})
        assert run(coordinator, read) == (18.0, 2.0)
        with torch.no_grad():
            model.bias += 1
        assert run(coordinator, read) == (18.0, 4.0)

    def test_a_function_always_gets_the_same_objects(self, strategy, coordinator):
        model, optimizer = make(strategy)
        seen = run(coordinator, lambda: (id(model), id(model.weight), id(optimizer)))
        for _ in range(4):
            again = run(coordinator, lambda: (id(model), id(model.weight), id(optimizer)))
            where = run(coordinator, sg.get_current_worker_index)
            if again == seen:
                break
            seen = again if where == 0 else seen
        assert again == seen

        def related():
            same = optimizer.param_groups[0]["params"][0] is model.weight
            return same, isinstance(model, nn.Linear), type(optimizer) is torch.optim.Adam

        assert run(coordinator, related) == (True, True, True)

    def test_train_and_eval_are_seen_by_later_functions(self, strategy, coordinator):
        model, _ = make(strategy, lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)))
        read = lambda: (model.training, model[1].training)
        assert run(coordinator, read) == (True, True)
        model.eval()
        assert run(coordinator, read) == (False, False)
        model[1].train()
        assert run(coordinator, read) == (False, True)

    def test_freezing_later_is_seen(self, strategy, coordinator):
        model, optimizer = make(strategy)
        step = stepping(model, optimizer)
        run(coordinator, step, X)
        model.weight.requires_grad_(False)
        before = model.weight.detach().clone(), model.bias.detach().clone()
        for _ in range(3):
            run(coordinator, step, X)
        assert torch.equal(model.weight, before[0])
        assert not torch.equal(model.bias, before[1])

    def test_recurrent_modules(self, strategy, coordinator):
        """Their C++ code reads a list of weights kept beside the parameters."""
        model, optimizer = make(strategy, lambda: nn.LSTM(3, 4, batch_first=True), torch.optim.SGD)
        plain = nn.LSTM(3, 4, batch_first=True)
        plain.load_state_dict(model.state_dict())
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        sequence = torch.randn(2, 5, 3)

        def train(model, optimizer):
            def step():
                optimizer.zero_grad()
                model(sequence)[0].square().mean().backward()
                optimizer.step()

            return step

        for _ in range(3):
            run(coordinator, train(model, optimizer))
            train(plain, other)()
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))

    def test_lazy_modules_must_have_been_called_once(self, strategy, coordinator):
        with strategy.scope():
            model = nn.LazyLinear(2)
        with pytest.raises(ValueError, match="example batch"):
            coordinator.schedule(lambda: model(X))
        model(X)
        assert run(coordinator, lambda: model(X).shape) == (4, 2)

    def test_a_deep_copy_is_a_model_of_its_own(self, strategy, coordinator):
        model, optimizer = make(strategy)
        twin = copy.deepcopy(model)
        run(coordinator, stepping(model, optimizer), X)
        assert not torch.equal(model.weight, twin.weight)
        torch.testing.assert_close(run(coordinator, lambda: twin(X).detach()), twin(X).detach())

    def test_models_keep_their_values_when_the_session_ends(self, cluster):
        with sg.ParameterServerStrategy(cluster.resolver) as strategy:
            model, optimizer = make(strategy)
            with sg.ClusterCoordinator(strategy) as coordinator:
                run(coordinator, stepping(model, optimizer), X)
                trained = copy.deepcopy(model.state_dict())
        torch.testing.assert_close(dict(model.state_dict()), dict(trained))
        assert model(X).shape == (4, 2)

    def test_forgotten_models_are_freed_on_the_servers(self, strategy, coordinator):
        """A program that makes models for weeks does not fill its servers."""

        def held():
            facts = [stats(strategy._variables.client, server) for server in (0, 1)]
            return sum(int(fact["bytes"]) for fact in facts)

        def wait_for(condition):
            deadline = time.monotonic() + 120
            while not condition() and time.monotonic() < deadline:
                coordinator.schedule(lambda: None).fetch()
            return condition()

        models = list(make(strategy, lambda: nn.Linear(64, 64)))
        shape = run(coordinator, lambda model=models[0]: model.weight.shape)
        assert shape == (64, 64)
        assert wait_for(lambda: held() >= 64 * 64 * 4)
        models.clear()
        for number in range(300):  # pushes the function that named the model out of memory
            coordinator.schedule(lambda number=number: number)
        coordinator.join(timeout_s=120)
        gc.collect()
        assert wait_for(lambda: held() == 0)

    def test_a_module_made_inside_a_function_is_its_own(self, coordinator):
        def work():
            layer = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            before = layer.weight.detach().clone()
            layer(X).sum().backward()
            optimizer.step()
            return torch.equal(before, layer.weight)

        assert run(coordinator, work) is False


class TestBuffers:
    def test_batch_statistics_reach_servers_and_other_workers(self, strategy, coordinator):
        """Issue 4.2: a step's change to BatchNorm statistics reaches the server."""
        with strategy.scope():
            norm = nn.BatchNorm1d(3)
        for _ in range(8):
            coordinator.schedule(lambda: norm(X + 1).sum().item())
        coordinator.join(timeout_s=120)
        assert int(norm.num_batches_tracked) == 8
        assert float(norm.running_mean.abs().sum()) > 0
        read = run(coordinator, lambda: norm.running_mean.clone())
        torch.testing.assert_close(read, norm.running_mean)


class TestOptimizers:
    def test_state_dict_holds_the_servers_state_and_can_be_loaded(self, cluster):
        """Training goes on, in another number of shards, as if it had not stopped."""
        torch.manual_seed(0)
        plain = nn.Linear(3, 4)
        start = copy.deepcopy(plain.state_dict())
        other = torch.optim.Adam(plain.parameters(), lr=0.1)
        for _ in range(4):
            stepping(plain, other)(X)
        saved = None
        for partitioner in (P.FixedShardsPartitioner(2), P.FixedShardsPartitioner(3)):
            with sg.ParameterServerStrategy(cluster.resolver, partitioner) as strategy:
                with strategy.scope():
                    model = nn.Linear(3, 4)
                    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
                if saved is None:
                    model.load_state_dict(start)
                else:
                    model.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                with sg.ClusterCoordinator(strategy) as coordinator:
                    for _ in range(2):
                        run(coordinator, stepping(model, optimizer), X)
                    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        torch.testing.assert_close(dict(saved[0]), dict(plain.state_dict()))
        expected = other.state_dict()["state"]
        for number, state in saved[1]["state"].items():
            for key, value in state.items():
                torch.testing.assert_close(value, expected[number][key])

    def test_loading_state_while_training(self, strategy, coordinator):
        model, optimizer = make(strategy)
        step = stepping(model, optimizer)
        run(coordinator, step, X)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        losses = [run(coordinator, step, X) for _ in range(3)]
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        again = [run(coordinator, step, X) for _ in range(3)]
        assert losses == pytest.approx(again)

    def test_settings_changed_by_hand_are_seen(self, strategy, coordinator):
        model, optimizer = make(strategy, optimizer=torch.optim.SGD)
        step = stepping(model, optimizer)
        run(coordinator, step, X)
        before = model.weight.detach().clone()
        optimizer.param_groups[0]["lr"] = 0.0
        for _ in range(3):
            run(coordinator, step, X)
        assert torch.equal(model.weight, before)
        optimizer.param_groups[0]["lr"] = 0.1
        run(coordinator, step, X)
        assert not torch.equal(model.weight, before)

    def test_groups_added_later(self, strategy, coordinator):
        torch.manual_seed(0)
        with strategy.scope():
            model, head = nn.Linear(3, 2), nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        full = nn.Sequential(model, head)
        step = stepping(full, optimizer)
        run(coordinator, step, X)
        before = head.weight.detach().clone()
        optimizer.add_param_group({"params": head.parameters(), "lr": 0.5})
        for _ in range(3):
            run(coordinator, step, X)
        assert not torch.equal(head.weight, before)

    def test_step_may_be_given_a_closure(self, strategy, coordinator):
        model, optimizer = make(strategy)

        def work():
            def loss():
                optimizer.zero_grad()
                value = model(X).square().mean()
                value.backward()
                return value

            return optimizer.step(loss).item()

        assert run(coordinator, work) > run(coordinator, work)


def test_staleness_is_measured(strategy, coordinator):
    """With two workers some writes of others lie between a read and its write; with one none."""
    staleness, pushes = metrics.distribution("ps.staleness"), metrics.timer("ps.push")
    before = staleness.snapshot().count, pushes.snapshot().count
    model, optimizer = make(strategy)
    for _ in range(20):
        coordinator.schedule(stepping(model, optimizer), args=(X,))
    coordinator.join(timeout_s=120)
    assert staleness.snapshot().minimum >= 0
    after = staleness.snapshot().count, pushes.snapshot().count
    assert [now - then for now, then in zip(after, before, strict=True)] == [20, 20]


class TestReplicasInAWorker:
    """PSS-4: several devices per worker, one replica each."""

    @pytest.mark.parametrize(
        "partitioner", [None, P.FixedShardsPartitioner(2)], ids=["whole", "cut"]
    )
    def test_two_replicas_give_one_devices_numbers(self, cluster, partitioner):
        torch.manual_seed(0)

        def build():
            return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 2))

        plain = build()
        other = torch.optim.Adam(plain.parameters(), lr=0.1)
        ids = torch.randint(0, 9, (5, 2))
        with sg.ParameterServerStrategy(
            cluster.resolver, partitioner, worker_devices=["cpu:0", "cpu:1"]
        ) as strategy:
            assert strategy.num_replicas_in_sync == 2
            with strategy.scope():
                model = build()
                model.load_state_dict(plain.state_dict())
                optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
                total = sg.Variable(0.0, aggregation=sg.VariableAggregation.SUM)
            step = stepping(model, optimizer)

            def replica(x):
                step(x)
                total.assign_add(torch.tensor(float(len(x))))

            def work():
                parts = sg.PerReplica([ids[:3], ids[3:]])
                strategy.run(replica, args=(parts,))

            with sg.ClusterCoordinator(strategy) as coordinator:
                for _ in range(3):
                    run(coordinator, work)
                    stepping(plain, other)(ids)
                torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
                assert float(total) == 15.0

    @pytest.mark.parametrize("aggregation", ["mean", "sum"])
    @pytest.mark.parametrize(
        "partitioner", [None, P.FixedShardsPartitioner(2)], ids=["whole", "cut"]
    )
    def test_replicas_look_rows_up_and_their_gradients_meet(
        self, cluster, partitioner, aggregation
    ):
        """No replica holds the table; uneven parts, rows of both replicas, accumulation, clipping."""
        torch.manual_seed(0)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.bag = nn.Embedding(9, 4), nn.EmbeddingBag(7, 4)
                self.head = nn.Linear(8, 2)

            def forward(self, ids):
                bagged = self.bag(ids % 7)
                return self.head(torch.cat([self.table(ids[:, 0]), bagged], 1))

        def passes(model, ids, scale):
            for part in (ids, (ids + 1) % 9):  # two passes of one step add up
                (scale * model(part).square().mean()).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            return norm, [name for name, one in model.named_parameters() if one.grad is None]

        plain = Model()
        other = torch.optim.Adagrad(plain.parameters(), lr=0.1)
        ids = torch.randint(0, 9, (5, 3))
        with sg.ParameterServerStrategy(
            cluster.resolver,
            partitioner,
            worker_devices=["cpu:0", "cpu:1"],
            gradient_aggregation=aggregation,
        ) as strategy:
            with strategy.scope():
                model = Model()
                model.load_state_dict(plain.state_dict())
                optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

            def replica(x):
                optimizer.zero_grad()
                scale = len(x) / 5 if aggregation == "sum" else 1.0
                norm, missing = passes(model, x, scale)
                optimizer.step()
                table = model.table.weight
                return float(norm), missing, table.grad_ids.tolist(), tuple(table.grad.shape)

            def work():
                parts = sg.PerReplica([ids[:3], ids[3:]])
                found = strategy.run(replica, args=(parts,))
                return [list(strategy.experimental_local_results(each)) for each in found]

            with sg.ClusterCoordinator(strategy) as coordinator:
                for _ in range(3):
                    norms, missing, rows, shapes = run(coordinator, work)
                    other.zero_grad()
                    expected, _ = passes(plain, ids, 1.0)
                    other.step()
                    assert missing == [[], []]
                    used = torch.cat([ids[:, 0], (ids[:, 0] + 1) % 9]).unique().tolist()
                    assert rows == [used, used]  # of both replicas, and of no other row
                    assert shapes == [(9, 4)] * 2
                    assert set(norms) == {norms[0]}
                    assert norms[0] == pytest.approx(float(expected), rel=1e-5)
                torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))

    def test_a_table_used_whole_by_replicas_has_one_devices_gradient(self, cluster):
        """An operator that is no lookup takes the whole table, beside lookups of the same table."""
        torch.manual_seed(0)

        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(9, 4)

            def forward(self, ids):
                return self.table(ids) @ self.table.weight.t()

        plain = Tied()
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        ids = torch.randint(0, 9, (5,))
        with sg.ParameterServerStrategy(
            cluster.resolver, P.FixedShardsPartitioner(2), worker_devices=["cpu:0", "cpu:1"]
        ) as strategy:
            with strategy.scope():
                model = Tied()
                model.load_state_dict(plain.state_dict())
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = stepping(model, optimizer)

            def work():
                strategy.run(step, args=(sg.PerReplica([ids[:2], ids[2:]]),))

            with sg.ClusterCoordinator(strategy) as coordinator:
                for _ in range(3):
                    run(coordinator, work)
                    stepping(plain, other)(ids)
                torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


class TestOtherHosts:
    """Without shared memory everything goes over the connection, with the same numbers."""

    @pytest.fixture
    def _apart(self, monkeypatch):
        monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "0")

    @pytest.mark.usefixtures("_apart")
    @pytest.mark.parametrize(
        "partitioner", [None, P.FixedShardsPartitioner(2)], ids=["whole", "cut"]
    )
    def test_training_over_the_connection(self, partitioner):
        torch.manual_seed(0)

        def build():
            return nn.Sequential(
                nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 2), nn.BatchNorm1d(2)
            )

        plain = build()
        other = torch.optim.Adagrad(plain.parameters(), lr=0.1)
        ids = torch.randint(0, 9, (5, 2))
        with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
            with sg.ParameterServerStrategy(cluster.resolver, partitioner) as strategy:
                with strategy.scope():
                    model = build()
                    model.load_state_dict(plain.state_dict())
                    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
                    v = sg.Variable(torch.zeros(5))
                with sg.ClusterCoordinator(strategy) as coordinator:
                    for _ in range(3):
                        run(coordinator, stepping(model, optimizer), ids)
                        stepping(plain, other)(ids)
                    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
                    run(coordinator, lambda: v.assign_add(torch.ones(5)) is None)
                    assert v.numpy().tolist() == [1.0] * 5
                    assert (
                        run(coordinator, lambda: F.relu(sg.convert_to_tensor(v)).sum().item()) == 5
                    )
