"""Train DeepFM on Criteo-like Parquet files with dynamic embeddings, on processes of this machine.

Two workers and two parameter servers. Checkpoints are written while training goes on: stop the program at any time and start it
again. With --kill a worker is killed halfway through. In the end the newest checkpoint is evaluated on another file and
exported; the exported program needs only PyTorch.

    python -m examples.criteo.train --directory /tmp/criteo
    python -m examples.criteo.train --directory /tmp/criteo --kill --page
"""

import argparse
import itertools
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

import stratagem as sg
from examples.criteo import data
from examples.criteo.model import DeepFM, for_serving

# Settings.
FILES = 4
ROWS_PER_FILE = 8192
BATCH = 512
SAVE_EVERY = 16


def step_of(model: nn.Module, optimizers: list[torch.optim.Optimizer]):
    """Return the training step: ordinary PyTorch."""

    def step(batch: dict[str, torch.Tensor]) -> float:
        for optimizer in optimizers:
            optimizer.zero_grad()
        logits = model(batch["dense"], batch["ids"])
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        sg.metrics.log("loss", loss.item())
        return loss.item()

    return step


def train(directory: Path, *, kill: bool, page: bool) -> tuple[int, float]:
    """Train one epoch from the newest checkpoint; return the steps and the rows per second of this run."""
    batches = data.read(directory / "train", BATCH)
    partitioner = sg.partitioners.FixedShardsPartitioner(2)
    with (
        sg.LocalCluster(workers=2, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, partitioner) as strategy,
        sg.ClusterCoordinator(strategy) as coordinator,
    ):
        with strategy.scope():
            torch.manual_seed(0)
            model = DeepFM()
            dense = [one for name, one in model.named_parameters() if "table" not in name]
            optimizers = [
                sg.optim.RowWiseAdagrad([model.table.weight], lr=0.05),
                torch.optim.Adam(dense, lr=1e-3),
            ]
        step = step_of(model, optimizers)
        checkpoint = sg.Checkpoint(model=model, tables=optimizers[0], dense=optimizers[1])
        shown = sg.dashboard(coordinator) if page else nullcontext()
        with (
            sg.CheckpointManager(checkpoint, directory / "checkpoints", max_to_keep=2) as manager,
            shown,
        ):
            if page:
                print("live page:", shown.url)
            first = number = manager.restore_or_initialize()
            began, rows = time.perf_counter(), 0
            for number, batch in enumerate(itertools.islice(batches, first, None), first + 1):
                coordinator.schedule(step, args=(batch,))
                rows += len(batch["label"])
                if number % SAVE_EVERY == 0:
                    coordinator.join()
                    manager.save(number)
                    print(f"step {number}: {len(model.table)} categories")
                if kill and number == first + SAVE_EVERY + 2:
                    cluster.kill_worker(0)
                    print("killed a worker; its steps run on the other one")
            coordinator.join()
            speed = rows / (time.perf_counter() - began)
            manager.save(number, final=True, wait=True)
        return number, speed


def evaluate(directory: Path) -> float:
    """Evaluate the newest checkpoint on the rows of another file, without the cluster; return the AUC."""

    def auc_of(model: nn.Module) -> dict[str, float]:
        auc = sg.metrics.AUC()
        for batch in data.read(directory / "test", BATCH):
            auc.update(model(batch["dense"], batch["ids"]).sigmoid(), batch["label"])
        return {"auc": auc.result()}

    def build() -> dict[str, nn.Module]:
        return {"model": DeepFM()}

    evaluator = sg.Evaluator(
        directory / "checkpoints", build, lambda found: auc_of(found["model"]), tensorboard=False
    )
    return evaluator.run()[-1].metrics["auc"]


def export(directory: Path) -> Path:
    """Export the newest checkpoint for serving; return the file."""
    model = DeepFM()
    sg.Checkpoint(model=model).restore(directory / "checkpoints", strict=False)
    rows = torch.export.Dim("rows", min=2)
    example = (torch.ones(4, 13), torch.ones(4, 26, dtype=torch.int64))
    program = torch.export.export(
        for_serving(model), example, dynamic_shapes=({0: rows}, {0: rows})
    )
    path = directory / "clicks.pt2"
    torch.export.save(program, path)
    return path


def main(
    directory: str,
    *,
    files: int = FILES,
    rows: int = ROWS_PER_FILE,
    kill: bool = False,
    page: bool = False,
) -> dict[str, float]:
    """Write data if there is none, train, evaluate and export."""
    place = Path(directory)
    if not (place / "train").exists():
        data.write(place / "train", files, rows)
        data.write(place / "test", 1, rows, seed=1)
    steps, speed = train(place, kill=kill, page=page)
    auc = evaluate(place)
    path = export(place)
    print(f"{steps} steps, {speed:,.0f} rows/s from files, AUC {auc:.3f}, exported to {path}")
    return {"steps": steps, "rows_per_s": speed, "auc": auc}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--rows", type=int, default=ROWS_PER_FILE)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--page", action="store_true")
    main(**vars(parser.parse_args()))
