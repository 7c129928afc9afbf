"""Steps that run the user's functions, or run ahead: map, filter, prefetch."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from stratagem._data import nests
from stratagem._data.background import Pool, Prefetcher, wait_for
from stratagem._data.calling import UserFunction
from stratagem._data.node import (
    END,
    UNKNOWN,
    ChoosingStep,
    Cursor,
    CursorContext,
    Node,
    State,
    Step,
    StepCursor,
)
from stratagem._data.seeds import mix

AUTOTUNE = -1
"""Let the library choose: one call per core, two elements ahead."""


@final
class MapNode(Step):
    """A function applied to each element, on `parallel` threads (0: in the caller's)."""

    keeps_rows = True

    def __init__(
        self, input: Node, function: UserFunction, parallel: int, seed: int | None
    ) -> None:
        super().__init__(input)
        self._function = function
        self._parallel = (os.cpu_count() or 1) if parallel == AUTOTUNE else parallel
        self._seed = seed

    @override
    def open(self, frame: CursorContext) -> Cursor:
        child = self.input.open(frame.child())
        return MapCursor(child, self._function, frame.seed(self._seed), self._parallel)

    @property
    @override
    def wants_seed(self) -> bool:
        return self._seed is None or self.input.wants_seed


class _PendingCall(NamedTuple):
    """An element on its way through a pool."""

    element: Any
    result: Future[Any]


@final
class MapCursor(StepCursor):
    """Submits elements in order, delivers results in order.

    Elements are numbered as they are pulled, so an element's seed does not depend on threads. The
    state holds inputs whose results were not delivered yet; the function runs on them again.
    """

    KEPT = ("ended",)

    def __init__(self, child: Cursor, function: UserFunction, seed: int, parallel: int) -> None:
        super().__init__(child)
        self._function = function
        self._seed = seed
        self._parallel = parallel
        self._pool: Pool | None = None
        self._pulled = 0  # elements numbered so far
        self._waiting: deque[Any] = deque()  # inputs of a restored state
        self._pending: deque[_PendingCall] = deque()
        self._ended = False

    def _call(self, element: Any, number: int) -> Any:
        seed = mix(self._seed, number)
        return nests.to_element(self._function.call(element, number=number, seed=seed))

    def _pull(self) -> Any:
        if self._waiting:
            return self._waiting.popleft()
        element = END if self._ended else self._child.next()
        if element is END:
            self._ended = True
        return element

    @override
    def next(self) -> Any:
        return self._next_in_pool() if self._parallel > 1 else self._next_here()

    def _next_here(self) -> Any:
        element = self._pull()
        if element is END:
            return END
        number, self._pulled = self._pulled, self._pulled + 1
        return self._call(element, number)

    def _next_in_pool(self) -> Any:
        # Twice the threads: they stay busy while the consumer works on an element.
        while len(self._pending) < 2 * self._parallel:
            element = self._pull()
            if element is END:
                break
            if self._pool is None:
                self._pool = Pool(self._call, self._parallel, f"stratagem-map-{self._function}")
            self._pending.append(_PendingCall(element, self._pool.submit(element, self._pulled)))
            self._pulled += 1
        if not self._pending:
            self.close()
            return END
        result = wait_for(
            self._pending[0].result, f"the function given to map(), {self._function},"
        )
        self._pending.popleft()
        return result

    @override
    def state(self) -> State:
        undelivered = [pending.element for pending in self._pending]
        return {
            **super().state(),
            "number": self._pulled - len(undelivered),
            "waiting": [*undelivered, *self._waiting],
        }

    @override
    def restore(self, state: State) -> None:
        super().restore(state)
        self._pulled = state["number"]
        self._waiting = deque(state["waiting"])

    @override
    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        super().close()


@final
class FilterNode(ChoosingStep):
    """The elements a function says yes to."""

    keeps_rows = True

    def __init__(self, input: Node, function: UserFunction, seed: int | None) -> None:
        super().__init__(input)
        self._function = function
        self._seed = seed

    @override
    def open(self, frame: CursorContext) -> Cursor:
        child = self.input.open(frame.child())
        return FilterCursor(child, self._function, frame.seed(self._seed))

    @override
    def cardinality(self) -> int:
        return 0 if self.input.cardinality() == 0 else UNKNOWN

    @property
    @override
    def wants_seed(self) -> bool:
        return self._seed is None or self.input.wants_seed


@final
class FilterCursor(StepCursor):
    """Pulls until one passes."""

    KEPT = ("number",)

    def __init__(self, child: Cursor, function: UserFunction, seed: int) -> None:
        super().__init__(child)
        self._function = function
        self._seed = seed
        self._number = 0

    @override
    def next(self) -> Any:
        while (element := self._child.next()) is not END:
            number, self._number = self._number, self._number + 1
            answer = self._function.call(element, number=number, seed=mix(self._seed, number))
            if _truth(answer, self._function):
                return element
        return END


def _truth(answer: Any, function: UserFunction) -> bool:
    if isinstance(answer, torch.Tensor) and answer.numel() != 1:
        raise ValueError(
            f"the function given to filter(), {function}, returned {nests.describe(answer)}; "
            "expected one True or False per element. Filter rows before batch()."
        )
    return bool(answer)


@final
class PrefetchNode(ChoosingStep):
    """Its input, read ahead in a thread."""

    keeps_rows = True

    def __init__(self, input: Node, size: int) -> None:
        super().__init__(input)
        self._size = 2 if size == AUTOTUNE else size

    @override
    def open(self, frame: CursorContext) -> Cursor:
        child = self.input.open(frame.child())
        return child if self._size == 0 else PrefetchCursor(child, self._size)


@final
class PrefetchCursor(Cursor):
    """A `Prefetcher` in the shape of a cursor."""

    def __init__(self, child: Cursor, size: int) -> None:
        self._ahead = Prefetcher(child, size, name="stratagem-prefetch")

    @override
    def next(self) -> Any:
        return self._ahead.next()

    @override
    def state(self) -> State:
        return self._ahead.state()

    @override
    def restore(self, state: State) -> None:
        self._ahead.restore(state)

    @override
    def close(self) -> None:
        self._ahead.close()
