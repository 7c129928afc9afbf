"""Pace of the thread that writes a cut to a file during training.

Writing takes processor time, and on a host whose cores all train, every millisecond of it is taken from the steps. So
the thread works in small pieces and rests after each. It does not rest if no step comes or if a program waits for the save.
"""

from __future__ import annotations

import time
from typing import Final, final

from stratagem._ps.server.cut import Cut

REST: Final = 11.0
"""Rest after a piece, as a multiple of the processor time that the piece took."""

LONGEST_REST_S: Final = 0.012
"""Longer rests would lengthen a save, and every step during a save makes copies."""

PACED_S: Final = 30.0
"""Rests are shortened if the file would take longer than this."""


@final
class SavePace:
    """Rests between the pieces of one file.

    Args:
        cut: the cut that is written.
        nbytes: size of the file, about.
    """

    def __init__(self, cut: Cut, nbytes: int) -> None:
        self.hurries = False
        """Set if a caller waits for the file. Any thread may set it."""
        self.rests = 0
        self._cut = cut
        self._nbytes = max(1, nbytes)
        self._began = time.monotonic()
        self._used = 0.0  # processor time of the thread at the end of its last rest

    def rest(self, moved: int) -> None:
        """Rest, if training continues; called by the writing thread after each piece, with the bytes it has written in all."""
        if not self._is_late(moved) and self._cut.is_trained and not self._cut.is_crowded:
            self.rests += 1
            time.sleep(min(LONGEST_REST_S, REST * (time.thread_time() - self._used)))
        self._used = time.thread_time()

    def _is_late(self, moved: int) -> bool:
        return self.hurries or (time.monotonic() - self._began) / PACED_S > moved / self._nbytes
