"""Tensors that a step keeps between its calls: replicas that agree write them once (issue 20, points 6 and 12)."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stratagem as sg
from stratagem.errors import ReplicaError

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(2))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


# ------------------------------------------------------------------ moving averages


class ShadowList:
    """A moving average as in the package torch_ema: a list of tensors, written in place."""

    def __init__(self, model, decay=0.9):
        self.decay, self.updates, self.model = decay, 0, model
        self.shadow = [p.clone().detach() for p in model.parameters()]

    def update(self):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        with torch.no_grad():
            for s, p in zip(self.shadow, self.model.parameters(), strict=True):
                s.sub_((1 - decay) * (s - p))

    def values(self):
        return self.shadow


class ShadowDict(ShadowList):
    """The same, with new tensors in a dict at every update."""

    def __init__(self, model):
        super().__init__(model)
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters()}

    def update(self):
        for name, p in self.model.named_parameters():
            average = 0.1 * p.data + 0.9 * self.shadow[name]
            self.shadow[name] = average.clone()

    def values(self):
        return list(self.shadow.values())


class NewList(ShadowList):
    """The same, with another list at every update."""

    def update(self):
        self.shadow = [
            0.9 * s + 0.1 * p.detach()
            for s, p in zip(self.shadow, self.model.parameters(), strict=True)
        ]


class Seldom(ShadowList):
    """The same, in every third step only, after it was left alone for two."""

    def update(self):
        self.updates += 1
        if self.updates % 3 == 0:
            lerp(self.shadow, self.model)


def lerp(shadow, model):
    for s, p in zip(shadow, model.parameters(), strict=True):
        s.lerp_(p.detach(), 0.1)


class Added(ShadowList):
    """The same, by adding a difference that was computed before."""

    def update(self):
        for s, p in zip(self.shadow, self.model.parameters(), strict=True):
            difference = p.detach() - s
            s.add_(difference, alpha=0.1)


class ThroughData(ShadowList):
    """The same, through ``.data``, which counts no version."""

    def update(self):
        for s, p in zip(self.shadow, self.model.parameters(), strict=True):
            s.data.mul_(0.9).add_(p.data, alpha=0.1)


class OfParameters(ShadowList):
    """The same, for the parameters of a copy, in place under ``no_grad``."""

    def __init__(self, model):
        super().__init__(model)
        self.average = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self):
        for e, p in zip(self.average.parameters(), self.model.parameters(), strict=True):
            e.mul_(0.9).add_(p, alpha=0.1)

    def values(self):
        return [p.detach() for p in self.average.parameters()]


class OfListedParameters(OfParameters):
    """The same, for a list of parameters that was made outside the step."""

    def __init__(self, model):
        super().__init__(model)
        self.listed = list(self.average.parameters())

    @torch.no_grad()
    def update(self):
        for e, p in zip(self.listed, self.model.parameters(), strict=True):
            e.mul_(0.9).add_(p, alpha=0.1)


class ByAttribute(OfParameters):
    """The same, for parameters by their names."""

    @torch.no_grad()
    def update(self):
        self.average[0].weight.lerp_(self.model[0].weight, 0.1)


class Target(OfParameters):
    """A target network that follows in every third step (the DQN tutorial)."""

    def update(self):
        self.updates += 1
        if self.updates % 3 == 0:
            self.average.load_state_dict(self.model.state_dict())


class Clipped(ShadowList):
    """Clipping of trained weights in place."""

    @torch.no_grad()
    def update(self):
        for p in self.model.parameters():
            p.clamp_(-0.2, 0.2)


AVERAGES = [
    ShadowList, ShadowDict, NewList, Seldom, Added, ThroughData, OfParameters, OfListedParameters, ByAttribute, Target, Clipped,
]  # fmt: skip


def train(strategy, kind, steps=7):
    with sg.OneDeviceStrategy("cpu:0").scope() if strategy is None else strategy.scope():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        average = kind(model)

    def step(x, y):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        average.update()

    for number in range(steps):
        if number == 4:  # what code outside the step replaces is found again
            average.shadow = copy.deepcopy(average.shadow)
        if strategy is None:
            step(X, Y)
        else:
            strategy.run(step, args=[sg.PerReplica(list(each.chunk(2))) for each in (X, Y)])
    return [*(p.detach() for p in model.parameters()), *average.values()]


@pytest.mark.parametrize("kind", AVERAGES)
def test_averages_move_once_for_all_replicas(kind, pair):
    """Every replica computes the same average: it is written once, not once per replica."""
    for mine, plain in zip(train(pair, kind), train(None, kind), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ values that depend on rows


class Kept:
    """Values that depend on the rows of a replica."""

    def __init__(self):
        self.mean = torch.zeros(4)
        self.total = torch.zeros(())
        self.rows = torch.zeros((), dtype=torch.long)
        self.last = torch.zeros(4)
        self.hidden = torch.zeros(4)

    def average(self, x):
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)

    def carry(self, x):
        self.hidden = torch.tanh(self.hidden + x.mean(0))

    def add_up(self, x):
        self.total += x.sum()
        self.rows.add_(len(x))

    def scratch(self, x):
        self.last.copy_(x[0])
        assert torch.equal(self.last, x[0])
        sg.get_replica_context().all_reduce("sum", x.sum())
        assert torch.equal(self.last, x[0])  # not another replica's


@pytest.mark.parametrize(("method", "name"), [("average", "mean"), ("carry", "hidden")])
def test_a_kept_value_that_depends_on_rows_is_refused(method, name, pair):
    """The error names the attribute; the value is the one from before."""
    kept = Kept()

    def step(x):
        getattr(kept, method)(x)

    with pytest.raises(ReplicaError, match=rf"Kept\.{name}(.|\n)*merge_call"):
        pair.run(step, args=[sg.PerReplica([X[:4], X[4:]])])
    assert not getattr(kept, name).any()


def test_sums_over_rows_add_up(pair):
    kept = Kept()
    for _ in range(3):
        pair.run(kept.add_up, args=[sg.PerReplica([X[:5], X[5:]])])
        pair.run(lambda x: kept.add_up(x), args=[sg.PerReplica([X[:4], X[4:]])])
    assert int(kept.rows) == 48
    torch.testing.assert_close(kept.total, X.sum() * 6)


def test_a_tensor_that_was_replaced_may_be_written_after_the_replicas_have_met(pair):
    """Each replica goes on with its own new tensor; code that runs once replaces it for all."""
    kept = Kept()

    def step(x):
        context = sg.get_replica_context()
        kept.mean = 0.5 * kept.mean + 1
        context.all_reduce("sum", x.sum())
        kept.mean.mul_(2)
        context.all_reduce("sum", x.sum())
        context.merge_call(lambda strategy: setattr(kept, "mean", kept.mean + 3))
        kept.mean.add_(kept.mean)

    for _ in range(3):
        pair.run(step, args=[sg.PerReplica([X[:4], X[4:]])])
    expected = torch.zeros(4)
    for _ in range(3):
        expected = 2 * (2 * (0.5 * expected + 1) + 3)
    assert torch.equal(kept.mean, expected)


def test_a_counter_in_a_tensor_moves_once(pair):
    """A constant is added, not a value of the rows."""
    kept = Kept()

    def count(x):
        kept.rows += 1
        kept.total.add_(0.5)

    for _ in range(3):
        pair.run(count, args=[sg.PerReplica([X[:4], X[4:]])])
    assert (int(kept.rows), float(kept.total)) == (3, 1.5)


def test_each_replica_reads_what_it_has_written(pair):
    """A tensor that every step overwrites belongs to the replica for the whole run."""
    kept = Kept()
    for _ in range(3):
        pair.run(kept.scratch, args=[sg.PerReplica([X[:4], X[4:]])])
    assert torch.equal(kept.last, X[4])


class Reversible:
    """Statistics of the rows, kept for the end of the same step, in attributes named as functions of torch (RevIN)."""

    def normalise(self, x):
        self.mean = torch.mean(x, dim=1, keepdim=True).detach()
        self.norm = torch.linalg.norm(x, dim=1, keepdim=True).detach()
        return (x - self.mean) / self.norm

    def undo(self, x):
        return x * self.norm + self.mean


def test_an_attribute_named_as_a_function_of_a_module_is_not_computed_from_itself(pair):
    kept = Reversible()
    for _ in range(3):
        back = pair.run(
            lambda x: kept.undo(kept.normalise(x)), args=[sg.PerReplica([X[:4], X[4:]])]
        )
        torch.testing.assert_close(torch.cat(pair.local_results(back)), X)


class Smoothing:
    """Keeps what it computed for a plot, under the name of a local variable (the annotated transformer)."""

    shown = None

    def __call__(self, x):
        shown = x.clone()
        shown.fill_(0.1)
        shown[:, 0] = x[:, 1]
        self.shown = shown
        return (x * shown.clone()).sum()


def test_a_result_kept_under_the_name_of_a_local_variable_is_the_last_replicas(pair):
    smoothing = Smoothing()
    for _ in range(3):
        pair.run(lambda x: smoothing(x), args=[sg.PerReplica([X[:4], X[4:]])])
    assert torch.equal(smoothing.shown[:, 0], X[4:, 1])


def test_a_run_that_fails_leaves_the_kept_values(pair):
    model = mlp()
    average = ShadowList(model)
    before = copy.deepcopy(average.shadow)

    def step(x):
        with torch.no_grad():
            for s in average.shadow:
                s.mul_(0.5)
        if sg.get_replica_context().replica_id_in_sync_group == 1:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        pair.run(step, args=[sg.PerReplica([X[:4], X[4:]])])
    for now, then in zip(average.shadow, before, strict=True):
        assert torch.equal(now, then)


def test_a_tensor_written_in_merge_call_is_written_once(pair):
    average = ShadowList(mlp())

    def step(x):
        sg.get_replica_context().merge_call(lambda strategy: average.update())

    for _ in range(3):
        with torch.no_grad():
            for p in average.model.parameters():
                p.add_(1.0)
        pair.run(step, args=[sg.PerReplica([X[:4], X[4:]])])
    plain = ShadowList(mlp())
    for _ in range(3):
        with torch.no_grad():
            for p in plain.model.parameters():
                p.add_(1.0)
        plain.update()
    for mine, other in zip(average.shadow, plain.shadow, strict=True):
        assert torch.equal(mine, other)


def test_an_object_given_as_an_argument_moves_once(pair):
    average, plain = ShadowList(mlp()), ShadowList(mlp())
    for each in (average, plain):
        with torch.no_grad():
            for p in each.model.parameters():
                p.add_(1.0)
    plain.update()
    pair.run(lambda given, x: given.update(), args=(average, sg.PerReplica([X[:4], X[4:]])))
    for mine, other in zip(average.shadow, plain.shadow, strict=True):
        assert torch.equal(mine, other)


def test_replicas_that_run_at_the_same_time_may_not_move_a_kept_tensor():
    """A write of one replica cannot be told from another's."""
    average = ShadowList(mlp())
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], parallel_replicas=True) as strategy:
        with pytest.raises(ReplicaError, match=r"ShadowList\.shadow(.|\n)*parallel_replicas=True"):
            strategy.run(lambda x: average.update(), args=[sg.PerReplica([X[:4], X[4:]])])


def test_objects_kept_by_a_function_are_freed_with_the_strategy(make_strategy):
    average = ShadowList(mlp())
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        average.strategy = strategy
        strategy.run(average.update)
    gone = weakref.ref(average.shadow[0])
    del average, strategy
    gc.collect()
    assert gone() is None


Floats = torch.Tensor


def test_a_step_may_name_the_class_of_tensors(pair):
    """``Tensor = torch.FloatTensor`` of PyTorch-GAN: its methods are Python functions around builtin ones."""
    with pair.scope():
        model = mlp()

    def step(x):
        model(x).mean().backward()
        return Floats(2).fill_(1.0).sum()

    assert float(next(pair.run_steps(step, [X]))) == 2.0


# ------------------------------------------------------------------ the state of recurrent networks


class Recurrent:
    """A network whose state goes on to the next step (truncated back-propagation)."""

    def __init__(self, cell, *, detach_first):
        torch.manual_seed(0)
        self.rnn, self.out = cell(4, 5, batch_first=True), nn.Linear(5, 2)
        self.optimizer = torch.optim.SGD([*self.rnn.parameters(), *self.out.parameters()], lr=0.1)
        self.hidden, self.detach_first = None, detach_first

    def train(self, x, y):
        before = self.hidden
        if self.detach_first and before is not None:
            before = (
                tuple(each.detach() for each in before)
                if type(before) is tuple
                else before.detach()
            )
        found, after = self.rnn(x[:, None], before)
        self.optimizer.zero_grad()
        F.mse_loss(self.out(found[:, -1]), y).backward()
        self.optimizer.step()
        if not self.detach_first:
            after = (
                tuple(each.detach() for each in after) if type(after) is tuple else after.detach()
            )
        self.hidden = after


@pytest.mark.parametrize("detach_first", [True, False])
@pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM])
def test_the_state_of_another_replica_is_refused(cell, detach_first, pair):
    """The second step would go on with the state of the last replica's rows."""
    with pair.scope():
        program = Recurrent(cell, detach_first=detach_first)
    parts = [sg.PerReplica(list(each.chunk(2))) for each in (X, Y)]
    with pytest.raises(ReplicaError, match=r"Recurrent\.hidden(.|\n)*different values"):
        for _ in range(3):
            pair.run(lambda x, y: program.train(x, y), args=parts)


class Decoder(nn.Module):
    """Keeps the state of its cell in an attribute, from zeros in every call (Tacotron 2)."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 6), nn.Linear(6, 2)

    def start(self, x):
        self.hidden = x.new_zeros(len(x), 6)

    def decode(self, x):
        self.hidden = self.cell(x, self.hidden)
        return self.out(self.hidden)

    def forward(self, x):
        self.start(x)
        return self.decode(x) + self.decode(2 * x)


def train_decoder(strategy, *, clear):
    with strategy.scope():
        torch.manual_seed(0)
        model = Decoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if clear:
            model.hidden = None

    list(strategy.run_steps(step, [(X, Y)] * 4))
    return [p.detach().clone() for p in model.parameters()]


def test_the_state_that_every_step_starts_anew_may_be_dropped_at_its_end(pair):
    with pytest.raises(ReplicaError, match=r"begins with a new value, .* set it to None"):
        train_decoder(pair, clear=False)
    plain = train_decoder(sg.OneDeviceStrategy("cpu:0"), clear=True)
    for mine, one in zip(train_decoder(pair, clear=True), plain, strict=True):
        torch.testing.assert_close(mine, one)
