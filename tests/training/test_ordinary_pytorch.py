"""What people do with models, inside and outside run: it works as in plain PyTorch (issue 2, section 3)."""

import copy
import functools
import importlib.util
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stratagem as sg

if importlib.util.find_spec("tqdm"):
    # torch.compile may show a progress bar, which maps a lock that stays until the process ends.
    importlib.import_module("tqdm").std.TqdmDefaultWriteLock.create_mp_lock()

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(6, 2, generator=torch.Generator().manual_seed(2))


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model, optimizer, batch):
    x, y = batch
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()


def cut(strategy, *tensors):
    size = strategy.num_replicas_in_sync
    if size == 1:
        return tensors
    return tuple(sg.PerReplica(list(torch.tensor_split(each, size))) for each in tensors)


def make(strategy, model_fn=mlp, optimizer_fn=sgd):
    torch.manual_seed(0)
    with strategy.scope():
        model = model_fn()
        return model, optimizer_fn(model)


def train(strategy, model, optimizer, steps=2):
    for _ in range(steps):
        strategy.run(lambda *batch: step(model, optimizer, batch), args=cut(strategy, X, Y))


def train_plainly(steps=2, model_fn=mlp):
    torch.manual_seed(0)
    model = model_fn()
    optimizer = sgd(model)
    for _ in range(steps):
        step(model, optimizer, (X, Y))
    return model, optimizer


def assert_same(ours, plain):
    mine, wanted = ours.state_dict(), plain.state_dict()
    assert list(mine) == list(wanted)
    for name in wanted:
        torch.testing.assert_close(mine[name], wanted[name], rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------ what is found outside run


def test_parameters_outside_run_are_ordinary_and_stay_the_same_objects(strategy):
    model, optimizer = make(strategy)
    before = list(model.parameters())
    assert all(type(p) is nn.Parameter and p.is_leaf for p in before)
    train(strategy, model, optimizer)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.param_groups[0]["params"][0] is before[0]


def test_the_model_outside_run_uses_the_central_values(strategy):
    model, optimizer = make(strategy)
    train(strategy, model, optimizer)
    plain, _ = train_plainly()
    torch.testing.assert_close(model(X), plain(X), rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(model(X), plain(X), rtol=1e-4, atol=1e-6)


def test_evaluation_in_run_gives_rows_in_order(strategy):
    model, _ = make(strategy)
    for context in (torch.no_grad, torch.inference_mode):

        def evaluate(x, context=context):
            with context():
                return model(x)

        found = strategy.run(evaluate, args=cut(strategy, X))
        torch.testing.assert_close(strategy.gather(found, axis=0), model(X))
    with torch.inference_mode():  # around the run
        found = strategy.run(model, args=cut(strategy, X))
    assert strategy.gather(found, axis=0).shape == (6, 2)
    train(strategy, model, sgd(model), steps=1)  # and training still works afterwards


def test_train_and_eval_modes_reach_the_replicas(strategy):
    model, _ = make(strategy, lambda: nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.99)))
    model.eval()
    found = strategy.gather(strategy.run(model, args=cut(strategy, X)), axis=0)
    torch.testing.assert_close(found, model(X))
    model.train()
    found = strategy.gather(strategy.run(model, args=cut(strategy, X)), axis=0)
    assert (found == 0).sum() > 6


def test_the_fast_paths_of_transformers_in_eval_agree(strategy):
    def encoder():
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2).eval()

    model, _ = make(strategy, encoder)
    x = torch.randn(5, 3, 4)
    with torch.no_grad():
        found = strategy.run(model, args=cut(strategy, x))
        torch.testing.assert_close(strategy.gather(found, axis=0), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["closure", "method", "lambda", "partial", "callable"])
def test_a_step_may_be_any_callable(kind, strategy):
    model, optimizer = make(strategy)

    class Trainer:
        def step(self, x, y):
            step(model, optimizer, (x, y))

        __call__ = step

    def closure(x, y):
        step(model, optimizer, (x, y))

    fn = {
        "closure": closure,
        "method": Trainer().step,
        "lambda": lambda x, y: step(model, optimizer, (x, y)),
        "partial": functools.partial(lambda o, x, y: step(model, o, (x, y)), optimizer),
        "callable": Trainer(),
    }[kind]
    for _ in range(2):
        strategy.run(fn, args=cut(strategy, X, Y))
    assert_same(model, train_plainly()[0])


# ------------------------------------------------------------------ saving, copying


def test_state_dicts_travel_both_ways(strategy):
    """Model and optimizer state of either side continue on the other, bit by bit the same start."""
    model, optimizer = make(strategy)
    train(strategy, model, optimizer)
    plain, plain_optimizer = mlp(), None
    plain.load_state_dict(model.state_dict())
    plain_optimizer = sgd(plain)
    plain_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(plain, plain_optimizer, (X, Y))
    train(strategy, model, optimizer, steps=1)
    assert_same(model, plain)

    other, other_optimizer = make(strategy)
    other.load_state_dict(plain.state_dict())  # outside scope
    other_optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    with strategy.scope():
        model.load_state_dict(plain.state_dict())  # in scope
        optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    step(plain, plain_optimizer, (X, Y))
    for each, opt in ((other, other_optimizer), (model, optimizer)):
        train(strategy, each, opt, steps=1)
        assert_same(each, plain)


def test_load_state_dict_with_assign_keeps_training(strategy):
    """assign=True puts other parameters in place; an optimizer made afterwards trains them."""
    model, _ = make(strategy)
    plain, _ = train_plainly(1)
    model.load_state_dict({k: v.clone() for k, v in plain.state_dict().items()}, assign=True)
    plain_optimizer = sgd(plain)
    optimizer = sgd(model)
    train(strategy, model, optimizer)
    for _ in range(2):
        step(plain, plain_optimizer, (X, Y))
    assert_same(model, plain)


def families():
    return nn.ModuleDict({
        "mlp": nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)),
        "lstm": nn.LSTM(4, 3, batch_first=True),
        "lazy": nn.LazyLinear(2),
        "embedding": nn.Embedding(5, 2, max_norm=1.0),
    })  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize(
    "strategy",
    [
        "mirrored2",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("one", "central2", "central3")),
    ],
    indirect=True,
)
def test_pickles_load_in_plain_pytorch_without_stratagem(strategy, tmp_path):
    """torch.save of whole models; the reading process never imports stratagem."""
    model, optimizer = make(strategy)
    train(strategy, model, optimizer)
    with strategy.scope():
        zoo = families()
    path = tmp_path / "model.pt"
    torch.save({"model": model, "optimizer": optimizer, "zoo": zoo}, path)
    program = (
        "import sys, torch\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *rest):\n"
        "        assert not name.startswith('stratagem'), name\n"
        "sys.meta_path.insert(0, Refuse())\n"
        f"found = torch.load({str(path)!r}, weights_only=False)\n"
        "model, optimizer, zoo = found['model'], found['optimizer'], found['zoo']\n"
        "assert type(model._modules['0']._parameters) is dict\n"
        "assert type(zoo['lstm']) is torch.nn.LSTM, type(zoo['lstm'])\n"
        "zoo['lstm'](torch.randn(2, 3, 4)); zoo['mlp'](torch.randn(3, 4))\n"
        "zoo['lazy'](torch.randn(2, 4)); zoo['embedding'](torch.tensor([1]))\n"
        "optimizer.zero_grad(); model(torch.ones(2, 4)).sum().backward(); optimizer.step()\n"
        "print(float(sum(p.detach().double().sum() for p in model.parameters())))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    wanted = float(sum(p.detach().double().sum() for p in model.parameters()))
    assert float(done.stdout) == pytest.approx(wanted, rel=1e-6)


def test_pickle_round_trip_in_process_gives_a_plain_model(two):
    model, _ = make(two)
    again = pickle.loads(pickle.dumps(model))
    assert type(again[0]._parameters) is dict
    assert_same(again, model)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert set(torch.load(buffer, weights_only=True)) == set(model.state_dict())


@pytest.mark.parametrize("in_scope", [True, False])
def test_a_deep_copy_belongs_to_the_strategy_too(in_scope, strategy):
    """VAR-18: copies are independent and train like the original, recurrent weights included."""

    def lstm():
        return nn.ModuleDict({"a": nn.LSTM(4, 3, batch_first=True), "b": nn.Linear(3, 2)})

    def seq_step(model, optimizer, x):
        optimizer.zero_grad()
        model["b"](model["a"](x)[0]).square().mean().backward()
        optimizer.step()

    model, optimizer = make(strategy, lstm)
    if in_scope:
        with strategy.scope():
            twin = copy.deepcopy(model)
    else:
        twin = copy.deepcopy(model)
    start = copy.deepcopy(model.state_dict())
    twin_optimizer = sgd(twin)
    plain = lstm()
    plain.load_state_dict(start)
    plain_optimizer = sgd(plain)
    x = torch.randn(5, 3, 4)
    for _ in range(2):
        seq_step(plain, plain_optimizer, x)
        strategy.run(lambda p: seq_step(twin, twin_optimizer, p), args=cut(strategy, x))
    assert_same(twin, plain)
    for name, value in start.items():
        assert torch.equal(model.state_dict()[name], value)
    assert optimizer.param_groups[0]["params"][0] is not twin_optimizer.param_groups[0]["params"][0]


def test_model_and_optimizer_copied_together_train(strategy):
    model, optimizer = make(strategy)
    train(strategy, model, optimizer, steps=1)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    train(strategy, twin, twin_optimizer, steps=1)
    assert_same(twin, train_plainly(2)[0])
    assert_same(model, train_plainly(1)[0])


def test_other_precisions_and_data_swaps_are_followed(strategy):
    """model.double(), p.data = …, share_memory(): replicas see the new storage at the next run."""
    model, _ = make(strategy)
    model.double()
    optimizer = sgd(model)
    plain, _ = train_plainly(0)
    plain.double()
    plain_optimizer = sgd(plain)
    for _ in range(2):
        strategy.run(
            lambda *b: step(model, optimizer, b), args=cut(strategy, X.double(), Y.double())
        )
        step(plain, plain_optimizer, (X.double(), Y.double()))
    assert_same(model, plain)
    for each in (model, plain):
        each[0].weight.data = torch.full_like(each[0].weight, 0.1)
        each.share_memory()
    for _ in range(2):
        strategy.run(
            lambda *b: step(model, optimizer, b), args=cut(strategy, X.double(), Y.double())
        )
        step(plain, plain_optimizer, (X.double(), Y.double()))
    assert_same(model, plain)


# ------------------------------------------------------------------ hooks


def test_hooks_on_modules_fire_in_every_replica(two):
    model, optimizer = make(two)
    seen = []
    model[2].register_forward_pre_hook(lambda m, args: seen.append("pre"))
    model[2].register_forward_hook(lambda m, args, out: seen.append("forward"))
    model[2].register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    train(two, model, optimizer, steps=1)
    assert sorted(seen) == ["backward", "backward", "forward", "forward", "pre", "pre"]


def test_hooks_on_parameters_act_on_the_aggregated_gradient(strategy):
    """A hook that is not linear gives the numbers of one device; it fires once per backward."""
    calls = []

    def hooked():
        model = mlp()
        model[0].weight.register_hook(lambda g: g.clamp(-0.001, 0.001))
        model[2].weight.register_hook(lambda g: calls.append(g.shape))
        return model

    def twice(model, optimizer, batch):
        x, y = batch
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        F.mse_loss(model(2 * x), y).backward()
        optimizer.step()

    sg.testing.assert_equivalent(hooked, sgd, twice, [(X, Y), (X[:5], Y[:5])], strategy)
    assert len(calls) == 8  # 2 trainings of 2 steps with 2 backward passes


def test_optimizers_stepped_by_post_accumulate_hooks_train_the_same(strategy):
    """The optimizer-in-backward recipe: one optimizer per parameter, stepped by its hook."""

    def hooked():
        model = mlp()
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1)

            def stepping(p, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(stepping)
        return model

    def only_backward(model, _, batch):
        x, y = batch
        F.mse_loss(model(x), y).backward()

    sg.testing.assert_equivalent(
        hooked, lambda m: None, only_backward, [(X, Y), (X[:5], Y[:5])], strategy
    )


def test_optimizer_hooks_fire_once_per_step(two):
    model, optimizer = make(two)
    seen = []
    optimizer.register_step_pre_hook(lambda o, a, k: seen.append("pre"))
    optimizer.register_step_post_hook(lambda o, a, k: seen.append("post"))
    train(two, model, optimizer, steps=2)
    assert seen == ["pre", "post"] * 2


# ------------------------------------------------------------------ torch.func, autocast, compile


def test_functional_call_and_transforms_work_in_replicas(strategy):
    model, _ = make(strategy)
    doubled = {name: 2 * p.detach() for name, p in model.named_parameters()}
    reference = copy.deepcopy(model)

    def called(x):
        return torch.func.functional_call(model, doubled, (x,))

    found = strategy.gather(strategy.run(called, args=cut(strategy, X)), axis=0)
    torch.testing.assert_close(found, torch.func.functional_call(reference, doubled, (X,)))

    def per_row(x, y):
        def loss(params, row, target):
            out = torch.func.functional_call(model, params, (row[None],))
            return F.mse_loss(out, target[None])

        params = {name: p.detach() for name, p in model.named_parameters()}
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)[
            "0.weight"
        ]

    found = strategy.gather(strategy.run(per_row, args=cut(strategy, X, Y)), axis=0)
    torch.testing.assert_close(found, per_row(X, Y))
    assert found.shape == (6, 8, 4)
    train(strategy, model, sgd(model), steps=1)


def test_autocast_and_grad_scaler_train_the_same(strategy):
    """bfloat16 forward under autocast; the scaler's scale grows and backs off once per step."""
    scalers = []

    def optimizers(model):
        scalers.append(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
        return sgd(model), scalers[-1]

    def scaled(model, both, batch):
        optimizer, scaler = both
        x, y = batch
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    bad = X.clone()
    bad[0] = float("inf")
    batches = [(X, Y), (bad, Y), (X[:5], Y[:5]), (X, Y)]
    sg.testing.assert_equivalent(mlp, optimizers, scaled, batches, strategy, rtol=0.02, atol=1e-3)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[0]._get_growth_tracker() == scalers[1]._get_growth_tracker()


def test_grad_scaler_without_unscale_and_updated_outside_run(two):
    model, optimizer = make(two)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

    def scaled(x, y):
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)

    for _ in range(2):
        two.run(scaled, args=cut(two, X, Y))
        scaler.update()
    assert scaler.get_scale() == 16.0
    assert_same(model, train_plainly()[0])


# When its cache is cold, as in a fresh clone, inductor runs a C++ compiler for minutes.
BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.soak)]


@pytest.fixture
def fresh_compiler(monkeypatch):
    """A compiler that remembers nothing. Replicas that compile at once leave its progress bar's thread."""
    monkeypatch.setattr(torch.hub.tqdm, "monitor_interval", 0, raising=False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_models_train_the_same(backend, strategy):
    """torch.compile(model): every replica trains its own leaf, and sees each update."""
    model, optimizer = make(strategy)
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        strategy.run(lambda *batch: step(compiled, optimizer, batch), args=cut(strategy, X, Y))
    assert_same(model, train_plainly(3)[0])
    torch.testing.assert_close(compiled(X), model(X))


# Torch hides this warning of its own compiler, which an "error" filter turns into an exception first.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_steps_train_the_same(backend, strategy):
    """torch.compile(step): where the replicas meet the graph breaks, around it it is compiled."""
    model, optimizer = make(strategy)

    @functools.partial(torch.compile, backend=backend)
    def whole(x, y):
        step(model, optimizer, (x, y))
        total = sg.get_replica_context().all_reduce("sum", x.sum())
        return total * 2

    for _ in range(12):  # more often than the compiler tries again
        totals = strategy.run(whole, args=cut(strategy, X, Y))
    assert_same(model, train_plainly(12)[0])
    for total in strategy.local_results(totals):
        torch.testing.assert_close(total, X.sum() * 2)


def test_a_module_built_inside_run_serves_but_is_not_trained(several):
    """Each replica built its own: using it is fine, training it is refused with the remedy."""

    def use(x):
        return nn.Linear(4, 2)(x).shape

    assert all(
        each[1] == 2 for each in several.local_results(several.run(use, args=cut(several, X)))
    )

    def train_it(x, y):
        model = nn.Linear(4, 2)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), (x, y))

    with pytest.raises(sg.errors.ForeignParameterError, match=r"inside `with strategy\.scope"):
        several.run(train_it, args=cut(several, X, Y))


def test_a_loaded_model_joins_by_becoming_a_submodule(strategy):
    """Pre-trained parts made elsewhere, wired into a model under the scope, train like the rest."""
    torch.manual_seed(0)
    backbone = pickle.loads(pickle.dumps(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8).eval())))

    def wired():
        return nn.Sequential(copy.deepcopy(backbone), nn.Tanh(), nn.Linear(8, 2))

    sg.testing.assert_equivalent(wired, sgd, step, [(X, Y), (X[:5], Y[:5])], strategy)


def test_an_optimizer_made_before_its_model_joined_is_refused(several):
    late = nn.Linear(4, 2)
    optimizer = sgd(late)
    with several.scope():
        model = nn.Sequential(late)
    with pytest.raises(sg.errors.ForeignParameterError, match="made before its parameters"):
        several.run(lambda x, y: step(model, optimizer, (x, y)), args=cut(several, X, Y))


def test_averaged_models_follow_outside_run(strategy):
    """Exponential moving averages are updated outside run; inside, the write is refused."""
    model, optimizer = make(strategy)
    with strategy.scope():
        average = torch.optim.swa_utils.AveragedModel(model)
    plain, plain_optimizer = train_plainly(0)
    plain_average = torch.optim.swa_utils.AveragedModel(plain)
    for _ in range(3):
        train(strategy, model, optimizer, steps=1)
        average.update_parameters(model)
        step(plain, plain_optimizer, (X, Y))
        plain_average.update_parameters(plain)
    assert_same(average, plain_average)
    found = strategy.gather(strategy.run(average, args=cut(strategy, X)), axis=0)
    torch.testing.assert_close(found, plain_average(X), rtol=1e-4, atol=1e-6)
