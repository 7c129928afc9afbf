"""Steps that call user functions or read ahead: map, filter, prefetch."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, final

import torch
from typing_extensions import override

from stratagem._data import nests
from stratagem._data.background import Pool, Prefetcher, wait_for
from stratagem._data.calling import UserFunction
from stratagem._data.column_cursors import keep_rows
from stratagem._data.cursor import END, Cursor, CursorContext, State, StepCursor
from stratagem._data.node import UNKNOWN, SeededStep, Step
from stratagem._data.seeds import mix

SeededNodeT = TypeVar("SeededNodeT", bound=SeededStep)

AUTOTUNE = -1
"""Let the library choose: one call per core, two elements ahead."""


class SeededCursor(StepCursor[SeededNodeT]):
    """Cursor of a step that calls a user function with a seed per element."""

    def __init__(self, node: SeededNodeT, context: CursorContext) -> None:
        super().__init__(node, context)
        self._seed = context.seed(node.seed)


class _PendingCall(NamedTuple):
    """Element that a pool works on."""

    element: Any
    result: Future[Any]


@final
class MapCursor(SeededCursor["MapNode"]):
    """Submits elements in order and yields results in order.

    Elements are numbered in the order they are read, so that an element's seed does not depend on threads.
    The state holds elements whose results were not yielded yet; the function runs on them again.
    """

    KEPT = ("number", "waiting", "ended")
    _number = 0  # number of the next element to call the function on
    _ended = False

    def __init__(self, node: MapNode, context: CursorContext) -> None:
        super().__init__(node, context)
        self._pool: Pool | None = None
        self._waiting: list[Any] = []  # elements of a restored state
        self._pending: deque[_PendingCall] = deque()

    def _call(self, element: Any, number: int) -> Any:
        seed = mix(self._seed, number)
        return nests.to_element(self._node.function.call(element, number=number, seed=seed))

    def _read(self) -> tuple[Any, int]:
        """Return the next element and its number."""
        if self._waiting:
            element, *self._waiting = self._waiting
        else:
            element = END if self._ended else self._child.next()
            if element is END:
                self._ended = True
                return END, 0
        self._number += 1
        return element, self._number - 1

    def next(self) -> Any:
        parallel = self._node.threads
        if parallel <= 1:
            element, number = self._read()
            return END if element is END else self._call(element, number)
        # Twice the threads, so that they stay busy while the caller works on an element.
        while len(self._pending) < 2 * parallel:
            element, number = self._read()
            if element is END:
                break
            if self._pool is None:
                name = f"stratagem-map-{self._node.function}"
                self._pool = Pool(self._call, parallel, name)
            self._pending.append(_PendingCall(element, self._pool.submit(element, number)))
        if not self._pending:
            self.close()
            return END
        what = f"the function given to map(), {self._node.function},"
        result = wait_for(self._pending[0].result, what)
        self._pending.popleft()
        return result

    @override
    def skip(self, count: int) -> int:
        if self._pending or self._waiting:
            return super().skip(count)
        done = 0 if self._ended else self._child.skip(count)  # without calling the function
        self._number += done
        return done

    @override
    def state(self) -> State:
        unused = [pending.element for pending in self._pending]
        number = self._number - len(unused)
        return {**super().state(), "number": number, "waiting": [*unused, *self._waiting]}

    @override
    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        super().close()


@final
@dataclass(frozen=True, eq=False)
class MapNode(SeededStep):
    """Function applied to each element, on `parallel` threads (0: in the caller's thread)."""

    CURSOR = MapCursor
    keeps_rows = True
    function: UserFunction
    parallel: int

    @property
    def threads(self) -> int:
        """Number of threads, with `AUTOTUNE` resolved."""
        return (os.cpu_count() or 1) if self.parallel == AUTOTUNE else self.parallel


@final
class FilterCursor(SeededCursor["FilterNode"]):
    """Reads elements until the function accepts one."""

    KEPT = ("number",)
    _number = 0

    def next(self) -> Any:
        function = self._node.function
        while (element := self._child.next()) is not END:
            number, self._number = self._number, self._number + 1
            answer = function.call(element, number=number, seed=mix(self._seed, number))
            if self._node.rows_per_batch is not None:
                kept = keep_rows(element, answer, function)
                if kept is not END:
                    return kept
            elif _truth(answer, function):
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
@dataclass(frozen=True, eq=False)
class FilterNode(SeededStep):
    """Elements that a function accepts; of batches of columns, the rows that it accepts."""

    CURSOR = FilterCursor
    keeps_rows = True
    function: UserFunction

    @property
    @override
    def rows_vary(self) -> bool:
        return self.rows_per_batch is not None or self.input.rows_vary

    @override
    def cardinality(self) -> int:
        return 0 if self.input.cardinality() == 0 else UNKNOWN


@final
@dataclass(frozen=True, eq=False)
class PrefetchNode(Step):
    """Elements of the input, read ahead by a thread."""

    keeps_rows = True
    size: int

    @override
    def open(self, context: CursorContext) -> Cursor:
        child = self.input.open(context.child())
        size = 2 if self.size == AUTOTUNE else self.size
        return Prefetcher(child, size, name="stratagem-prefetch") if size else child
