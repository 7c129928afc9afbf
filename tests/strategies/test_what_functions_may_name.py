"""Modules, builtins and objects that a scheduled function may name, and the error about those it may not (issue 20, 10 and 15)."""

from __future__ import annotations

import builtins
import functools
import importlib
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from warm_start import run_program

import stratagem as sg

pytestmark = pytest.mark.process

WAIT_S = 150.0


def run(coordinator: sg.ClusterCoordinator, function: Callable[..., Any]) -> Any:
    return coordinator.schedule(function).fetch(timeout_s=WAIT_S)


def test_modules_with_a_class_of_their_own_are_sent_by_name(alone: sg.ClusterCoordinator) -> None:
    ops, aten, cudnn, mkldnn = (
        torch.ops,
        torch.ops.aten,
        torch.backends.cudnn,
        torch.backends.mkldnn,
    )

    def use() -> tuple[float, float, bool, bool]:
        x = torch.tensor(-2.0)
        found = float(ops.aten.abs(x)), float(aten.neg(x))
        return *found, cudnn.is_available(), mkldnn.is_available()

    assert run(alone, use) == (2.0, 2.0, cudnn.is_available(), mkldnn.is_available())


def test_a_builtin_that_the_program_replaced_is_sent_by_name(
    alone: sg.ClusterCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As programs do that print on one rank only."""
    plain = builtins.abs
    monkeypatch.setattr(builtins, "abs", lambda x: 100)

    def use() -> int:
        return plain(-3)

    assert run(alone, use) == 3


def test_a_class_of_an_extension_under_another_name_is_sent_by_name(
    alone: sg.ClusterCoordinator,
) -> None:
    kept = [torch.nn.attention.SDPBackend.MATH]

    def use() -> bool:
        return kept[0] == torch.nn.attention.SDPBackend.MATH

    assert run(alone, use)


CACHED_MODULE = """
import functools
import torch

@functools.lru_cache(maxsize=8)
def power(base, exponent):
    return base if exponent == 1 else base * power(base, exponent - 1)

class Table(torch.nn.Linear):
    @staticmethod
    @functools.cache
    def size():
        return power(2, 3)

    def forward(self, x):
        return super().forward(x) * self.size()
"""


def test_functions_with_a_cache_need_no_module_on_the_worker(
    alone: sg.ClusterCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in vector-quantize-pytorch: ``@functools.cache`` on a helper of the model's module."""
    (tmp_path / "my_cached_model.py").write_text(CACHED_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module: Any = importlib.import_module("my_cached_model")
    monkeypatch.setitem(sys.modules, "my_cached_model", module)

    @functools.cache
    def local(x: int) -> int:
        return x + 1

    with alone.strategy.scope():
        model = module.Table(2, 1, bias=False)
        nn.init.ones_(model.weight)

    def use() -> tuple[float, int, int, int | None]:
        found = float(model(torch.ones(1, 2))), module.power(3, 4), local(1)
        return *found, module.power.cache_parameters()["maxsize"]

    assert run(alone, use) == (16.0, 81, 2, 8)


def test_a_captured_function_with_a_cache_is_not_packed_again(alone: sg.ClusterCoordinator) -> None:
    @functools.cache
    def double(x: int) -> int:
        return 2 * x

    def use() -> int:
        return double(4)

    assert run(alone, use) == 8
    before = sg.metrics.snapshot().counters.get("coordinator.functions_packed_again", 0)
    assert [run(alone, use) for _ in range(3)] == [8, 8, 8]
    assert sg.metrics.snapshot().counters.get("coordinator.functions_packed_again", 0) == before


class Demanding(nn.Module):
    """Its ``__new__`` expects an argument, which pickle does not give."""

    def __new__(cls, size: int) -> Any:
        return super().__new__(cls)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, 1)


def test_a_module_whose_class_expects_arguments_of_new(alone: sg.ClusterCoordinator) -> None:
    with alone.strategy.scope():
        model = Demanding(3)
    assert run(alone, lambda: model.layer.in_features) == 3


class Holder:
    """Has something that stays in its process."""

    def __init__(self) -> None:
        self.tools = {"lock": threading.Lock()}


def test_the_path_to_what_cannot_be_pickled_is_named(alone: sg.ClusterCoordinator) -> None:
    holder = Holder()
    helper = functools.partial(lambda held, x: x, holder)

    def step() -> Any:
        return helper(1)

    expected = r"cannot pickle '_thread.lock' object, at step → helper → \[0\] → tools → \['lock'\]"
    with pytest.raises(TypeError, match=expected):
        alone.schedule(step)


def test_the_path_leads_through_modules_and_hooks(alone: sg.ClusterCoordinator) -> None:
    lock = threading.Lock()
    with alone.strategy.scope():
        model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())

    def watch(*args: Any) -> None:
        with lock:
            pass

    model[0].register_forward_hook(watch)

    def step() -> Any:
        return model(torch.ones(1, 1))

    with pytest.raises(TypeError, match=r"at step → model → 0 → forward_hooks\[0\] → lock\."):
        alone.schedule(step)


def test_the_path_to_an_argument_is_named(alone: sg.ClusterCoordinator) -> None:
    with pytest.raises(TypeError, match=r"at arguments → \[1\] → tools → \['lock'\]\."):
        alone.schedule(print, args=(1, Holder()))


def test_an_attribute_set_later_is_named_with_the_path(alone: sg.ClusterCoordinator) -> None:
    with alone.strategy.scope():
        model = nn.Linear(1, 1)
    assert run(alone, lambda: model.training)
    model.holder = Holder()  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"'holder' of Linear.*at holder → tools → \['lock'\]\."):
        alone.schedule(lambda: model.training)


def test_a_scripted_module_is_refused_by_name(alone: sg.ClusterCoordinator) -> None:
    with alone.strategy.scope():
        scripted = torch.jit.script(nn.Linear(2, 1))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a torch.jit.script module was captured"):
            alone.schedule(lambda: scripted(torch.ones(1, 2)))


@torch.jit.script
def soft_clamp(x: torch.Tensor, value: float = 3.0) -> torch.Tensor:
    return (x / value).tanh() * value


def test_a_scripted_function_is_sent(alone: sg.ClusterCoordinator) -> None:
    """x-transformers keeps one in an attribute of a module."""
    with alone.strategy.scope():
        model = nn.Linear(2, 1)
    model.clamp = soft_clamp

    def use() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(4.0)
        return model.clamp(x), soft_clamp(x, 2.0)

    for _ in range(2):
        one, two = run(alone, use)
        x = torch.arange(4.0)
        torch.testing.assert_close(torch.as_tensor(one), (x / 3).tanh() * 3)
        torch.testing.assert_close(torch.as_tensor(two), (x / 2).tanh() * 2)


class Average:
    """As torch_ema: copies of the parameters, and weak references to the parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.shadow = [p.detach().clone() for p in parameters]
        self.references = [weakref.ref(p) for p in parameters]

    def update(self) -> None:
        for s, reference in zip(self.shadow, self.references, strict=True):
            p = reference()
            assert p is not None
            s.lerp_(p.detach(), 0.5)


def test_a_weak_reference_to_a_parameter_is_sent_as_one(alone: sg.ClusterCoordinator) -> None:
    """On the worker it refers to the worker's view, which sees each step."""
    with alone.strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    average = Average(list(model.parameters()))
    expected = average.shadow[1].clone()

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        model(torch.zeros(1, 2)).sum().backward()
        optimizer.step()
        average.update()
        return average.shadow[1]

    bias = model.bias.detach().clone()
    for _ in range(3):
        bias -= 1.0
        expected.lerp_(bias, 0.5)
        torch.testing.assert_close(torch.as_tensor(run(alone, step)), expected)


def test_a_weak_reference_to_something_else_is_refused(alone: sg.ClusterCoordinator) -> None:
    """Nothing would keep the object alive on the worker."""
    tensor = torch.ones(1)
    reference = weakref.ref(tensor)
    with pytest.raises(TypeError, match=r"'weakref.ReferenceType'.*reference"):
        alone.schedule(lambda: reference())


def test_publishing_sends_changes_that_were_made_behind_torch(
    alone: sg.ClusterCoordinator,
) -> None:
    with alone.strategy.scope():
        model = nn.Dropout(0.5)
        weight = nn.Linear(1, 1)
        both = nn.Sequential(model, weight)

    def read() -> float:
        return float(both[0].p)

    assert run(alone, read) == 0.5
    vars(model)["p"] = 0.25
    alone.strategy.publish(both)
    assert run(alone, read) == 0.25
    with pytest.raises(sg.errors.ForeignParameterError, match="publish got ReLU"):
        alone.strategy.publish(nn.ReLU())


MODULES = {
    "odd": """
import builtins, threading
import even

plain = builtins.print
lock = threading.Lock()
factor = 3.0


def quiet(*args, **kwargs):
    pass


builtins.print = quiet


def scaled(x):
    print("not shown")
    return even.halved(x) * factor


def locked():
    with lock:
        return 1
""",
    "even": """
import odd


def halved(x):
    return x / 2 if odd.factor else x
""",
    "script": """
import threading
import torch
from torch import nn
import stratagem as sg
import odd

log = open(__file__)
lock = threading.Lock()


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.layer.register_forward_hook(lambda module, given, found: found * 2)

    def forward(self, x):
        return self.layer(x)


class Model(Base):
    def forward(self, x):
        return super().forward(x) + 1


class Wrapper:
    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return odd.scaled(self.model(x).sum())


def main():
    with sg.LocalCluster(workers=1, ps=1) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with sg.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                wrapper = Wrapper(Model())
            step = lambda x: wrapper(x).item()
            odd.plain(coordinator.schedule(step, args=(torch.ones(1, 2),)).fetch(timeout_s=60))
            try:
                coordinator.schedule(lambda: odd.locked()).get(timeout_s=60)
            except TypeError as error:
                odd.plain(error)
            try:
                coordinator.schedule(lambda: lock.locked())
            except TypeError as error:
                odd.plain(error)


if __name__ == "__main__":
    main()
""",
}


def test_a_script_with_variables_that_cannot_be_pickled(tmp_path: Path) -> None:
    """``python script.py``: modules that import each other travel with the variables that functions use."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    done = run_program(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WAIT_S * 2,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == "7.5"
    assert second.startswith("odd.locked was not sent to the workers: cannot pickle '_thread.lock'")
    assert "at odd.locked → lock. Create it" in second
    assert "→ lock" in third
