"""Contexts: scopes, replicas, and what each thread believes (spec section 1)."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

import stratagem as sg
from stratagem._core import context
from stratagem._strategies.default import DefaultStrategy


@pytest.fixture
def two():
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


@pytest.fixture
def one():
    with sg.OneDeviceStrategy("cpu:0") as strategy:
        yield strategy


def state():
    replica = sg.get_replica_context()
    return (
        sg.get_strategy(),
        sg.has_strategy(),
        sg.in_cross_replica_context(),
        None if replica is None else int(replica.replica_id_in_sync_group),
    )


def test_a_thread_starts_in_the_default_replica_context():
    """CTX-1."""
    default = sg.get_strategy()
    assert state() == (default, False, False, 0)
    replica = sg.get_replica_context()
    assert type(replica.replica_id_in_sync_group) is int
    assert replica.num_replicas_in_sync == 1
    assert replica.strategy is default
    assert sg.get_strategy() is default, "the default strategy is one object"
    assert context.current_replica() is None


@pytest.mark.parametrize("where", ["default", "cross", "replica", "merge"])
def test_exactly_one_of_replica_and_cross_replica(two, where):
    """CTX-2."""
    seen = []

    def look(*_):
        seen.append((sg.get_replica_context() is not None, sg.in_cross_replica_context()))

    if where == "default":
        look()
    elif where == "cross":
        with two.scope():
            look()
    elif where == "replica":
        two.run(look)
    else:
        two.run(lambda: sg.get_replica_context().merge_call(look))
    assert seen
    assert all(a != b for a, b in seen)
    assert seen[0][1] == (where in ("cross", "merge"))


def test_there_is_one_default_strategy():
    """CTX-3."""
    default = sg.get_strategy()
    with pytest.raises(RuntimeError, match="one default strategy per process"):
        DefaultStrategy()
    with pytest.raises(RuntimeError):
        copy.deepcopy(default)
    with pytest.raises(RuntimeError):
        copy.copy(default)


def test_scope_makes_a_strategy_current_and_restores(two):
    """CTX-4."""
    before = state()
    with two.scope() as given:
        assert given is two
        assert state() == (two, True, True, None)
    assert state() == before
    with pytest.raises(KeyError):
        with two.scope():
            raise KeyError
    assert state() == before


def test_scopes_of_one_strategy_nest_and_can_be_reused(two):
    """CTX-5."""
    scope = two.scope()
    with scope, two.scope(), scope:
        assert sg.get_strategy() is two
    assert not sg.has_strategy()
    with scope:
        with scope:
            pass
        assert sg.get_strategy() is two, "only the outermost exit restores"
    assert not sg.has_strategy()


def test_strategies_do_not_mix(one, two):
    """CTX-6."""
    with two.scope():
        for call in (
            lambda: one.scope().__enter__(),
            lambda: one.run(lambda: None),
            lambda: one.reduce("sum", 1, axis=None),
            lambda: one.gather(1, axis=0),
        ):
            with pytest.raises(RuntimeError, match="mixing different strategy objects"):
                call()
        assert sg.get_strategy() is two
    with pytest.raises(RuntimeError, match="mixing different strategy objects"):
        two.run(lambda: one.run(lambda: None))


@pytest.mark.parametrize("kind", ["one", "two"])
def test_own_replica_context_is_not_cross_replica(kind, request):
    """CTX-7, GAT-4, RUN-11: in a replica, scope, run and reduce are refused; gather has its own hint."""
    strategy = request.getfixturevalue(kind)
    for call, hint in (
        (lambda: strategy.scope().__enter__(), "merge_call"),
        (lambda: strategy.run(lambda: None), "merge_call"),
        (lambda: strategy.reduce("sum", 1, axis=None), "merge_call"),
        (lambda: strategy.gather(torch.ones(1), axis=0), "all_gather"),
        (lambda: strategy._call_for_each_replica(lambda: None, (), None), "merge_call"),
    ):
        with pytest.raises(RuntimeError, match=hint):
            strategy.run(call)
    assert strategy.run(lambda: 5) == 5


def test_the_default_scope_is_almost_a_no_op(two):
    """CTX-8."""
    default = sg.get_strategy()
    before = state()
    with default.scope() as given, default.scope():
        assert given is default
        assert state() == before
        with two.scope():
            assert sg.get_strategy() is two
            with pytest.raises(RuntimeError, match="mixing"):
                sg.Variable(1.0)
    with two.scope():
        with pytest.raises(RuntimeError, match="must not nest"):
            default.scope().__enter__()
        sg.Variable(1.0)
    assert state() == before


def test_leaving_a_scope_before_an_inner_device_scope_is_refused(two):
    """CTX-9: and the exit succeeds after the inner scope is closed."""
    scope = two.scope()
    scope.__enter__()
    device = torch.device("cpu")
    device.__enter__()
    with pytest.raises(RuntimeError, match="device scope"):
        scope.__exit__(None, None, None)
    assert sg.get_strategy() is two
    device.__exit__(None, None, None)
    scope.__exit__(None, None, None)
    assert not sg.has_strategy()


def test_scopes_are_left_in_order_and_once(two):
    """A scope object that is not the innermost one, or not open at all, refuses to be left."""
    outer, inner = two.scope(), two.scope()
    with pytest.raises(RuntimeError, match="not the innermost"):
        outer.__exit__(None, None, None)
    with outer:
        inner.__enter__()
        with pytest.raises(RuntimeError, match="not the innermost"):
            outer.__exit__(None, None, None)
        inner.__exit__(None, None, None)
        with pytest.raises(RuntimeError, match="not the innermost"):
            inner.__exit__(None, None, None)
    assert not sg.has_strategy()


def test_the_state_belongs_to_the_thread(two):
    """CTX-10: a thread started in a scope or in a replica begins in the default context."""
    seen = []

    def in_new_thread():
        thread = threading.Thread(target=lambda: seen.append(state()))
        thread.start()
        thread.join()

    with two.scope():
        in_new_thread()
    two.run(in_new_thread)
    assert seen == [(sg.get_strategy(), False, False, 0)] * 3


def test_set_strategy_is_a_scope_without_a_block(one, two):
    """CTX-11."""
    sg.set_strategy(one)
    try:
        assert state()[:3] == (one, True, True)
        sg.set_strategy(two)
        assert sg.get_strategy() is two
        with two.scope():
            for argument in (None, one, two):
                with pytest.raises(RuntimeError, match=r"with strategy\.scope"):
                    sg.set_strategy(argument)
    finally:
        sg.set_strategy(None)
    assert not sg.has_strategy()
    sg.set_strategy(None)
    with one.scope():
        for argument in (None, one, two):
            with pytest.raises(RuntimeError, match=r"with strategy\.scope"):
                sg.set_strategy(argument)
    with sg.get_strategy().scope(), pytest.raises(RuntimeError, match=r"with strategy\.scope"):
        sg.set_strategy(None)
    assert not sg.has_strategy()


def test_run_and_reduce_need_no_scope(two):
    """CTX-12, CTX-13: they work from the default context and from the own cross-replica context."""
    for _ in range(2):
        assert two.run(lambda: sg.get_strategy()) is two
        assert two.reduce("mean", 3.0, axis=None) == 3.0
        assert torch.equal(
            two.gather(sg.PerReplica([torch.ones(1), torch.ones(2)]), axis=0), torch.ones(3)
        )
    with two.scope():
        assert two.run(lambda: sg.get_strategy()) is two
        assert two.reduce("mean", 3.0, axis=None) == 3.0


def test_variables_record_their_strategy(one):
    """CTX-14."""
    assert sg.Variable(1.0).distribute_strategy is None
    with one.scope():
        assert sg.Variable(1.0).distribute_strategy is one


def test_scope_moves_no_computation(one):
    """CTX-15: operations in scope but outside run stay on the ordinary device."""
    with one.scope():
        assert torch.ones(1).device == torch.device("cpu")
        assert context.current_replica() is None


def test_replica_context_has_its_replica_id(one, two):
    """CTX-20."""

    def tell():
        me = sg.get_replica_context()
        return (me.replica_id_in_sync_group, me.num_replicas_in_sync, me.strategy, me.devices)

    id_, count, strategy, devices = one.run(tell)
    assert id_.dtype == torch.int32
    assert (int(id_), count, strategy) == (0, 1, one)
    assert devices == ("/job:localhost/replica:0/task:0/device:CPU:0",)
    ids, count, strategy, devices = two.run(tell)
    assert [int(i) for i in ids.values] == [0, 1]
    assert {i.dtype for i in ids.values} == {torch.int32}
    assert (count, strategy) == (2, two)
    parts = two.local_results(devices)
    assert parts == (
        [["/job:localhost/replica:0/task:0/device:CPU:0"]],
        [["/job:localhost/replica:0/task:0/device:CPU:1"]],
    )


@pytest.mark.parametrize("bad", ["0", 1.0, True, [0]])
def test_a_replica_context_needs_a_number(one, bad):
    """CTX-21."""
    with pytest.raises(ValueError, match="not a replica's number"):
        sg.ReplicaContext(one, bad)
    sg.ReplicaContext(one, 0)
    sg.ReplicaContext(one, torch.tensor(1))
    sg.ReplicaContext(one, None)


def test_a_replica_context_works_only_where_it_is_active(one, two):
    """CTX-22."""
    kept = one.run(sg.get_replica_context)
    uses = (
        lambda c: c.merge_call(lambda _: None),
        lambda c: c.all_reduce("sum", torch.ones(1)),
        lambda c: c.all_gather(torch.ones(1), 0),
        lambda c: c.devices,
    )
    for use in uses:
        with pytest.raises(RuntimeError, match="inside the function given to run"):
            use(kept)
        with one.scope(), pytest.raises(RuntimeError, match="inside the function given to run"):
            use(kept)
        with pytest.raises(RuntimeError, match="mismatching context"):
            one.run(lambda: use(kept))
        with pytest.raises(RuntimeError, match="mismatching strategies"):
            two.run(lambda: use(kept))
        default = sg.get_replica_context()
        with pytest.raises(RuntimeError, match="mismatching strategies"):
            one.run(lambda: use(default))


def test_default_and_one_device_merge_call(one):
    """CTX-33: called with the strategy, in cross-replica context, arguments as they are."""
    seen = []

    def merge(strategy, x, *, y):
        seen.append((strategy, sg.in_cross_replica_context(), sg.has_strategy(), x))
        return x + y

    default = sg.get_strategy()
    assert sg.get_replica_context().merge_call(merge, args=(1,), kwargs={"y": 2}) == 3
    assert (
        one.run(lambda: sg.get_replica_context().merge_call(merge, args=(3,), kwargs={"y": 4})) == 7
    )
    assert seen == [(default, True, False, 1), (one, True, True, 3)]
    with pytest.raises(TypeError, match="needs a function"):
        sg.get_replica_context().merge_call(3)


def test_value_context():
    """CTX-40."""
    assert (sg.ValueContext().replica_id_in_sync_group, sg.ValueContext().num_replicas_in_sync) == (
        0,
        1,
    )
    value = sg.ValueContext(1, 2)
    assert (value.replica_id_in_sync_group, value.num_replicas_in_sync) == (1, 2)
    for name in ("replica_id_in_sync_group", "num_replicas_in_sync"):
        with pytest.raises(AttributeError):
            setattr(value, name, 5)


def test_input_context():
    """CTX-41."""
    first = sg.InputContext()
    assert (first.num_input_pipelines, first.input_pipeline_id, first.num_replicas_in_sync) == (
        1,
        0,
        1,
    )
    four = sg.InputContext(num_input_pipelines=3, input_pipeline_id=2, num_replicas_in_sync=4)
    assert four.get_per_replica_batch_size(8) == 2
    assert four.get_per_replica_batch_size(0) == 0
    with pytest.raises(ValueError, match="10 does not divide evenly by the 4 replicas"):
        four.get_per_replica_batch_size(10)
    assert "id 2" in str(four)
    assert "total 3" in str(four)


def test_worker_index_exists_only_in_scheduled_functions():
    """CCO-40."""
    with pytest.raises(RuntimeError, match="outside a scheduled function"):
        sg.get_current_worker_index()
    with context.worker_index(2):
        assert sg.get_current_worker_index() == 2
        with context.worker_index(5):
            assert sg.get_current_worker_index() == 5
        assert sg.get_current_worker_index() == 2
    with pytest.raises(RuntimeError):
        sg.get_current_worker_index()


def test_function_returns_its_argument():
    """Spec 13.4."""

    def f():
        return 1

    assert sg.compat.function(f) is f


def test_colocate_needs_the_scope(one):
    """CTX-12: require_scope refuses outside, accepts in cross-replica and in replica context."""
    with pytest.raises(RuntimeError, match=r"needs to be inside `with strategy\.scope"):
        context.require_scope(one, "colocate_vars_with()")
    with one.scope():
        context.require_scope(one, "colocate_vars_with()")
    one.run(lambda: context.require_scope(one, "colocate_vars_with()"))


def test_representations_show_state(two):
    """Every object here says what it is."""
    assert "Scope of CentralStorageStrategy" in repr(two.scope())
    shown = two.run(lambda: (repr(sg.get_replica_context()), repr(context.current_replica())))
    assert shown[0].values[1] == "<ReplicaContext 1 of 2>"
    assert "Replica 1 of 2 on cpu:1" in shown[1].values[1]
    assert repr(sg.ValueContext(1, 2)) == "ValueContext(1, 2)"
