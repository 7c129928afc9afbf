"""A parameter server over ``torch.distributed.rpc``.

As in its tutorials on parameter servers: a call carries gradients there and the new values back, and asks both servers at once. The MLP's
parameters are divided between the servers; the table is divided by rows, and a step first asks for the rows of its batch.
"""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn

from benchmarks import models, work
from benchmarks.torch_peers.trainer import Place, Trainer, model_of, optimizer_of

TIMEOUT_S = 60.0


def _join(place: Place, name: str, rank: int) -> None:
    rpc.init_rpc(
        name,
        rank=rank,
        world_size=place.workers + place.servers,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{place.meeting}",
            rpc_timeout=TIMEOUT_S,
            num_worker_threads=place.workers,  # a server never has more calls at once
        ),
    )


class Shard:
    """State of one server: dense parameters, and for the embedding row its part of the table, with the optimizer."""

    def __init__(self, place: Place) -> None:
        self.lock = threading.Lock()
        model = model_of(place.row, place.size)
        if place.row == "mlp":
            self.dense = list(model.parameters())[place.index :: place.servers]
            self.optimizer = optimizer_of("mlp", self.dense)
            return
        assert isinstance(model, models.Table)
        half = place.size["rows"] // place.servers
        self.table = model.table.weight.detach()[half * place.index : half * (place.index + 1)]
        self.table = self.table.clone()
        self.sums = torch.zeros_like(self.table)
        self.dense = list(model.head.parameters()) if place.index == 0 else []
        if self.dense:
            self.optimizer = optimizer_of("embedding", self.dense)

    def apply(self, gradients: list[Tensor]) -> list[Tensor]:
        """Make a step of the dense parameters; return their values."""
        with self.lock:
            for parameter, gradient in zip(self.dense, gradients, strict=True):
                parameter.grad = gradient
            if self.dense:
                self.optimizer.step()
            return [parameter.detach().clone() for parameter in self.dense]

    def lookup(self, ids: Tensor) -> Tensor:
        """Return rows of the table."""
        return self.table.index_select(0, ids)

    def scatter(self, ids: Tensor, gradient: Tensor) -> None:
        """Make a step of Adagrad on rows of the table; ids are distinct."""
        rate, epsilon = work.EMBEDDING_LEARNING_RATE, work.EMBEDDING_EPSILON
        with self.lock:
            sums = self.sums.index_select(0, ids).addcmul_(gradient, gradient)
            self.sums.index_copy_(0, ids, sums)
            self.table.index_add_(0, ids, gradient.div(sums.sqrt_().add_(epsilon)).mul_(-rate))


_shard: Shard | None = None


def _mine() -> Shard:
    assert _shard is not None
    return _shard


def update(gradients: list[Tensor]) -> list[Tensor]:
    """Run on a server: apply dense gradients and return the values."""
    return _mine().apply(gradients)


def look_up(ids: Tensor) -> Tensor:
    """Run on a server: return rows."""
    return _mine().lookup(ids)


def update_rows(ids: Tensor, gradient: Tensor, dense: list[Tensor]) -> list[Tensor]:
    """Run on a server: apply gradients of rows and of dense parameters; return the dense values."""
    _mine().scatter(ids, gradient)
    return _mine().apply(dense)


def values() -> list[Tensor]:
    """Run on a server: return the dense values."""
    return [parameter.detach() for parameter in _mine().dense]


def serve(place: Place, line: Connection) -> None:
    """Run a server until the connection to the main process ends."""
    global _shard
    _shard = Shard(place)
    _join(place, f"ps{place.index}", place.index)
    line.send("ready")
    try:
        line.recv()
    except (EOFError, OSError):
        pass  # the main process has closed the connection
    rpc.shutdown(graceful=False)


class Worker(Trainer):
    """A trainer that asks all servers at once."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.model = model_of(place.row, place.size)
        self.servers = [f"ps{index}" for index in range(place.servers)]
        _join(place, f"worker{place.index}", place.servers + place.index)
        if place.row == "mlp":
            parameters = list(self.model.parameters())
            self.parts = [parameters[i :: place.servers] for i in range(place.servers)]
        else:
            assert isinstance(self.model, models.Table)
            self.head: nn.Module = self.model.head
            self.parts = [list(self.head.parameters()), []]
            self.half = place.size["rows"] // place.servers

    def step(self) -> None:
        inputs, labels = self.next_batch()
        self.model.zero_grad()
        if self.place.row == "mlp":
            self.loss(self.model(inputs), labels).backward()
            calls = [
                rpc.rpc_async(server, update, (self._gradients(part),))
                for server, part in zip(self.servers, self.parts, strict=True)
            ]
        else:
            rows, places, ids = self._rows(inputs)
            rows.requires_grad_()
            self.loss(self._head_output(rows, places, len(inputs)), labels).backward()
            assert rows.grad is not None
            gradients = rows.grad.split([len(one) for one in ids])
            calls = [
                rpc.rpc_async(server, update_rows, (one, gradient, self._gradients(part)))
                for server, one, gradient, part in zip(
                    self.servers, ids, gradients, self.parts, strict=True
                )
            ]
        self._take([call.wait() for call in calls])

    @staticmethod
    def _gradients(part: list[Any]) -> list[Tensor]:
        return [parameter.grad for parameter in part]

    @torch.no_grad()
    def _take(self, answers: list[list[Tensor]]) -> None:
        for part, found in zip(self.parts, answers, strict=True):
            for parameter, value in zip(part, found, strict=True):
                parameter.copy_(value)

    def _rows(self, inputs: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        unique, places = torch.unique(inputs, return_inverse=True)
        cut = int(torch.searchsorted(unique, self.half))
        ids = [unique[:cut], unique[cut:] - self.half]
        calls = [
            rpc.rpc_async(server, look_up, (one,))
            for server, one in zip(self.servers, ids, strict=True)
        ]
        return torch.cat([call.wait() for call in calls]), places, ids

    def _head_output(self, rows: Tensor, places: Tensor, count: int) -> Tensor:
        found: Tensor = self.head(rows.index_select(0, places.flatten()).view(count, -1))
        return found

    def mean_loss(self) -> float:
        self._take([rpc.rpc_sync(server, values) for server in self.servers])
        return super().mean_loss()

    def output(self, inputs: Tensor) -> Tensor:
        if self.place.row == "mlp":
            found: Tensor = self.model(inputs)
            return found
        rows, places, _ = self._rows(inputs)
        return self._head_output(rows, places, len(inputs))

    def close(self) -> None:
        rpc.shutdown(graceful=False)
