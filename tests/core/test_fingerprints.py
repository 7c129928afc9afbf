"""Fingerprints of functions and values (`_core/fingerprints.py`)."""

from __future__ import annotations

import enum
import functools
import gc
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stratagem._core.fingerprints import MOST_VALUES, Fingerprint
from stratagem._wire.codec import digest


class Settings:
    """An object of the user's."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Slotted:
    """An object without ``__dict__``."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Color(enum.IntEnum):
    RED = 1


def look(value: Any, digests: list[Any] | None = None) -> Fingerprint:
    """Return a fingerprint in which linear layers are managed; it lists the values that are packed to be compared."""

    def packed(obj: Any) -> tuple[Any, tuple[()]]:
        if digests is not None:
            digests.append(obj)
        return digest(obj), ()

    return Fingerprint(value, lambda obj: id(obj) if isinstance(obj, nn.Linear) else None, packed)


def is_same(seen: Fingerprint, value: Any) -> bool:
    """Compare with a new fingerprint; the quick check must not find the same where there is a difference."""
    same = seen == look(value)
    assert same or seen.managed_if_same(value) is None
    return same


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(nested)
def test_a_value_is_unchanged_until_it_changes(value: Any) -> None:
    seen = look([value])
    assert is_same(seen, [value])
    assert not is_same(seen, [value, 1])


@given(nested, nested)
def test_values_with_equal_records_are_equal(one: Any, other: Any) -> None:
    """By value and type, at every depth: True, 1 and 1.0 are three values, 0.0 and -0.0 are two."""
    if is_same(look([one]), [other]):
        assert repr(one) == repr(other)


CHANGES: list[tuple[Any, Callable[[Any], Any]]] = [
    ([1, 2], lambda v: v.append(3)),
    ({"a": [1]}, lambda v: v["a"].append(2)),
    ({1, 2}, lambda v: v.add(3)),
    (OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
    (([1],), lambda v: v[0].append(2)),
    (torch.zeros(2), lambda v: v.add_(1)),
    (torch.zeros(2), lambda v: v.data.add_(1)),
    (torch.zeros(2), lambda v: v.numpy().fill(1)),
    (torch.zeros(1 << 20), lambda v: v.numpy().__setitem__(123_457, 1)),
    (torch.arange(50_001), lambda v: v.numpy().__setitem__([7001, 9001], [9001, 7001])),
    (torch.arange(3 << 16).view(-1, 3), lambda v: np.random.default_rng(0).shuffle(v.numpy())),
    (torch.zeros(5000), lambda v: v.data.add_(1)),
    (torch.zeros(2), lambda v: v.requires_grad_()),
    ([torch.zeros(2)], lambda v: v[0].add_(1)),
    (np.zeros(3), lambda v: v.fill(1)),
    (np.zeros(5000), lambda v: v.__setitem__(4321, 1)),
    (list(range(MOST_VALUES)), lambda v: v.__setitem__(77, 0)),
    (Settings(a=Settings(b=1)), lambda v: setattr(v.a, "b", 2)),
    (Slotted(1), lambda v: setattr(v, "value", 2)),
    ([nn.Dropout(0.5)], lambda v: setattr(v[0], "p", 0.25)),
    (nn.CrossEntropyLoss(), lambda v: setattr(v, "label_smoothing", 0.1)),
    (nn.CrossEntropyLoss(), lambda v: v.eval()),
    (nn.CrossEntropyLoss(), lambda v: v.register_forward_hook(print)),
    (functools.partial(max, [1]), lambda v: v.args[0].append(2)),
]


@pytest.mark.parametrize(("value", "change"), CHANGES)
def test_a_change_inside_a_value_is_found(value: Any, change: Callable[[Any], Any]) -> None:
    seen = look((value,))
    assert is_same(seen, (value,))
    assert seen.can_change
    change(value)
    assert not is_same(seen, (value,))


@pytest.mark.parametrize(
    "value",
    [3, "x", 1.5, None, torch.float32, (1, (2, "x")), print, nn.ReLU, frozenset({1}), Color.RED],
)
def test_a_value_that_cannot_change_is_known_as_such(value: Any) -> None:
    seen = look((value,))
    assert not seen.can_change
    assert is_same(seen, (value,))


def test_common_values_are_compared_without_packing_them() -> None:
    """So that a step with a loss module costs what one without costs (issue 20, point 13)."""
    digests: list[Any] = []
    values = (nn.CrossEntropyLoss(), Settings(a=[1]), torch.zeros(10**6), {"a": nn.Dropout()})
    assert look(values, digests) == look(values, digests)
    assert digests == []


def test_managed_objects_are_compared_by_identity_and_returned() -> None:
    layer = nn.Linear(1, 1)
    seen = look([layer])
    layer.extra = 1  # type: ignore[assignment]
    assert seen == look([layer])
    assert seen.managed[0] is layer
    assert seen != look([nn.Linear(1, 1)])


def test_a_fingerprint_keeps_no_object_alive() -> None:
    """And does not mistake another object that has got its address for it."""
    for make in (lambda: nn.Linear(1, 1), lambda: torch.zeros(5000)):
        holder = [make()]
        seen, reference = look(holder), weakref.ref(holder[0])
        seen.managed.clear()
        holder.clear()
        gc.collect()
        assert reference() is None
        holder.append(make())
        if isinstance(holder[0], torch.Tensor):
            assert seen != look(holder)


def test_an_object_that_contains_itself_has_a_fingerprint() -> None:
    value = Settings(a=1)
    value.itself = value  # type: ignore[attr-defined]
    seen = look([value])
    assert seen == look([value])
    value.a = 2  # type: ignore[attr-defined]
    assert seen != look([value])


def test_a_long_chain_of_functions_has_a_fingerprint() -> None:
    scope: dict[str, Any] = {"__name__": "a_users_module"}
    for number in range(3000):
        exec(f"def f{number}(x):\n    return f{number + 1}(x)", scope)
    seen = look(scope["f0"])
    assert seen == look(scope["f0"])
    scope["f3000"] = 1
    assert seen != look(scope["f0"])


# ------------------------------------------------------------------ functions


def test_helpers_globals_and_defaults_of_a_function_are_part_of_it() -> None:
    scope = types.ModuleType("a_users_module")
    exec(
        "limit = 3\n"
        "def helper(x):\n    return x + limit\n"
        "def step(x, rates=[1]):\n    return helper(x) * rates[0]\n",
        vars(scope),
    )
    step = scope.step
    for change in (
        lambda: setattr(scope, "limit", 4),
        lambda: setattr(scope, "helper", lambda x: x),
        lambda: step.__defaults__[0].append(2),
        lambda: setattr(step, "__defaults__", (2,)),
    ):
        seen = look(step)
        assert is_same(seen, step)
        change()
        assert not is_same(seen, step)


def test_equal_functions_have_equal_fingerprints() -> None:
    def make(rate: float) -> Callable[[float], float]:
        return lambda x: x * rate

    seen = look(make(0.5))
    assert is_same(seen, make(0.5))
    assert not is_same(seen, make(0.25))


def test_a_function_in_a_container_or_object_is_part_of_it() -> None:
    rate = [1.0]

    def scale(x: float) -> float:
        return x * rate[0]

    for value in ([scale], {"f": scale}, Settings(f=scale), functools.partial(scale, 1.0)):
        seen = look((value,))
        assert is_same(seen, (value,))
        rate[0] += 1.0
        assert not is_same(seen, (value,))


def test_a_method_that_is_replaced_changes_objects_of_the_class() -> None:
    class Local:
        def rate(self) -> float:
            return 1.0

    value = Local()
    seen = look((value,))
    assert is_same(seen, (value,))
    Local.rate = lambda self: 2.0  # type: ignore[method-assign]
    assert not is_same(seen, (value,))
