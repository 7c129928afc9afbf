"""What every single-machine strategy does alike: run, results, copying, life (RUN-*, LOC-*, CPY-*)."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import stratagem as sg

T = torch.tensor
MAKERS = {
    "one": lambda: sg.OneDeviceStrategy("cpu:0"),
    "central": lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "central1": lambda: sg.CentralStorageStrategy(["cpu:0"]),
    "mirrored": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored3": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]),
}


@pytest.fixture(params=MAKERS)
def strategy(request):
    with MAKERS[request.param]() as made:
        yield made


@pytest.fixture(params=["central", "mirrored"])
def two(request):
    with MAKERS[request.param]() as made:
        yield made


def test_run_takes_tuples_and_lists(strategy):
    """RUN-1."""
    assert strategy.run(lambda a, b: a + b, args=(1, 2)) == 3
    assert strategy.run(lambda a, b: a + b, args=[1, 2]) == 3
    assert strategy.run(lambda a, *, b: a + b, args=(1,), kwargs={"b": 5}) == 6
    assert strategy.run(lambda: 4, options=sg.compat.RunOptions(bucketizing=True)) == 4


@pytest.mark.parametrize("args", [{"x": 1}, 5, "ab", torch.ones(2), {1}, None])
def test_other_arguments_are_refused(strategy, args):
    """RUN-1."""
    with pytest.raises(ValueError, match="expected a tuple or list"):
        strategy.run(lambda *_: None, args=args)


@pytest.mark.parametrize("fn", [None, 3, "step", torch.ones(1)])
def test_a_step_that_is_not_callable_raises(strategy, fn):
    """Issue 2.7."""
    with pytest.raises(TypeError, match="not callable"):
        strategy.run(fn)


def test_any_callable_will_do(strategy):
    """Spec 13.4; issue 2.3: closures, methods, lambdas, partials, modules."""

    class Trainer:
        def __init__(self):
            self.factor = 3

        def step(self, x):
            return x * self.factor

        def __call__(self, x):
            return x + self.factor

    trainer = Trainer()
    assert strategy.run(trainer.step, args=(2,)) == 6
    assert strategy.run(trainer, args=(2,)) == 5
    assert strategy.run(functools.partial(pow, 2), args=(5,)) == 32
    out = strategy.run(torch.nn.Identity(), args=(T([1.0]),))
    assert all(torch.equal(x, T([1.0])) for x in strategy.local_results(out))


def test_call_for_each_replica_does_not_check_args(two):
    """RUN-11."""
    assert two._call_for_each_replica(lambda a, b: a + b, "xy", None) == "xy"


def test_one_replica_and_slicing():
    """RUN-2, RUN-4: central storage with one device slices, one device does not."""
    value = sg.PerReplica([7])
    with MAKERS["central1"]() as central:
        assert central.run(lambda x: x, args=(value,)) == 7
    one = MAKERS["one"]()
    assert one.run(lambda x: x, args=(value,)) is value
    assert sg.get_strategy().run(lambda x: x, args=(value,)) is value


def test_local_results(two):
    """LOC-1."""
    value = sg.PerReplica([1, 2])
    assert two.local_results(value) == (1, 2)
    assert two.local_results({"a": value, "b": 3}) == ({"a": 1, "b": 3}, {"a": 2, "b": 3})
    assert two.local_results(5) == (5,)
    assert two.local_results([1, 2]) == ([1, 2], [1, 2])
    for single in (MAKERS["one"](), sg.get_strategy()):
        for given in (value, [1, 2], None):
            assert single.local_results(given) == (given,)


def test_values_from_function(two):
    """VFF-1: once per replica in order; always wrapped, nests recursed."""
    calls = []

    def value_fn(context):
        calls.append((context.replica_id_in_sync_group, context.num_replicas_in_sync))
        return {"same": 1, "own": [context.replica_id_in_sync_group]}

    made = two.distribute_values_from_function(value_fn)
    assert calls == [(0, 2), (1, 2)]
    assert made["same"].values == (1, 1)
    assert made["own"][0].values == (0, 1)
    with MAKERS["central1"]() as single:
        assert single.distribute_values_from_function(lambda _: 5).values == (5,)
    for bare in (MAKERS["one"](), sg.get_strategy()):
        assert bare.distribute_values_from_function(lambda c: c.num_replicas_in_sync) == 1
    with pytest.raises(TypeError, match="not callable"):
        two.distribute_values_from_function(5)


def test_copying(strategy):
    """CPY-1."""
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.copy(strategy)
    with copy.deepcopy(strategy) as twin:
        assert twin is not strategy
        assert type(twin) is type(strategy)
        assert twin._arguments() == strategy._arguments()
        with strategy.scope(), pytest.raises(RuntimeError, match="mixing"):
            twin.run(lambda: None)
        assert twin.run(lambda: sg.get_strategy()) is twin
    holder = copy.deepcopy({"a": strategy, "b": strategy})
    assert holder["a"] is holder["b"]
    holder["a"].close()


def test_repr_can_be_read(strategy):
    """repr is an expression that creates such a strategy; it is short, because errors contain it."""
    text = repr(strategy)
    assert text.startswith(type(strategy).__name__ + "(")
    assert "'cpu:0'" in text
    assert "gradient_aggregation" not in text
    assert "/job:" not in text
    arguments = {**strategy._arguments(), "gradient_aggregation": "sum"}
    for made in (strategy, type(strategy)(**arguments)):
        with eval(f"sg.{made!r}") as twin:
            assert repr(twin) == repr(made)


def test_gradient_aggregation(strategy):
    """Issue 2.2: a keyword on every strategy."""
    assert strategy.gradient_aggregation == "mean"
    arguments = {**strategy._arguments(), "gradient_aggregation": "sum"}
    with type(strategy)(**arguments) as summing:
        assert summing.gradient_aggregation == "sum"
    with pytest.raises(ValueError, match="gradient_aggregation='max' is not known"):
        type(strategy)(**{**arguments, "gradient_aggregation": "max"})


def test_single_machine_strategies_have_no_resolver(strategy):
    """RES-0, LIM-26, CSS-3."""
    assert strategy.cluster_resolver is None


def test_use_after_close(strategy):
    """Closing lets go of threads; the strategy makes new ones when it is used again."""
    strategy.close()
    strategy.close()
    assert strategy.run(lambda: 1) == 1
    with strategy.scope():
        assert sg.get_strategy() is strategy


def test_a_failed_call_leaves_nothing_changed(strategy):
    """Issue 2.7."""
    for bad in (
        lambda: strategy.run(3),
        lambda: strategy.run(lambda: None, args=3),
        lambda: strategy.reduce("x", 1, axis=None),
        lambda: strategy.run(lambda: 1 / 0),
    ):
        with pytest.raises((TypeError, ValueError, ZeroDivisionError)):
            bad()
        assert not sg.has_strategy()
        assert sg.get_replica_context() is not None
    assert strategy.run(lambda: 2) == 2


def test_attributes_that_do_not_exist(strategy):
    """Unknown names stay AttributeErrors."""
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        _ = strategy.runn
    with pytest.raises(AttributeError):
        _ = strategy._no_such_hook


def test_subclasses_must_fill_the_hooks():
    """`Strategy` is abstract."""
    with pytest.raises(TypeError, match="abstract"):
        sg.Strategy()
