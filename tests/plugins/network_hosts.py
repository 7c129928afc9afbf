"""Several hosts on one machine: network namespaces, connected by a bridge, with real interfaces and links that can be cut.

They need root and the command ``ip``. Every host runs real processes; nothing of the machine's own network is used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any, Self

CAN_MAKE_HOSTS = os.geteuid() == 0 and shutil.which("ip") is not None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60)


class NetworkHosts:
    """A bridge and one namespace per name; `close` removes all of them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._mark = f"sg{os.getpid() % 100000}"
        self._bridge = f"{self._mark}br"
        # 198.18.0.0/15 is reserved for tests between networks.
        self.addresses = {name: f"198.18.7.{2 + index}" for index, name in enumerate(names)}
        # The bridge is in a namespace of its own: the machine's own routes and firewall do not matter.
        _ip("netns", "add", self._bridge)
        try:
            self._in(self._bridge, "link", "add", "br0", "type", "bridge")
            self._in(self._bridge, "link", "set", "br0", "up")
            for index, name in enumerate(names):
                self._add(index, name)
        except BaseException:
            self.close()
            raise

    def _add(self, index: int, name: str) -> None:
        space, port = self._space(name), f"p{index}"
        _ip("netns", "add", space)
        self._in(self._bridge, *f"link add {port} type veth peer name eth0 netns {space}".split())
        self._in(self._bridge, "link", "set", port, "master", "br0", "up")
        self._in(space, "link", "set", "lo", "up")
        self._in(space, "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
        self._in(space, "link", "set", "eth0", "up")

    def start(self, name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process on a host."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self._space(name), *command], text=True, **options
        )

    def cut(self, name: str) -> None:
        """Take the link of a host away: packets are lost, and no connection is closed."""
        self._in(self._bridge, "link", "set", self._port(name), "down")

    def heal(self, name: str) -> None:
        """Give the link back."""
        self._in(self._bridge, "link", "set", self._port(name), "up")

    def close(self) -> None:
        """Remove every namespace of this object."""
        for space in (self._bridge, *(self._space(name) for name in self.addresses)):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _space(self, name: str) -> str:
        return f"{self._mark}{name}"

    def _port(self, name: str) -> str:
        return f"p{list(self.addresses).index(name)}"

    def _in(self, space: str, *words: str) -> None:
        _ip("-n", space, *words)
