"""Exceptions cross processes with type, words and traceback."""

from __future__ import annotations

import threading

import pytest

from stratagem import errors
from stratagem._wire import messages
from stratagem._wire.failures import TEXT_LIMIT, exception_from, failure_from


class OwnError(Exception):
    """A user's class: only by pickle can it come back as itself."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code


class WantsMore(Exception):
    """Its constructor and its args do not fit: pickle alone does not bring it back."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("only one argument")
        self.two = two


class NeverComesBack(Exception):
    """Holds something that belongs to its process."""

    def __init__(self) -> None:
        super().__init__("only one argument")
        self.lock = threading.Lock()


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as got:
        return got


def send(error: BaseException, *, with_pickle: bool = False) -> messages.RemoteFailure:
    """Through bytes, as over a connection."""
    failure = failure_from(caught(error), task="/job:worker/task:1", with_pickle=with_pickle)
    back = messages.decode(messages.encode(failure))
    assert isinstance(back, messages.RemoteFailure)
    return back


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad value"),
        KeyError("missing"),
        OSError(2, "No such file"),
        StopIteration(),
        errors.NotFoundError("no variable 7"),
        errors.WriteFenced("too late"),
        OverflowError(2**80),
    ],
    ids=repr,
)
def test_builtin_and_own_types_come_back_as_themselves(error: Exception) -> None:
    """Without any pickle."""
    back = exception_from(send(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert "raised by /job:worker/task:1" in back.__notes__
    assert isinstance(back.__cause__, errors.RemoteError)
    assert "in caught" in back.__cause__.remote_traceback


def test_user_types_need_pickle_and_permission() -> None:
    """Pickled only where asked for, opened only where allowed; otherwise RemoteError with the facts."""
    trusted = exception_from(send(OwnError(3, "x"), with_pickle=True), may_unpickle=True)
    assert isinstance(trusted, OwnError)
    assert trusted.code == 3
    for failure in (send(OwnError(3, "x"), with_pickle=True), send(OwnError(3, "x"))):
        back = exception_from(failure)
        assert type(back) is errors.RemoteError
        assert back.type_name.endswith("OwnError")
        assert back.task == "/job:worker/task:1"
        assert "in caught" in back.remote_traceback


def test_a_constructor_with_arguments_of_its_own_keeps_its_type() -> None:
    """Issue 4, section 4: a user's exception arrives with its type, and what it holds."""
    back = exception_from(send(WantsMore(1, 2), with_pickle=True), may_unpickle=True)
    assert type(back) is WantsMore
    assert (str(back), back.two) == ("only one argument", 2)


def test_an_exception_that_does_not_survive_pickling_travels_as_text() -> None:
    """It is tried before it is sent."""
    failure = send(NeverComesBack(), with_pickle=True)
    assert failure.pickled == b""
    assert "only one argument" in str(exception_from(failure, may_unpickle=True))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
def test_exceptions_that_end_the_other_process_do_not_end_this_one(error: BaseException) -> None:
    """Base exceptions arrive as RemoteError, unless asked for: a function of the user's raised it."""
    for with_pickle in (False, True):
        back = exception_from(send(error, with_pickle=with_pickle), may_unpickle=True)
        assert type(back) is errors.RemoteError
        same = exception_from(send(error, with_pickle=with_pickle), any_type=True)
        assert type(same) is type(error)
        assert same.args == error.args


def test_errors_that_need_facts_come_back_with_their_words() -> None:
    """A class of ours whose constructor wants more than a text."""
    back = exception_from(send(errors.ParameterServerLost("gone", task="/job:ps/task:0")))
    assert isinstance(back, errors.RemoteError)
    assert "gone" in str(back)


def test_long_and_broken_texts_are_sent_short_and_whole() -> None:
    """Megabytes of text are cut in the middle, lone surrogates are escaped."""
    back = exception_from(send(ValueError("a" * 10**6 + "\udcff the end")))
    assert len(str(back)) < 2 * TEXT_LIMIT
    assert str(back).endswith("the end")


def test_names_that_are_no_exceptions_are_not_called() -> None:
    """A hostile failure cannot make us call builtins by name."""
    for name in ("builtins.print", "builtins.type", "builtins.exit", "stratagem.errors.Sequence"):
        failure = messages.RemoteFailure(type_name=name, text="x", args=("x",))
        assert type(exception_from(failure)) is errors.RemoteError
