"""Programs that are ordinary PyTorch and less usual: on parameter servers they give plain PyTorch's numbers.

Each program runs twice, by itself and with its functions scheduled on one worker, and both runs must give the same.
"""

import contextlib
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from own_optimizer import Stubborn
from torch import nn
from torch.func import functional_call, grad

import stratagem as sg

pytestmark = pytest.mark.process

P = sg.partitioners


@pytest.fixture(scope="module")
def cluster():
    """One worker and two parameter servers, each a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRATAGEM_OPTIMIZER_MODULES", "own_optimizer")
        with sg.LocalCluster(workers=1, ps=2) as made:
            yield made


@pytest.fixture(params=[None, P.FixedShardsPartitioner(2)], ids=["whole", "sharded"])
def partitioner(request):
    """How variables are cut."""
    return request.param


class Here:
    """Runs a program's functions in this process: plain PyTorch."""

    scope = staticmethod(contextlib.nullcontext)

    @staticmethod
    def call(function, *args):
        return function(*args)


class OnServers:
    """Schedules a program's functions, one after the other."""

    def __init__(self, strategy, coordinator):
        self.scope = strategy.scope
        self._coordinator = coordinator

    def call(self, function, *args):
        value = self._coordinator.schedule(function, args=args)
        self._coordinator.join(timeout_s=60)
        return value.get(timeout_s=60)


def assert_same_here_and_there(program, cluster, partitioner):
    torch.manual_seed(7)
    expected = program(Here)
    with (
        sg.ParameterServerStrategy(cluster.resolver, partitioner) as strategy,
        sg.ClusterCoordinator(strategy) as coordinator,
    ):
        torch.manual_seed(7)
        found = program(OnServers(strategy, coordinator))
        torch.testing.assert_close(found, expected)


def sentences(count=4):
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(0, 11, (4, 6), generator=generator),
            torch.randn(4, 6, 2, generator=generator),
        )
        for _ in range(count)
    ]


def tagger():
    return nn.Sequential(nn.Embedding(11, 3), nn.Linear(3, 2))


def training(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def dense(state):
    return {
        key: value if isinstance(value, torch.Tensor) else float(value)
        for key, value in state.items()
    }


def states(optimizer):
    return {number: dense(one) for number, one in optimizer.state_dict()["state"].items()}


# ------------------------------------------------------------------ what optimizers are made with


@pytest.mark.parametrize("sparse", [False, True])
def test_adagrad_starts_from_the_accumulator_it_was_given(cluster, partitioner, sparse):
    def program(run):
        with run.scope():
            model = nn.Sequential(nn.Embedding(11, 3, sparse=sparse), nn.Linear(3, 2))
            optimizer = torch.optim.Adagrad(
                model.parameters(), lr=0.1, initial_accumulator_value=0.3
            )
        step = training(model, optimizer)
        losses = [run.call(step, *batch) for batch in sentences()]
        return losses, dict(model.state_dict()), states(optimizer)

    assert_same_here_and_there(program, cluster, partitioner)


def test_servers_know_the_attributes_of_a_users_optimizer(cluster, partitioner):
    def program(run):
        with run.scope():
            model = nn.Linear(4, 2)
            optimizer = Stubborn(model.parameters(), 0.1, keep=0.75)
        step = training(model, optimizer)
        x, y = torch.ones(3, 4), torch.zeros(3, 2)
        return [run.call(step, x, y) for _ in range(3)], dict(model.state_dict())

    assert_same_here_and_there(program, cluster, partitioner)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_servers_make_numbers_of_the_state_with_the_programs_default_dtype(
    cluster, partitioner, kind
):
    """These classes keep numbers in tensors of the default dtype: products of betas, rates."""

    def program(run):
        with run.scope():
            model = nn.Linear(4, 2)
            optimizer = kind(model.parameters(), lr=0.1)
        step = training(model, optimizer)
        x, y = torch.ones(3, 4), torch.zeros(3, 2)
        for _ in range(3):
            run.call(step, x, y)
        return dict(model.state_dict()), {
            number: {key: value.dtype for key, value in one.items()}
            for number, one in optimizer.state_dict()["state"].items()
        }

    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(7)
        weights, dtypes = program(Here)
        with (
            sg.ParameterServerStrategy(cluster.resolver, partitioner) as strategy,
            sg.ClusterCoordinator(strategy) as coordinator,
        ):
            torch.manual_seed(7)
            found, kinds = program(OnServers(strategy, coordinator))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, weights, rtol=1e-14, atol=1e-14)
    assert kinds == dtypes


# ------------------------------------------------------------------ who steps, and who has the state


def test_steps_on_the_coordinator_between_those_of_workers(cluster, partitioner):
    def program(run):
        with run.scope():
            model = tagger()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step = training(model, optimizer)
        losses = [
            run.call(step, *batch) if number % 2 else step(*batch)
            for number, batch in enumerate(sentences(6))
        ]

        def closure():
            optimizer.zero_grad()
            loss = model(sentences(1)[0][0]).square().mean()
            loss.backward()
            return loss

        optimizer.zero_grad()  # so that it is the closure that makes the gradients
        losses.append(optimizer.step(closure).item())
        losses.append(run.call(step, *sentences(1)[0]))
        return losses, dict(model.state_dict()), states(optimizer)

    assert_same_here_and_there(program, cluster, partitioner)


def test_copies_and_pickles_of_an_optimizer_have_the_servers_state(cluster, partitioner):
    def program(run):
        with run.scope():
            model = tagger()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step = training(model, optimizer)
        run.call(step, *sentences(1)[0])
        found = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
        run.call(step, *sentences(1)[0])
        return [states(one) for one in (*found, optimizer)]

    assert_same_here_and_there(program, cluster, partitioner)


def test_a_generator_with_batch_norm_is_trained_after_the_critics_step(cluster, partitioner):
    def program(run):
        with run.scope():
            generator = nn.Sequential(
                nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)
            )
            critic = nn.Sequential(nn.Linear(2, 4), nn.LeakyReLU(0.2), nn.Linear(4, 1))
            generates = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9))
            judges = torch.optim.RMSprop(critic.parameters(), lr=0.01)

        def step(noise, real):
            judges.zero_grad()
            fake = generator(noise)
            judged = F.softplus(-critic(real)) + F.softplus(critic(fake.detach()))
            judged.mean().backward()
            judges.step()
            generates.zero_grad()
            loss = F.softplus(-critic(fake)).mean()
            loss.backward()
            generates.step()
            return loss.item()

        data = torch.Generator().manual_seed(1)
        losses = [
            run.call(step, torch.randn(4, 8, generator=data), torch.randn(4, 2, generator=data))
            for _ in range(4)
        ]
        return losses, dict(generator.state_dict()), dict(critic.state_dict())

    assert_same_here_and_there(program, cluster, partitioner)


# ------------------------------------------------------------------ gradients of tables


def test_autograd_grad_of_a_table(cluster, partitioner):
    def program(run):
        with run.scope():
            model = tagger()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            unused = nn.Embedding(3, 2)

        def step(x, y):
            parameters = list(model.parameters())
            loss = F.mse_loss(model(x), y) + model[0](x[:1]).sum() + 0.1 * model[0].weight.norm()
            found = torch.autograd.grad(loss, parameters)
            for parameter, gradient in zip(parameters, found, strict=True):
                parameter.grad = gradient
            optimizer.step()
            return found

        def fast(x, y):  # a step of meta-learning: through the gradient of the gradient
            optimizer.zero_grad()
            named = dict(model.named_parameters())
            loss = F.mse_loss(functional_call(model, named, (x,)), y)
            found = torch.autograd.grad(loss, tuple(named.values()), create_graph=True)
            moved = {
                name: parameter - 0.1 * gradient
                for (name, parameter), gradient in zip(named.items(), found, strict=True)
            }
            outer = F.mse_loss(functional_call(model, moved, (x,)), y)
            outer.backward()
            optimizer.step()
            return outer.item()

        def odd(x):
            rows = model[0](x).sum(-1)
            nothing = torch.autograd.grad(
                rows.sum(), unused.weight, allow_unused=True, retain_graph=True
            )
            (zeros,) = torch.autograd.grad(
                rows.sum(), unused.weight, materialize_grads=True, retain_graph=True
            )
            with pytest.raises(RuntimeError, match="index 1 appears to not have been used"):
                torch.autograd.grad(rows.sum(), [model[0].weight, unused.weight])
            return nothing == (None,), zeros

        firsts = [run.call(step, *batch) for batch in sentences()]
        seconds = [run.call(fast, *batch) for batch in sentences()]
        return firsts, seconds, run.call(odd, sentences(1)[0][0]), dict(model.state_dict())

    assert_same_here_and_there(program, cluster, partitioner)


def test_backward_to_chosen_inputs_reaches_a_table(cluster, partitioner):
    def program(run):
        with run.scope():
            model = tagger()
            unused = nn.Embedding(3, 2)
            optimizer = torch.optim.SGD([*model.parameters(), *unused.parameters()], lr=0.1)

        def step(x, y):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward(inputs=[model[0].weight])
            others = [model[1].weight.grad is None, model[1].bias.grad is None]
            optimizer.step()
            return others

        def in_vain(x, y):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward(inputs=[unused.weight])
            return [one.grad is None for one in model.parameters()]

        found = [run.call(step, *batch) for batch in sentences()]
        return found, run.call(in_vain, *sentences(1)[0]), dict(model.state_dict())

    assert_same_here_and_there(program, cluster, partitioner)


def test_a_model_with_tables_can_be_compiled_on_the_worker(cluster, partitioner):
    def program(run):
        with run.scope():
            model = tagger()
            compiled = torch.compile(model, backend="eager")
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def step(x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(compiled(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()

        return [run.call(step, *batch) for batch in sentences()], dict(model.state_dict())

    assert_same_here_and_there(program, cluster, partitioner)


def test_torch_func_works_on_detached_tables_and_never_computes_without_rows(cluster, partitioner):
    def program(run):
        with run.scope():
            model = tagger()

        def gradients(x, y):
            named = {name: one.detach() for name, one in model.named_parameters()}
            return grad(lambda given: F.mse_loss(functional_call(model, given, (x,)), y))(named)

        return run.call(gradients, *sentences(1)[0])

    assert_same_here_and_there(program, cluster, partitioner)
    with (
        sg.ParameterServerStrategy(cluster.resolver, partitioner) as strategy,
        sg.ClusterCoordinator(strategy) as coordinator,
    ):
        with strategy.scope():
            model = tagger()

        def past_the_table(x, y):
            named = dict(model.named_parameters())
            found = grad(lambda given: F.mse_loss(functional_call(model, given, (x,)), y))(named)
            return found["1.weight"].tolist()

        coordinator.schedule(past_the_table, args=sentences(1)[0])
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            coordinator.join(timeout_s=60)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8:UserWarning")
@pytest.mark.parametrize("kind", [torch.float32, torch.int16, torch.uint8])
def test_ids_of_other_types_are_refused_as_in_plain_pytorch(cluster, partitioner, kind):
    def program(run):
        with run.scope():
            table, bag = nn.Embedding(5, 2), nn.EmbeddingBag(5, 2)

        def look(ids):
            refused = []
            for use in (table, bag, lambda given: table.weight.index_select(0, given[0])):
                try:
                    use(ids)
                except RuntimeError:
                    refused.append(True)
            return refused

        def index(key):
            try:
                return table.weight[key].detach()
            except IndexError:
                return None

        key = torch.tensor([1, 0, 1, 0, 0]).to(kind)  # to torch, bytes are a mask
        return run.call(look, torch.ones(1, 2).to(kind)), run.call(index, key)

    assert_same_here_and_there(program, cluster, partitioner)
