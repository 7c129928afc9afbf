"""Process of a PyTorch peer: it starts the peer's processes and counts their steps.

Run by the harness: ``python -m benchmarks.torch_peers.side``.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.protocol import Work, serve
from benchmarks.torch_peers import ddp, hogwild, remote_calls
from benchmarks.torch_peers.trainer import Place, Trainer

START_LIMIT_S = 120.0
STEPS_LIMIT_S = 240.0
CLOSE_LIMIT_S = 10.0


class Processes(Work):
    """Workers, and servers if the form has any, as processes that make steps on request.

    Args:
        row: ``mlp`` or ``embedding``.
        size: sizes of the row.
        trainer: makes a worker's trainer in its process.
        server: runs a server's process until its connection ends.
        shared: tensors in memory that all processes share.
    """

    def __init__(
        self,
        row: str,
        size: dict[str, Any],
        trainer: Callable[[Place], Trainer],
        server: Callable[[Place, Connection], None] | None = None,
        shared: Any = None,
    ) -> None:
        super().__init__()
        self._size = size
        self._folder = tempfile.TemporaryDirectory(prefix="torch-peer-")
        start = multiprocessing.get_context("spawn")
        self._tasks: dict[str, Any] = {}
        self._lines: list[Connection] = []
        self._workers: list[Connection] = []
        servers = size["servers"] if server is not None else 0

        def begin(job: str, index: int, target: Callable[..., None], program: Any) -> Connection:
            place = Place(
                row=row,
                size=size,
                index=index,
                workers=size["workers"],
                servers=servers,
                meeting=str(Path(self._folder.name) / "meeting"),
                shared=shared,
            )
            here, there = start.Pipe()
            task = start.Process(target=target, args=(program, place, there), daemon=True)
            task.start()
            there.close()
            self._tasks[f"{job} {index}"] = task
            self._lines.append(here)
            return here

        try:
            for index in range(servers):
                begin("ps", index, _serve, server)
            self._workers = [begin("worker", i, _work, trainer) for i in range(size["workers"])]
            for line in self._lines:
                self._answer(line, START_LIMIT_S)
        except BaseException:
            self.close()
            raise

    def steps(self, count: int) -> None:
        # All workers make as many: those of DDP wait for each other.
        share = -(-count // len(self._workers))
        self._ask(share)

    def check(self) -> dict[str, Any]:
        before = self._ask("loss")[0]
        self.steps(self._size["check_steps"])
        return {"loss_before": before, "loss_after": self._ask("loss")[0]}

    def _ask(self, question: Any) -> list[Any]:
        for line in self._workers:
            line.send(question)
        return [self._answer(line, STEPS_LIMIT_S) for line in self._workers]

    def _answer(self, line: Connection, limit_s: float) -> Any:
        if not line.poll(limit_s):
            raise TimeoutError(f"a process of the peer gave no answer in {limit_s:g} s")
        try:
            answer = line.recv()
        except EOFError:
            raise RuntimeError("a process of the peer ended; its error is in the log") from None
        return answer

    def processes(self) -> dict[str, int]:
        return {**super().processes(), **{name: task.pid for name, task in self._tasks.items()}}

    def close(self) -> None:
        for line in self._lines:
            line.close()
        for task in self._tasks.values():
            task.join(CLOSE_LIMIT_S)
            if task.is_alive():
                task.kill()
                task.join(CLOSE_LIMIT_S)
        self._folder.cleanup()


def _work(make: Callable[[Place], Trainer], place: Place, line: Connection) -> None:
    """Run one worker's process: a number asks for so many steps."""
    torch.set_num_threads(1)
    trainer = make(place)
    line.send("ready")
    try:
        while True:
            question = line.recv()
            if question == "loss":
                line.send(trainer.mean_loss())
            else:
                for _ in range(question):
                    trainer.step()
                line.send("done")
    except (EOFError, OSError):
        pass  # the main process has closed the connection
    finally:
        trainer.close()


def _serve(serve_one: Callable[[Place, Connection], None], place: Place, line: Connection) -> None:
    torch.set_num_threads(1)
    serve_one(place, line)


def make(row: str, size: dict[str, Any]) -> Work:
    """Return the peer's work of a row such as ``mlp_torch``."""
    kind, form = row.removesuffix("_torch"), size["form"]
    if form == "ddp":
        return Processes(kind, size, ddp.Replica)
    if form == "hogwild":
        return Processes(kind, size, hogwild.Worker, shared=hogwild.shared(kind, size))
    if form == "rpc":
        return Processes(kind, size, remote_calls.Worker, remote_calls.serve)
    raise ValueError(f"form {form!r} is not known: expected ddp, hogwild or rpc")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(serve(make))
