"""`RayShareServer`: the Ray actor that gives batches of one Ray dataset to all workers that ask.

Ray's own ``streaming_split`` makes every consumer wait for all others when an epoch begins, and has a fixed number of
them. Workers that run scheduled functions come and go, and some run more functions than others.

This module imports neither torch nor the other modules of the package, so that the actor starts fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

BATCH_ROWS = 1024
"""Rows of a batch, as of `from_parquet` and the other columnar sources. Batches are cut and joined by `batch`."""


@final
class RayShareServer:
    """Iterates a Ray dataset once per epoch; every batch goes to one worker.

    Args:
        source: a `ray.data.Dataset` or `ray.data.DataIterator`.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._epoch = 0
        self._ended = False
        self._given = 0  # batches of the present epoch
        self._batches: Iterator[Any] | None = None

    def next(self, finished: int) -> tuple[int, Any, bool]:
        """Return the number of an epoch, its next batch or None at its end, and whether it had any batch.

        Args:
            finished: the last epoch that the caller has finished, -1 if none. A caller that has finished the
                present epoch begins the next one; any other caller takes part in the present one.
        """
        if finished == self._epoch and self._ended:
            self._epoch, self._ended, self._given = self._epoch + 1, False, 0
        batch = None
        if not self._ended:
            if self._batches is None:
                self._batches = read_batches(self._source)
            batch = next(self._batches, None)
            self._given += batch is not None
            if batch is None:
                self._ended, self._batches = True, None
        return self._epoch, batch, self._given > 0


def read_batches(source: Any) -> Iterator[Any]:
    """Begin an epoch; return its batches as dictionaries of NumPy arrays."""
    return iter(source.iter_batches(batch_size=BATCH_ROWS, batch_format="numpy"))
