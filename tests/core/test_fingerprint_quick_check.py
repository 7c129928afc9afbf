"""The quick check that a function leads to the same objects as before (`_core/fingerprints.py`)."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stratagem._core.fingerprints import Fingerprint

SOURCE = """
import math
from torch import nn

rate = 0.1
fixed = (1, 2)

class Base(nn.Module):
    def forward(self, x):
        return x * rate

class Model(Base):
    width = 3

    def forward(self, x):
        return super().forward(x) + math.pi * helper(x)

def helper(x, by=(2, 3)):
    return x * by[0]

def make(model, number):
    def step(x):
        return helper(model(x)) * number + rate + len(fixed) + Model.width + math.tau
    return step

def other(x):
    return x
"""


def look(value: Any) -> Fingerprint:
    def packed(obj: Any) -> tuple[Any, tuple[()]]:
        return repr(obj), ()

    return Fingerprint(value, lambda obj: id(obj) if isinstance(obj, nn.Linear) else None, packed)


@pytest.fixture
def program() -> types.SimpleNamespace:
    """A module of the user's, and a function of it that has captured a model and a number."""
    module = types.ModuleType("program_of_a_user")
    exec(compile(SOURCE, "program_of_a_user.py", "exec"), vars(module))
    model = nn.Linear(1, 1)
    return types.SimpleNamespace(module=module, model=model, step=module.make(model, 4))


def _set_cell(program: Any) -> None:
    step = program.step
    step.__closure__[step.__code__.co_freevars.index("number")].cell_contents = 5


def _delete_cell(program: Any) -> None:
    step = program.step
    del step.__closure__[step.__code__.co_freevars.index("number")].cell_contents


def _rename_member(program: Any) -> None:
    kind = program.module.Model
    value = kind.width
    del kind.width
    kind.height = value
    kind.width = 4


CHANGES: dict[str, Callable[[Any], object]] = {
    "closure variable": _set_cell,
    "closure variable without a value": _delete_cell,
    "global": lambda one: setattr(one.module, "rate", 0.2),
    "type of a global": lambda one: setattr(one.module, "rate", 1),
    "deleted global": lambda one: delattr(one.module, "fixed"),
    "new global": lambda one: setattr(one.module, "len", lambda x: 0),
    "code": lambda one: setattr(one.module.helper, "__code__", one.module.other.__code__),
    "function": lambda one: setattr(one.module, "helper", one.module.other),
    "default": lambda one: setattr(one.module.helper, "__defaults__", ((9, 9),)),
    "keyword default": lambda one: setattr(one.module.helper, "__kwdefaults__", {"by": 1}),
    "attribute of a function": lambda one: setattr(one.module.helper, "mark", 1),
    "attribute of the step": lambda one: setattr(one.step, "mark", 1),
    "class attribute": lambda one: setattr(one.module.Model, "width", 4),
    "new class attribute": lambda one: setattr(one.module.Model, "depth", 4),
    "renamed member": _rename_member,
    "method": lambda one: setattr(one.module.Model, "forward", one.module.other),
    "method of a base class": lambda one: setattr(one.module.Base, "forward", one.module.other),
    "base class": lambda one: setattr(one.module.Model, "__bases__", (nn.Module,)),
    "class": lambda one: setattr(one.module, "Model", type("Model", (nn.Module,), {"width": 3})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed(program: Any, change: str) -> None:
    seen = look(program.step)
    assert seen.managed_if_same(program.step) == [program.model]
    CHANGES[change](program)
    assert seen.managed_if_same(program.step) is None
    assert seen != look(program.step)


@pytest.mark.parametrize("change", ["method", "class attribute", "method of a base class"])
def test_a_class_alone_is_checked(program: Any, change: str) -> None:
    seen = look((program.module.Model,))
    assert seen.managed_if_same((program.module.Model,)) is not None
    CHANGES[change](program)
    assert seen.managed_if_same((program.module.Model,)) is None


def test_another_cached_method_is_a_change(program: Any) -> None:
    """A member of every wrapped kind counts: it is no slot of the class."""
    kind = program.module.Model
    kind.cached = functools.cache(program.module.helper)
    seen = look((kind,))
    kind.cached = functools.cache(program.module.other)
    assert seen.managed_if_same((kind,)) is None
    assert seen != look((kind,))


def test_another_function_is_not_the_same(program: Any) -> None:
    seen = look(program.step)
    assert seen.managed_if_same(program.module.make(program.model, 4)) is None


@pytest.mark.parametrize(
    "value",
    [[1], {"a": 1}, {1}, torch.zeros(1), types.SimpleNamespace(a=1), ([1],), [].append],
    ids=lambda value: type(value).__name__,
)
def test_values_that_can_change_inside_have_no_quick_check(program: Any, value: Any) -> None:
    program.module.rate = value
    assert look(program.step).managed_if_same(program.step) is None


def test_nothing_is_kept_alive(program: Any) -> None:
    seen = look(program.step)
    seen.managed = []
    gone = [weakref.ref(one) for one in (program.model, program.step, program.module.Model)]
    program.model = program.step = program.module = None
    gc.collect()
    assert [one() for one in gone] == [None, None, None]
    assert seen.managed_if_same(len) is None


def test_a_new_object_with_the_id_of_a_former_one_is_a_change(program: Any) -> None:
    def make() -> Any:
        """Return a function of an installed module, which counts by identity alone."""
        return types.FunctionType(program.module.other.__code__, {"__name__": "torch"})

    program.module.rate = make()
    seen = look(program.step)
    before = id(program.module.rate)
    assert seen.managed_if_same(program.step) is not None
    del program.module.rate
    made: list[Any] = []  # all of them are kept, until one has the id
    while len(made) < 10_000 and not (made and id(made[-1]) == before):
        made.append(make())
    program.module.rate = made[-1]
    assert seen.managed_if_same(program.step) is None


def test_a_managed_object_with_another_token_is_a_change(program: Any) -> None:
    tokens = {id(program.model): 1}
    seen = Fingerprint(program.step, lambda obj: tokens.get(id(obj)), lambda obj: (repr(obj), ()))
    assert seen.managed_if_same(program.step) == [program.model]
    tokens[id(program.model)] = 2
    assert seen.managed_if_same(program.step) is None
