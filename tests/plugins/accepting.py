"""Accept connections of a listener in a thread, while a test makes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from stratagem._wire.listener import Listener


@contextmanager
def accepting(listener: Listener) -> Iterator[list[object]]:
    """Accepts in a thread; gives the list of channels let in."""
    accepted: list[object] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            channel = listener.accept(timeout_s=0.05)
            if channel is not None:
                accepted.append(channel)
                channel.close()

    thread = threading.Thread(target=run, name="test-acceptor")
    thread.start()
    try:
        yield accepted
    finally:
        stop.set()
        thread.join(120)
