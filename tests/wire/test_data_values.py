"""Results and exceptions are decoded as data: nothing that a worker sends runs code in the coordinator."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import os
import pathlib
import pickle
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from stratagem._wire import data_values
from stratagem._wire.codec import (
    LocalBuffers,
    Outgoing,
    pack,
    pickle_exception,
    unpack,
    unpickle_exception,
)
from stratagem._wire.data_values import UntrustedValueError
from stratagem._wire.messages import Packed

ran: list[object] = []


@dataclasses.dataclass
class Loss:
    value: float
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        ran.append(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: int


class Point(NamedTuple):
    x: float
    y: float


class Colour(enum.Enum):
    RED = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Broken(ValueError):
    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"{code} at {where}")
        self.code = code
        self.where = where


@dataclasses.dataclass
class SetsState:
    value: int

    def __setstate__(self, state: object) -> None:
        ran.append(state)


class Plain:
    def __init__(self) -> None:
        self.value = 1


class Runs:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def there_and_back(value: object) -> Any:
    outgoing = Outgoing()
    packed = pack(value, outgoing, prefers_data=True)
    return unpack(packed, LocalBuffers(outgoing.buffers), trusted=False)


def decode(pickled: bytes) -> Any:
    return unpack(
        Packed(payload=pickled, tensors=(), raw=(), body=-1), LocalBuffers([]), trusted=False
    )


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "b", b"c", (1 + 2j)], "s": {1, 2}, "f": frozenset({3})},
        [range(3), slice(1, 2, 3), bytearray(b"x"), 2**80],
        collections.OrderedDict(a=1),
        collections.defaultdict(list, a=[1]),
        collections.deque([1, 2], maxlen=5),
        collections.Counter("abca"),
        [dt.datetime(2026, 1, 2, tzinfo=dt.UTC), dt.timedelta(seconds=3)],
        decimal.Decimal("1.5"),
        pathlib.Path("/tmp/a"),
        [torch.float32, torch.Size([1, 2]), torch.device("cpu")],
        np.float32(1.5),
        np.datetime64("2026-01-02"),
        np.dtype("f4"),
        Frozen(3),
        Point(1.0, 2.0),
        [Colour.RED, Access.READ | Access.WRITE],
        Loss(1.0, {"points": [Point(1.0, 2.0)], "colour": Colour.RED}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_data_arrives_as_it_was(value: object) -> None:
    """Built-in types, standard types, and classes of modules that the receiver has imported."""
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(2000)[::3],
        np.array([["a", None]], dtype=object),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array("text"),
        np.empty((0, 3), np.float32),
    ],
    ids=str,
)
def test_arrays_arrive_as_they_were(array: Any) -> None:
    """Of any dtype and order, and they can be written to."""
    back = there_and_back(array)
    assert back.dtype == array.dtype
    assert back.flags.writeable
    np.testing.assert_array_equal(back, array)


def test_tensors_and_named_tuples_of_torch_arrive() -> None:
    """A result such as that of `tensor.max(0)`, and a tensor inside a dataclass."""
    values = torch.arange(12.0).view(3, 4).max(0)
    back = there_and_back(Loss(1.0, {"max": values}))
    assert type(back.parts["max"]) is type(values)
    assert torch.equal(back.parts["max"].indices, values.indices)


def test_a_dataclass_is_made_without_its_constructor() -> None:
    """Only its fields are set, also if it refers to itself."""
    loss = Loss(1.0)
    loss.parts["itself"] = loss
    ran.clear()
    back = there_and_back(loss)
    assert back.parts["itself"] is back
    assert ran == []


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no", 3),
        Broken(7, where="here"),
        KeyError("a"),
        OSError(2, "none", "file"),
        ModuleNotFoundError("no module", name="a.b"),
        StopIteration(5),
        SystemExit(3),
        ExceptionGroup("several", [ValueError("a"), Broken(1, where="b")]),
        UnicodeDecodeError("utf-8", b"a", 0, 1, "bad"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_arrive_as_they_were(error: BaseException) -> None:
    """With arguments and attributes, and without a call of their constructor."""
    back = unpickle_exception(pickle_exception(error), trusted=False)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)
    for name in ("errno", "filename", "value", "code", "reason", "name"):
        assert getattr(back, name, None) == getattr(error, name, None)


@pytest.mark.parametrize(
    ("hostile", "name"),
    [
        (Runs(os.system, "touch {}"), "system"),
        (Runs(eval, "open('{}', 'w')"), "builtins.eval"),
        (Runs(functools.partial(os.mkdir, "{}")), "functools.partial"),
        (Runs(getattr, os, "system"), "builtins.getattr"),
        (Runs(pickle.loads, b"I1\n."), "loads"),
        (Runs(__import__, "antigravity"), "builtins.__import__"),
        (Runs(torch.load, "x"), "torch"),
        (Plain(), "Plain"),
        (SetsState(3), "SetsState"),
        (lambda: 1, "cloudpickle"),
    ],
    ids=[
        "system",
        "eval",
        "partial",
        "getattr",
        "loads",
        "import",
        "torch",
        "class",
        "setstate",
        "function",
    ],
)
def test_anything_else_is_refused_by_name(hostile: object, name: str, tmp_path: Any) -> None:
    """The error names the object and the remedy, and nothing has run."""
    ran.clear()
    if isinstance(hostile, Runs):
        mark = str(tmp_path / "mark")
        function, arguments = hostile._call
        hostile = Runs(function, *(a.format(mark) if isinstance(a, str) else a for a in arguments))
    with pytest.raises(UntrustedValueError, match=rf"(?s){name}.*trust_workers=True"):
        there_and_back(hostile)
    with pytest.raises(UntrustedValueError):
        there_and_back({"deep": [Loss(1.0, {"in": hostile})]})
    assert list(tmp_path.iterdir()) == []
    assert ran == [] or all(isinstance(one, Loss) for one in ran)


def test_classes_are_not_imported() -> None:
    """A class of a module that the receiver does not use is refused."""
    name = ("turtledemo.clock", "Hand", "")
    with pytest.raises(UntrustedValueError, match=r"turtledemo.clock.Hand"):
        decode(pickle.dumps(_Call(data_values.make_dataclass, name)))


@pytest.mark.parametrize(
    "name",
    [
        ("subprocess", "Popen", ""),
        ("os", "system", ""),
        (__name__, "Plain", ""),
        (__name__, "SetsState", ""),
        ("stratagem._wire.data_values", "make_enum.__globals__", ""),
        ("nowhere", "", "0123"),
    ],
)
@pytest.mark.parametrize(
    "make", ["make_dataclass", "make_enum", "make_named_tuple", "make_exception"]
)
def test_only_data_classes_can_be_named(make: str, name: tuple[str, str, str]) -> None:
    """The functions that a pickle may call check the class."""
    arguments = {"make_exception": ((), {}), "make_dataclass": ()}.get(make, ((),))
    with pytest.raises(UntrustedValueError):
        decode(pickle.dumps(_Call(getattr(data_values, make), name, *arguments)))


def test_a_pickle_cannot_change_the_functions_that_it_calls() -> None:
    """The pickle machine can set attributes of every object that it finds."""
    for state in (b"}", b"N}X\x01\x00\x00\x00aK\x01s\x86"):  # a dictionary; (None, {"a": 1})
        program = b"\x80\x04cstratagem._wire.data_values\nmake_path\n" + state + b"b."
        with pytest.raises(UntrustedValueError):
            decode(program)
    with pytest.raises(TypeError, match="immutable type"):
        decode(b"\x80\x04ccollections\nOrderedDict\nN}X\x01\x00\x00\x00aK\x01s\x86b.")


class _Call:
    def __init__(self, function: Any, *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def test_few_names_of_all_loaded_modules_are_allowed() -> None:
    """Types of the standard library, dtypes of torch, and the functions that make data."""
    allowed = set()
    for module in [*sys.modules.values()]:
        for name in list(vars(module)):
            try:
                allowed.add(repr(data_values.find_global(module.__name__, name)))
            except UntrustedValueError:
                continue
    assert not any("system" in one or "eval" in one for one in allowed)
    assert 30 < len(allowed) < 150
