"""A switch between network interfaces that keeps every frame for a time, for kernels without ``netem``.

``python -m benchmarks.delay_switch 0.0005 p0 p1 p2`` forwards frames between these interfaces of its network namespace. Segments travel
whole (up to 64 KB), so that few frames carry many bytes.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence

_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_ETH_P_ALL = 3
_HEADER = 10  # struct virtio_net_hdr before each frame: offsets of segments and checksums
_FRAME = 1 << 17
_BUFFER = 1 << 26
_FRAMES_AT_ONCE = 64


class Switch:
    """Ports, the addresses behind them, and the frames on their way."""

    def __init__(self, delay_s: float, interfaces: Sequence[str]) -> None:
        self._delay_s = delay_s
        self._ports = [_port(name) for name in interfaces]
        self._behind: dict[bytes, socket.socket] = {}
        self._frames: deque[tuple[float, socket.socket, bytes]] = deque()

    def run(self) -> None:
        """Forward frames until the process ends."""
        while True:
            wait = None
            if self._frames:
                wait = max(0.0, self._frames[0][0] - time.monotonic())
            readable, _, _ = select.select(self._ports, [], [], wait)
            for port in readable:
                self._receive(port)
            now = time.monotonic()
            while self._frames and self._frames[0][0] <= now:
                _, port, frame = self._frames.popleft()
                self._send(port, frame)

    def _receive(self, port: socket.socket) -> None:
        for _ in range(_FRAMES_AT_ONCE):
            try:
                frame = port.recv(_FRAME, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._frames.append((time.monotonic() + self._delay_s, port, frame))

    def _send(self, source: socket.socket, frame: bytes) -> None:
        to, origin = frame[_HEADER : _HEADER + 6], frame[_HEADER + 6 : _HEADER + 12]
        self._behind[origin] = source
        known = self._behind.get(to)
        for port in self._ports if known is None else [known]:
            if port is not source:
                # A full queue loses the frame, as that of a real switch does.
                with contextlib.suppress(BlockingIOError, OSError):
                    port.send(frame, socket.MSG_DONTWAIT)


def _port(interface: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        port.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    port.bind((interface, 0))
    return port


def main(arguments: Sequence[str]) -> None:
    """Forward frames until a signal comes."""
    delay_s, *interfaces = arguments
    switch = Switch(float(delay_s), interfaces)
    print("ready", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        switch.run()


if __name__ == "__main__":
    main(sys.argv[1:])
