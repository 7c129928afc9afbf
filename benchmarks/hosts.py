"""Hosts of a benchmark on one machine: network namespaces whose links have a rate and a delay.

Needs root, ``ip`` and ``tc``. Rates are those of the kernel's token bucket (``tbf``) at each host. A delay is made by ``delay_switch.py`` in place of
the bridge, because many kernels have no ``netem``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 60.0
_ROUND_TRIPS = 200
_ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 7)) as listener:
    print("ready", flush=True)
    peer, _ = listener.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := peer.recv(64):
        peer.sendall(data)
"""
_TAKE = """
import socket, sys
with socket.create_server((sys.argv[1], 9)) as listener:
    print("ready", flush=True)
    peer, _ = listener.accept()
    room = bytearray(1 << 20)
    while peer.recv_into(room):
        pass
"""
_GIVE = """
import socket, sys, time
data, limit_s = bytes(1 << 20), float(sys.argv[2])
with socket.create_connection((sys.argv[1], 9)) as peer:
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < limit_s:
        peer.sendall(data)
        count += len(data)
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)  # the other side has received all of it
    print(count * 8 / (time.perf_counter() - begin) / 1e9)
"""
_ASK = """
import socket, statistics, sys, time
with socket.create_connection((sys.argv[1], 7)) as peer:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    taken = []
    for _ in range(int(sys.argv[2])):
        begin = time.perf_counter()
        peer.sendall(b"x")
        peer.recv(1)
        taken.append(time.perf_counter() - begin)
print(statistics.median(taken))
"""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Properties of every host's link: bits per second in each direction, and the delay of a round trip; 0: not limited."""

    name: str
    gigabits: float = 0.0
    round_trip_s: float = 0.0


def missing() -> str | None:
    """Return why hosts cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"the command {command!r} is missing: install iproute2"
    return None


class Hosts:
    """One namespace for each name, and one with the switch between them; `close` removes all of them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._mark = f"sgb{os.getpid()}"
        self._middle = f"{self._mark}switch"
        # 198.18.0.0/15 is reserved for tests between networks.
        self.addresses = {name: f"198.18.9.{2 + index}" for index, name in enumerate(names)}
        self._ports = {name: f"p{index}" for index, name in enumerate(names)}
        self._switch: subprocess.Popen[str] | None = None
        try:
            _run("ip", "netns", "add", self._middle)
            self._in(self._middle, "ip", "link", "add", "br0", "type", "bridge")
            self._in(self._middle, "ip", "link", "set", "br0", "up")
            for name in names:
                self._add(name)
        except BaseException:
            self.close()
            raise

    def _add(self, name: str) -> None:
        space, port = self.space(name), self._ports[name]
        _run("ip", "netns", "add", space)
        veth = f"ip link add {port} type veth peer name eth0 netns {space}"
        self._in(self._middle, *veth.split())
        self._in(self._middle, "ip", "link", "set", port, "master", "br0", "up")
        self._in(space, "ip", "link", "set", "lo", "up")
        self._in(space, "ip", "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
        self._in(space, "ip", "link", "set", "eth0", "up")

    def space(self, name: str) -> str:
        """Return the namespace of a host."""
        return f"{self._mark}{name}"

    def prefix(self, name: str) -> tuple[str, ...]:
        """Return the words before a command that runs it on a host."""
        return ("ip", "netns", "exec", self.space(name))

    def set_link(self, link: Link) -> None:
        """Give the links of all hosts a rate and a delay; connections stay."""
        self._end_switch()
        for name, port in self._ports.items():
            inside = self.prefix(name)
            subprocess.run(
                [*inside, *["tc", "qdisc", "del", "dev", "eth0", "root"]],
                capture_output=True,
                check=False,
            )
            if link.gigabits:
                # Tokens of 2 ms: the bucket must cover the time between two events of the kernel.
                burst = max(1 << 17, int(link.gigabits * 1e9 / 8 * 0.002))
                words = f"tc qdisc add dev eth0 root tbf rate {link.gigabits:g}gbit burst {burst} latency 50ms"
                _run(*inside, *words.split())
            master = ("nomaster",) if link.round_trip_s else ("master", "br0")
            self._in(self._middle, "ip", "link", "set", port, *master)
        if link.round_trip_s:
            self._switch = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self._middle, sys.executable),
                    *("-m", "benchmarks.delay_switch", str(link.round_trip_s / 2)),
                    *self._ports.values(),
                ],
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            assert self._switch.stdout is not None
            if self._switch.stdout.readline() != "ready\n":
                raise RuntimeError("the switch did not start; its error is above")

    def switch_pid(self) -> int | None:
        """Return the process of the switch that makes delays; None without delay."""
        return None if self._switch is None else self._switch.pid

    def round_trip_s(self, one: str, other: str) -> float:
        """Return the median round trip of a byte between two hosts, over TCP."""
        return self._between(one, other, _ECHO, _ASK, str(_ROUND_TRIPS))

    def stream_gigabits(self, one: str, other: str, seconds: float) -> float:
        """Return what one plain TCP connection between two hosts carries, in 10**9 bits per second."""
        return self._between(one, other, _TAKE, _GIVE, str(seconds))

    def _between(self, one: str, other: str, server: str, client: str, argument: str) -> float:
        address = self.addresses[one]
        with subprocess.Popen(
            [*self.prefix(one), sys.executable, "-c", server, address],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                asked = [*self.prefix(other), sys.executable, "-c", client, address, argument]
                return float(_run(*asked))
            finally:
                process.kill()

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Return the bytes that each host has sent and received."""
        listed = json.loads(self._in(self._middle, "ip", "-s", "-j", "link"))
        stats = {one["ifname"]: one["stats64"] for one in listed}
        # The switch receives what a host sends.
        return {
            name: (int(stats[port]["rx"]["bytes"]), int(stats[port]["tx"]["bytes"]))
            for name, port in self._ports.items()
        }

    def wait_for(self, name: str, port: int, limit_s: float = LIMIT_S) -> None:
        """Wait until a program on a host listens on a port."""
        end = time.monotonic() + limit_s
        probe = f"ss -Htln sport = :{port}"
        while not _run(*self.prefix(name), *probe.split()):
            if time.monotonic() > end:
                raise TimeoutError(f"nothing listens on {name}:{port} after {limit_s:g} s")
            time.sleep(0.2)

    def close(self) -> None:
        """End the switch and remove every namespace."""
        self._end_switch()
        for space in (self._middle, *map(self.space, self.addresses)):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _end_switch(self) -> None:
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait(LIMIT_S)
            if self._switch.stdout is not None:
                self._switch.stdout.close()
            self._switch = None

    def _in(self, space: str, *words: str) -> str:
        return _run("ip", "netns", "exec", space, *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout
