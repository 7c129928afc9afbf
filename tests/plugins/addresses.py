"""Addresses for tests: ports without a listener, invalid addresses, and names that appear later."""

from __future__ import annotations

import socket
from typing import Any

import pytest

import stratagem as sg

NO_ADDRESSES = [
    "somewhere",
    "somewhere:http",
    ":2222",
    "somewhere:0",
    "some..where:2222",
    "some where:2222",
    "$(PS_HOST):2222",
    "http://somewhere:2222",
    "10.0.0.256:2222",
    "somewhere:80:2222",
    f"{'long.' * 60}name:2222",
]
"""Texts that are not addresses; no code should wait for them."""


@pytest.fixture
def nobody() -> list[str]:
    """Two addresses without a listener."""
    with sg.Server({"ps": ["127.0.0.1:0"]}) as one, sg.Server({"ps": ["127.0.0.1:0"]}) as two:
        return [one.address, two.address]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Host names and their addresses; empty at first, like a name service that does not know them yet.

    This replaces Kubernetes' name service: names that end in ``.invalid`` are known only from here, however long the
    machine's own name service takes to say so. Other names are resolved as usual.
    """
    known: dict[str, str] = {}
    ask = socket.getaddrinfo

    def answer(host: str, port: int, *more: Any, **options: Any) -> Any:
        if host.endswith(".invalid") and host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if host in known:
            host, _, text = known[host].rpartition(":")
            port = int(text)
        return ask(host, port, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return known
