"""Python numbers that a step moves: replicas that agree move them once, others are refused (issue 20, point 6)."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stratagem as sg
from stratagem._core.step_code import changes_in
from stratagem.errors import ReplicaError

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(5, 2, generator=torch.Generator().manual_seed(2))
STEPS = 5  # the function is searched in the 1st, 2nd and 4th


@dataclasses.dataclass
class Annealed:
    """Numbers of a program that change in every step."""

    tau: float = 1.0
    beta: float = 0.25
    turn: bool = False
    floor: float = 1.0
    average: float = 0.0
    total: float = 0.0
    rows: int = 0


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def train(strategy, program):
    """Run a program under a strategy, or on one device; return its numbers and its parameters."""
    if strategy is None:
        model, step, found = program()
        for _ in range(STEPS):
            step((X, Y))
    else:
        with strategy.scope():
            model, step, found = program()
        list(strategy.run_steps(step, [(X, Y)] * STEPS))
    return found(), {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(strategy, program):
    mine, plain = train(strategy, program), train(None, program)
    assert mine[0] == pytest.approx(plain[0], rel=1e-5)
    torch.testing.assert_close(mine[1], plain[1], rtol=1e-5, atol=1e-6)


def trained(change, loss_of):
    """A program that changes numbers before it computes the loss with them."""

    def program():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        numbers = Annealed()

        def step(batch):
            x, y = batch
            change(numbers, x)
            optimizer.zero_grad()
            loss = loss_of(numbers, F.mse_loss(model(x), y))
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, step, lambda: dataclasses.asdict(numbers)

    return program


def decay(numbers, x):
    numbers.tau *= 0.5
    numbers.beta += 0.125
    numbers.floor = max(numbers.floor - 0.3, 0.1)
    numbers.turn = not numbers.turn


def weighted(numbers, loss):
    return loss * numbers.tau * numbers.beta * numbers.floor * (2 if numbers.turn else 1)


def test_numbers_move_once_per_step(pair):
    """Temperatures, annealed weights and alternating flags, as attributes."""
    assert_same(pair, trained(decay, weighted))


def balance_of(x, gather):
    rows = x.square().sum(1)
    if gather and sg.in_cross_replica_context() is False:
        rows = sg.get_replica_context().all_gather(rows, axis=0)
    return rows.mean().item() - 3.5


def balanced(gather):
    """BEGAN: a weight of the loss follows the losses, in a closure variable that starts as an integer."""

    def program():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        k = 0

        def step(batch):
            nonlocal k
            x, y = batch
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) - k * model(x).square().mean()
            loss.backward()
            optimizer.step()
            k = k + 0.1 * balance_of(x, gather)
            k = min(
                max(k, 0),
                1,
            )
            print(f"k={k}")

        return model, step, lambda: k

    return program


def test_a_number_that_depends_on_a_replicas_rows_is_refused(pair):
    with pytest.raises(ReplicaError, match=r"number in variable 'k' differs(.|\n)*all_gather"):
        train(pair, balanced(gather=False))


def test_the_remedy_gives_the_number_of_one_device(pair):
    """Also for uneven batches."""
    assert_same(pair, balanced(gather=True))


def test_a_refused_number_has_its_value_from_before_the_run(pair):
    seen = []

    def program():
        model, step, found = balanced(gather=False)()
        seen.append(found)
        return model, step, found

    with pytest.raises(ReplicaError):
        train(pair, program)
    assert seen[0]() == 0


calls = 1.0


def globally():
    """The same for a global variable."""

    def program():
        global calls
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        calls = 1.0

        def step(batch):
            global calls
            calls /= 2
            optimizer.zero_grad()
            (calls * F.mse_loss(model(batch[0]), batch[1])).backward()
            optimizer.step()

        return model, step, lambda: calls

    return program


def test_global_numbers_move_once_per_step(pair):
    assert_same(pair, globally())


def log(numbers, x):
    numbers.average = 0.9 * numbers.average + 0.1 * x.mean().item()
    numbers.total += x.sum().item()
    numbers.rows += len(x)
    print(f"{numbers.average} {numbers.total / numbers.rows}")


def test_numbers_for_a_log_are_no_error_and_sums_add_up(pair):
    """A logged average is the last replica's own; sums are those of all rows."""
    program = trained(log, lambda numbers, loss: loss)
    (mine, parameters), (plain, wanted) = train(pair, program), train(None, program)
    torch.testing.assert_close(parameters, wanted, rtol=1e-5, atol=1e-6)
    assert mine["total"] == pytest.approx(plain["total"], rel=1e-5)
    assert mine["rows"] == plain["rows"]
    own = 0.0
    for _ in range(STEPS):
        own = 0.9 * own + 0.1 * X[3:].mean().item()  # the rows of the last replica
    assert mine["average"] == pytest.approx(own, rel=1e-5)


def ring(numbers, x):
    n = len(x)
    numbers.rows = (numbers.rows + n) % 7


def test_a_number_that_may_count_rows_is_named_if_all_replicas_agree(pair, caplog):
    """Equal parts: 3 rows in each replica cannot be told from a constant."""
    numbers = Annealed()
    for _ in range(3):
        pair.run(lambda x: ring(numbers, x), args=(sg.PerReplica([X[:2], X[2:4]]),))
    assert numbers.rows == 6
    assert [one.getMessage() for one in caplog.records if "Annealed.rows" in one.getMessage()]


@pytest.mark.parametrize("kind", [sg.CentralStorageStrategy, sg.MirroredStrategy])
def test_numbers_are_refused_if_replicas_run_at_the_same_time(kind):
    with kind(["cpu:0", "cpu:1"], parallel_replicas=True) as strategy:
        with pytest.raises(ReplicaError, match=r"'numbers' → Annealed\.(.|\n)*parallel_replicas"):
            train(strategy, trained(decay, weighted))


def sums(self, loss, n):
    self.a += loss * n
    self.b = self.b + loss.item()
    self.c -= n
    self.d = self.d + 0.9 * loss
    self.e = loss.item()
    self.f[0] = 2 * self.f[0]


def recurrences(self, loss):
    self.a = 0.9 * self.a + loss
    self.b = self.b * 0.9 + loss
    self.c = loss if self.c is None else min(self.c, loss)
    self.d **= 2
    self.e += 1
    self.g = loss - self.g
    self.h = (
        self.h
        * 2
    )  # fmt: skip


def numbers_of(function):
    return {name[1:]: {*kinds} for name, kinds in changes_in(function.__code__).numbers.items()}


def uses(self, loss, writer):
    print("loss", self.a, self.b)
    writer.add_scalar("c", self.c)
    text = f"{self.d}"
    if self.e == -1.0 or self.f is None:
        return text
    weight = self.g * 2
    (torch.log(loss) * self.h).backward()
    if self.i > 0.5:
        return weight
    self.k += 1
    return self.j


def test_sums_are_no_recurrences():
    found = numbers_of(sums)
    assert {name for name, kinds in found.items() if kinds == {"adds"}} == set("abcd")
    assert found.keys() == set("abcd")
    assert changes_in(sums.__code__).items == {(".f", 0): {"moves"}}


def test_recurrences_are_found():
    found = numbers_of(recurrences)
    assert {name for name, kinds in found.items() if kinds & {"moves", "varies"}} == set("abcdegh")


def test_what_goes_into_a_log_is_not_used():
    used = {name for name in changes_in(uses.__code__).used if len(name) == 2}
    assert used == {".g", ".h", ".i", ".j"}


def set_aside(model):
    """Keep running statistics as they are, as programs with SAM's second step do."""

    def of(module):
        if isinstance(module, nn.BatchNorm1d):
            module.backup_momentum = module.momentum
            module.momentum = 0

    model.apply(of)


def bring_back(model):
    """Undo `set_aside`."""

    def of(module):
        if isinstance(module, nn.BatchNorm1d) and hasattr(module, "backup_momentum"):
            module.momentum = module.backup_momentum

    model.apply(of)


def test_attributes_that_a_step_sets_aside_come_back_in_every_replica(pair):
    """Each replica finds the momentum from before, also if another replica has just set it to 0."""

    def train(strategy):
        with strategy.scope():
            model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            for prepare in (bring_back, set_aside):
                prepare(model)
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()

        for _ in strategy.run_steps(step, [X * n for n in range(1, 6)]):
            pass
        return model[0].running_mean.clone(), model[0].momentum, model[0].backup_momentum

    plain = train(sg.OneDeviceStrategy("cpu"))
    found = train(pair)
    torch.testing.assert_close(found[0], plain[0])
    assert found[1:] == plain[1:] == (0, 0.1)


class OfClass:
    """A number in the class."""

    gain = 1.0


class InSlot:
    """A number in a slot."""

    __slots__ = ("gain",)

    def __init__(self):
        self.gain = 1.0


@pytest.mark.parametrize("holder", [OfClass, InSlot()])
def test_numbers_of_classes_and_in_slots_are_set_aside(pair, holder):
    """Libraries keep numbers in classes (peft's configurations); a step sets one and brings it back."""

    def program():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            x, y = batch
            before = holder.gain
            holder.gain = 0.5
            loss = holder.gain * F.mse_loss(model(x), y)
            holder.gain = before
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return model, step, lambda: holder.gain

    assert_same(pair, program)


class AverageMeter:
    """The meter of PyTorch's ImageNet example: adds up tensors, and has a method for several processes."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def reduce_over_processes(self):
        total = torch.tensor([self.sum, self.count])
        self.sum, self.count = total.tolist()
        self.avg = self.sum / self.count


def test_a_meter_adds_up_tensors_over_the_replicas(pair):
    with pair.scope():
        model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter, expected = AverageMeter(), AverageMeter()

    def step(batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch), batch[:, :2]).backward()
        optimizer.step()
        meter.update(batch[:, 0].mean(), len(batch))

    batches = [torch.arange(20.0).reshape(5, 4) + number for number in range(5)]
    list(pair.run_steps(step, batches))
    for batch in batches:
        expected.update(batch[:, 0].mean(), len(batch))
    assert meter.count == expected.count == 25
    torch.testing.assert_close(meter.sum, expected.sum)


def test_calling_a_method_of_the_name_is_no_use_of_a_meter(pair):
    """`accuracy` of PyTorch's ImageNet example calls ``.sum()`` and scales a local variable in place."""
    with pair.scope():
        model = nn.Linear(4, 2)
    meter = AverageMeter()

    def accuracy(output, target):
        correct = output.argmax(1).eq(target)
        return correct.float().sum(0, keepdim=True).mul_(100.0 / len(target))

    def step(batch):
        meter.update(accuracy(model(batch), (batch[:, 0] > 8).long())[0], len(batch))

    batches = [torch.arange(20.0).reshape(5, 4) + number for number in range(5)]
    list(pair.run_steps(step, batches))
    seen, targets = torch.cat(batches), torch.cat(batches)[:, 0] > 8
    right = (model(seen).argmax(1) == targets).float().mean()
    torch.testing.assert_close(meter.avg, 100 * right)
