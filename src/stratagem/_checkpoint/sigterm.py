"""Handle SIGTERM: the manager saves at the next step and then ends the program."""

from __future__ import annotations

import signal
import threading
import weakref
from typing import Any, Final, final

from stratagem._owner import Owner
from stratagem.errors import CheckpointError

EXIT_CODE: Final = 128 + signal.SIGTERM
"""Exit code that shells report for a program ended by SIGTERM."""


@final
class SigtermNote(Owner):
    """Handler that notes SIGTERM. A second SIGTERM has the effect it had before.

    Raises:
        CheckpointError: made in a thread that cannot handle signals.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointError(
                "save_on_sigterm=True needs a CheckpointManager made in the main thread: Python "
                "handles signals there only."
            )
        self.arrived = False
        note = weakref.ref(self)

        def handle(number: int, _frame: Any) -> None:
            here = note()
            if here is not None:
                here._note()
            else:  # the manager was dropped without close(): nothing would save
                signal.signal(number, before)
                signal.raise_signal(number)

        self._before: Any = signal.signal(signal.SIGTERM, handle)
        before = self._before

    def _note(self) -> None:
        if self.arrived:
            self.close()
            signal.raise_signal(signal.SIGTERM)
        self.arrived = True

    def close(self) -> None:
        """Handle the signal as before."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def __repr__(self) -> str:
        return f"<SigtermNote {'arrived' if self.arrived else 'not arrived'}>"
