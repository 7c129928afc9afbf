"""A training program that is killed and started again, each time in a process of its own.

Run as a script with one JSON argument: `{"directory": …, "strategy": …, "optimizers": [...], "stops": [...]}`.
The process loads torch once and forks a child for every run. For each optimizer, one child trains without
a break; others train the same, each killed by SIGKILL at a step of `stops`, the last one to the end. Printed
is one JSON line per optimizer: the digests of both final states, and the step each child began at.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint  # what the first save would load

import stratagem as sg

STEPS = 23

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
}


def make_strategy(name: str) -> sg.Strategy:
    if name.startswith("one"):
        return sg.OneDeviceStrategy("cpu:0")
    if name == "central":
        return sg.CentralStorageStrategy(["cpu:0", "cpu:1"])
    if name == "mirrored":
        return sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    return sg.get_strategy()  # the default one, which is none


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.3)
        self.out = torch.nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.norm(self.table(ids).sum(1))))


def augment(ids: torch.Tensor, y: torch.Tensor, rng: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return ids, y + torch.rand(()) * 0.1 + rng.python.random() * 0.1


def digest(value: Any) -> str:
    """A hash of a nest, bit for bit."""
    found = hashlib.sha256()

    def add(each: Any) -> None:
        if isinstance(each, torch.Tensor):
            found.update(f"{each.dtype}{tuple(each.shape)}".encode())
            found.update(
                each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(each, dict):
            for key, inner in each.items():
                found.update(repr(key).encode())
                add(inner)
        elif isinstance(each, list | tuple):
            for inner in each:
                add(inner)
        else:
            found.update(repr(each).encode())

    add(value)
    return found.hexdigest()


def train(directory: Path, strategy_name: str, optimizer_name: str, stop: int, pipe: int) -> None:
    """Train from the newest checkpoint to `STEPS`; killed at step `stop`."""
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)  # noqa: NPY002 # the stream that old programs use
    ids = torch.randint(0, 50, (100, 4))
    y = torch.rand(100, 1)
    strategy = make_strategy(strategy_name)
    with strategy.scope():
        model = Model()
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        seen = sg.Variable(0, aggregation="SUM", synchronization="ON_READ")
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15),
        ],
        milestones=[5],
    )
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    # 100 rows in batches of 17: epochs of 6 steps, the last one with 15 rows.
    if strategy_name == "one, DataLoader":
        rows = torch.utils.data.TensorDataset(ids, y)
        dataset: Any = torch.utils.data.DataLoader(rows, batch_size=17, shuffle=True)
    else:
        slices = sg.data.Dataset.from_tensor_slices((ids, y))
        dataset = slices.shuffle(40).map(augment).batch(17).prefetch(2)
    batches = strategy.distribute_dataset(dataset)
    noise = torch.Generator().manual_seed(5)
    losses: list[float] = []

    def step(batch: Any) -> torch.Tensor:
        ids, y = batch
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(ids), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.assign_add(torch.tensor(len(y)))
        return loss.detach()

    checkpoint = sg.Checkpoint(
        model=model,
        optimizer=optimizer,
        schedule={"scheduler": scheduler, "scaler": scaler},
        average=average,
        data=batches,
        seen=seen,
        noise=noise,
        losses=losses,
    )
    with sg.CheckpointManager(checkpoint, directory, every_steps=1, max_to_keep=2) as manager:
        first = done = manager.restore_or_initialize()
        os.write(pipe, f"{first}\n".encode())
        handle = None
        while done < STEPS:
            for batch in batches:
                result = strategy.run(step, args=(batch,))
                losses.append(float(strategy.reduce("mean", result, axis=None)))
                scheduler.step()
                average.update_parameters(model)
                with torch.no_grad():  # draws of every kind between steps
                    model.out.bias.add_(random.random() * 1e-3 + float(np.random.rand()) * 1e-3)  # noqa: NPY002
                    model.out.bias.add_(torch.rand(1, generator=noise) * 1e-3)
                done += 1
                handle = manager.step(done) or handle
                if done == stop:
                    if stop % 2 and handle is not None:
                        handle.wait(60)  # else the save is killed, too
                    os.kill(os.getpid(), signal.SIGKILL)
                if done == STEPS:
                    break
    state = [
        model.state_dict(),
        optimizer.state_dict(),
        scheduler.state_dict(),
        average.state_dict(),
    ]
    state += [scaler.state_dict(), losses, noise.get_state(), torch.get_rng_state()]
    state += [random.getstate(), np.random.get_state()[1].tolist(), int(seen)]  # noqa: NPY002
    if not strategy._is_default:
        strategy.close()
    os.write(pipe, f"{digest(state)}\n".encode())


def in_a_child(*arguments: Any) -> list[str]:
    """The lines a run wrote; its process is over."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        code = 1
        try:
            train(*arguments, writer)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as lines:
        found = lines.read().split()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    expected = -signal.SIGKILL if arguments[-1] else 0
    if code != expected:
        raise SystemExit(f"{arguments}: the child ended with {code}, not {expected}")
    return found


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    for optimizer in job["optimizers"]:
        directory = Path(job["directory"]) / optimizer
        plain = in_a_child(directory / "unbroken", job["strategy"], optimizer, 0)
        starts = []
        for stop in [*job["stops"], 0]:
            lines = in_a_child(directory / "broken", job["strategy"], optimizer, stop)
            starts.append(int(lines[0]))
        print(json.dumps([optimizer, plain[1], lines[1], starts]), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
