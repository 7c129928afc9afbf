"""tf.compat.v1's `OneDeviceStrategy`: input iterators, and ``reduce`` with an optional axis.

Everything else is inherited from the base of `stratagem.OneDeviceStrategy`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, final

from stratagem._core.user_contexts import InputContext
from stratagem._strategies.base import Strategy
from stratagem._strategies.one_device import SingleDevice
from stratagem.config import InputReplicationMode

__all__ = ["InputIterator", "OneDeviceStrategy"]

_Config = TypeVar("_Config")


@final
class InputIterator:
    """Iterator of the V1 methods; it can be reset to the start."""

    def __init__(self, begin: Callable[[], Iterator[Any]], what: str) -> None:
        self._begin = begin
        self._what = what
        self._taken = 0
        self._current: Iterator[Any] | None = None

    def initialize(self) -> None:
        """Reset to the start. Not needed before the first use."""
        self._taken = 0
        self._current = None

    @property
    def initializer(self) -> None:
        """Reset to the start, as `initialize` does; V1 code ran this in a session."""
        self.initialize()

    def get_next(self) -> Any:
        """Return the next step's input; raise `StopIteration` at the end."""
        if self._current is None:
            self._current = self._begin()
        value = next(self._current)
        self._taken += 1
        return value

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.get_next()

    def __repr__(self) -> str:
        return f"<InputIterator over {self._what} [{self._taken} taken]>"


@final
class OneDeviceStrategyV1(SingleDevice):
    """`stratagem.OneDeviceStrategy` with the V1 methods and an optional axis in ``reduce``.

    Args:
        device: its name, such as ``"/cpu:0"`` or ``"/gpu:0"``.
        gradient_aggregation: as in other strategies; without effect, because there is one replica.

    Example:
        >>> import stratagem as sg
        >>> strategy = sg.compat.v1.OneDeviceStrategy(device="/cpu:0")
        >>> result = 0
        >>> for i in range(10):
        ...     result += strategy.run(lambda x: x * 2, args=(i,))
        >>> print(strategy.reduce("sum", result))
        90
    """

    # `Strategy.reduce` is final; the V1 signature differs by one default.
    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:  # type: ignore[misc]
        """Call `Strategy.reduce`; the axis is optional."""
        return Strategy.reduce(self, reduce_op, value, axis)

    def experimental_run(
        self, fn: Callable[..., Any], input_iterator: InputIterator | None = None
    ) -> Any:
        """Run `fn` on each replica with the iterator's next input."""
        if input_iterator is None:
            return self.run(fn)
        return self.run(fn, args=(input_iterator.get_next(),))

    def make_dataset_iterator(self, dataset: Any) -> InputIterator:
        """Return an iterator over a dataset batched by the global batch size."""
        distributed = self.distribute_dataset(dataset)
        return InputIterator(lambda: iter(distributed), repr(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """Return an iterator over the result of `input_fn`: a dataset, or a function called for each input.

        Raises:
            ValueError: another replication mode, or `input_fn` returned something else.
        """
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise ValueError(
                f"replication_mode={replication_mode!r} is not supported here: expected "
                "InputReplicationMode.PER_WORKER. For one dataset per replica use "
                "distribute_datasets_from_function() with InputOptions."
            )
        given = input_fn(InputContext(1, 0, self.num_replicas_in_sync))
        if callable(given):
            call = given
            return InputIterator(lambda: _calls(call), repr(given))
        if isinstance(given, Iterable) and not isinstance(given, Iterator):
            distributed = self.distribute_datasets_from_function(lambda _: given)
            return InputIterator(lambda: iter(distributed), repr(given))
        raise ValueError(
            f"input_fn returned {given!r}: expected a dataset, or a function without arguments "
            "that returns the next input."
        )

    def update_config_proto(self, config_proto: _Config) -> _Config:
        """Return a deep copy of the argument: there are no sessions to configure."""
        return copy.deepcopy(config_proto)


def _calls(fn: Callable[[], Any]) -> Iterator[Any]:
    """Yield results of `fn` until it raises StopIteration."""
    while True:
        try:
            value = fn()
        except StopIteration:
            return
        yield value


OneDeviceStrategy = OneDeviceStrategyV1
