"""Steps that are ordinary PyTorch but not the usual lines: they give one device's numbers, or say why not."""

import copy
import pickle

import cloudpickle
import pytest
import torch
from torch import nn
from torch.autograd import grad as grad_by_name  # before there is any strategy
from torch.nn import functional as F

import stratagem as sg
from stratagem.errors import ForeignParameterError, ReplicaError

GENERATOR = torch.Generator().manual_seed(7)
BATCHES = [
    (torch.randn(n, 5, generator=GENERATOR), torch.randn(n, 2, generator=GENERATOR))
    for n in (7, 6, 1, 5)
]


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def on_one_device(train):
    return train(make_model(), lambda step, batch: step(batch))


def under(strategy, train, make=make_model):
    with strategy.scope():
        model = make()

    def run(step, batch):
        (part,) = strategy.distribute_dataset([batch])
        return strategy.run(step, args=(part,))

    return train(model, run)


def agree(got, wanted):
    for name, value in wanted.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}"
        )


# ------------------------------------------------------------------ parameters taken outside run


@pytest.mark.parametrize("use", ["clip", "zero", "delete", "scale", "add"])
def test_gradients_of_parameters_taken_outside_run_are_the_replicas(use, strategy):
    """``params = list(model.parameters())`` outside, ``clip_grad_norm_(params, …)`` inside."""

    def train(model, run):
        params = list(model.parameters())
        optimizer = torch.optim.SGD(params, lr=0.5)

        def step(batch):
            x, y = batch
            if len(x) == 0:
                return None
            loss = F.mse_loss(model(x), y)
            if use == "zero":
                for p in params:
                    p.grad = None
            elif use == "delete":
                for p in params:
                    del p.grad
            else:
                optimizer.zero_grad()
            loss.backward()
            if use == "clip":
                nn.utils.clip_grad_norm_(params, 0.01)
            elif use == "scale":
                for p in params:
                    p.grad.mul_(0.1)
            elif use == "add":
                for p in params:
                    p.grad = p.grad + 0.01 * p.detach()
            total = sum(p.grad.norm() for p in params)
            optimizer.step()
            return total

        norms = [run(step, batch) for batch in BATCHES]
        first = norms[0] if isinstance(norms[0], torch.Tensor) else norms[0].values[0]
        return {**model.state_dict(), "norm": first}

    agree(under(strategy, train), on_one_device(train))


def test_unmanaged_parameters_lose_their_gradient_in_all_replicas_at_once(several):
    """torch frees such a gradient twice when two threads do it at the same time; replicas take turns."""
    shared = [nn.Parameter(torch.zeros(8, 5)) for _ in range(8)]

    def clear():
        for p in shared:
            p.grad = None
        return all(p.grad is None for p in shared)

    for _ in range(300):
        for p in shared:
            p.grad = torch.ones(8, 5)
        assert several.run(clear) is True


@pytest.mark.parametrize(
    "use", ["grad", "imported", "unused", "batched", "penalty", "graph", "inputs"]
)
@pytest.mark.parametrize("aggregation", ["mean", "sum"])
def test_parameters_taken_outside_run_can_be_differentiated_by(use, aggregation, make_strategy):
    """``torch.autograd.grad(loss, params)``: of the leaf the model used, and of what the loss did with ``params``."""

    def train(model, run, copies):
        params = list(model.parameters())
        optimizer = torch.optim.SGD(params, lr=0.1)

        def step(batch):
            x, y = batch
            if len(x) == 0:
                return
            loss = F.mse_loss(model(x), y) / copies
            optimizer.zero_grad()
            if use == "inputs":
                loss.backward(inputs=params[:2])
            elif use == "batched":
                out = model(x).mean(0)
                several = torch.autograd.grad(out, params, torch.eye(2), is_grads_batched=True)
                for p, g in zip(params, several, strict=True):
                    p.grad = g.sum(0) / copies
            elif use == "graph":
                first = torch.autograd.grad(loss, params[:2], create_graph=True)
                (loss + 0 * sum(g.square().sum() for g in first)).backward()
            else:
                if use == "penalty":
                    loss = loss + 0.3 * sum(p.square().sum() for p in params) / copies
                ask = grad_by_name if use == "imported" else torch.autograd.grad
                unused = torch.ones(1, requires_grad=True)
                asked = [*params, unused] if use == "unused" else params
                found = ask(loss, asked, allow_unused=use == "unused")
                if use == "unused":
                    assert found[-1] is None
                for p, g in zip(params, found, strict=False):
                    p.grad = g
            optimizer.step()

        for batch in BATCHES[:2]:
            run(step, batch)
        return model.state_dict()

    strategy = make_strategy("central2", gradient_aggregation=aggregation)
    with strategy.scope():
        model = make_model()

    def run(step, batch):
        halves = [
            each[:4].chunk(2) for each in batch
        ]  # equal parts, so that "sum" is the mean doubled
        strategy.run(step, args=(tuple(sg.PerReplica(list(each)) for each in halves),))

    got = train(model, run, 2 if aggregation == "sum" else 1)
    agree(got, train(make_model(), lambda step, b: step([each[:4] for each in b]), 1))


def test_a_parameter_the_loss_does_not_use_is_named_as_torch_names_it(strategy):
    with strategy.scope():
        model = make_model()
    params = list(model.parameters())

    def step():
        with pytest.raises(
            RuntimeError, match="index 1 appears to not have been used in the graph"
        ):
            torch.autograd.grad(model[0].weight.sum(), params)
        zeros = torch.autograd.grad(model[0].weight.sum(), params, materialize_grads=True)
        return [g.sum() for g in zeros]

    sums = strategy.run(step)
    assert [float(strategy.local_results(each)[0]) for each in sums] == [40.0, 0.0, 0.0, 0.0]


def test_a_penalty_on_parameters_taken_outside_run_is_not_dropped_by_backward(several):
    """``backward(inputs=params)`` with the central parameters in the loss too: refused, with the remedy."""
    with several.scope():
        model = make_model()
    params = list(model.parameters())

    def step():
        loss = model(torch.ones(2, 5)).sum() + nn.utils.parameters_to_vector(params).square().sum()
        loss.backward(inputs=params)

    with pytest.raises(ForeignParameterError, match="Ask the model for it inside the function"):
        several.run(step)


@pytest.mark.parametrize("taken", ["outside", "inside"])
def test_transforms_may_be_the_first_to_ask_for_a_replicas_tensors(taken, strategy):
    """torch.func.grad over parameters taken outside: leaves and buffers outlive the transform."""

    def make():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2)).eval()

    def train(model, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outside = dict(model.named_parameters())

        def transformed(batch):
            x, y = batch
            if len(x) == 0:
                return
            params = outside if taken == "outside" else dict(model.named_parameters())
            found = torch.func.grad(
                lambda given: F.mse_loss(torch.func.functional_call(model, given, (x,)), y)
            )(params)
            for name, p in params.items():
                p.grad = found[name]
            optimizer.step()

        def usual(batch):
            x, y = batch
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

        for batch in BATCHES[:2]:
            run(transformed, batch)
            run(usual, batch)
        return model.state_dict()

    agree(under(strategy, train, make), train(make(), lambda step, batch: step(batch)))


# ------------------------------------------------------------------ users' schedulers


class Halving(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler of the user's, made before there is any strategy, whose step is all its own."""

    def __init__(self, optimizer):
        self.moves = 0
        super().__init__(optimizer)

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, metric=None):
        self.moves += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5


@pytest.mark.parametrize("late", [False, True])
def test_users_schedulers_move_once_in_replicas(late, strategy):
    """A ``step`` that overrides torch's, with and without calling the one it overrides."""
    kind = Halving
    if late:

        class Counting(Halving):
            calls = 0

            def step(self, metric=None):
                self.calls += 1
                super().step(metric)

        kind = Counting
    with strategy.scope():
        model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = kind(optimizer)  # moves as it is made
    for _ in range(2):
        strategy.run(lambda: scheduler.step())
    scheduler.step()
    assert scheduler.moves == 4
    assert optimizer.param_groups[0]["lr"] == 0.5**4
    if late:
        assert scheduler.calls == 4
    again = cloudpickle.loads(cloudpickle.dumps(kind))  # as it goes to workers
    assert again(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)).moves == 1


# ------------------------------------------------------------------ optimizers


@pytest.mark.parametrize("look", ["index", "get", "in"])
def test_the_optimizers_state_is_found_by_a_replicas_parameters(look, strategy):
    def train(model, run):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

        def step(batch):
            x, y = batch
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            held = [p for group in optimizer.param_groups for p in group["params"]]
            if look == "in":
                return torch.tensor([p in optimizer.state for p in held])
            if look == "get":
                return optimizer.state.get(held[0])["exp_avg"].clone()
            return optimizer.state[held[0]]["exp_avg"].clone()

        seen = run(step, BATCHES[0])
        seen = seen if isinstance(seen, torch.Tensor) else seen.values[-1]
        state = optimizer.state_dict()["state"]
        assert sorted(state) == [0, 1, 2, 3]
        plain = pickle.loads(pickle.dumps(optimizer))
        assert len(plain.state) == len(copy.deepcopy(optimizer).state) == 4
        return {"seen": seen, "exp_avg": state[0]["exp_avg"]}

    agree(under(strategy, train), on_one_device(train))


class Descent(torch.optim.Optimizer):
    """As people wrote them before ``set_to_none``, with a step that takes what it likes."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def zero_grad(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.detach_()
                    p.grad.zero_()

    def step(self, closure=None, *, loss=None, scale=1.0, note=""):
        factor = scale if loss is None else scale / (1 + float(loss))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-factor * group["lr"])
        return f"stepped {note}"


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_users_optimizer_takes_its_own_arguments(where, strategy):
    """Numbers that differ between replicas, such as a loss, become the mean over the rows."""

    def train(model, run):
        optimizer = Descent(model.parameters(), lr=0.5)

        def step(batch):
            x, y = batch
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            if where == "inside":
                assert optimizer.step(loss=loss.detach(), scale=0.5, note="now") == "stepped now"

        for batch in BATCHES[:2]:
            run(step, batch)
            if where == "outside":
                assert optimizer.step(scale=0.5) == "stepped "
        return model.state_dict()

    agree(under(strategy, train), on_one_device(train))


def test_a_step_with_a_closure_gets_its_other_arguments(several):
    with several.scope():
        model = make_model()
        optimizer = Descent(model.parameters(), lr=0.5)
    for given in [((lambda: 1.0,), {}), ((), {"closure": lambda: 1.0})]:
        found = several.run(lambda given=given: optimizer.step(*given[0], note="once", **given[1]))
        assert found == "stepped once"


# ------------------------------------------------------------------ backward passes


def test_a_step_that_catches_a_failed_backward_and_goes_on_trains_the_same(strategy):
    """The next pass meets again, so that clipping sees the aggregated gradient."""

    def train(model, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(batch):
            x, y = batch
            hidden = model[0](x)
            hidden.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                F.mse_loss(model[2](model[1](hidden)), y).backward()
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()

        for batch in BATCHES[:2]:
            run(step, batch)
        return model.state_dict()

    agree(under(strategy, train), on_one_device(train))


@pytest.mark.parametrize("aggregation", ["mean", "sum"])
def test_gradients_before_a_failed_backward_are_kept(aggregation, make_strategy):
    strategy = make_strategy("central2", gradient_aggregation=aggregation)
    with strategy.scope():
        model = make_model()

    def step(batch):
        x, y = batch
        F.mse_loss(model(x), y).backward()
        before = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(ZeroDivisionError):
            out = model(x)
            out.register_hook(lambda _: 1 / 0)
            out.sum().backward()
        for p, grad in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p.grad, grad)

    (part,) = strategy.distribute_dataset(BATCHES[:1])
    strategy.run(step, args=(part,))


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_loss_made_of_gradients_with_a_graph_is_refused_with_the_remedy(several):
    """The graph of .grad ends where replicas meet: such a loss would silently have no gradient."""
    with several.scope():
        model = make_model()

    def step(batch):
        x, y = batch
        F.mse_loss(model(x), y).backward(create_graph=True)

    (part,) = several.distribute_dataset(BATCHES[:1])
    with pytest.raises(ReplicaError, match=r"create_graph=True.*all_reduce"):
        several.run(step, args=(part,))


def test_a_penalty_on_the_gradient_of_the_whole_batch_trains_the_same(strategy):
    """What the refusal above advises."""

    def train(model, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            x, y = batch
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            grads = sg.get_replica_context().all_reduce("mean", grads)
            (loss + 0.5 * sum(g.square().sum() for g in grads)).backward()
            optimizer.step()

        for _ in range(3):
            run(step, BATCHES[1])  # as many rows for each replica
        return model.state_dict()

    agree(under(strategy, train), on_one_device(train))


def test_complex_numbers_are_differentiated_through_collectives(two):
    def step():
        ctx = sg.get_replica_context()
        factor = int(ctx.replica_id_in_sync_group) + 1
        x = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
        (ctx.all_reduce("sum", x) * factor).real.sum().backward()
        z = torch.tensor([1 + 2j], requires_grad=True)
        (ctx.all_gather(z, axis=0) * factor).real.sum().backward()
        return x.grad, z.grad

    reduced, gathered = two.run(step)
    assert [g.tolist() for g in reduced.values] == [[3, 3], [3, 3]]
    assert [g.tolist() for g in gathered.values] == [[3], [3]]


# ------------------------------------------------------------------ buffers


class Counters(nn.Module):
    """One tensor under two names, and one under two modules."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 2)
        steps = torch.zeros(2)
        self.register_buffer("one", steps)
        self.register_buffer("other", steps)
        self.child = nn.Module()
        self.child.register_buffer("steps", steps)

    def forward(self, x):
        self.one += 1
        self.child.steps += self.other
        return self.linear(x)


def test_one_tensor_registered_as_several_buffers_stays_one(strategy):
    def make():
        torch.manual_seed(3)
        return Counters()

    def train(model, run):
        model = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            x, y = batch
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

        seen = {}
        for number, batch in enumerate([*BATCHES, *BATCHES]):
            run(step, batch)
            seen |= {
                f"{number} {k}": v.clone() for k, v in model.named_buffers(remove_duplicate=False)
            }
        return seen

    agree(under(strategy, train, make), train(make(), lambda step, batch: step(batch)))


def test_a_buffer_of_several_names_cannot_be_assigned_under_one_of_them(several):
    """The other names would still mean the old tensor, which a replica's copy cannot express."""
    with several.scope():
        model = Counters()

    def step():
        model.other = model.other + 0.5

    with pytest.raises(sg.errors.ReplicaError, match=r"'one', 'other', 'steps'.*copy_"):
        several.run(step)
    model.other = model.other + 0.5
    assert model.other.tolist() == [0.5, 0.5]
    assert model.one.tolist() == [0.0, 0.0]
