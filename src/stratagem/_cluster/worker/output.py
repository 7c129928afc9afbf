"""Send a worker's printed lines and log records to its coordinator.

In a worker process `OutputForwarder` replaces standard output and standard error and adds a log handler. Workers
in the coordinator's own process do not use it. `worker_link.py` logs the lines on the coordinator.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
from typing import Final, TextIO, final

from typing_extensions import override

from stratagem._wire.channel import Channel
from stratagem._wire.messages import LogLine
from stratagem.errors import WireError

TEXT_LIMIT: Final = 1 << 16  # longest line sent: a longer message would end the connection


@final
class OutputForwarder:
    """Replaces `sys.stdout` and `sys.stderr`, and adds a log handler, until closed.

    Args:
        echo: also write to the streams that were there before.
    """

    def __init__(self, *, echo: bool) -> None:
        self._channel: Channel | None = None
        self._echo = echo
        self._before = (sys.stdout, sys.stderr)
        sys.stdout = _Stream(self, sys.stdout, logging.INFO)
        sys.stderr = _Stream(self, sys.stderr, logging.WARNING)
        self._handler = _Handler(self)
        logging.getLogger().addHandler(self._handler)

    def attach(self, channel: Channel) -> None:
        """Send lines to this coordinator from now on."""
        self._channel = channel

    def detach(self) -> None:
        """Write lines to the old streams: there is no coordinator."""
        self._channel = None

    def send(self, level: int, logger: str, text: str) -> bool:
        """Send a line; return False if it is to be written to the old streams."""
        channel = self._channel
        if channel is None:
            return False
        if len(text) > TEXT_LIMIT:
            text = f"{text[:TEXT_LIMIT]} … {len(text) - TEXT_LIMIT} characters left out"
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")  # lone surrogates
        try:
            channel.notify(LogLine(level=level, logger=logger, text=text))
        except WireError:
            return False
        return not self._echo

    def close(self) -> None:
        """Restore the streams. May be called again."""
        sys.stdout, sys.stderr = self._before
        logging.getLogger().removeHandler(self._handler)


class _Stream(io.TextIOBase):
    """Splits text into lines, separately for each thread."""

    def __init__(self, forwarder: OutputForwarder, under: TextIO, level: int) -> None:
        self._forwarder = forwarder
        self._under = under
        self._level = level
        self._parts: dict[int, str] = {}

    @override
    def write(self, text: str) -> int:
        thread = threading.get_ident()
        *lines, rest = (self._parts.pop(thread, "") + text).split("\n")
        if rest:
            self._parts[thread] = rest
        for line in lines:
            if not self._forwarder.send(self._level, "", line):
                self._under.write(line + "\n")
        return len(text)

    @override
    def flush(self) -> None:
        self._under.flush()

    @override
    def writable(self) -> bool:
        return True

    @override
    def fileno(self) -> int:
        return self._under.fileno()

    @override
    def isatty(self) -> bool:
        return False


class _Handler(logging.Handler):
    """Sends log records, except those about sending."""

    def __init__(self, forwarder: OutputForwarder) -> None:
        super().__init__()
        self._forwarder = forwarder

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("stratagem.wire"):
            self._forwarder.send(record.levelno, record.name, self.format(record))
