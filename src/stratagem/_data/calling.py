"""Calls of user functions: arguments, random numbers, errors.

A function given to `map`, `filter` or `interleave` gets a tuple's items as its arguments, and an `ElementRng`
if it has a parameter named ``rng``. While the function runs, torch's random functions draw from the element's
generator too. Threads and the training step share torch's global generator, so the pipeline can neither seed
nor lock it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

from stratagem._core.torch_patches.random_streams import Drawing
from stratagem._data.seeds import ElementRng


def element_randomness(rng: ElementRng) -> AbstractContextManager[None]:
    """Let torch's random operators on the CPU draw from an element's generator, in this thread."""
    return Drawing(lambda device: rng.torch if device.type == "cpu" else None)


@final
class UserFunction:
    """Function of a user, and the verb of `Dataset` that it was given to."""

    def __init__(self, fn: Callable[..., Any], verb: str) -> None:
        if not callable(fn):
            raise TypeError(f"{verb}() expects a function of one element, got {fn!r}")
        self.fn = fn
        self.verb = verb
        self.takes_rng = _has_rng(fn)

    def call(self, element: Any, *, number: int, seed: int) -> Any:
        """Call the function on one element; `number` is used in error messages."""
        rng = ElementRng(seed)
        arguments = element if type(element) is tuple else (element,)
        try:
            with element_randomness(rng):
                if self.takes_rng:
                    return self.fn(*arguments, rng=rng)
                return self.fn(*arguments)
        except StopIteration as error:
            raise RuntimeError(
                f"the function given to {self.verb}() raised StopIteration at element {number}; "
                "that must not end the dataset silently. Use take() or filter() to end it."
            ) from error
        except Exception as error:
            error.add_note(f"in the function given to {self.verb}(), {self}, at element {number}")
            raise

    def __repr__(self) -> str:
        return getattr(self.fn, "__qualname__", None) or repr(self.fn)


def _has_rng(fn: Callable[..., Any]) -> bool:
    try:
        return "rng" in inspect.signature(fn).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False
