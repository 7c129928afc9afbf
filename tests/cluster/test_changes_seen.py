"""A function scheduled again sees what it captures as it is by then, wherever the change was made."""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import stratagem as sg
from stratagem import metrics
from stratagem._core.fingerprints import Fingerprint

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def cluster() -> Iterator[sg.LocalCluster]:
    """One worker, a process."""
    with sg.LocalCluster(workers=1, ps=1) as made:
        yield made


@pytest.fixture
def coordinator(cluster: sg.LocalCluster) -> Iterator[sg.ClusterCoordinator]:
    """A coordinator of the test's own."""
    with (
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
        sg.ClusterCoordinator(strategy) as made,
    ):
        yield made


@pytest.fixture
def settings() -> Iterator[types.ModuleType]:
    """A module of the user's, as a file beside the script is."""
    module: Any = types.ModuleType("users_settings")
    exec(
        "rate = 1\ntable = {'a': 1}\nclass Sizes: width = 1\ndef doubled(): return 2 * rate",
        vars(module),
    )
    module.__file__ = "/home/user/users_settings.py"
    sys.modules["users_settings"] = module
    yield module
    del sys.modules["users_settings"]


class Mood(enum.Enum):
    GOOD = 1


class Scaled(torch.nn.Module):
    """A model of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.rate * x).sum()


class Pair(NamedTuple):
    first: int
    second: int = 2


def packed_again() -> float:
    return metrics.snapshot().counters.get("coordinator.functions_packed_again", 0)


def check(coordinator: Any, function: Callable[[], Any], *changes: Callable[[], Any]) -> None:
    """Every change is seen by the closures scheduled after it, and by none before."""
    values, expected = [], []
    for change in (lambda: None, *changes):
        change()
        values += [coordinator.schedule(function) for _ in range(3)]
        expected += [function()] * 3
    found = [value.get(timeout_s=120) for value in values]
    assert found == expected
    assert len({repr(one) for one in expected}) > 1  # else nothing was changed at all


def test_attributes_of_a_class(coordinator: Any) -> None:
    class Base:
        rate = 1
        table = {"a": 1}

        @classmethod
        def scaled(cls) -> int:
            return 10 * cls.rate

    class Config(Base):
        def method(self) -> int:
            return 1

    def read() -> tuple[int, ...]:
        return Config.rate, Config.scaled(), Config().method()

    def read_table() -> int:
        return Config.table["a"]

    check(
        coordinator,
        read,
        lambda: setattr(Base, "rate", 2),
        lambda: setattr(Config, "rate", 3),
        lambda: setattr(Config, "method", lambda self: 4),
        lambda: setattr(Config, "rate", 1),
    )
    check(coordinator, read_table, lambda: Base.table.update(a=2))


def test_a_class_changed_back_by_way_of_another_function(coordinator: Any) -> None:
    """The worker has the class once: what another function brought there must not stay."""

    class Config:
        rate = 1

    def read() -> int:
        return Config.rate

    def read_too() -> int:
        return -Config.rate

    for rate in (1, 2, 1, 2):
        Config.rate = rate
        function = read if rate == 1 else read_too
        assert coordinator.schedule(function).get(timeout_s=120) == function()


def test_contents_of_a_module(coordinator: Any, settings: Any) -> None:
    def read() -> tuple[int, ...]:
        return settings.rate, settings.doubled(), settings.Sizes.width

    def read_table() -> int:
        return settings.table["a"]

    check(
        coordinator,
        read,
        lambda: setattr(settings, "rate", 2),
        lambda: setattr(settings.Sizes, "width", 3),
        lambda: setattr(settings, "doubled", lambda: 5),
        lambda: setattr(settings, "rate", 1),
    )
    check(coordinator, read_table, lambda: settings.table.update(a=2))


def test_attributes_of_a_function(coordinator: Any) -> None:
    def helper() -> int:
        return 0

    helper.count = 1  # type: ignore[attr-defined]

    def read() -> int:
        return helper.count  # type: ignore[attr-defined, no-any-return]

    check(coordinator, read, lambda: setattr(helper, "count", 2))


def test_changes_seen_through_a_long_chain_of_functions(coordinator: Any) -> None:
    box = {"now": 1}
    number = 1

    def last() -> int:
        return number

    chain: Callable[[], int] = last
    for _ in range(40):
        chain = (lambda inner: lambda: inner())(chain)

    def change() -> None:
        nonlocal number
        number = 2
        box["now"] = 2

    check(coordinator, chain, change)


def test_small_tensors_written_past_their_version(coordinator: Any) -> None:
    tensor = torch.zeros(2)
    array = tensor.numpy()
    half = torch.zeros(3, dtype=torch.bfloat16)

    def read() -> list[float]:
        return [*tensor.tolist(), *half.tolist()]

    check(
        coordinator,
        read,
        lambda: array.__setitem__(0, 1.0),
        lambda: tensor.data.add_(1),
        lambda: half.data.fill_(3),
    )


def test_an_unchanged_step_needs_no_new_fingerprint(
    cluster: sg.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the function nor of the class of its model: both are compared by identity."""
    made: list[Any] = []
    create = Fingerprint.__init__

    def count(self: Fingerprint, root: Any, *args: Any, **kwargs: Any) -> None:
        made.append(root)
        create(self, root, *args, **kwargs)

    with (
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
        sg.ClusterCoordinator(strategy) as coordinator,
    ):
        with strategy.scope():
            model = Scaled()

        def step(x: torch.Tensor) -> float:
            return float(model(x))

        first = [coordinator.schedule(step, args=(torch.ones(1),)).get() for _ in range(2)]
        monkeypatch.setattr(Fingerprint, "__init__", count)
        assert coordinator.schedule(step, args=(torch.ones(1),)).get() == first[-1]
        assert made == []
        monkeypatch.setattr(Scaled, "forward", lambda self, x: x.sum() + 5)
        assert coordinator.schedule(step, args=(torch.ones(1),)).get() == 6.0
        assert made != []


def test_plain_classes_are_not_packed_again(coordinator: Any, settings: Any) -> None:
    """Looking at what cannot change is enough: enumerations, named tuples, methods, descriptors."""

    class Slotted:
        __slots__ = ("a",)

        def __init__(self) -> None:
            self.a = 1

        @property
        def doubled(self) -> int:
            return 2 * self.a

        @staticmethod
        def name() -> str:
            return type(Slotted()).__name__

    def use() -> tuple[Any, ...]:
        slotted = Slotted()
        return Mood.GOOD.value, Pair(1), slotted.doubled, slotted.name(), settings.rate

    before = packed_again()
    values = [coordinator.schedule(use) for _ in range(3)]
    assert [value.get(timeout_s=120) for value in values] == [use()] * 3
    assert packed_again() == before
