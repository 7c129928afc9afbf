"""Patterns from public training programs, in replicas: equal to plain PyTorch, or refused with the remedy (issue 20)."""

import copy
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import stratagem as sg
from stratagem.errors import ForeignParameterError, ReplicaError

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(2))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(strategy, program, steps=4):
    """Run a program; it gets `build` to make modules and returns its step and the module to compare.

    Without a strategy, ``step`` gets the whole batch on one device.
    """
    if strategy is None:
        step, result = program(lambda make: make(), lambda function: function())
        for _ in range(steps):
            step(X, Y)
        return result

    def build(make):
        with strategy.scope():
            return make()

    def once(function):
        return sg.get_replica_context().merge_call(lambda strategy: function())

    step, result = program(build, once)
    parts = [sg.PerReplica(list(each.chunk(strategy.num_replicas_in_sync))) for each in (X, Y)]
    for _ in range(steps):
        strategy.run(step, args=parts)
    return result


def assert_same(strategy, program, steps=4):
    mine = train(strategy, program, steps).state_dict()
    for name, value in train(None, program, steps).state_dict().items():
        torch.testing.assert_close(
            mine[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


# ------------------------------------------------------------------ updates written by hand (point 9)


def add_to_data(parameters):
    for p in parameters:
        p.data.add_(p.grad, alpha=-0.1)


def subtract(parameters):
    with torch.no_grad():
        for p in parameters:
            p -= 0.1 * p.grad


def assign_data(parameters):
    for p in parameters:
        p.data = p.data - 0.1 * p.grad


def copy_values(parameters):
    with torch.no_grad():
        for p in parameters:
            p.copy_(p - 0.1 * p.grad)


UPDATES = [add_to_data, subtract, assign_data, copy_values]


def by_hand(update, *, taken="inside", steps=2):
    """A program that updates its parameters itself, several times in one run."""

    def program(build, once):
        model = build(mlp)
        outside = list(model.parameters())

        def step(x, y):
            for _ in range(steps):
                model.zero_grad()
                F.mse_loss(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                update(outside if taken == "outside" else model.parameters())

        return step, model

    return program


@pytest.mark.parametrize(
    ("update", "taken"),
    [
        *((update, "inside") for update in UPDATES),
        *((update, "outside") for update in UPDATES),
    ],
)
def test_manual_updates_are_written_once(update, taken, pair):
    """Every replica computes the same value from the aggregated gradient."""
    assert_same(pair, by_hand(update, taken=taken))


def test_a_value_that_depends_on_the_rows_of_a_replica_is_refused(pair):
    def program(build, once):
        model = build(mlp)

        def step(x, y):
            model[0].bias.data.add_(x.mean())

        return step, model

    with pytest.raises(ReplicaError, match=r"replica 1 has another value"):
        train(pair, program)


def test_a_write_in_some_of_the_replicas_is_refused_and_undone(pair):
    with pair.scope():
        model = mlp()
    before = model[0].bias.detach().clone()

    def step(x):
        if sg.get_replica_context().replica_id_in_sync_group == 1:
            model[0].bias.data.add_(1.0)

    def look(x):
        return float(model[0].bias.detach().sum())

    with pytest.raises(ReplicaError, match=r"not every replica wrote"):
        pair.run(step, args=(sg.PerReplica([X[:4], X[4:]]),))
    assert model[0].bias.tolist() == before.tolist()
    found = pair.run(look, args=(sg.PerReplica([X[:4], X[4:]]),))
    assert set(pair.local_results(found)) == {float(before.sum())}


def test_reading_data_changes_nothing(pair):
    def program(build, once):
        model = build(mlp)
        optimizer = sgd(model)

        def step(x, y):
            optimizer.zero_grad()
            (F.mse_loss(model(x), y) + sum(p.data.sum() for p in model.parameters())).backward()
            optimizer.step()
            assert model[0].weight.data.shape == (8, 4)

        return step, model

    assert_same(pair, program)


def test_weights_are_clipped_between_two_optimizers(pair):
    """WGAN."""

    def program(build, once):
        generator, critic = build(mlp), build(lambda: nn.Linear(2, 1))
        with torch.no_grad():
            critic.weight.fill_(0.3)
            critic.bias.fill_(0.3)
        first = torch.optim.RMSprop(critic.parameters(), lr=0.01)
        second = torch.optim.RMSprop(generator.parameters(), lr=0.01)

        def step(x, y):
            first.zero_grad()
            (critic(generator(x).detach()).mean() - critic(y).mean()).backward()
            first.step()
            for p in critic.parameters():
                p.data.clamp_(-0.1, 0.1)
            second.zero_grad()
            (-critic(generator(x)).mean()).backward()
            second.step()

        return step, nn.ModuleList([generator, critic])

    assert_same(pair, program)


def test_a_target_network_follows_in_the_step(pair):
    """DQN."""

    def program(build, once):
        model, target = build(mlp), build(mlp)
        optimizer = sgd(model)

        def step(x, y):
            with torch.no_grad():
                wanted = target(x)
            optimizer.zero_grad()
            F.mse_loss(model(x), wanted + y).backward()
            optimizer.step()
            for theirs, mine in zip(target.parameters(), model.parameters(), strict=True):
                theirs.data.copy_(0.5 * mine.data + 0.5 * theirs.data)

        return step, nn.ModuleList([model, target])

    assert_same(pair, program)


def test_a_flag_written_through_data_of_a_buffer_is_kept(pair):
    """ema-pytorch: ``self.initted.data.copy_(torch.tensor(True))``."""
    with pair.scope():
        model = mlp()
        model.register_buffer("ready", torch.tensor(False))

    def step(x):
        model.ready.data.copy_(torch.tensor(True))

    pair.run(step, args=(sg.PerReplica([X[:4], X[4:]]),))
    assert bool(model.ready)


def test_a_replica_without_rows_need_not_write(pair):
    with pair.scope():
        model = mlp()
    plain = mlp()

    def step(model, x, y):
        model.zero_grad()
        if not len(x):
            return
        F.mse_loss(model(x), y).backward()
        add_to_data(model.parameters())

    rows = [sg.PerReplica([X, X[:0]]), sg.PerReplica([Y, Y[:0]])]
    pair.run(lambda x, y: step(model, x, y), args=rows)
    step(plain, X, Y)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("update", UPDATES)
def test_manual_updates_in_merge_call_equal_plain_pytorch(update, pair):
    """The function sees the aggregated gradients and writes the parameters once; the replicas follow."""

    def program(build, once):
        model = build(mlp)

        def step(x, y):
            for _ in range(2):
                model.zero_grad()
                F.mse_loss(model(x), y).backward()
                once(lambda: update(model.parameters()))

        return step, model

    assert_same(pair, program)


def test_gradients_set_by_hand_are_aggregated_for_merge_call(pair):
    def program(build, once):
        model = build(mlp)

        def step(x, y):
            slopes = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
            for p, slope in zip(model.parameters(), slopes, strict=True):
                p.grad = slope
            once(lambda: subtract(model.parameters()))

        return step, model

    assert_same(pair, program)


def test_a_graph_made_before_merge_call_is_differentiated_after_it(pair):
    def program(build, once):
        model = build(mlp)
        optimizer = sgd(model)

        def step(x, y):
            loss = F.mse_loss(model(x), y)
            once(lambda: None)
            loss.backward()
            optimizer.step()
            once(optimizer.zero_grad)

        return step, model

    assert_same(pair, program)


def test_merge_call_sees_current_buffers(pair):
    def program(build, once):
        def make():
            torch.manual_seed(0)
            return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))

        model = build(make)
        copied = build(lambda: copy.deepcopy(model))

        def step(x, y):
            model(x)
            once(lambda: copied.load_state_dict(model.state_dict()))

        return step, nn.ModuleList([copied])

    mine, plain = (train(each, program, 1)[0][0] for each in (pair, None))
    torch.testing.assert_close(mine.running_mean, plain.running_mean)
    assert mine.num_batches_tracked == plain.num_batches_tracked == 1


# ------------------------------------------------------------------ running statistics in parameters (point 7)


class Statistics(nn.Module):
    """A layer that keeps a running mean in a parameter without gradient."""

    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.linear = nn.Linear(4, 2)
        self.write = write

    def forward(self, x):
        self.write(self, x.detach().mean(0))
        return self.linear(x - self.mean)


def in_place(layer, mean):
    layer.mean.mul_(0.9).add_(mean, alpha=0.1)


def through_data(layer, mean):
    layer.mean.data.mul_(0.9).add_(mean, alpha=0.1)


def by_data(layer, mean):
    layer.mean.data = 0.9 * layer.mean + 0.1 * mean


def by_assignment(layer, mean):
    layer.mean = nn.Parameter(0.9 * layer.mean + 0.1 * mean, requires_grad=False)


@pytest.mark.parametrize("write", [in_place, through_data, by_data, by_assignment])
def test_statistics_kept_in_parameters_are_refused(write, pair):
    """Each replica would write its own rows' statistics to the one parameter; a buffer is the remedy."""

    def program(build, once):
        model = build(lambda: Statistics(write))

        def step(x, y):
            F.mse_loss(model(x), y).backward()

        return step, model

    with pytest.raises(ReplicaError, match=r"parameter 'mean'(.|\n)*register_buffer"):
        train(pair, program)


# ------------------------------------------------------------------ objects that replicas share (point 6)


class Trainer:
    """An object that keeps its loss in an attribute and counts its steps."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.steps = model, optimizer, 0

    def train(self, x, y):
        self.optimizer.zero_grad()
        self.loss = F.mse_loss(self.model(x), y)
        self.loss.backward()
        self.optimizer.step()

    def scheduled_step(self):
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / self.steps
        self.optimizer.step()


def test_a_loss_in_an_attribute_is_differentiated_by_its_own_replica(pair):
    """``self.loss = f(); zero_grad(); self.loss.backward()`` (minGPT): replicas take turns up to there."""

    def program(build, once):
        model = build(mlp)
        trainer = Trainer(model, sgd(model))

        def step(x, y):
            trainer.loss = F.mse_loss(model(x), y)
            time.sleep(0.001)  # offers the interpreter to the other replica
            trainer.optimizer.zero_grad()
            trainer.loss.backward()
            trainer.optimizer.step()

        return step, model

    assert_same(pair, program, steps=20)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_modules_that_compute_an_attribute_before_forward_train_the_same(pair):
    """``weight_norm`` and ``spectral_norm`` of older programs (TCN) set ``module.weight`` in a hook."""

    def program(build, once):
        def make():
            torch.manual_seed(0)
            layers = [
                nn.utils.weight_norm(nn.Linear(4, 64)),
                nn.utils.weight_norm(nn.Linear(64, 2)),
            ]
            return nn.Sequential(layers[0], nn.Tanh(), layers[1])

        model = build(make)
        optimizer = sgd(model)

        def step(x, y):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

        return step, model

    assert_same(pair, program, steps=20)


def test_the_loss_of_another_replica_is_refused(pair):
    """A shared attribute that is overwritten before ``backward()`` is noticed, not trained on."""

    def program(build, once):
        model = build(mlp)
        trainer = Trainer(model, sgd(model))

        def step(x, y):
            trainer.loss = F.mse_loss(model(x), y)
            sg.get_replica_context().all_reduce("sum", torch.ones(()))  # both have written it
            trainer.loss.backward()

        return step, model

    with pytest.raises(ReplicaError, match=r"parameters of another replica.*local variable"):
        train(pair, program)


def test_learning_rates_that_differ_between_replicas_are_refused(pair):
    """A rule that depends on a replica's own rows gives each of them another learning rate."""

    def program(build, once):
        model = build(mlp)
        optimizer = sgd(model)

        def step(x, y):
            F.mse_loss(model(x), y).backward()
            optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * float(x.mean())
            optimizer.step()

        return step, model

    with pytest.raises(ReplicaError, match=r"'lr' to 0\.\d+.*merge_call"):
        train(pair, program)


def test_learning_rates_that_agree_are_kept(pair):
    """A rule that depends on values from outside ``run`` sets the same number in every replica."""

    def program(build, once):
        model = build(mlp)
        optimizer = sgd(model)

        def step(x, y):
            for factor in (1.0, 0.5):
                optimizer.param_groups[0]["lr"] = 0.1 * factor
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()

        return step, model

    assert_same(pair, program)


class CountingLinear(nn.Linear):
    """A module that counts its calls, and decays its output with them."""

    def __init__(self):
        super().__init__(4, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls


GLOBAL_STEPS = 0


def test_counters_of_steps_move_once_for_all_replicas(pair):
    """Rules of attention-is-all-you-need (an object), nanoGPT (a global) and beta-VAE (a module's attribute)."""
    found = []

    def program(build, once):
        global GLOBAL_STEPS
        GLOBAL_STEPS, inner = 0, 0
        torch.manual_seed(0)
        model = build(CountingLinear)
        trainer = Trainer(model, sgd(model))
        found.append((trainer, lambda: (GLOBAL_STEPS, inner)))

        def step(x, y):
            global GLOBAL_STEPS
            nonlocal inner
            trainer.optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 / (1 + GLOBAL_STEPS + inner))
            trainer.scheduled_step()
            GLOBAL_STEPS += 1
            inner = inner + 1

        return step, model

    assert_same(pair, program, steps=5)
    for trainer, others in found:
        assert (trainer.steps, trainer.model.calls, *others()) == (5, 5, 5, 5)


def test_counters_of_rows_add_up_over_replicas(pair):
    """``total += len(x)`` (pytorch-cifar) and a count in a loop are sums over the rows of all replicas."""
    counts = {"rows": 0}
    total = looped = 0

    def step(x, y):
        nonlocal total, looped
        total += len(x)
        counts["rows"] += len(x)
        for _ in x:
            looped += 1

    for _ in range(3):
        pair.run(step, args=[sg.PerReplica([X[:5], X[5:]]), sg.PerReplica([Y[:5], Y[5:]])])
    assert (total, counts["rows"], looped) == (24, 24, 24)


def test_a_counter_of_a_replaced_object_moves_once(pair):
    """Another object under the same name is found at once, although the function is the same."""
    model = mlp()
    holder = Trainer(model, sgd(model))

    def step():
        holder.steps += 1

    for _ in range(3):
        pair.run(step)
    first, holder = holder, Trainer(model, sgd(model))
    pair.run(step)
    assert (first.steps, holder.steps) == (3, 1)


def test_counters_move_once_in_merge_call(pair):
    """A hand-written learning-rate rule counts steps in Python; in merge_call it runs once."""

    def program(build, once):
        model = build(mlp)
        trainer = Trainer(model, sgd(model))

        def step(x, y):
            trainer.optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            once(trainer.scheduled_step)

        return step, model

    assert_same(pair, program)


# ------------------------------------------------------------------ inner loops, SAM, averages (point 12)


@pytest.mark.parametrize("inner", ["functional_call", "autograd.grad", "copy"])
def test_inner_loops_of_meta_learning_train_the_same(inner, pair):
    """Each replica adapts to its own task; plain PyTorch averages the tasks' gradients."""

    def program(build, once):
        model = build(mlp)
        optimizer = sgd(model)

        def adapt(x, y):
            if inner == "copy":  # first order: the gradient at the adapted copy
                fast = copy.deepcopy(model)
                inner_optimizer = torch.optim.SGD(fast.parameters(), lr=0.05)
                for _ in range(2):
                    inner_optimizer.zero_grad()
                    F.mse_loss(fast(x), y).backward()
                    inner_optimizer.step()
                return torch.autograd.grad(F.mse_loss(fast(x), y), list(fast.parameters()))
            weights = dict(model.named_parameters())

            def predict(weights):
                if inner == "functional_call":
                    return torch.func.functional_call(model, weights, (x,))
                a, b, c, d = weights.values()
                return F.linear(torch.tanh(F.linear(x, a, b)), c, d)

            values = list(weights.values())
            slopes = torch.autograd.grad(F.mse_loss(predict(weights), y), values, create_graph=True)
            fast = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), slopes, strict=True)}
            return torch.autograd.grad(F.mse_loss(predict(fast), y), values)

        def step(x, y):
            tasks = list(zip(x.split(4), y.split(4), strict=True))
            found = [adapt(*task) for task in tasks]
            for p, *slopes in zip(model.parameters(), *found, strict=True):
                p.grad = torch.stack(slopes).mean(0)
            optimizer.step()

        return step, model

    assert_same(pair, program)


class Sharpness(torch.optim.Optimizer):
    """SAM: climb to a worse point nearby, take the gradient there, step from the old point."""

    def __init__(self, params, **settings):
        super().__init__(params, dict(rho=0.05, **settings))
        self.base = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * 0.05 / norm)
        self.zero_grad()

    @torch.no_grad()
    def descend(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure):
        self.climb()
        with torch.enable_grad():
            closure()
        self.descend()


@pytest.mark.parametrize("call", ["methods", "merge_call", "closure"])
def test_two_step_optimizers_train_the_same(call, pair):
    """Methods that an optimizer class adds run once for all replicas, as ``step`` does."""

    def program(build, once):
        model = build(mlp)
        optimizer = Sharpness(model.parameters(), lr=0.1, momentum=0.9)

        def step(x, y):
            def closure():
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            closure()
            if call == "closure":
                optimizer.step(closure)
            elif call == "merge_call":
                once(optimizer.climb)
                closure()
                once(optimizer.descend)
            else:
                optimizer.climb()
                closure()
                optimizer.descend()

        return step, model

    assert_same(pair, program)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_trains_the_same(reentrant, pair):
    def program(build, once):
        model = build(mlp)
        optimizer = sgd(model)

        def step(x, y):
            optimizer.zero_grad()
            x = x.clone().requires_grad_()
            hidden = checkpoint(model[:2], x, use_reentrant=reentrant)
            out = checkpoint(model[2], hidden, use_reentrant=reentrant)
            F.mse_loss(out, y).backward()
            optimizer.step()

        return step, model

    assert_same(pair, program)


@pytest.mark.parametrize("place", ["step", "merge_call", "step hook"])
def test_averages_updated_in_the_step_equal_plain_pytorch(place, pair):
    def program(build, once):
        model = build(mlp)
        optimizer = sgd(model)
        average = build(lambda: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
        if place == "step hook":
            optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))

        def step(x, y):
            optimizer.zero_grad()
            with torch.no_grad():
                average(x)  # a teacher's prediction: the average takes part in the run
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if place == "step":
                average.update_parameters(model)
            elif place == "merge_call":
                once(lambda: average.update_parameters(model))

        return step, nn.ModuleList([model, average])

    assert_same(pair, program)


@pytest.mark.parametrize("clipped", [False, True])
def test_a_bare_tensor_of_an_optimizer_trains_the_same(clipped, pair):
    """The temperature of SAC belongs to no module; its own code reads its gradient."""

    def program(build, once):
        model = build(mlp)
        optimizer = sgd(model)
        log_alpha = torch.zeros(1, requires_grad=True)
        alpha_optimizer = build(lambda: torch.optim.Adam([log_alpha], lr=0.1))

        def step(x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            (log_alpha.exp().detach() * loss).backward()
            optimizer.step()
            alpha_optimizer.zero_grad()
            (log_alpha.exp() * (model(x).detach() - 1.0)).mean().backward()
            if clipped:
                nn.utils.clip_grad_norm_([log_alpha], 0.01)
                assert log_alpha.grad.norm() < 0.02
            alpha_optimizer.step()

        result = nn.Module()
        result.model = model
        result.register_buffer("log_alpha", log_alpha.detach())
        return step, result

    assert_same(pair, program)


class Regularized(nn.Module):
    """A module that keeps parameters in plain lists, as DeepCTR-Torch does for its penalties."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.penalized = [
            (list(self.first.parameters()), 0.01),
            ([("last", self.last.weight)], 0.02),
        ]

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))

    def penalty(self):
        total = torch.zeros(())
        for weights, factor in self.penalized:
            for weight in weights:
                tensor = weight[1] if isinstance(weight, tuple) else weight
                total = total + factor * tensor.square().sum()
        return total


def test_parameters_in_plain_lists_of_a_module_train_the_same(pair):
    def program(build, once):
        model = build(Regularized)
        optimizer = sgd(model)

        def step(x, y):
            optimizer.zero_grad()
            (F.mse_loss(model(x), y) + model.penalty()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

        return step, model

    assert_same(pair, program, steps=7)


class Lookahead(torch.optim.Optimizer):
    """A wrapper that shares the groups of another optimizer, as timm's: no ``Optimizer.__init__``."""

    def __init__(self, base):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.base, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state = {}
        self._patch_step_function()

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            slow = self.state.setdefault(p, p.clone())
            slow.lerp_(p, 0.5)
            p.copy_(slow)


def test_optimizers_that_wrap_another_one_run_in_merge_call(pair):
    """Every replica would write the parameters; the error shows the line to write instead."""

    def program(build, once, step_once=True):
        model = build(mlp)
        optimizer = Lookahead(sgd(model))

        def step(x, y):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if step_once:
                once(optimizer.step)
            else:
                optimizer.step()

        return step, model

    with pytest.raises(ForeignParameterError, match=r"Lookahead wraps another.*merge_call\("):
        train(pair, lambda build, once: program(build, once, step_once=False))
    assert_same(pair, program)
