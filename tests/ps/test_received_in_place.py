"""New values of large parameters are received in the worker's own copies, and connections break in the middle."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
import torch

from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.client.server_connection import Membership
from stratagem._ps.placement import Placement
from stratagem._ps.server.loop import ParameterServer
from stratagem._ps.types import GroupSpec
from stratagem._ps.worker.worker_variables import WorkerVariables
from stratagem.errors import StratagemError

ROWS = 100_000  # 400 KB


class Relay:
    """Passes bytes on between clients and a server, and cuts a connection after so many bytes of the server."""

    def __init__(self, server: str) -> None:
        host, port = server.rsplit(":", 1)
        self._server = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.left: int | None = None  # bytes until the cut
        self.cuts = 0
        self.refuses = False
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuses:
                client.close()
                continue
            server = socket.create_connection(self._server)
            self._sockets += [client, server]
            self._start(self._pass_on, client, server, False)
            self._start(self._pass_on, server, client, True)

    def _pass_on(self, one: socket.socket, other: socket.socket, is_server: bool) -> None:
        with contextlib.suppress(OSError):  # the other thread was faster
            while data := one.recv(1 << 14):
                if is_server and self.left is not None:
                    data = data[: self.left]
                    self.left -= len(data)
                other.sendall(data)
                if is_server and self.left == 0:
                    self.left = None
                    self.cuts += 1
                    break
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._threads[0].join(60.0)
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60.0)
        for one in (self._listener, *self._sockets):
            one.close()


@contextmanager
def worker(
    relay: Relay,
) -> Iterator[tuple[WorkerVariables, torch.nn.Parameter, torch.optim.Optimizer]]:
    """A worker with one large parameter of zeros, and SGD."""
    who = Membership(session="test", task="/job:chief/task:0", is_owner=True)
    with PsClient([("/job:ps/task:0", relay.address)], who, shared_memory=False) as client:
        remote = RemoteVariable(Placement(1).place("w", (ROWS,), torch.float32), client)
        client.create_all(remote.wanted())
        remote.put(torch.zeros(ROWS))
        group = GroupSpec(variables=(remote.places[0].variable,), settings={"lr": 1.0})
        client.create_optimizer(0, 1, "torch.optim.sgd.SGD", [group])
        variables = WorkerVariables(client)
        leaf = variables.parameter(remote.description, requires_grad=True, as_table=False)
        yield variables, leaf, torch.optim.SGD([leaf], lr=1.0)
        variables.close()


def step(
    variables: WorkerVariables, leaf: torch.nn.Parameter, optimizer: torch.optim.Optimizer
) -> tuple[list[float], list[float]]:
    """Make a step with a gradient of ones; return the numbers of the parameter before and after."""
    with variables.closure(1):
        before = leaf.detach().unique().tolist()
        optimizer.zero_grad()
        leaf.sum().backward()
        variables.push(1, optimizer, {0: {"lr": 1.0}})
        return before, leaf.detach().unique().tolist()


@pytest.fixture
def relay() -> Iterator[Relay]:
    with ParameterServer("127.0.0.1:0").start() as server:
        with closing(Relay(server.address)) as made:
            yield made


def test_a_value_is_received_in_the_parameter_itself(relay: Relay) -> None:
    with worker(relay) as (variables, leaf, optimizer):
        step(variables, leaf, optimizer)
        memory = leaf.data_ptr()
        places: list[object] = []
        place = variables._copies.place

        def noted(server: int, variable: int) -> memoryview | None:
            places.append(place(server, variable))
            return places[-1]  # type: ignore[return-value]

        variables._copies.place = noted  # type: ignore[method-assign]
        assert step(variables, leaf, optimizer) == ([-1.0], [-2.0])
        assert len(places) == 1
        assert isinstance(places[0], memoryview)
        assert leaf.data_ptr() == memory


def test_a_connection_that_breaks_within_a_value_is_made_again(relay: Relay) -> None:
    """The write counts once, and the whole value is received again."""
    with worker(relay) as (variables, leaf, optimizer):
        step(variables, leaf, optimizer)
        for done in range(1, 4):
            relay.left = 100_000 * done
            assert step(variables, leaf, optimizer) == ([-done], [-done - 1.0])
            assert relay.cuts == done


@pytest.mark.parametrize("catches", [False, True])
def test_after_a_step_that_failed_within_a_value_the_next_function_reads_it_again(
    relay: Relay, monkeypatch: pytest.MonkeyPatch, catches: bool
) -> None:
    """A function that catches the error fails too: its parameters were parts of two values."""
    monkeypatch.setenv("STRATAGEM_WIRE_TIMEOUT_S", "3")
    with worker(relay) as (variables, leaf, optimizer):
        step(variables, leaf, optimizer)
        with pytest.raises(StratagemError):
            with variables.closure(1):
                optimizer.zero_grad()
                leaf.sum().backward()
                relay.refuses, relay.left = True, 200_000
                with contextlib.suppress(StratagemError if catches else ()):
                    variables.push(1, optimizer, {0: {"lr": 1.0}})
        assert len(leaf.detach().unique()) > 1  # a part of the value has arrived
        relay.refuses = False
        before, after = step(variables, leaf, optimizer)
        assert (len(before), len(after)) == (1, 1)
        assert after[0] == before[0] - 1
