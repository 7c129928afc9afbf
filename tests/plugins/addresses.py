"""Addresses for tests: where nobody listens, what is no address at all, and names that become known while one waits."""

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
"""What no connection can ever be made to, and nobody should wait for."""


@pytest.fixture
def nobody() -> list[str]:
    """Two addresses where nobody listens."""
    with sg.Server({"ps": ["127.0.0.1:0"]}) as one, sg.Server({"ps": ["127.0.0.1:0"]}) as two:
        return [one.address, two.address]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Host names and where they lead; empty at first, as a name service that has not heard of them yet.

    The one thing of a Kubernetes cluster that cannot be had here. Everything else is asked of the real one.
    """
    known: dict[str, str] = {}
    ask = socket.getaddrinfo

    def answer(host: str, port: int, *more: Any, **options: Any) -> Any:
        if host in known:
            host, _, text = known[host].rpartition(":")
            port = int(text)
        return ask(host, port, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return known
