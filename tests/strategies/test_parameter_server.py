"""`ParameterServerStrategy` as the coordinator's program sees it: PSS-1 … PSS-33, PRT-3 … PRT-5."""

import copy
import logging

import pytest
import torch
from torch import nn

import stratagem as sg

P = sg.partitioners
PS = "/job:ps/replica:0/task:{}/device:CPU:0"


def resolver(spec, task_type=None, task_id=None):
    return sg.cluster_resolver.SimpleClusterResolver(
        sg.ClusterSpec(spec), task_type=task_type, task_id=task_id
    )


GOOD = {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1"]}


@pytest.mark.parametrize(
    ("spec", "task", "error", "message"),
    [
        ({}, (None, None), ValueError, "empty"),
        ({**GOOD, "master": ["m:1"]}, (None, None), ValueError, "'master'"),
        (GOOD, ("boss", 0), ValueError, "'boss'"),
        ({"worker": ["w:1"], "ps": ["p:1"]}, ("chief", 0), ValueError, "'chief' is not a job"),
        ({**GOOD, "chief": ["a:1", "b:1"]}, (None, None), ValueError, "2 tasks of 'chief'"),
        ({**GOOD, "evaluator": ["a:1", "b:1"]}, (None, None), ValueError, "'evaluator'"),
        (GOOD, ("worker", 2), ValueError, "task_id=2"),
        (GOOD, ("worker", None), TypeError, "task_id"),
        ({"worker": ["w:1"]}, (None, None), ValueError, "no parameter server"),
        ({"ps": ["p:1"]}, (None, None), ValueError, "no worker"),
    ],
)
def test_clusters_that_cannot_serve_are_refused(spec, task, error, message):
    """PSS-1."""
    with pytest.raises(error, match=message):
        sg.ParameterServerStrategy(resolver(spec, *task))


def test_no_resolver_at_all():
    """PSS-1."""
    with pytest.raises(AttributeError, match="TFConfigClusterResolver"):
        sg.ParameterServerStrategy(None)


def test_a_partitioner_must_be_callable():
    """Found at construction, before anything is connected."""
    spec = {"worker": ["a:1"], "ps": ["b:1"]}
    with pytest.raises(TypeError, match=r"variable_partitioner=2 has type int.*FixedShards"):
        sg.ParameterServerStrategy(resolver(spec), 2)


@pytest.fixture(scope="module")
def cluster():
    """Two workers and three parameter servers, as threads of this process."""
    with sg.LocalCluster(workers=2, ps=3, in_process=True) as made:
        yield made


@pytest.fixture
def strategy(cluster):
    with sg.ParameterServerStrategy(cluster.resolver) as made:
        yield made


@pytest.fixture
def coordinator(strategy):
    with sg.ClusterCoordinator(strategy) as made:
        yield made


def test_attributes_of_the_strategy(cluster):
    """RES-0 as corrected by 13.1; PSS-4."""
    given = cluster.resolver
    with sg.ParameterServerStrategy(given) as strategy:
        assert strategy.cluster_resolver is given
        check_facts(cluster, strategy)


def check_facts(cluster, strategy):
    assert strategy.num_replicas_in_sync == 1
    assert strategy.extended.parameter_devices == tuple(PS.format(i) for i in range(3))
    with pytest.raises(ValueError, match="gradient_aggregation"):
        sg.ParameterServerStrategy(cluster.resolver, gradient_aggregation="median")
    with pytest.raises(ValueError, match="worker_devices"):
        sg.ParameterServerStrategy(cluster.resolver, worker_devices="cpu:0")


def test_copying(strategy):
    """CPY-1."""
    with copy.deepcopy(strategy) as twin:
        assert twin is not strategy
    with pytest.raises(RuntimeError):
        copy.copy(strategy)
    with sg.ClusterCoordinator(strategy), pytest.raises(TypeError, match="coordinator"):
        copy.deepcopy(strategy)


class TestPlacement:
    """PSS-10 … PSS-12."""

    def test_round_robin_and_outside_scope(self, strategy):
        """PSS-10, the page's example: v2 … v5 on tasks 0, 1, 2, 0, v1 with the coordinator."""
        outside = sg.Variable(0.0)
        with strategy.scope():
            made = [sg.Variable(float(i)) for i in range(4)]
        assert [v.device for v in made] == [PS.format(i) for i in (0, 1, 2, 0)]
        assert outside.device == "/job:chief/replica:0/task:0/device:CPU:0"
        # The name is a device's here, and no longer when nothing is coordinated any more.
        moved = strategy.extended.broadcast_to(torch.ones(2), outside.device)
        assert moved.device == torch.device("cpu")
        strategy.close()
        assert sg.Variable(0.0).device == "/job:localhost/replica:0/task:0/device:CPU:0"

    def test_every_shard_counts_one(self, cluster):
        with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(2)) as strategy:
            with strategy.scope():
                first = sg.Variable(torch.zeros(4, 2))
                second = sg.Variable(torch.zeros(()))
                third = sg.Variable(torch.zeros(5))
        devices = [v.device for v in (*first.variables, second, *third.variables)]
        assert devices == [PS.format(i) for i in (0, 1, 2, 0, 1)]

    def test_parameters_of_modules_count_in_the_order_of_registration(self, strategy):
        with strategy.scope():
            nn.Linear(2, 2)
            assert sg.Variable(0.0).device == PS.format(2)

    def test_colocated_variables_are_whole_and_not_counted(self, cluster):
        """PSS-12."""
        with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(2)) as strategy:
            with strategy.scope():
                anchor = sg.Variable(1.0)
                other = sg.Variable(1.0)
                with strategy.extended.colocate_vars_with(other):
                    beside = sg.Variable(torch.zeros(4))
                after = sg.Variable(1.0)
        assert isinstance(beside, sg.Variable)
        assert [v.device for v in (anchor, other, beside, after)] == [
            PS.format(i) for i in (0, 1, 1, 2)
        ]


class TestPartitioning:
    """PRT-3 … PRT-5."""

    def test_partitioner_is_asked_with_shape_and_dtype(self, cluster):
        """PRT-3."""
        asked = []

        class Noting(P.Partitioner):
            def __call__(self, shape, dtype, axis=0):
                asked.append((tuple(shape), dtype))
                return [1] * len(shape)

        with sg.ParameterServerStrategy(cluster.resolver, Noting()) as strategy, strategy.scope():
            sg.Variable(torch.zeros(3, 2), dtype=torch.float64)
            nn.Linear(5, 4, bias=False)
        assert asked == [((3, 2), torch.float64), ((4, 5), torch.float32)]

    def test_names_of_shards(self, cluster):
        """PRT-5 and the page's example."""
        with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(2)) as strategy:
            with strategy.scope():
                w = sg.Variable(torch.randn(100, 10), name="w")
            assert isinstance(w, sg.ShardedVariable)
            assert w.name == "ShardedVariable"
            assert [part.name for part in w.variables] == ["w/part_0", "w/part_1"]
            x = torch.randn(100, 10)
            torch.testing.assert_close(x * w, x * sg.convert_to_tensor(w))

    def test_initial_value_shard_by_shard(self, cluster):
        """PRT-4: a function that can, makes each shard; the whole is never built."""
        calls = []

        def fill(partition_shape, partition_offset):
            calls.append((partition_shape, partition_offset))
            return torch.full(partition_shape, float(partition_offset[0]))

        with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(3)) as strategy:
            with strategy.scope():
                v = sg.Variable(fill, shape=(8, 2), dtype=torch.float32)
            assert calls == [((3, 2), (0, 0)), ((3, 2), (3, 0)), ((2, 2), (6, 0))]
            assert sg.convert_to_tensor(v)[:, 0].tolist() == [0, 0, 0, 3, 3, 3, 6, 6]

    def test_initial_value_made_whole_is_sliced(self, cluster):
        """PRT-4: functions without these arguments, and arrays."""
        whole = torch.arange(16.0).reshape(8, 2)
        calls = []

        def make():
            calls.append(1)
            return whole

        with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(3)) as strategy:
            with strategy.scope():
                made = [
                    sg.Variable(make, shape=(8, 2), dtype=torch.float32),
                    sg.Variable(make),
                    sg.Variable(whole.numpy()),
                ]
            for v in made:
                torch.testing.assert_close(sg.convert_to_tensor(v), whole)
            assert len(calls) == 2
            with strategy.scope():
                with pytest.raises(ValueError, match="initial value"):
                    sg.Variable(shape=(8, 2), dtype=torch.float32)
                with pytest.raises(ValueError, match="has shape"):
                    sg.Variable(lambda: torch.zeros(5, 2), shape=(8, 2), dtype=torch.float32)


class TestVariables:
    """Reading and writing, from here and from workers."""

    @pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
    def test_aggregation_means_nothing_with_one_replica(self, strategy, coordinator, aggregation):
        """PSS-33 and the table of section 4."""
        with strategy.scope():
            v = sg.Variable(10.0, aggregation=aggregation)

        def work():
            return strategy.run(lambda: v.assign_add(torch.tensor(1.0)))

        assert coordinator.schedule(work).fetch() == 11.0
        assert v.assign(3.0) == 3.0
        assert float(v) == 3.0

    def test_every_kind_of_write(self, strategy, coordinator):
        with strategy.scope():
            v = sg.Variable(torch.arange(6.0).reshape(3, 2), name="v")
        delta = torch.sparse_coo_tensor(
            [[2, 0, 2]], torch.ones(3, 2), (3, 2), check_invariants=True
        )

        def work():
            v.assign_sub(torch.ones(3, 2))
            v.scatter_add(delta)
            return v.sparse_read(torch.tensor([2, 0])).clone()

        assert coordinator.schedule(work).fetch().tolist() == [[5.0, 6.0], [0.0, 1.0]]
        assert v.numpy().tolist() == [[0.0, 1.0], [1.0, 2.0], [5.0, 6.0]]
        with pytest.raises(ValueError, match="shape"):
            v.assign(torch.ones(2, 2))

    def test_additions_of_all_workers_count(self, strategy, coordinator):
        with strategy.scope():
            v = sg.Variable(0, dtype=torch.int64)
        for _ in range(50):
            coordinator.schedule(lambda: v.assign_add(1))
        coordinator.join(timeout_s=120)
        assert int(v) == 50

    def test_making_a_variable_inside_a_function_is_refused(self, coordinator):
        coordinator.schedule(lambda: sg.Variable(1.0))
        with pytest.raises(ValueError, match="on the coordinator"):
            coordinator.join(timeout_s=120)

    def test_per_worker_variables(self, strategy, coordinator):
        """PSS-13."""
        with strategy.scope():
            v = sg.Variable(5.0, name="mine", per_worker_variable=True)
        assert not v.trainable
        values = coordinator.create_per_worker_resource(
            lambda: v.assign_add(1.0 + sg.get_current_worker_index())
        )
        coordinator.schedule(lambda value: None, args=(values,)).fetch()
        coordinator.join(timeout_s=120)
        for _ in range(200):
            if [float(one) for one in v.read_all()] == [6.0, 7.0]:
                break
            coordinator.schedule(lambda: None).fetch()
        assert [float(one) for one in v.read_all()] == [6.0, 7.0]

    def test_cached_reads(self, strategy):
        """PSS-14."""
        with strategy.scope():
            v = sg.Variable(1.0)
        with strategy.cache_variable_reads():
            assert float(v) == 1.0
            v.assign(2.0)
            assert float(v) == 1.0
            with pytest.raises(ValueError, match="nest"), strategy.cache_variable_reads():
                pass
        assert float(v) == 2.0

    def test_gradients_through_a_sharded_variable(self, cluster):
        """Issue 4.2: page 003's limitation is gone."""
        with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(2)) as strategy:
            with strategy.scope():
                w = sg.Variable(torch.ones(4, 2), trainable=True)
            with sg.ClusterCoordinator(strategy) as coordinator:

                def work():
                    (sg.convert_to_tensor(w) * torch.arange(8.0).reshape(4, 2)).sum().backward()
                    return [part.grad.clone() for part in w.variables]

                first, second = coordinator.schedule(work).fetch()
        assert first.tolist() == [[0, 1], [2, 3]]
        assert second.tolist() == [[4, 5], [6, 7]]


class TestOutsideAFunction:
    """PSS-30 … PSS-32."""

    def test_run_works_here_and_warns(self, strategy, caplog):
        with caplog.at_level(logging.WARNING, "stratagem"):
            assert strategy.run(lambda x: x + 1, args=(1,)) == 2
        assert "coordinator" in caplog.text

    def test_reduce_maps_over_nests_and_leaves_plain_values(self, strategy):
        """PSS-32."""
        value = {"a": sg.PerReplica([torch.tensor(3.0)]), "b": 7}
        assert strategy.reduce("sum", value, axis=None) == {"a": torch.tensor(3.0), "b": 7}
        assert strategy.reduce("mean", torch.tensor([1.0, 3.0]), axis=0) == 2.0
        plain = torch.ones(2)
        assert strategy.gather(plain, axis=0) is plain
        made = strategy.distribute_values_from_function(lambda ctx: ctx.num_replicas_in_sync)
        assert strategy.local_results(made) == (1,)

    def test_distributed_datasets_are_built_on_workers(self, strategy, coordinator):
        """PSS-31."""
        batches = [torch.arange(4), torch.arange(4, 8)]
        made = strategy.distribute_dataset(batches)
        with pytest.raises(ValueError, match="create_per_worker_dataset"):
            iter(made)
        with pytest.raises(ValueError, match="create_per_worker_dataset"):
            _ = made.cardinality
        iterator = iter(coordinator.create_per_worker_dataset(made))
        # DATA sharding: the first batch is worker 0's, the second worker 1's.
        values = [
            coordinator.schedule(
                lambda it: (int(sg.get_current_worker_index()), next(it, None)), args=(iterator,)
            )
            for _ in range(8)
        ]
        seen = [one for one in coordinator.fetch(values) if one[1] is not None]
        for worker, batch in seen:
            assert batch.tolist() == ([0, 1, 2, 3] if worker == 0 else [4, 5, 6, 7])

    @pytest.mark.parametrize("policy", ["AUTO", "DATA", "OFF"])
    def test_workers_share_a_distributed_dataset_by_its_policy(self, strategy, coordinator, policy):
        """INP-30: together the workers see every row once; with OFF, each sees all of them."""
        options = sg.data.DistributeOptions(auto_shard_policy=sg.data.AutoShardPolicy[policy])
        dataset = sg.data.Dataset.range(20).shuffle().batch(3).with_options(options)
        distributed = coordinator.create_per_worker_dataset(strategy.distribute_dataset(dataset))

        def rows(iterator):
            return [row for batch in iterator for row in batch.tolist()]

        mine = coordinator.create_per_worker_resource(rows, args=(iter(distributed),))
        seen = coordinator.fetch(
            [
                coordinator.schedule(lambda r: (int(sg.get_current_worker_index()), r), (mine,))
                for _ in range(40)
            ]
        )
        by_worker = dict(seen)
        for worker, found in by_worker.items():
            expected = 20 if policy == "OFF" else (11 if worker == 0 else 9)
            assert len(set(found)) == len(found) == expected
        if len(by_worker) == 2:
            both = by_worker[0] + by_worker[1]
            assert sorted(both) == sorted(list(range(20)) * (2 if policy == "OFF" else 1))
