"""Addresses of tasks: IPv6, and the interface that a task listens on."""

from __future__ import annotations

import logging
import socket

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem._wire.connecting import split_address
from stratagem.cluster_resolver import SimpleClusterResolver

KEY = "a key for the tests of addresses"


def own_address() -> str:
    """Return an address of this machine that is not loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing: it only chooses an interface
        except OSError:
            return "127.0.0.2"
        return str(sock.getsockname()[0])


@pytest.mark.parametrize("host", ["[::1]", "127.0.0.1", "localhost"])
def test_a_cluster_trains_at_addresses_of_either_family(host: str) -> None:
    """Workers, servers and the coordinator find each other by IPv6, IPv4 and by name."""
    with (
        sg.Server({"ps": [f"{host}:0"]}) as server,
        sg.Server({"worker": [f"{host}:0"]}) as worker,
    ):
        spec = sg.ClusterSpec({"ps": [server.address], "worker": [worker.address]})
        assert server.address.startswith(f"{host}:")
        strategy = sg.ParameterServerStrategy(SimpleClusterResolver(spec))
        with strategy, strategy.scope():
            model = nn.Linear(2, 1, bias=False)
            nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

            def step() -> None:
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

            coordinator = sg.ClusterCoordinator(strategy)
            for _ in range(4):
                coordinator.schedule(step)
            coordinator.join(timeout_s=60)
            assert model.weight.tolist() == [[-2.0, -2.0]]
            coordinator.close()


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_a_task_listens_on_the_interface_of_its_address_only(job: str) -> None:
    """Nothing answers at the same port of another interface."""
    host = own_address()
    with sg.Server({job: [f"{host}:0"]}, key=KEY) as server:
        port = split_address(server.address)[1]
        socket.create_connection((host, port), timeout=30).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=30)


def test_an_address_of_another_machine_is_served_on_every_interface(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may belong to a service in front of this machine; the log says so."""
    with caplog.at_level(logging.WARNING), sg.Server({"ps": ["192.0.2.250:0"]}, key=KEY) as server:
        port = split_address(server.address)[1]
        assert server.address == f"192.0.2.250:{port}"
        socket.create_connection(("127.0.0.1", port), timeout=30).close()
    assert "not an address of this machine" in caplog.text


def test_a_bare_ipv6_host_is_advertised_with_brackets() -> None:
    """Without a port the task's own is advertised."""
    with sg.Server({"ps": ["[::1]:0"]}, advertised_address="fd00::5") as server:
        assert server.address == f"[fd00::5]:{split_address(server.address)[1]}"
        assert split_address(server.address)[1] > 0
