"""A relay between a client and one address that delays, loses and cuts what passes.

It replaces a bad network where the kernel has no netem. TCP repeats lost packets, so a lost packet is a pause
here: as long as TCP's timer, which doubles with every loss in a row. A cut holds everything back until `heal`.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Callable
from typing import Self

FIRST_TIMER_S = 0.2  # of TCP, for a packet that is not acknowledged
NOTED_BYTES = 200  # the handshake and the first message, which names the client


class Relay:
    """Accepts connections and passes them on to `to`.

    Args:
        to: address of the task.
        delay_s: for each direction; a round trip takes twice as long.
        loss: share of packets that are lost and sent again.
        listen: where it accepts connections.
    """

    def __init__(
        self, to: str, *, delay_s: float = 0.0, loss: float = 0.0, listen: str = "127.0.0.1:0"
    ) -> None:
        self._host, _, port = to.rpartition(":")
        self._port = int(port)
        self._delay_s = delay_s
        self._loss = loss
        self._random = random.Random(7)
        self._cut: list[bytes] = []
        self.lost = 0
        self.address = listen
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="test-relay")
        self._thread.start()
        assert self._ready.wait(60), "the relay's thread has not started"

    def cut(self, *clients: str) -> None:
        """Let nothing pass, of every client or of those with these words in their first message."""
        words = [word.encode() for word in clients or ("",)]
        self._call(lambda: setattr(self, "_cut", words))

    def heal(self) -> None:
        """Let everything pass again, also what was held back."""
        self._call(lambda: setattr(self, "_cut", []))

    def close(self) -> None:
        """Close all connections."""
        self._call(self._ended.set)
        self._thread.join(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _call(self, function: Callable[[], object]) -> None:
        """Call a function in the relay's thread; return when it has been called."""
        called = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (function(), called.set()))
        assert called.wait(60), "the relay's thread does not answer"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        host, _, port = self.address.rpartition(":")
        server = await asyncio.start_server(self._accept, host, int(port))
        self.address = "{}:{}".format(*server.sockets[0].getsockname())
        self._ready.set()
        await self._ended.wait()
        server.close()
        for _ in range(
            3
        ):  # a connection may be half accepted; aborted ones close in the next rounds
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.01)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        noted = bytearray()
        try:
            await self._pass(noted)
            there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, OSError | asyncio.CancelledError):
                return
            raise
        try:
            await asyncio.gather(
                self._pump(reader, there_writer, noted, notes=True),
                self._pump(there_reader, writer, noted, notes=False),
            )
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            there_writer.transport.abort()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        noted: bytearray,
        *,
        notes: bool,
    ) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1024)
        sender = asyncio.ensure_future(self._send(queue, writer, noted))
        try:
            while True:
                data = await reader.read(1 << 16)
                if notes:
                    noted += data[: max(0, NOTED_BYTES - len(noted))]
                await queue.put((self._loop.time() + self._delay_s + self._pause_s(), data))
                if not data:
                    await sender
                    return
        finally:
            sender.cancel()

    async def _send(
        self,
        queue: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        noted: bytearray,
    ) -> None:
        while True:
            due, data = await queue.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            await self._pass(noted)
            if not data:
                writer.close()
                return
            writer.write(data)
            await writer.drain()

    async def _pass(self, noted: bytearray) -> None:
        while any(word in noted for word in self._cut):
            await asyncio.sleep(0.02)

    def _pause_s(self) -> float:
        pause_s, timer_s = 0.0, FIRST_TIMER_S + 2 * self._delay_s
        while self._random.random() < self._loss:
            self.lost += 1
            pause_s += timer_s
            timer_s *= 2
        return pause_s


def main(listen: str, to: str, delay_s: str, loss: str) -> None:
    """Run a relay until standard input ends, then print how many packets were lost."""
    with Relay(to, delay_s=float(delay_s), loss=float(loss), listen=listen) as relay:
        sys.stdin.read()
    print(f"lost {relay.lost}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
