"""Record of the rows that were written since a cut, for delta checkpoints.

One mark (a byte) per row. Periods begin with a cut: a delta on a checkpoint holds the rows of all periods since the
cut of that checkpoint, so that a save that failed loses no mark.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor


@final
class ChangedRows:
    """Marks of written rows, by period. Nothing is marked before the first period begins.

    Example:
        >>> changed = ChangedRows()
        >>> changed.begin(7, [1])
        >>> changed.mark(1, torch.tensor([2, 2]), torch.zeros(4, 8))
        >>> changed.since(7, 1)
        tensor([2])
        >>> changed.since(6, 1) is None
        True
    """

    def __init__(self) -> None:
        self._known: dict[int, frozenset[int]] = {}  # by cut: the variables at that time
        self._periods: dict[int, dict[int, Tensor | None]] = {}  # cut → variable → marks; None: all

    @property
    def is_active(self) -> bool:
        return bool(self._periods)

    def begin(self, cut: int, variables: Iterable[int]) -> None:
        """Begin a period with a cut of these variables."""
        self._periods[cut] = {}
        self._known[cut] = frozenset(variables)

    def forget_before(self, cut: int) -> None:
        """Forget the periods before a cut: no delta will be built on an older one."""
        if cut in self._periods:
            while next(iter(self._periods)) != cut:
                gone = next(iter(self._periods))
                del self._periods[gone], self._known[gone]

    def mark_all(self, variables: Iterable[int]) -> None:
        """Mark all rows of these variables, and of optimizer state for them, as written."""
        if self._periods:
            next(reversed(self._periods.values())).update(dict.fromkeys(variables))

    def mark(self, variable: int, ids: Tensor | None, tensor: Tensor) -> None:
        """Mark rows of a variable as written; None marks all."""
        if not self._periods:
            return
        marks = next(reversed(self._periods.values()))
        if ids is None:
            marks[variable] = None
            return
        found = marks.get(variable, _NEW)
        if found is _NEW:
            found = marks[variable] = torch.zeros(len(tensor), dtype=torch.bool)
        if found is not None:
            found[ids] = True

    def since(self, cut: int, variable: int) -> Tensor | None:
        """Return the rows written since a cut, ascending; None for all, also if the cut is not known."""
        if variable not in self._known.get(cut, ()):
            return None
        total: Tensor | None = None
        counts = False
        for number, marks in self._periods.items():
            counts = counts or number == cut
            if not counts or variable not in marks:
                continue
            found = marks[variable]
            if found is None:
                return None
            total = found if total is None else total | found
        if total is None:
            return torch.empty(0, dtype=torch.int64)
        return total.nonzero().flatten()


_NEW = torch.empty(0)
