"""Steps on large shards in pieces give plain PyTorch's bits, and leave its state behind."""

import pytest
import torch
from elementwise import ELEMENTWISE
from torch import nn

from stratagem._ps.server import chunked_step
from stratagem._ps.server.shard_optimizer import ServerOptimizer
from stratagem._ps.types import Gradient, GroupSpec

STEPS = 3

# Every elementwise class, with options that change what it keeps.
OPTIMIZERS = [
    *ELEMENTWISE,
    ("Adam", {"lr": 0.1, "fused": True}),
    ("AdamW", {"lr": 0.1, "foreach": True}),
    ("RMSprop", {"lr": 0.1, "centered": True, "momentum": 0.5}),
]


class Centred(torch.optim.SGD):
    """Takes the mean off a gradient: on pieces it would compute something else."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad - parameter.grad.mean()
        return super().step(closure)


@pytest.fixture(autouse=True)
def one_thread():
    """As on a server; several threads cut torch's loops elsewhere, which may show in the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces of 4 KB, so that a few thousand numbers are many pieces."""
    for module in ("chunked_step", "shard_optimizer"):
        monkeypatch.setattr(f"stratagem._ps.server.{module}.CHUNK_BYTES", 1 << 12)


def start(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def row_gradients(shape):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randperm(shape[0], generator=generator)[: shape[0] // 3]
        yield ids, torch.randn(ids.numel(), *shape[1:], generator=generator)


def both(name, options, shape, *, rows):
    """Weights and state after some steps: plain PyTorch's, and a server's."""
    plain, mine = nn.Parameter(start(shape)), start(shape)
    optimizer = getattr(torch.optim, name)([plain], **options)
    group = GroupSpec(variables=(1,), settings=options)
    stepper = ServerOptimizer(f"torch.optim.{name}", [group], {1: mine})
    for ids, values in row_gradients(shape):
        plain.grad = torch.zeros(shape).index_copy_(0, ids, values)
        gradient = Gradient(variable=1, values=plain.grad.clone())
        if rows:
            gradient = Gradient(variable=1, values=values, ids=ids)
        stepper.step([gradient])
        optimizer.step()
    state = {entry.key: entry.value for entry in stepper.state_entries()}
    return (plain.detach(), optimizer.state[plain]), (mine, state)


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "dense"])
@pytest.mark.parametrize("shape", [(1003, 5), (3, 2001), (4099,)], ids=str)
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=str)
def test_pieces_give_plain_pytorchs_bits(name, options, shape, rows):
    """Every elementwise class: weights, state and step counts are the same to the last bit."""
    (weight, state), (mine, kept) = both(name, options, shape, rows=rows)
    assert torch.equal(mine, weight)
    assert kept.keys() == state.keys()
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(kept[key], value), key
        else:
            assert kept[key] == value


def test_no_call_of_the_class_sees_more_than_a_piece(monkeypatch):
    """What bounds the temporaries: `step` never has a parameter larger than a piece before it."""
    seen = []
    step = torch.optim.Adam.step

    def watched(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        seen.append(sum(p.nbytes for p in parameters if p.grad is not None))
        return step(self, closure)

    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    tensors = {1: start((5000,)), 2: start((500,)), 3: start((500,)), 4: start((500,))}
    options = {"lr": 0.1, "foreach": True}
    groups = [GroupSpec(variables=tuple(tensors), settings=options)]
    stepper = ServerOptimizer("torch.optim.Adam", groups, tensors)
    stepper.step([Gradient(variable=n, values=torch.ones_like(t)) for n, t in tensors.items()])
    assert sum(seen) == sum(tensor.nbytes for tensor in tensors.values())
    assert max(seen) <= 1 << 12
    assert all(parameter.grad is None for parameter in stepper._parameters.values())


def test_a_step_that_fails_leaves_the_groups_as_they_were(monkeypatch):
    """The next gradient is stepped as if the failed one had not come."""
    groups = [
        GroupSpec(variables=(1,), settings={"lr": 0.1}),
        GroupSpec(variables=(2,), settings={"lr": 0.2}),
    ]
    tensors = {1: torch.ones(5000), 2: torch.ones(3)}
    stepper = ServerOptimizer("torch.optim.Adam", groups, tensors)
    with stepper.settings({0: {"lr": torch.tensor([0.1, 0.2])}}), pytest.raises(TypeError):
        stepper.step([Gradient(variable=1, values=torch.ones(5000))])
    gradients = [Gradient(variable=n, values=torch.ones_like(t)) for n, t in tensors.items()]
    stepper.step(gradients)
    assert set(stepper._optimizer.state) == set(stepper._parameters.values())
    torch.testing.assert_close(tensors[2], torch.full((3,), 0.8))
    torch.testing.assert_close(tensors[1][-5:], torch.full((5,), 0.9))


def test_an_unknown_optimizer_class_gets_its_whole_parameter():
    """Nobody knows what a subclass of a known class does with it."""
    weight, gradient = start((5000,)), torch.arange(5000.0)
    group = GroupSpec(variables=(1,), settings={"lr": 1.0})
    stepper = ServerOptimizer(f"{__name__}.Centred", [group], {1: weight}, modules=(__name__,))
    stepper.step([Gradient(variable=1, values=gradient)])
    assert torch.equal(weight, start((5000,)) - (gradient - gradient.mean()))


def test_rows_without_order_find_their_places():
    rows = chunked_step.RowsOfGradient(torch.tensor([[4.0], [1.0], [3.0]]), torch.tensor([4, 1, 3]))
    like = torch.zeros(2, 1)
    found = [rows.between(start, start + 2, like).flatten().tolist() for start in (0, 2, 4)]
    assert found == [[0.0, 1.0], [0.0, 3.0], [4.0, 0.0]]
