"""The tree of exceptions is the one errors.py draws, and fits what TF code expects (13.3)."""

import inspect
import pickle
import re

import pytest

import stratagem as sg
from stratagem import errors

FAMILY = {
    name: found
    for name, found in vars(errors).items()
    if inspect.isclass(found) and issubclass(found, sg.StratagemError)
}


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """name -> (the class it is drawn under, the builtin in brackets), from the module's docstring."""
    found: dict[str, tuple[str | None, str | None]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([ │├└─]*)(\w+)(?: +\[(\w+)\])?(?: {2}|$)", line)
        if match:
            depth = len(match[1]) // 4
            above[depth:] = [match[2]]
            found[match[2]] = (above[depth - 1] if depth else None, match[3])
    return found


def test_the_drawing_is_the_tree():
    """Every class with one base of ours, StratagemError at the root, and its builtin in brackets."""
    picture = drawn()
    assert set(picture) == set(FAMILY)
    for name, (parent, builtin) in picture.items():
        bases = [base.__name__ for base in FAMILY[name].__mro__[1:]]
        if parent is not None:
            assert parent in bases, name
        if builtin is not None:
            assert builtin in bases, name


@pytest.mark.parametrize(
    ("ours", "builtin"),
    [
        (errors.ContextError, RuntimeError),
        (errors.StrategyMismatch, RuntimeError),
        (errors.ReplicaMismatch, RuntimeError),
        (errors.DeviceNotFound, ValueError),  # InvalidArgument
        (errors.UnequalRows, ValueError),
        (errors.ShardingError, ValueError),
        (errors.EndOfData, StopIteration),  # OutOfRange
        (errors.UnsupportedOptimizer, NotImplementedError),
        (errors.DeadlineExceeded, TimeoutError),
    ],
)
def test_13_3_what_tf_raises_as_a_builtin_is_caught_as_one(ours, builtin):
    assert issubclass(ours, builtin)
    assert issubclass(ours, sg.StratagemError)


@pytest.mark.parametrize("name", ["ContextError", "ForeignParameterError", "EndOfData"])
def test_errors_travel(name):
    """Between processes: a pickled error is the same class with the same words."""
    error = pickle.loads(pickle.dumps(FAMILY[name]("what happened")))
    assert type(error) is FAMILY[name]
    assert "what happened" in str(error)


def test_the_earlier_name_of_an_error_still_works():
    """Programs that catch it need no change; other names do not exist."""
    assert errors.ClosurePoisonous is errors.ClosureLostTooOften
    with pytest.raises(AttributeError, match="NoSuchError"):
        errors.NoSuchError
