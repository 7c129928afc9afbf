"""Replicas side by side: how they meet, and what happens when one fails, leaves or never arrives."""

from __future__ import annotations

import contextvars
import signal
import sys
import threading
import time
import traceback

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meeting import me, meet
from waiting import wait_until

import stratagem as sg
from stratagem._core import context
from stratagem._core.rendezvous import Rendezvous
from stratagem.errors import ReplicaTimeout

LIMIT_S = 60.0


@pytest.fixture(params=[2, 3])
def strategy(request):
    with sg.MirroredStrategy([f"cpu:{i}" for i in range(request.param)]) as made:
        yield made


@pytest.fixture(params=[2, 3])
def parallel(request):
    devices = [f"cpu:{i}" for i in range(request.param)]
    with sg.MirroredStrategy(devices, parallel_replicas=True) as made:
        yield made


@pytest.fixture(scope="module")
def three():
    with sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as made:
        made.run(lambda: None)  # its threads are the module's, not the first test's
        yield made


# ------------------------------------------------------------------ side by side


def test_parallel_replicas_run_at_the_same_time(parallel):
    """Issue 2.4: side by side, each on its own thread: replica 0 on the caller's, the others on named ones."""
    strategy = parallel
    barrier = threading.Barrier(strategy.num_replicas_in_sync)

    def step():
        barrier.wait(LIMIT_S)
        return threading.current_thread().name

    first, *others = strategy.run(step).values
    assert first == threading.current_thread().name
    assert others == [
        f"MirroredStrategy-replica-{i}" for i in range(1, strategy.num_replicas_in_sync)
    ]


def test_replicas_take_turns_in_their_order(strategy):
    """Issue 20.6: between two rendezvous one replica runs, then the next. The last to arrive goes on first."""
    size = strategy.num_replicas_in_sync
    seen = []

    def step():
        for phase in range(3):
            for _ in range(20):
                seen.append((phase, me()))
                time.sleep(0)  # offers the interpreter to other threads
            meet(None, lambda values: values)

    strategy.run(step)
    orders = [[*range(size)]]
    for _ in range(2):
        *others, last = orders[-1]
        orders.append([last, *sorted(others)])
    in_turns = [(phase, i) for phase, order in enumerate(orders) for i in order for _ in range(20)]
    assert seen == in_turns


def test_a_replica_goes_on_until_it_needs_the_result(strategy):
    """A meeting where nobody waits costs no change of turns; the last to arrive combines."""
    size = strategy.num_replicas_in_sync
    seen, total = [], []

    def combine(brought):
        seen.append("combined")
        total.append(sum(brought))
        return total * size

    def step():
        context.current_replica().is_ahead = meet(me(), combine, waits=False) is None
        seen.append(("went on", me()))
        if context.current_replica().is_ahead:
            context.current_replica().group.wait(me())
        seen.append(("needed it", me()))
        return total[0]

    assert strategy.run(step) == sum(range(size))
    last = size - 1
    order = [*range(last)]
    assert seen == [
        *[("went on", i) for i in order],
        "combined",
        ("went on", last),
        ("needed it", last),
        *[("needed it", i) for i in order],
    ]


@settings(max_examples=150, deadline=None)
@given(
    plans=st.lists(st.lists(st.sampled_from(["waits", "goes on", "late"]), max_size=4),
                   min_size=3, max_size=3),
    leaves=st.booleans(),
)  # fmt: skip
def test_meetings_are_combined_in_order_whoever_goes_on(three, plans, leaves):
    """Replicas wait, go on, or go on and wait later; one without rows leaves: every meeting is combined once."""
    rows = [1, 1, 0] if leaves else [1, 1, 1]
    batch = sg.PerReplica([torch.zeros(n) for n in rows])
    combined = []

    def step(_):
        group = context.current_replica().group
        for place, how in enumerate(plans[me()]):

            def combine(brought, place=place):
                combined.append((place, brought))
                return [place] * 3

            found = meet(me(), combine, label=f"place {place}", waits=how == "waits")
            assert found in ((place,) if how == "waits" else (place, None))
            if how == "late":
                group.wait(me())
            if how != "goes on" or found is not None:
                assert combined[-1][0] >= place
        return "done"

    lengths = [len(plan) for plan in plans]
    if lengths[0] == lengths[1] and (
        lengths[2] == lengths[0] or (leaves and lengths[2] < lengths[0])
    ):
        assert three.run(step, args=(batch,)) == "done"
        assert combined == [
            (place, [i if place < lengths[i] else None for i in range(3)])
            for place in range(lengths[0])
        ]
    else:
        with pytest.raises(sg.errors.ReplicaMismatch):
            three.run(step, args=(batch,))
    assert three.run(me).values == (0, 1, 2)


def test_an_error_of_a_meeting_where_nobody_waits_ends_the_run(strategy):
    """A replica that has gone on cannot be given the error."""
    trail = []

    def combine(brought):
        raise ZeroDivisionError("together")

    def step():
        try:
            meet(0, combine, waits=False)
            meet(0, lambda brought: brought, label="next")
            trail.append("went on")
        finally:
            trail.append(me())

    with pytest.raises(ZeroDivisionError, match="together") as caught:
        strategy.run(step)
    assert sorted(trail) == [*range(strategy.num_replicas_in_sync)]
    assert not hasattr(caught.value, "__notes__")
    assert strategy.run(lambda: 1) == 1


def test_a_replica_that_is_delayed_before_it_waits_takes_its_turn_once(monkeypatch):
    """Replica 1 has combined and come to the next rendezvous before replica 0 looks whether it may go on."""
    plain, delayed = Rendezvous._wait, []

    def wait(self, replica_id):
        if not delayed:
            delayed.append(replica_id)
            wait_until(lambda: 1 in self._waits_for)
        return plain(self, replica_id)

    monkeypatch.setattr(Rendezvous, "_wait", wait)

    def step():
        return [meet(me(), lambda values: [sum(values)] * len(values)) for _ in range(3)]

    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as two:
        assert two.run(step) == [1, 1, 1]
    assert delayed == [0]


def test_a_replica_that_waits_for_a_later_one_is_named(monkeypatch):
    """Replicas take turns: replica 2 cannot run while replica 1 waits for it outside a rendezvous."""
    monkeypatch.setenv("STRATAGEM_REPLICA_TIMEOUT_S", "0.3")
    arrived = threading.Event()

    def step():
        if me() == 1:
            arrived.wait(LIMIT_S)
        if me() == 2:
            arrived.set()

    with sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        with pytest.raises(ReplicaTimeout, match=r"replicas \[2\] waited 0.3 s for \[<Replica 1"):
            strategy.run(step)
        arrived.set()
        assert strategy.run(lambda: 1) == 1


def test_threads_are_kept_between_runs(strategy):
    """The same threads serve run after run."""
    first = strategy.run(threading.get_ident).values
    assert strategy.run(threading.get_ident).values == first


def test_fn_is_called_once_per_replica(strategy):
    """RUN-5."""
    calls = []
    strategy.run(lambda: calls.append(me()))
    assert sorted(calls) == list(range(strategy.num_replicas_in_sync))


# ------------------------------------------------------------------ meeting


def test_merge_call_merges_and_hands_back(strategy):
    """CTX-30."""
    size = strategy.num_replicas_in_sync
    caller = threading.get_ident()
    seen = []

    def together(current, number, shared, *, named):
        seen.append((current, threading.get_ident(), sg.in_cross_replica_context(), shared, named))
        total = sum(current.local_results(number))
        return {"total": total, "own": sg.PerReplica([10 * v for v in number.values])}

    def step():
        return sg.get_replica_context().merge_call(
            together, args=(me() + 1, "x"), kwargs={"named": 7}
        )

    result = strategy.run(step)
    assert seen == [(strategy, caller, True, "x", 7)], "once, on the caller's thread"
    assert result["total"] == size * (size + 1) // 2
    assert result["own"].values == tuple(10 * (i + 1) for i in range(size))


def test_merge_call_leaves_variables_whole(two):
    """CTX-30: variables are not cut into components."""
    with two.scope():
        variable = sg.Variable(1.0)
    got = two.run(lambda: sg.get_replica_context().merge_call(lambda _, v: v, args=(variable,)))
    assert got is variable


def test_replica_zeros_function_is_used(two):
    """CTX-30."""
    functions = [lambda _: "zero", lambda _: "one"]
    assert two.run(lambda: sg.get_replica_context().merge_call(functions[me()])) == "zero"


def test_a_function_kept_for_tf_may_hold_a_merge_call(strategy):
    """CTX-34, 13.4: nothing is traced, so ``sg.compat.function`` around either is no obstacle."""

    @sg.compat.function
    def inner():
        return sg.get_replica_context().merge_call(
            lambda strategy, value: sum(strategy.local_results(value)), args=(me(),)
        )

    @sg.compat.function
    def step():
        return inner() + 1

    size = strategy.num_replicas_in_sync
    assert strategy.run(step) == size * (size - 1) // 2 + 1


def test_replica_zero_records_each_step_once(strategy):
    """CTX-23: a summary writer is the user's; the number in the context is an ordinary condition."""
    written = []

    def step(number):
        if sg.get_replica_context().replica_id_in_sync_group == 0:
            written.append(number)

    for number in range(3):
        strategy.run(step, args=(number,))
    assert written == [0, 1, 2]


def test_the_first_runs_warn_of_nothing(caplog, recwarn):
    """RUN-12: TF warns that running eagerly is slow; here it is how steps run (13.9)."""
    caplog.set_level(0)
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as fresh:
        for _ in range(6):
            fresh.run(me)
    assert [record for record in caplog.records if record.levelno >= 30] == []
    assert len(recwarn) == 0


def test_many_meetings_in_a_row(strategy):
    """Meetings do not mix up, whoever is faster."""
    size = strategy.num_replicas_in_sync

    def step():
        total = 0
        for turn in range(200):
            total += meet(turn * me(), lambda brought: [sum(brought)] * size)
        return total

    assert strategy.run(step) == sum(t * sum(range(size)) for t in range(200))


def test_unequal_numbers_of_meetings(strategy):
    """CTX-31."""

    def step():
        for _ in range(1 + (me() == 0)):
            sg.get_replica_context().merge_call(lambda _: None)

    with pytest.raises(RuntimeError, match="different number of merge_call"):
        strategy.run(step)
    assert strategy.run(me).values == tuple(range(strategy.num_replicas_in_sync))


def test_meeting_in_different_places(two):
    """AR-5, CTX-31: different collectives are detected, not waited for."""

    def step():
        if me() == 0:
            return sg.get_replica_context().all_reduce("sum", torch.ones(1))
        return sg.get_replica_context().all_gather(torch.ones(1), axis=0)

    with pytest.raises(sg.errors.ReplicaMismatch, match="met in different places"):
        two.run(step)


def test_an_error_in_merge_fn_comes_out_unchanged(two):
    """CTX-32."""
    error = LookupError("mine")

    def merge(_):
        raise error

    with pytest.raises(LookupError) as caught:
        two.run(lambda: sg.get_replica_context().merge_call(merge))
    assert caught.value is error
    assert not getattr(error, "__notes__", None)


def test_an_error_in_a_meeting_can_be_caught_by_every_replica(strategy):
    """What combine raises is raised in all replicas alike, and the run may go on."""

    def combine(brought):
        raise ZeroDivisionError

    def step():
        try:
            meet(1, combine)
        except ZeroDivisionError:
            return meet(me(), lambda brought: [sum(brought)] * len(brought))
        return None

    size = strategy.num_replicas_in_sync
    assert strategy.run(step) == sum(range(size))


def test_run_inside_a_meeting(two):
    """A merge function may use run: spare threads serve it."""

    def merge(current):
        return current.reduce("sum", current.run(lambda: torch.tensor(float(me() + 1))), axis=None)

    assert two.run(lambda: sg.get_replica_context().merge_call(merge)) == 3.0


def test_meet_in_a_group_of_one():
    """One replica meets nobody, in cross-replica context all the same."""
    strategy = sg.OneDeviceStrategy("cpu")

    def step():
        return meet(4, lambda brought: [(brought, sg.in_cross_replica_context())])

    assert strategy.run(step) == ([4], True)


# ------------------------------------------------------------------ replicas without rows


def test_a_replica_without_rows_may_leave(strategy):
    """Contract 2: the others meet without it, and see None in its place."""
    size = strategy.num_replicas_in_sync
    batch = sg.PerReplica([torch.ones(2)] * (size - 1) + [torch.ones(0)])

    def step(x):
        if len(x) == 0:
            return None
        return meet(me(), lambda brought: [str(brought)] * size)

    result = strategy.run(step, args=(batch,)).values
    assert result == (str([*range(size - 1), None]),) * (size - 1) + (None,)


def test_a_replica_without_rows_may_return_nothing(two):
    """Where the others return a structure, it has None in every place; reductions leave it out."""
    batch = sg.PerReplica([torch.ones(2), torch.ones(0)])

    def step(x):
        return {"loss": x.sum(), "parts": (x, "same")} if len(x) else None

    result = two.run(step, args=(batch,))
    assert two.reduce("mean", result["loss"], axis=None) == 2.0
    assert result["parts"][1].values == ("same", None)
    with pytest.raises(AssertionError, match="different structures"):
        two.run(lambda: {"loss": 1} if me() == 0 else None)


def test_merge_call_without_a_replica_that_left(two):
    """Its component is None, and reductions leave it out."""
    batch = sg.PerReplica([torch.ones(2), torch.ones(0)])

    def step(x):
        if len(x) == 0:
            return None
        return sg.get_replica_context().merge_call(
            lambda current, value: current.reduce("sum", value, axis=None), args=(x.sum(),)
        )

    assert two.run(step, args=(batch,)).values == (torch.tensor(2.0), None)


def test_row_weights(two):
    """Weights follow the rows: 5 rows on 2 replicas count 3/5 and 2/5; 1 row counts 1 and 0."""

    def weights():
        return context.current_replica().group.row_weights

    def of(*batch):
        return two.run(lambda *_: weights(), args=batch)

    rows = lambda *sizes: sg.PerReplica([torch.zeros(n, 3) for n in sizes])
    assert two.run(weights) == (0.5, 0.5)
    assert of(rows(3, 2)) == (0.6, 0.4)
    assert of(rows(1, 0)) == (1.0, 0.0)
    assert of(rows(0, 0)) == (0.5, 0.5)
    assert of(torch.zeros(7), sg.PerReplica([1, 2]), {"x": rows(3, 1)}) == (0.75, 0.25)
    assert of(sg.PerReplica([torch.tensor(1.0), torch.tensor(2.0)])) == (0.5, 0.5)
    told = sg.PerReplica([torch.zeros(4), torch.zeros(4)], rows=(1, 3))
    assert of(rows(5, 5), told) == (0.25, 0.75), "what a dataset says wins"
    nested = sg.PerReplica([(torch.zeros(3), 1), (torch.zeros(1), 2)])
    assert of(nested) == (0.75, 0.25)


# ------------------------------------------------------------------ failing


def test_an_exception_keeps_type_traceback_and_tells_the_replica(strategy):
    """RUN-8; issue 2.3."""
    last = strategy.num_replicas_in_sync - 1

    class MineError(Exception):
        pass

    def deep():
        raise MineError("so it goes")

    def step():
        if me() == last:
            deep()
        return meet(0, lambda brought: brought)

    with pytest.raises(MineError, match="so it goes") as caught:
        strategy.run(step)
    assert any("in deep" in line for line in traceback.format_tb(caught.value.__traceback__))
    assert any(f"Replica {last} of" in note for note in caught.value.__notes__)
    assert strategy.run(lambda: 1) == 1, "usable afterwards"


def test_waiting_replicas_unwind(two):
    """RUN-8: finally blocks of the others run; their own code cannot go on."""
    trail = []

    def step():
        if me() == 1:
            raise KeyError("one")
        try:
            meet(0, lambda brought: brought)
            trail.append("went on")
        finally:
            trail.append("unwound")

    with pytest.raises(KeyError):
        two.run(step)
    assert trail == ["unwound"]


def test_unwinding_passes_through_backward(two):
    """A replica waiting inside autograd's engine unwinds too."""

    def step():
        x = torch.ones(2, requires_grad=True)
        y = sg.get_replica_context().all_reduce("sum", x * 2)
        if me() == 1:
            raise KeyError("one")
        y.sum().backward()

    with pytest.raises(KeyError):
        two.run(step)
    assert two.run(lambda: 1) == 1


def test_the_lowest_replicas_error_is_raised_and_the_others_are_named(parallel):
    """No error is lost, and the choice does not depend on timing."""
    strategy = parallel
    barrier = threading.Barrier(strategy.num_replicas_in_sync)

    def step():
        barrier.wait(LIMIT_S)
        raise ValueError(f"number {me()}")

    with pytest.raises(ValueError, match="number 0") as caught:
        strategy.run(step)
    notes = "\n".join(caught.value.__notes__)
    assert "replica 1 also failed: ValueError: number 1" in notes


def test_a_base_exception_reaches_the_caller(two):
    """SystemExit in a replica is not swallowed by its thread."""

    def step():
        sys.exit(3)

    with pytest.raises(SystemExit):
        two.run(step)


def test_a_replica_that_never_arrives(monkeypatch):
    """Issue 2.4: an error after a configurable limit, naming who waits for whom; then all is well."""
    monkeypatch.setenv("STRATAGEM_REPLICA_TIMEOUT_S", "3")
    release = threading.Event()
    with sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:

        def step():
            if me() == 1:
                release.wait(LIMIT_S)
            return meet(0, lambda brought: brought)

        with pytest.raises(
            sg.errors.ReplicaTimeout, match=r"Replica 1 of 3.*did not arrive"
        ) as caught:
            strategy.run(step)
        assert caught.value.missing == (1,)
        assert set(caught.value.waiting) == {0, 2}
        assert caught.value.limit_s == 3.0
        assert isinstance(caught.value, TimeoutError)
        assert any("left behind" in note for note in caught.value.__notes__)
        assert strategy.run(me).values == (0, 1, 2), "a fresh thread took the stuck one's place"
        release.set()


def test_replicas_that_run_at_the_same_time_do_not_wait_long_for_replica_zero(monkeypatch):
    """It runs on the caller's thread, which gets the error as soon as replica 0 goes on."""
    monkeypatch.setenv("STRATAGEM_REPLICA_TIMEOUT_S", "1")
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], parallel_replicas=True) as strategy:

        def step():
            if me() == 0:
                group = context.current_replica().group
                wait_until(lambda: group.aborted)
            return meet(0, lambda brought: brought)

        with pytest.raises(sg.errors.ReplicaTimeout) as caught:
            strategy.run(step)
        assert (caught.value.missing, caught.value.waiting) == ((0,), (1,))
        assert strategy.run(me).values == (0, 1)


def test_ctrl_c_ends_a_step_that_is_stuck_in_replica_zero(two):
    """As on one device: the error comes from the line at which the step is stuck, and names the replica."""
    stuck = threading.Event()

    def interrupt():
        stuck.wait(LIMIT_S)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def step():
        stuck.set()
        threading.Event().wait(LIMIT_S)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        two.run(step)
    helper.join(LIMIT_S)
    assert any("in <Replica 0 of 2" in note for note in caught.value.__notes__)
    assert any(frame.name == "step" for frame in traceback.extract_tb(caught.value.__traceback__))
    assert two.run(me).values == (0, 1)


def test_slow_combining_is_not_a_timeout(monkeypatch):
    """The limit is for arriving, not for what is done together."""
    monkeypatch.setenv("STRATAGEM_REPLICA_TIMEOUT_S", "2")
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:

        def merge(_):
            deadline = time.monotonic() + 2.5
            while time.monotonic() < deadline:
                torch.ones(10).sum()
            return 5

        assert strategy.run(lambda: sg.get_replica_context().merge_call(merge)) == 5


@pytest.mark.parametrize("text", ["0", "-1", "soon"])
def test_the_limit_must_be_a_duration(monkeypatch, two, text):
    """Bad settings are refused with their name and value."""
    monkeypatch.setenv("STRATAGEM_REPLICA_TIMEOUT_S", text)
    with pytest.raises(ValueError, match=f"STRATAGEM_REPLICA_TIMEOUT_S='{text}'"):
        two.run(lambda: None)


# ------------------------------------------------------------------ everything at once


class BoomError(Exception):
    """Raised by a replica on purpose."""


@settings(max_examples=120, deadline=None)
@given(
    plans=st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=3, max_size=3),
    rows=st.lists(st.integers(0, 2), min_size=3, max_size=3),
)
def test_whatever_replicas_do_the_run_ends_and_the_next_one_works(three, plans, rows):
    """Any mixture of meeting, failing, leaving early and having no rows: never a hang."""
    batch = sg.PerReplica([torch.zeros(n) for n in rows])

    def step(_):
        meetings, fails = plans[me()]
        for turn in range(meetings):
            meet(turn, lambda brought: brought)
        if fails:
            raise BoomError
        return "done"

    present = [i for i in range(3) if rows[i] or not any(rows)]
    lengths = {plans[i][0] for i in present}
    absent = [i for i in range(3) if i not in present]
    fine = (
        len(lengths) == 1
        and not any(fails for _, fails in plans)
        and all(plans[i][0] <= min(lengths) for i in absent)
    )
    if fine:
        assert three.run(step, args=(batch,)) == "done"
    else:
        with pytest.raises((BoomError, sg.errors.ReplicaMismatch)) as caught:
            three.run(step, args=(batch,))
        if isinstance(caught.value, BoomError):
            assert any(fails for _, fails in plans)
    assert three.run(me).values == (0, 1, 2)


def test_ctrl_c_ends_a_run(two):
    """KeyboardInterrupt reaches the caller while replicas work, and they unwind."""

    def step():
        if me() == 0:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            meet(0, lambda brought: brought)
        return "never interrupted"

    with pytest.raises(KeyboardInterrupt):
        two.run(step)
    assert two.run(me).values == (0, 1)


def test_runs_of_several_threads_merge_their_tensors_in_turn():
    """The end of a run belongs to its turn: buffers and gradients are one set for all threads."""
    failed = []
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            norm = torch.nn.BatchNorm1d(3)
        x = sg.PerReplica([torch.ones(2, 3), torch.zeros(2, 3)])

        def train():
            try:
                for _ in range(50):
                    strategy.run(lambda part: norm(part).sum().backward(), args=(x,))
            except Exception as error:  # whatever it is, shown below
                failed.append(error)

        several = [threading.Thread(target=train) for _ in range(4)]
        for each in several:
            each.start()
        for each in several:
            each.join()
        assert not failed
        assert int(norm.num_batches_tracked) == 200


def test_replicas_see_the_callers_context_variables():
    """Each in a copy of its own, as with one device what the caller set is what the step finds."""
    variable = contextvars.ContextVar("variable", default="nobody's")
    variable.set("the caller's")

    def step():
        seen = variable.get()
        variable.set("a replica's")
        return seen

    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        assert strategy.run(step) == "the caller's"
    assert variable.get() == "the caller's"


def test_errors_without_a_text_and_errors_raised_again_are_noted_once():
    class Mute(Exception):
        def __str__(self):
            return self.missing

    known = ValueError("known")
    started = threading.Barrier(2)  # both fail, whoever is first

    def step():
        number = int(sg.get_replica_context().replica_id_in_sync_group)
        started.wait(timeout=120)
        raise known if number == 0 else Mute

    with sg.MirroredStrategy(["cpu:0", "cpu:1"], parallel_replicas=True) as strategy:
        for _ in range(3):
            with pytest.raises(ValueError, match="known"):
                strategy.run(step)
    notes = known.__notes__
    assert sum("in <Replica 0" in note for note in notes) == 1
    assert "(replica 1 also failed: Mute, whose text raised AttributeError)" in notes


def test_keyword_arguments_that_are_no_mapping_are_refused():
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        for given in ([1], ("a",), 3):
            with pytest.raises(TypeError, match=r"kwargs=.*expected a dict"):
                strategy.run(print, kwargs=given)
