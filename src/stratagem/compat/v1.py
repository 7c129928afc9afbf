"""tf.compat.v1's `OneDeviceStrategy`: iterators that must be asked, an optional axis, no sessions.

Only what the V1 page has and today's classes do not; everything else is inherited from the same single
device that `stratagem.OneDeviceStrategy` is. Nothing in the package uses this module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, final

from stratagem._core.user_contexts import InputContext
from stratagem._strategies.base import Strategy
from stratagem._strategies.one_device import SingleDevice
from stratagem.compat import spelling
from stratagem.config import InputReplicationMode

__all__ = ["InputIterator", "OneDeviceStrategy"]

_Config = TypeVar("_Config")


@final
class InputIterator:
    """What the V1 methods hand out: an iterator that can be asked and set back to the start.

    Example:
        >>> import stratagem as sg
        >>> strategy = sg.compat.v1.OneDeviceStrategy("cpu:0")
        >>> iterator = strategy.make_dataset_iterator(sg.data.Dataset.range(4).batch(2))
        >>> iterator.get_next(), iterator.get_next()
        (tensor([0, 1]), tensor([2, 3]))
        >>> iterator.initialize()
        >>> iterator.get_next()
        tensor([0, 1])
    """

    def __init__(self, begin: Callable[[], Iterator[Any]], what: str) -> None:
        self._begin = begin
        self._what = what
        self._taken = 0
        self._current: Iterator[Any] | None = None

    def initialize(self) -> None:
        """Go back to the start. Not needed before the first use."""
        self._taken = 0
        self._current = None

    @property
    def initializer(self) -> None:
        """Sets back to the start, as `initialize`; V1 code ran this in a session."""
        self.initialize()

    def get_next(self) -> Any:
        """The next step's input; `StopIteration` at the end, again at every further call."""
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
    """The V1 class: `stratagem.OneDeviceStrategy` with the V1 methods and ``reduce``'s axis optional.

    Args:
        device: its name, such as ``"/cpu:0"`` or ``"/gpu:0"``.
        gradient_aggregation: kept for symmetry; one replica has nothing to aggregate.

    Example:
        >>> import stratagem as sg
        >>> strategy = sg.compat.v1.OneDeviceStrategy(device="/cpu:0")
        >>> result = 0
        >>> for i in range(10):
        ...     result += strategy.run(lambda x: x * 2, args=(i,))
        >>> print(strategy.reduce("sum", result))
        90
    """

    # `reduce` is final so that today's strategies agree on it; the V1 page's signature differs by one
    # default, and only this historical class may differ from the others.
    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:  # type: ignore[misc]
        """As `Strategy.reduce`; the axis may be left out."""
        return Strategy.reduce(self, reduce_op, value, axis)

    def experimental_run(
        self, fn: Callable[..., Any], input_iterator: InputIterator | None = None
    ) -> Any:
        """Run `fn` on each replica with the iterator's next input (INP-42).

        Example:
            >>> import stratagem as sg
            >>> strategy = sg.compat.v1.OneDeviceStrategy("cpu:0")
            >>> iterator = strategy.make_dataset_iterator(sg.data.Dataset.range(4).batch(4))
            >>> strategy.experimental_run(lambda x: x.sum(), iterator)
            tensor(6)
        """
        if input_iterator is None:
            return self.run(fn)
        return self.run(fn, args=(input_iterator.get_next(),))

    def make_dataset_iterator(self, dataset: Any) -> InputIterator:
        """An iterator over a dataset batched by the global batch size (INP-40)."""
        distributed = self.distribute_dataset(dataset)
        return InputIterator(lambda: iter(distributed), repr(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """An iterator over what `input_fn` returns: a dataset, or a function called for each input.

        Raises:
            ValueError: another replication mode, or `input_fn` returned something else (INP-41).
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
        if not isinstance(given, Iterator) and _is_iterable(given):
            distributed = self.distribute_datasets_from_function(lambda _: given)
            return InputIterator(lambda: iter(distributed), repr(given))
        raise ValueError(
            f"input_fn returned {given!r}: expected a dataset, or a function without arguments "
            "that returns the next input."
        )

    def update_config_proto(self, config_proto: _Config) -> _Config:
        """A deep copy of what it is given: there are no sessions to configure."""
        return copy.deepcopy(config_proto)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: object = None) -> Any:
        """A dataset of the rows of NumPy arrays (INP-43); `session` is ignored."""
        return spelling.make_numpy_dataset(self, numpy_input, session)


def _calls(fn: Callable[[], Any]) -> Iterator[Any]:
    """Results of calling `fn` until it raises StopIteration."""
    while True:
        try:
            value = fn()
        except StopIteration:
            return
        yield value


def _is_iterable(value: Any) -> bool:
    try:
        iter(value)
    except TypeError:
        return False
    return True


OneDeviceStrategy = OneDeviceStrategyV1
