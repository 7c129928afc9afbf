"""Random steps that change numbers and tensors which the program keeps: under replicas all values equal plain PyTorch's."""

from __future__ import annotations

import collections
import random
import textwrap
import types

import pytest
import torch
from torch import nn

import stratagem as sg

X = torch.arange(24.0).reshape(6, 4) / 24
STEPS = 5  # the function is searched in the 1st, 2nd and 4th

STATEMENTS = """
S.a{n} += 1
S.a{n} = S.a{n} + 2
S.a{n} *= 0.5
S.a{n} = S.a{n} * 2 - 1
S.a{n} = max(S.a{n} - 0.3, 0.1)
S.flag{n} = not S.flag{n}
S.a{n} = S.a{n} ** 2 % 5
S.a{n} += S.stride
S.a{n} = (S.a{n} + S.stride) % 7
S.a{n} = S.a{n} + 1 if S.a{n} < 2 else 0
S.a{n} += 1 if S.stride > 2 else 2
before = S.a{n}; S.a{n} = before + 1
before = S.d['k{n}'] * 2; before = before % 5; S.d['k{n}'] = before + 1
S.a{n}, S.b{n} = S.b{n}, S.a{n}
S.a{n} = S.b{n} = S.a{n} + 1
S.a{n} += S.b{n}; S.b{n} = S.a{n} - S.b{n}
S.inner.n{n} = S.inner.n{n} * 2 + 1
S.d['k{n}'] += 1
S.d['k{n}'] = S.d['k{n}'] * 0.5 + 1
S.d['new{n}'] = S.d.get('new{n}', 0) + 1
S.counter['c'] += 1
S.l[{n}] += 2
S.nested[0]['z'] += 1
for k in list(S.halves): S.halves[k] *= 0.5
GLOBAL['k{n}'] += 3
Kind.total += 1
by_helper(S)
by_helper_of_items(S.d, 'k{n}')
count()
meet()
meet(); S.t{n}.mul_(0.5)
S.t{n} = S.t{n} + 1; meet(); S.t{n}.mul_(0.5); meet(); S.t{n} += w.detach().sum()
S.lt = [s * 2 for s in S.lt]; meet(); S.lt[{n}].add_(1)
S.rows{n} += len(x)
S.rows{n} = S.rows{n} + x.shape[0]
S.sum{n} += float(x.sum())
S.d['r{n}'] += len(x)
S.t{n}.mul_(0.9).add_(w.detach().sum(), alpha=0.1)
S.t{n} = 0.9 * S.t{n} + 0.1 * w.detach().sum()
S.dt['t{n}'] = S.dt['t{n}'] * 0.5 + w.detach().mean()
S.lt[{n}].lerp_(w.detach().mean(), 0.5)
S.lt = [s + 1 for s in S.lt]
for s in S.lt: s.mul_(0.75)
S.tsum{n} += x.sum()
S.tsum{n}.add_(x.sum())
S.tcount{n} += 1
S.tcount{n}.add_(1)
""".strip().splitlines()

PROGRAM = """
def make(S, model, optimizer, GLOBAL):
    counted = 0

    def count():
        nonlocal counted
        counted += 1

    def step(x):
        w = model.weight
{before}
        used = S.a0 + S.a1 + S.d["k0"] + S.l[0] + S.flag0
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean() * (1 + 0.01 * used % 7)
        loss.backward()
{after}
        optimizer.step()

    return step, lambda: counted
"""


class Kind:
    total = 0


def by_helper(state):
    state.helped += 1


def meet():
    """Wait for the other replicas."""
    sg.get_replica_context().all_reduce("sum", torch.ones(()))


def by_helper_of_items(items, key):
    items[key] = items[key] + 1


def state():
    numbers = range(3)
    found = types.SimpleNamespace(
        stride=3,
        helped=0,
        d={f"{k}{n}": int(k == "k") * (n + 1) for k in "kr" for n in numbers},
        halves={"p": 1.0, "q": 2.0},
        l=[1, 2, 3],
        counter=collections.Counter(),
        nested=[{"z": 1}],
        inner=types.SimpleNamespace(n0=0, n1=0, n2=0),
        dt={f"t{n}": torch.tensor(2.0 + n) for n in numbers},
        lt=[torch.tensor(3.0 + n) for n in numbers],
    )
    for n in numbers:
        for name, value in (("a", n + 1), ("b", 5), ("rows", 0), ("sum", 0.0), ("flag", True)):
            setattr(found, f"{name}{n}", value)
        setattr(found, f"t{n}", torch.tensor(1.0 + n))
        setattr(found, f"tsum{n}", torch.zeros(()))
        setattr(found, f"tcount{n}", torch.zeros((), dtype=torch.long))
    return found


def flat(value, path=""):
    """Yield every number, with its place."""
    if isinstance(value, (bool, int, float, torch.Tensor)):
        yield path, float(value)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from flat(one, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        yield from flat(dict(enumerate(value)), path)
    else:
        yield from flat(vars(value), path)


def source_of(seed):
    """Return the source of a random program."""
    chance = random.Random(seed)
    lines = [
        chance.choice(STATEMENTS).format(n=chance.randint(0, 2))
        for _ in range(chance.randint(2, 6))
    ]
    cut = chance.randint(0, len(lines))
    before, after = (
        textwrap.indent("\n".join(some), " " * 8) for some in (lines[:cut], lines[cut:])
    )
    return PROGRAM.format(before=before, after=after)


def train(source, strategy):
    """Run a program; return all its numbers and its parameters."""
    names = {one.__name__: one for one in (by_helper, by_helper_of_items, meet, Kind)}
    exec(source, names)
    torch.manual_seed(0)
    Kind.total = 0
    kept, items = state(), {f"k{n}": n for n in range(3)}
    with strategy.scope():
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step, counted = names["make"](kept, model, optimizer, items)
    for _ in range(STEPS):
        whole = strategy.num_replicas_in_sync == 1
        strategy.run(step, args=(X if whole else sg.PerReplica([X[:3], X[3:]]),))
    found = dict(flat([vars(kept), items, Kind.total, counted()]))
    return found, model.weight.detach().clone()


@pytest.mark.parametrize(
    "first",
    [0, 10, 20, 30, *(pytest.param(k, marks=pytest.mark.soak) for k in range(40, 2000, 10))],
)
def test_random_programs_keep_the_values_of_one_device(pair, first):
    """Ten programs of two to six statements, before and after ``backward``."""
    with sg.OneDeviceStrategy("cpu:0") as one:
        for seed in range(first, first + 10):
            source = source_of(seed)
            plain, mine = train(source, one), train(source, pair)
            assert mine[0] == pytest.approx(plain[0], rel=1e-4, abs=1e-4), source
            torch.testing.assert_close(mine[1], plain[1], rtol=1e-4, atol=1e-4, msg=source)
