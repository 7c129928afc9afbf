"""The bare socket programs: workers and servers as plain processes that exchange the same bytes as a row's steps.

Fixed messages without headers, blocking sockets, no coordinator, no recovery: the least that a program of this form needs. Two processes
can share a step's work in no simpler way over TCP.
"""

from __future__ import annotations

import multiprocessing
import selectors
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import models, work
from benchmarks.protocol import Work

START_LIMIT_S = 120.0
STEPS_LIMIT_S = 240.0
CLOSE_LIMIT_S = 10.0


def send(sock: socket.socket, *tensors: Tensor) -> None:
    """Send the bytes of contiguous tensors."""
    views = [memoryview(one.numpy()).cast("B") for one in tensors if one.numel()]
    while views:
        sent = sock.sendmsg(views[:512])
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]


def receive(sock: socket.socket, *tensors: Tensor) -> None:
    """Fill contiguous tensors with received bytes."""
    for one in tensors:
        view = memoryview(one.numpy()).cast("B") if one.numel() else memoryview(b"")
        while len(view):
            count = sock.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]


class Row:
    """One row: `worker_step` in a worker, `answer` in a server for each request of a worker."""

    worker = 0  # index of the worker

    def __init__(self, size: dict[str, Any], task: int, shared: Any = None) -> None:
        self.size, self.task, self.done = size, task, 0
        self.shared = shared  # tensors in memory that all processes share

    def worker_step(self, servers: Sequence[socket.socket]) -> None:
        """Run one step."""
        raise NotImplementedError

    def answer(self, worker: socket.socket) -> None:
        """Receive one request and answer it."""
        raise NotImplementedError

    def facts(self, servers: Sequence[socket.socket]) -> dict[str, Any]:
        """Return facts about the work, in a worker."""
        return {}


class Empty(Row):
    """Add 1 to a number of server 0."""

    def __init__(self, size: dict[str, Any], task: int) -> None:
        super().__init__(size, task)
        self.number, self.counter = torch.ones(1), torch.zeros(1)

    def worker_step(self, servers: Sequence[socket.socket]) -> None:
        send(servers[0], self.number)
        receive(servers[0], self.counter)

    def answer(self, worker: socket.socket) -> None:
        receive(worker, self.number)
        self.counter += self.number
        send(worker, self.counter)


class Traffic(Row):
    """64 MB: every second variable is on the second server."""

    def __init__(self, size: dict[str, Any], task: int) -> None:
        super().__init__(size, task)
        shapes = work.byte_shapes(size)
        self.values = [torch.ones(shape) for shape in shapes]
        self.room = [torch.empty(shape) for shape in shapes]
        self.request = torch.zeros(1)

    def of(self, values: list[Tensor], server: int) -> list[Tensor]:
        """Return the values of one server."""
        return values[server :: self.size["servers"]]


class Read(Traffic):
    """Read all variables and compute their sum."""

    def worker_step(self, servers: Sequence[socket.socket]) -> None:
        for server in servers:
            send(server, self.request)
        for index, server in enumerate(servers):
            receive(server, *self.of(self.room, index))
        self.sum = sum(float(one.sum()) for one in self.room)

    def answer(self, worker: socket.socket) -> None:
        receive(worker, self.request)
        send(worker, *self.of(self.values, self.task))

    def facts(self, servers: Sequence[socket.socket]) -> dict[str, Any]:
        self.worker_step(servers)
        return {"sum": self.sum, "expected": work.gigabytes(self.size) * 1e9 / 4}


class Add(Traffic):
    """Add a tensor to every variable; the server acknowledges each."""

    def worker_step(self, servers: Sequence[socket.socket]) -> None:
        for one, other in zip(*(self.of(self.values, i) for i in range(len(servers))), strict=True):
            send(servers[0], one)
            send(servers[1], other)
        for index, server in enumerate(servers):
            receive(server, *[self.request for _ in self.of(self.room, index)])

    def answer(self, worker: socket.socket) -> None:
        mine = self.of(self.values, self.task)
        place, self.done = self.done % len(mine), self.done + 1
        receive(worker, self.room[0])
        mine[place].add_(self.room[0])
        send(worker, self.request)


class Mlp(Row):
    """Send gradients, receive parameters: weights on server 0, biases on server 1."""

    def __init__(self, size: dict[str, Any], task: int) -> None:
        super().__init__(size, task)
        self.model = models.Mlp(size)
        models.set_mlp(self.model, size)
        self.values = [parameter.data for parameter in self.model.parameters()]
        self.room = [torch.empty_like(value) for value in self.values]
        self.arrays = work.mlp_batches(size)
        self.batches = models.tensors(self.arrays)

    def worker_step(self, servers: Sequence[socket.socket]) -> None:
        inputs, labels = self.batches[self.done % len(self.batches)]
        self.done += 1
        self.model.zero_grad()
        F.cross_entropy(self.model(inputs), labels).backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        for index, server in enumerate(servers):
            send(server, *[one for one in gradients[index::2] if one is not None])
        for index, server in enumerate(servers):
            receive(server, *self.values[index::2])

    def answer(self, worker: socket.socket) -> None:
        receive(worker, *self.room[self.task :: 2])
        for value, gradient in zip(
            self.values[self.task :: 2], self.room[self.task :: 2], strict=True
        ):
            value.add_(gradient, alpha=-work.MLP_LEARNING_RATE)
        send(worker, *self.values[self.task :: 2])

    def facts(self, servers: Sequence[socket.socket]) -> dict[str, Any]:
        before = models.mean_loss(self.model, F.cross_entropy, self.arrays)
        for _ in range(self.size["check_steps"]):
            self.worker_step(servers)
        after = models.mean_loss(self.model, F.cross_entropy, self.arrays)
        return {"loss_before": before, "loss_after": after}


class Embedding(Row):
    """Fetch rows of half a table from each server, send their gradients back; the layer is on server 0."""

    def __init__(self, size: dict[str, Any], task: int) -> None:
        super().__init__(size, task)
        self.half = size["rows"] // 2
        self.head = nn.Linear(size["columns"] * size["width"], 1)
        with torch.no_grad():
            self.head.weight.copy_(torch.from_numpy(work.embedding_head(size)))
            self.head.bias.zero_()
        self.layer = [parameter.data for parameter in self.head.parameters()]
        self.sums = [torch.zeros_like(value) for value in self.layer]
        self.count = torch.zeros(1, dtype=torch.int64)
        self.arrays = work.embedding_batches(size)
        self.batches = models.tensors(self.arrays)
        if task >= 0:
            table = torch.from_numpy(work.embedding_table(size))
            self.table = table[self.half * task : self.half * (task + 1)].clone()
            self.table_sums = torch.zeros_like(self.table)

    def worker_step(self, servers: Sequence[socket.socket]) -> None:
        inputs, labels = self.batches[self.done % len(self.batches)]
        self.done += 1
        self.head.zero_grad()
        rows, places, ids = self.fetch(servers, inputs)
        self.loss(rows, places, inputs, labels).backward()
        assert rows.grad is not None
        parts = rows.grad.split([len(one) for one in ids])
        for index, server in enumerate(servers):
            dense = [one.grad for one in self.head.parameters() if one.grad is not None]
            send(
                server, self.counts[index], ids[index], parts[index], *(dense if not index else ())
            )
        receive(servers[0], *self.layer)
        receive(servers[1], self.count)

    def fetch(
        self, servers: Sequence[socket.socket], inputs: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the rows of a batch as a leaf, the place of each id in it, and the ids of each server."""
        unique, places = torch.unique(inputs, return_inverse=True)
        cut = int(torch.searchsorted(unique, self.half))
        ids = [unique[:cut], unique[cut:] - self.half]
        rows = torch.empty(len(unique), self.size["width"])
        self.counts = [torch.tensor([len(one)]) for one in ids]
        for index, server in enumerate(servers):
            send(server, -self.counts[index], ids[index])
        for server, part in zip(servers, rows.split([len(one) for one in ids]), strict=True):
            receive(server, part)
        return rows.requires_grad_(), places, ids

    def loss(self, rows: Tensor, places: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch."""
        found = rows.index_select(0, places.flatten()).view(len(inputs), -1)
        return F.binary_cross_entropy_with_logits(self.head(found), labels)

    def answer(self, worker: socket.socket) -> None:
        receive(worker, self.count)
        count = int(self.count)
        ids = torch.empty(abs(count), dtype=torch.int64)
        receive(worker, ids)
        if count < 0:
            send(worker, self.table.index_select(0, ids))
            return
        gradient = torch.empty(count, self.size["width"])
        dense = [torch.empty_like(value) for value in self.layer] if self.task == 0 else []
        receive(worker, gradient, *dense)
        sums = self.table_sums.index_select(0, ids).addcmul_(gradient, gradient)
        self.table_sums.index_copy_(0, ids, sums)
        rate, epsilon = work.EMBEDDING_LEARNING_RATE, work.EMBEDDING_EPSILON
        step = gradient.div_(sums.sqrt_().add_(epsilon)).mul_(-rate)
        self.table.index_add_(0, ids, step)
        for value, total, one in zip(self.layer, self.sums, dense, strict=bool(dense)):
            total.addcmul_(one, one)
            value.addcdiv_(one, total.sqrt().add_(epsilon), value=-rate)
        send(worker, *(self.layer if self.task == 0 else [self.count]))

    def facts(self, servers: Sequence[socket.socket]) -> dict[str, Any]:
        before = self.mean_loss(servers)
        for _ in range(self.size["check_steps"]):
            self.worker_step(servers)
        return {"loss_before": before, "loss_after": self.mean_loss(servers)}

    @torch.no_grad()
    def mean_loss(self, servers: Sequence[socket.socket]) -> float:
        """Return the mean loss over all batches."""
        losses = []
        for inputs, labels in self.batches:
            rows, places, _ = self.fetch(servers, inputs)
            losses.append(float(self.loss(rows, places, inputs, labels)))
        return sum(losses) / len(losses)


ROWS: dict[str, type[Row]] = {
    "empty": Empty,
    "read": Read,
    "add": Add,
    "mlp": Mlp,
    "embedding": Embedding,
}


class BareSockets(Work):
    """The bare program of a row: servers, workers, and this process, which counts steps."""

    def __init__(self, row: type[Row], size: dict[str, Any], shared: Any = None) -> None:
        super().__init__()
        self.size = size
        if issubclass(row, Traffic):
            self.amount_per_step = work.gigabytes(size)
        start = multiprocessing.get_context("spawn")
        self._tasks: dict[str, Any] = {}
        self._lines: dict[str, Connection] = {}

        def begin(name: str, target: Any, *arguments: Any) -> Connection:
            here, there = start.Pipe()
            task = start.Process(target=target, args=(row, size, shared, *arguments, there))
            task.daemon = True
            task.start()
            there.close()
            self._tasks[name], self._lines[name] = task, here
            return here

        servers = [begin(f"ps {i}", _serve, i) for i in range(size["servers"])]
        ports = [self._answer(one, START_LIMIT_S) for one in servers]
        self._workers = [begin(f"worker {i}", _work, i, ports) for i in range(size["workers"])]
        for one in self._workers:
            self._answer(one, START_LIMIT_S)

    def _answer(self, line: Connection, limit_s: float) -> Any:
        if not line.poll(limit_s):
            raise TimeoutError(f"a bare process gave no answer in {limit_s:g} s")
        return line.recv()

    def steps(self, count: int) -> None:
        share, rest = divmod(count, len(self._workers))
        for index, line in enumerate(self._workers):
            line.send(share + (1 if index < rest else 0))
        for line in self._workers:
            self._answer(line, STEPS_LIMIT_S)

    def check(self) -> dict[str, Any]:
        self._workers[0].send(-1)
        facts: dict[str, Any] = self._answer(self._workers[0], STEPS_LIMIT_S)
        return facts

    def processes(self) -> dict[str, int]:
        return {**super().processes(), **{name: task.pid for name, task in self._tasks.items()}}

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        for task in self._tasks.values():
            task.join(CLOSE_LIMIT_S)
            if task.is_alive():
                task.kill()
                task.join(CLOSE_LIMIT_S)


def _work(
    row: type[Row],
    size: dict[str, Any],
    shared: Any,
    index: int,
    ports: list[int],
    line: Connection,
) -> None:
    """Run one worker's process: steps on request, facts for -1."""
    torch.set_num_threads(1)
    made = row(size, -1) if shared is None else row(size, -1, shared)
    made.worker = index
    servers = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    for server in servers:
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.send(0)
    try:
        while True:
            count = line.recv()
            if count < 0:
                line.send(made.facts(servers))
                continue
            for _ in range(count):
                made.worker_step(servers)
            line.send(0)
    except (EOFError, OSError):
        pass  # the other side has closed the connection
    finally:
        for server in servers:
            server.close()


def _serve(row: type[Row], size: dict[str, Any], shared: Any, task: int, line: Connection) -> None:
    """Run one server's process until the connection to the main process ends."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    made = row(size, task) if shared is None else row(size, task, shared)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        selectors.DefaultSelector() as selector,
    ):
        selector.register(listener, selectors.EVENT_READ)
        selector.register(line, selectors.EVENT_READ)
        line.send(listener.getsockname()[1])
        while True:
            for key, _ in selector.select():
                if key.fileobj is line:
                    return
                if key.fileobj is listener:
                    worker, _ = listener.accept()
                    worker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    selector.register(worker, selectors.EVENT_READ)
                    continue
                try:
                    made.answer(key.fileobj)  # type: ignore[arg-type]
                except (EOFError, OSError):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
