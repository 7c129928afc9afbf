"""What a worker prints and logs, sent to its coordinator's log.

`OutputForwarder` stands in a worker process for standard output and as a handler of the root logger.
The coordinator's side is `log_line`. Nothing here is used by in-process workers: they print where
everybody prints.
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

TEXT_LIMIT: Final = 1 << 16
"""Longest line sent; a message has a limit, and passing it would end the connection."""


@final
class OutputForwarder:
    """Takes over `sys.stdout`, `sys.stderr` and logging until closed.

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
        """From now on lines go to this coordinator."""
        self._channel = channel

    def detach(self) -> None:
        """There is no coordinator now: lines go to the old streams."""
        self._channel = None

    def send(self, level: int, logger: str, text: str) -> bool:
        """Sends a line; False when there is nobody to send it to."""
        channel = self._channel
        if channel is None:
            return False
        if len(text) > TEXT_LIMIT:
            text = f"{text[:TEXT_LIMIT]} … {len(text) - TEXT_LIMIT} characters left out"
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")  # lone surrogates
        try:
            channel.notify(LogLine(level=level, logger=logger, text=text), timeout_s=2.0)
        except WireError:
            return False
        return not self._echo

    def close(self) -> None:
        """Gives the streams back. May be called again."""
        sys.stdout, sys.stderr = self._before
        logging.getLogger().removeHandler(self._handler)


class _Stream(io.TextIOBase):
    """Cuts what is written into lines; each thread has a line of its own."""

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
    """Sends log records; those of our own wire are left out, they would never end."""

    def __init__(self, forwarder: OutputForwarder) -> None:
        super().__init__()
        self._forwarder = forwarder

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("stratagem.wire"):
            self._forwarder.send(record.levelno, record.name, self.format(record))


def log_line(task: str, line: LogLine) -> None:
    """Puts a worker's line into this process's log, under ``stratagem.tasks.<task>``."""
    origin = f"{line.logger}: " if line.logger else ""
    logging.getLogger(f"stratagem.tasks.{task}").log(
        line.level, "[%s] %s%s", task, origin, line.text
    )
