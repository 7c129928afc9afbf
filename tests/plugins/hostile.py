"""Bytes of hostile peers, for tests that attack a listening socket. Seeds are fixed by the tests."""

from __future__ import annotations

import os
import random
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from stratagem._wire.handshake import ClientHandshake, ClusterKey

LIMIT_S = 120.0
SEED = 20240607
KEY = ClusterKey(b"a key for this test only")
MEMORY_GROWTH_BYTES = 200 << 20
INTERESTING = [0, 1, 2, -1, 7, 255, 2**31, 2**63 - 1, -(2**63), 2**40]


class Target:
    """A task in a process of its own; its script prints the address it listens on."""

    def __init__(self, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, KEY.text()], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self._memory = self.memory()
        self._descriptors = self.descriptors()
        self._threads = self.threads()

    def memory(self) -> int:
        """Resident bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
        return int(line.split()[1]) * 1024

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def check_unharmed(self) -> None:
        """Alive; no more memory, threads or descriptors than a little work explains."""
        assert self.process.poll() is None
        assert self.memory() - self._memory < MEMORY_GROWTH_BYTES
        deadline = Deadline()
        while self.descriptors() > self._descriptors + 8 or self.threads() > self._threads + 4:
            deadline.check()

    def exit(self) -> str:
        """How the process ended, if it did within a moment."""
        try:
            return f"ended with {self.process.wait(1.0)}"
        except subprocess.TimeoutExpired:
            return "still runs"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=LIMIT_S)


class Deadline:
    """Fails a wait that lasts too long."""

    def __init__(self) -> None:
        self._left = int(LIMIT_S / 0.01)

    def check(self) -> None:
        self._left -= 1
        assert self._left > 0
        select.select([], [], [], 0.01)


def strange_bytes(random_: random.Random) -> bytes:
    """Return bytes that scanners, other protocols and broken peers send."""
    opening = bytearray(ClientHandshake(KEY, who="x").opening())
    choice = random_.randrange(5)
    if choice == 0:
        return random_.randbytes(random_.randrange(200))
    if choice == 1:
        return b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
    if choice == 2:
        opening[random_.randrange(len(opening))] ^= 1 << random_.randrange(8)
        return bytes(opening) + random_.randbytes(random_.randrange(100))
    if choice == 3:
        return bytes(opening) + random_.randbytes(32)
    return bytes(opening[: random_.randrange(len(opening))])


def attack_as_strangers(address: str, count: int) -> None:
    """Many connections, a window of them open at the same time."""
    random_ = random.Random(SEED)
    host, port = address.rsplit(":", 1)
    window: list[socket.socket] = []
    for _ in range(count):
        sock = socket.create_connection((host, int(port)), timeout=LIMIT_S)
        try:
            sock.sendall(strange_bytes(random_))
        except OSError:
            pass  # refused while we were sending
        window.append(sock)
        if len(window) > 30:
            window.pop(0).close()
    for sock in window:
        sock.close()


def mutate(value: Any, random_: random.Random) -> Any:
    """The same structure with one or more leaves changed to others of the same kind."""
    if isinstance(value, dict):
        return {key: one if key == "type" else mutate(one, random_) for key, one in value.items()}
    if isinstance(value, list):
        changed = [mutate(one, random_) for one in value]
        if changed and not isinstance(value[0], str) and random_.random() < 0.03:
            changed.append(random_.choice(changed))
        return changed
    if random_.random() > 0.06 or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return random_.choice(INTERESTING)
    if isinstance(value, float):
        return random_.choice([0.0, -1.0, float("nan"), float("inf"), 1e300])
    if isinstance(value, bytes):
        return random_.randbytes(len(value))
    return value  # texts are names and tags


def broken(frame: bytes, random_: random.Random) -> bytes:
    """A frame with some bytes changed, cut out or put in."""
    data = bytearray(frame)
    for _ in range(random_.randrange(1, 4)):
        position = random_.randrange(min(len(data), random_.choice([24, 120, 2000])))
        choice = random_.randrange(3)
        if choice == 0:
            data[position] ^= 1 << random_.randrange(8)
        elif choice == 1:
            del data[position : position + random_.randrange(1, 9)]
        else:
            data[position:position] = random_.randbytes(random_.randrange(1, 9))
    return bytes(data)


def send_then_hang_up(sock: socket.socket, data: bytes) -> None:
    """Sends bytes as they are, then the end; returns when the other side has hung up, too."""
    try:
        sock.send(data)
        # A frame that announces more than it brings is waited for; this ends the waiting.
        sock.shutdown(socket.SHUT_WR)
        while select.select([sock], [], [], LIMIT_S)[0] and sock.recv(1 << 16):
            pass
        assert not sock.recv(1)
    except OSError:
        pass  # it hung up on us while we were sending
