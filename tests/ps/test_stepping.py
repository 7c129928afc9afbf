"""The real optimizer classes on shards give plain PyTorch's numbers, dense and by rows."""

import inspect

import pytest
import torch
from elementwise import ELEMENTWISE
from own_optimizer import GradientKeeper
from torch import nn

from stratagem._ps.server.shard_optimizer import ServerOptimizer, resolve_optimizer_class
from stratagem._ps.types import Gradient, GroupSpec
from stratagem.errors import UnsupportedOptimizer

ROWS, WIDTH, STEPS = 11, 3, 6

# Every optimizer the issue names, with the options that change its path.
OPTIMIZERS = [
    *ELEMENTWISE,
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "maximize": True}),
    ("Adagrad", {"lr": 0.1}),
    ("Adam", {"lr": 0.1}),
    ("AdamW", {"lr": 0.1}),
    ("RMSprop", {"lr": 0.1, "centered": True}),
]


def gradients():
    """Row gradients of a few steps: unique ids, some steps touching one shard only or nothing."""
    generator = torch.Generator().manual_seed(0)
    for ids in ([0, 4, 10], [1, 2], [0, 1, 9], [], [4], [3, 4, 5, 6, 10]):
        yield (
            torch.tensor(ids, dtype=torch.int64),
            torch.randn(len(ids), WIDTH, generator=generator),
        )


def start():
    return torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).clone()


def plain(name, options, *, sparse=False):
    """One-device PyTorch on the same gradients."""
    weight = nn.Parameter(start())
    optimizer = getattr(torch.optim, name)([weight], **options)
    for ids, values in gradients():
        dense = torch.zeros(ROWS, WIDTH).index_copy_(0, ids, values)
        weight.grad = dense
        if sparse:
            weight.grad = torch.sparse_coo_tensor(
                ids.unsqueeze(0), values, (ROWS, WIDTH), check_invariants=True
            ).coalesce()
        optimizer.step()
    return weight.detach()


def sharded(name, options, sizes, *, rows, sparse=False):
    """The same on shards, each with its own server-side optimizer."""
    whole = start()
    pieces = []
    for begin, size in zip(torch.tensor([0, *sizes]).cumsum(0)[:-1].tolist(), sizes, strict=True):
        shard = whole[begin : begin + size].clone()
        group = GroupSpec(variables=(1,), settings=options)
        stepper = ServerOptimizer(f"torch.optim.{name}", [group], {1: shard})
        for ids, values in gradients():
            mine = (ids >= begin) & (ids < begin + size)
            local, part = ids[mine] - begin, values[mine]
            if rows:
                gradient = Gradient(variable=1, values=part, ids=local, sparse=sparse)
            else:
                dense = torch.zeros(size, WIDTH).index_copy_(0, local, part)
                gradient = Gradient(variable=1, values=dense)
            stepper.step([gradient])
        pieces.append(shard)
    return torch.cat(pieces)


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "dense"])
@pytest.mark.parametrize("sizes", [[ROWS], [4, 4, 3]], ids=["whole", "sharded"])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=str)
def test_trained_weights_equal_plain_pytorch(name, options, sizes, rows):
    torch.testing.assert_close(sharded(name, options, sizes, rows=rows), plain(name, options))


@pytest.mark.parametrize("sizes", [[ROWS], [4, 4, 3]], ids=["whole", "sharded"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SparseAdam", {"lr": 0.1}),
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("Adagrad", {"lr": 0.1}),
    ],
    ids=str,
)
def test_sparse_gradients_equal_plain_pytorch(name, options, sizes):
    """``sparse=True`` layers: the class sees what plain PyTorch would give it."""
    torch.testing.assert_close(
        sharded(name, options, sizes, rows=True, sparse=True), plain(name, options, sparse=True)
    )


def test_adam_refuses_sparse_gradients_as_plain_pytorch_does():
    with pytest.raises(RuntimeError, match="sparse gradients"):
        sharded("Adam", {"lr": 0.1}, [ROWS], rows=True, sparse=True)


def test_row_step_of_adagrad_leaves_other_rows_and_their_state_alone():
    """Only the rows of the gradient are written (bit for bit)."""
    weight = start()
    group = GroupSpec(variables=(1,), settings={"lr": 0.1})
    stepper = ServerOptimizer("torch.optim.Adagrad", [group], {1: weight})
    stepper.step([Gradient(variable=1, values=torch.ones(2, WIDTH), ids=torch.tensor([2, 5]))])
    changed = (weight != start()).any(dim=1).nonzero().flatten().tolist()
    assert changed == [2, 5]
    state = {entry.key: entry.value for entry in stepper.state_entries()}
    assert state["sum"].any(dim=1).nonzero().flatten().tolist() == [2, 5]
    assert float(state["step"]) == 1


def test_variables_without_a_gradient_stay_and_groups_keep_their_rates():
    a, b, c = torch.ones(2), torch.ones(2), torch.ones(2)
    groups = [
        GroupSpec(variables=(1, 2), settings={"lr": 0.5}),
        GroupSpec(variables=(), settings={"lr": 9.0}),
        GroupSpec(variables=(3,), settings={"lr": 0.25}),
    ]
    stepper = ServerOptimizer("torch.optim.SGD", groups, {1: a, 2: b, 3: c})
    both = [Gradient(variable=1, values=torch.ones(2)), Gradient(variable=3, values=torch.ones(2))]
    stepper.step(both)
    assert (a[0], b[0], c[0]) == (0.5, 1.0, 0.75)
    with stepper.settings({2: {"lr": 0.75, "initial_lr": 1.0}}):
        stepper.step(both)
    assert (a[0], b[0], c[0]) == (0.0, 1.0, 0.0)
    stepper.step(both)  # the settings were that step's alone
    assert (a[0], b[0], c[0]) == (-0.5, 1.0, -0.25)
    assert "initial_lr" not in stepper._optimizer.param_groups[2]


def test_state_survives_saving_loading_and_a_new_group():
    a, b = torch.ones(2), torch.ones(2)
    one = [GroupSpec(variables=(1,), settings={"lr": 0.1})]
    two = [*one, GroupSpec(variables=(2,), settings={"lr": 0.1})]
    stepper = ServerOptimizer("torch.optim.Adam", one, {1: a})
    stepper.step([Gradient(variable=1, values=torch.ones(2))])
    grown = ServerOptimizer("torch.optim.Adam", two, {1: a, 2: b})
    grown.put_states(stepper.take_states([1]))
    assert {entry.key for entry in grown.state_entries()} == {"step", "exp_avg", "exp_avg_sq"}
    other = ServerOptimizer("torch.optim.Adam", one, {1: a.clone()})
    other.load_state(grown.state_entries())
    before = [entry.value.clone() for entry in other.state_entries()]
    grown.step([Gradient(variable=1, values=torch.ones(2))])
    assert all(map(torch.equal, before, [entry.value for entry in other.state_entries()]))


def test_gradient_for_a_foreign_variable_or_of_a_wrong_shape_is_refused():
    stepper = ServerOptimizer(
        "torch.optim.SGD", [GroupSpec(variables=(1,), settings={})], {1: torch.ones(2)}
    )
    with pytest.raises(ValueError, match="variable 2 got a gradient"):
        stepper.step([Gradient(variable=2, values=torch.ones(2))])
    with pytest.raises(ValueError, match=r"\(3,\).*expected \(2,\)"):
        stepper.step([Gradient(variable=1, values=torch.ones(3))])


def test_only_allowed_modules_are_imported():
    """Servers import torch.optim and what their list names, nothing else."""
    assert resolve_optimizer_class("torch.optim.Adam") is torch.optim.Adam
    for name in ("os.path.join", "torch.optimistic.Adam", "antigravity.Adam", "Adam"):
        with pytest.raises(UnsupportedOptimizer, match="may not import"):
            resolve_optimizer_class(name)
    for name in ("torch.optim.lr_scheduler", "torch.optim.Nothing", "torch.optim.Optimizers"):
        with pytest.raises(UnsupportedOptimizer, match=r"not a torch\.optim\.Optimizer"):
            resolve_optimizer_class(name)


@pytest.mark.parametrize("line", ["raise SystemExit(2)", "raise KeyError('HOME')"])
def test_a_module_that_fails_at_its_import_does_not_end_the_server(line, tmp_path, monkeypatch):
    """A training script parses its command line, or reads files that the server does not have."""
    (tmp_path / "own_script.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedOptimizer, match=r"own_script' raised .*a module of its own"):
        resolve_optimizer_class("own_script.Own", ("own_script",))


def settings_of(kind):
    """Settings that lead through a class's ways of stepping: all at once, by itself, fused."""
    known = inspect.signature(kind).parameters
    asked = {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True, "centered": True}
    for how in ("foreach", "fused", None):
        if how is not None and how not in known:
            continue
        for maximize in (False, True):
            for decays in (False, True):
                settings = {"lr": 0.01, "maximize": maximize, how: True, "amsgrad": True, **asked}
                if not decays:
                    settings["weight_decay"] = 0.0
                yield {key: value for key, value in settings.items() if key in known}


def memory_of(tensor):
    parts = [tensor._values(), tensor._indices()] if tensor.is_sparse else [tensor]
    return {part.untyped_storage().data_ptr() for part in parts}


CLASSES = [
    f"{kind.__module__}.{kind.__name__}"
    for kind in (*(getattr(torch.optim, name) for name in torch.optim.__all__), GradientKeeper)
    if isinstance(kind, type) and kind not in (torch.optim.Optimizer, torch.optim.LBFGS)
]


@pytest.mark.parametrize("class_name", CLASSES)
def test_no_step_writes_or_keeps_a_gradient(class_name):
    """It is a worker's memory: the worker uses it again as soon as the step is over."""
    kind = resolve_optimizer_class(class_name, ["own_optimizer"])
    ids = torch.tensor([1, 5])
    steps = 0
    for settings in settings_of(kind):
        groups = [GroupSpec(variables=(1,), settings=settings)]
        for rows, given in ((8, None), (40_000, None), (8, ids)):
            weight = torch.ones(rows, 8)
            stepper = ServerOptimizer(class_name, groups, {1: weight}, modules=["own_optimizer"])
            for sparse in (False, True) if given is not None else (False,):
                values = torch.ones(len(given) if given is not None else rows, 8)
                try:
                    stepper.step([Gradient(variable=1, values=values, ids=given, sparse=sparse)])
                except RuntimeError:
                    continue  # a class that takes no sparse gradients, or only these
                steps += 1
                assert torch.equal(values, torch.ones_like(values)), settings
                kept = [entry.value for entry in stepper.state_entries()]
                for tensor in [one for one in kept if isinstance(one, torch.Tensor)]:
                    assert not memory_of(tensor) & (memory_of(values) | memory_of(ids)), settings
    assert steps >= 4
