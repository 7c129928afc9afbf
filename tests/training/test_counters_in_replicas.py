"""Counters and numbers of a step on replicas, wherever the program keeps them and whatever code moves them (issue 20)."""

import collections
import dataclasses
import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stratagem as sg
from stratagem.errors import ReplicaError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(6, 2, generator=torch.Generator().manual_seed(2))
STEPS = 5  # the function is searched in the 1st, 2nd and 4th


class Holder:
    """An object with counters."""

    in_class = 0
    default = 0

    def __init__(self):
        self.steps = 0
        self.pos = 0
        self.stride = 3
        self.rows = 0
        self.calls = {"n": 0, "rows": 0, "rate": 1.0}

    def move(self):
        self.__count()

    def __count(self):
        self.steps += 1


@dataclasses.dataclass(slots=True)
class Slots:
    """An object without a dict."""

    steps: int = 0


GLOBAL = {"n": 0}
COUNT = 0


def by_helper(holder, x):
    bump(holder)
    return holder.steps


def bump(holder):
    holder.steps += 1


def by_helper_of_helper(holder, x):
    bump_twice(holder)
    return holder.steps


def bump_twice(holder):
    bump(holder)
    bump(holder)


def by_global_in_helper(holder, x):
    count()
    return COUNT


def count():
    global COUNT
    COUNT += 1


def by_stride(holder, x):
    holder.pos += holder.stride
    return holder.pos


def in_class(holder, x):
    type(holder).in_class += 1
    return Holder.in_class


def default_of_class(holder, x):
    holder.default += 1
    return holder.default


def in_dict(holder, x):
    holder.calls["n"] += 1
    holder.calls["rate"] *= 0.5
    holder.calls["rows"] += len(x)
    return holder.calls["n"] + holder.calls["rate"]


def in_dict_by_get(holder, x):
    holder.calls["new"] = holder.calls.get("new", 0) + 1
    return holder.calls["new"]


def in_global_dict(holder, x):
    GLOBAL["n"] += 1
    return GLOBAL["n"]


def in_dict_by_helper(holder, x):
    add(holder.calls, "n")
    return holder.calls["n"]


def add(counts, name):
    counts[name] += 1


LARGE = {f"key{k}": 0 for k in range(500)}
LIST = [0] * 300
COUNTER: collections.Counter = collections.Counter()
SLOTS = Slots()
NAMESPACE = types.SimpleNamespace(steps=0, more=types.SimpleNamespace(steps=0))


def in_large_dict(holder, x):
    LARGE["key7"] += 1
    return LARGE["key7"]


def in_list(holder, x):
    LIST[5] += 1
    LIST[6] += LIST[5]
    return LIST[5] + LIST[6]


def in_counter(holder, x):
    COUNTER["calls"] += 1
    return COUNTER["calls"]


def in_slots(holder, x):
    SLOTS.steps += 1
    return SLOTS.steps


def in_namespace(holder, x):
    NAMESPACE.steps += 1
    NAMESPACE.more.steps += 2
    return NAMESPACE.steps + NAMESPACE.more.steps


def by_local_variable(holder, x):
    before = holder.steps
    holder.steps = before + 1
    return holder.steps


def by_local_variable_in_dict(holder, x):
    before = holder.calls["n"]
    holder.calls["n"] = before + 1
    return holder.calls["n"]


def by_changed_local_variable(holder, x):
    steps = holder.steps
    steps += 1
    holder.steps = steps
    return holder.steps


def by_private_method(holder, x):
    holder.move()
    return holder.steps


def swapped(holder, x):
    holder.steps, holder.pos = holder.pos + 1, holder.steps
    return holder.steps + 2 * holder.pos


MOVES = [
    by_helper, by_helper_of_helper, by_global_in_helper, by_stride, in_class, default_of_class, in_dict, in_dict_by_get,
    in_global_dict, in_dict_by_helper, in_large_dict, in_list, in_counter, in_slots, in_namespace,
    by_local_variable, by_local_variable_in_dict, by_changed_local_variable, by_private_method, swapped,
]  # fmt: skip


def reset():
    global COUNT
    COUNT = 0
    Holder.in_class = 0
    GLOBAL["n"] = SLOTS.steps = NAMESPACE.steps = NAMESPACE.more.steps = 0
    LARGE["key7"] = LIST[5] = LIST[6] = 0
    COUNTER.clear()


def step_of(model, optimizer, holder, move, given, x, y):
    number = move(holder, x)
    optimizer.zero_grad()
    (F.mse_loss(model(x), y) / (1 + number)).backward()
    optimizer.step()
    given["seen"].append(number)


def train(strategy, move, how):
    """Train with a loss that depends on the counter; return the parameters and the counter's last value."""
    reset()
    torch.manual_seed(0)
    holder, given = Holder(), {"seen": []}
    if strategy is None:
        model = nn.Linear(4, 2)
    else:
        with strategy.scope():
            model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = functools.partial(step_of, model, optimizer, holder, move, given)
    if how == "closure":
        inner = step

        def step(x, y):
            inner(x, y)

    for _ in range(STEPS):
        if strategy is None:
            step(X, Y)
        elif how == "run_steps":
            list(strategy.run_steps(lambda batch: step(*batch), [(X, Y)]))
        else:
            strategy.run(step, args=[sg.PerReplica(list(each.split(3))) for each in (X, Y)])
    return model.state_dict(), given["seen"][-1], holder.calls["rows"]


@pytest.mark.parametrize("how", ["partial", "closure", "run_steps"])
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_numbers_move_once_per_step(pair, move, how):
    mine, plain = train(pair, move, how), train(None, move, how)
    assert mine[1:] == plain[1:]
    torch.testing.assert_close(mine[0], plain[0], rtol=1e-5, atol=1e-6)


def test_sums_over_rows_add_up_wherever_they_are(pair):
    """With equal halves: a sum of rows moves as much in every replica as a counter would."""
    holder, totals, sums = Holder(), {"rows": 0, "loss": 0.0, "steps": 0}, [0]

    def step(x):
        holder.rows += len(x)
        holder.calls["n"] += x.shape[0]
        totals["rows"] = totals["rows"] + len(x)
        sums[0] += x.size(0)
        count_rows(totals, x)
        totals["steps"] += 1

    def count_rows(totals, x):
        totals["loss"] += float(len(x))

    for _ in range(3):
        pair.run(step, args=(sg.PerReplica(list(X.split(3))),))
    assert (holder.rows, holder.calls["n"], sums) == (18, 18, [18])
    assert totals == {"rows": 18, "loss": 18.0, "steps": 3}


@pytest.mark.parametrize("place", ["attribute", "dict"])
def test_a_counter_that_depends_on_rows_is_refused_if_the_step_uses_it(pair, place):
    holder = Holder()

    def attribute(x):
        if x[0, 0] == X[0, 0]:
            holder.steps += 1
        scaled = x * holder.steps
        return scaled.sum()

    def item(x):
        if x[0, 0] == X[0, 0]:
            holder.calls["n"] += 1
        scaled = x * holder.calls["n"]
        return scaled.sum()

    with pytest.raises(ReplicaError, match=r"differs between the replicas(.|\n)*all_gather"):
        pair.run(
            attribute if place == "attribute" else item, args=(sg.PerReplica(list(X.split(3))),)
        )
    assert holder.steps == holder.calls["n"] == 0


def test_a_number_that_a_local_variable_carries_is_refused_if_it_depends_on_rows(pair):
    """It was the last replica's, without an error."""
    holder = Holder()

    def step(x):
        rows = holder.rows
        scaled = x * rows
        holder.rows = rows + int(100 * x[0, 0])
        return scaled.sum()

    with pytest.raises(
        ReplicaError, match=r"Holder\.rows differs between the replicas(.|\n)*all_gather"
    ):
        pair.run(step, args=(sg.PerReplica(list(X.split(3))),))
    assert holder.rows == 0


def test_a_time_that_every_step_replaces_is_no_error(pair):
    """The trainer of minGPT keeps when the last step began, and how long it took."""
    trainer, clock = types.SimpleNamespace(time=0.0, took=0.0), iter(range(1, 100))

    def step(x):
        now = float(next(clock))
        trainer.took = now - trainer.time
        trainer.time = now
        scaled = x * trainer.took
        return scaled.sum()

    for _ in range(3):
        pair.run(step, args=(sg.PerReplica(list(X.split(3))),))
    assert trainer.time == 6.0


def test_an_average_for_a_log_in_a_dict_is_no_error(pair):
    """Although code reads attributes of the same name."""
    meters, output = {"loss": 0.0}, types.SimpleNamespace(loss=torch.ones(()))

    def step(x):
        meters["loss"] = 0.5 * meters["loss"] + 0.5 * x.mean().item()
        print(f"{meters['loss']:.3f}")
        scaled = output.loss * x.mean()
        return scaled.sum()

    for _ in range(2):
        pair.run(step, args=(sg.PerReplica(list(X.split(3))),))
    last = X[3:].mean().item()
    assert meters["loss"] == pytest.approx(0.75 * last)


@pytest.mark.parametrize("place", ["attribute", "dict"])
def test_a_failed_step_leaves_the_counter(pair, place):
    holder = Holder()

    def step(x):
        holder.steps += 1
        holder.calls["n"] += 1
        raise KeyError(holder.steps + holder.calls["n"])

    with pytest.raises(KeyError, match="2"):
        pair.run(step, args=(sg.PerReplica(list(X.split(3))),))
    assert holder.steps == holder.calls["n"] == 0


def test_counters_that_the_step_uses_are_refused_if_replicas_run_at_the_same_time():
    holder = Holder()

    def step(x):
        holder.steps += 1
        scaled = x * holder.steps
        return scaled.sum()

    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"], parallel_replicas=True) as strategy:
        with pytest.raises(ReplicaError, match=r"Holder\.steps(.|\n)*parallel_replicas"):
            strategy.run(step, args=(sg.PerReplica(list(X.split(3))),))


class Loop:
    """A trainer whose own loop, which counts too, the step does not call."""

    def __init__(self):
        self.iterations = 0

    def run(self, batches):
        for _ in batches:
            self.iterations += 1


def test_a_loop_that_the_step_does_not_call_makes_no_sum_of_its_counter(pair):
    with pair.scope():
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = Loop()

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        loop.iterations += 1

    for _ in pair.run_steps(step, [(X, Y)] * STEPS):
        pass
    assert loop.iterations == STEPS
