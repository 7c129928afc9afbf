"""Calling the user's functions: arguments, randomness, errors.

A function given to `map`, `filter` or `interleave` gets a tuple's items as its arguments, and an
`ElementRng` if it has a parameter named ``rng``. While it runs, torch's own random functions draw
from that element's generator too: threads share torch's global generator, and the training step
uses it, so neither seeding nor locking it from here could be right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from stratagem._data.seeds import ElementRng


def _random_functions() -> frozenset[Any]:
    """Torch's functions that take ``generator=``: the ones an element's generator is handed to."""
    tensor = torch.Tensor
    return frozenset(
        {
            torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli,
            torch.multinomial, torch.poisson, tensor.bernoulli, tensor.bernoulli_, tensor.cauchy_,
            tensor.exponential_, tensor.geometric_, tensor.log_normal_, tensor.multinomial,
            tensor.normal_, tensor.random_, tensor.uniform_,
        }
    )  # fmt: skip


_RANDOM = _random_functions()
_LIKE = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}


@final
class ElementRandomness(TorchFunctionMode):
    """Hands the element's generator to torch's random functions, in this thread only."""

    def __init__(self, rng: ElementRng) -> None:
        super().__init__()
        self._rng = rng

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM and kwargs.get("generator") is None and _on_cpu(args, kwargs):
            kwargs = {**kwargs, "generator": self._rng.torch}
        elif func in _LIKE and len(args) == 1 and args[0].device.type == "cpu" and not kwargs:
            like = args[0]
            return _LIKE[func](like.shape, dtype=like.dtype, generator=self._rng.torch)
        return func(*args, **kwargs)


def _on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a random call draws on the CPU; an accelerator has generators of its own."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "cpu"
    return all(a.device.type == "cpu" for a in args if isinstance(a, torch.Tensor))


@final
class UserFunction:
    """A user's function and the verb it was given to."""

    def __init__(self, fn: Callable[..., Any], verb: str) -> None:
        if not callable(fn):
            raise TypeError(f"{verb}() expects a function of one element, got {fn!r}")
        self.fn = fn
        self.verb = verb
        self.takes_rng = _has_rng(fn)

    def call(self, element: Any, *, number: int, seed: int) -> Any:
        """Run it on one element; `number` is for the message, `seed` for its randomness."""
        rng = ElementRng(seed)
        arguments = element if type(element) is tuple else (element,)
        try:
            with ElementRandomness(rng):
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

    @override
    def __repr__(self) -> str:
        return getattr(self.fn, "__qualname__", None) or repr(self.fn)


def _has_rng(fn: Callable[..., Any]) -> bool:
    try:
        return "rng" in inspect.signature(fn).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False
