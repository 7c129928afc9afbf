"""One minute of training on this machine alone: two workers, two servers, and a death on purpose.

The order of events: start a local cluster, train the click model asynchronously, kill a worker half way
and watch it come back, evaluate against the best possible score, write the model as a plain PyTorch
file, load that file in a process that never imports Stratagem, draw the curves, leave nothing behind.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stratagem import config
from stratagem._cluster.coordinator.coordinator import ClusterCoordinator
from stratagem._cluster.coordinator.remote_values import RemoteValue, RemoteValueStatus
from stratagem._cluster.launch.local_cluster import LocalCluster
from stratagem._core.context import get_current_worker_index
from stratagem._core.partition import MinSizePartitioner
from stratagem._core.user_contexts import InputContext
from stratagem._data.dataset import Dataset
from stratagem._demo.artefacts import draw_curves, predict_without_stratagem, save_model
from stratagem._demo.clicks import Clicks, ClickWorld, WideAndDeep, auc
from stratagem._demo.view import Picture, View, open_view
from stratagem._demo.watching import ClusterObserver
from stratagem._strategies.parameter_server import ParameterServerStrategy

__all__ = ["DemoOptions", "run_demo"]

BATCH = 512
LEARNING_RATE = 0.05
ROWS_PER_WORKER = 400_000
ROWS_HELD_OUT = 50_000
# Enough closures ahead that no worker waits, few enough that the count of steps stays honest.
STEPS_AHEAD = 100
LOOK_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the command line can change."""

    seconds: int = 60
    workers: int = 2
    ps: int = 2
    output: str = "demo-output"
    plain: bool = False
    rows_per_worker: int = ROWS_PER_WORKER


@dataclass(kw_only=True)
class Progress:
    """What has happened so far; the picture and the curves are made from it."""

    started_at: float
    losses: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    steps_of: Counter[int] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    total_steps: int = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since training began."""
        return time.monotonic() - self.started_at

    def mark(self, note: str) -> None:
        """Something worth a line in the picture and a line on the curve."""
        self.marks.append((self.elapsed_s, note))
        self.notes.append(f"{self.elapsed_s:5.1f} s  {note}")


def run_demo(options: DemoOptions) -> int:
    """Run the whole demonstration; returns the exit code."""
    torch.manual_seed(0)
    world = ClickWorld(seed=0)
    held_out = world.sample(ROWS_HELD_OUT, seed=999)
    output = Path(options.output)
    with open_view(plain=options.plain or config.environment("CI") is not None) as view:
        view.say(f"starting {options.workers} workers and {options.ps} parameter servers …")
        with LocalCluster(workers=options.workers, ps=options.ps) as cluster:
            # Both tables (15 kB and 124 kB) are cut into one shard per server; layers stay whole.
            partitioner = MinSizePartitioner(min_shard_bytes=4 << 10, max_shards=options.ps)
            strategy = ParameterServerStrategy(cluster.resolver, partitioner)
            with strategy, ClusterCoordinator(strategy) as coordinator:
                with strategy.scope():
                    model = WideAndDeep(
                        num_categories=world.num_categories,
                        num_fields=len(world.vocabulary),
                        num_dense=held_out.dense.shape[1],
                    )
                    optimizer = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE)
                eyes = ClusterObserver(cluster, coordinator)
                trainer = _Trainer(options, cluster, coordinator, view, eyes)
                progress = trainer.train(world, model, optimizer)
                eyes.close()
                _report(view, world, held_out, model, progress, output)
    view.say("every process is gone; nothing is left but the files above")
    return 0


class _Trainer:
    """Keeps the queue filled, the picture fresh, and kills one worker half way."""

    def __init__(
        self,
        options: DemoOptions,
        cluster: LocalCluster,
        coordinator: ClusterCoordinator,
        view: View,
        eyes: ClusterObserver,
    ) -> None:
        self._options = options
        self._cluster = cluster
        self._coordinator = coordinator
        self._view = view
        self._eyes = eyes
        self._waiting: list[RemoteValue] = []
        self._victim: int | None = None  # pid of the worker we killed
        self._victim_is_back = False

    def train(self, world: ClickWorld, model: nn.Module, optimizer: Any) -> Progress:
        """Train for about ``options.seconds``."""
        rows = self._options.rows_per_worker

        def dataset_fn(context: InputContext) -> Dataset:
            # Every worker draws rows of its own: same world, another seed.
            clicks = world.sample(rows, seed=1 + context.input_pipeline_id)
            dataset = Dataset.from_tensor_slices((clicks.ids, clicks.dense, clicks.label))
            return dataset.shuffle(seed=context.input_pipeline_id).repeat().batch(BATCH)

        def step(iterator: Any) -> tuple[int, torch.Tensor]:
            ids, dense, label = next(iterator)
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(ids, dense), label)
            loss.backward()
            optimizer.step()
            return int(get_current_worker_index()), loss.detach()

        iterators = iter(self._coordinator.create_per_worker_dataset(dataset_fn))
        self._view.say("every worker draws its own clicks …")
        for _ in range(10 * self._options.workers):  # the first steps wait for the rows to be drawn
            self._coordinator.schedule(step, args=(iterators,))
        self._coordinator.join(timeout_s=120)
        progress = Progress(started_at=time.monotonic())
        seconds = self._options.seconds
        while progress.elapsed_s < seconds:
            while len(self._waiting) < STEPS_AHEAD:
                self._waiting.append(self._coordinator.schedule(step, args=(iterators,)))
            self._look(progress, seconds)
            if progress.elapsed_s > seconds / 2 and self._victim is None:
                self._kill_a_worker(progress)
            time.sleep(LOOK_EVERY_S)
        self._coordinator.join(timeout_s=60)
        self._look(progress, seconds)
        progress.total_steps = len(progress.losses)
        self._view.show(self._picture(progress))
        return progress

    def _look(self, progress: Progress, seconds: float) -> None:
        """Take in the finished steps and redraw."""
        still_waiting: list[RemoteValue] = []
        for value in self._waiting:
            if value.status is RemoteValueStatus.NOT_READY:
                still_waiting.append(value)
                continue
            worker, loss = value.fetch()
            progress.losses.append(float(loss))
            progress.times_s.append(progress.elapsed_s)
            progress.steps_of[worker] += 1
        self._waiting = still_waiting
        # How many steps it will be is not known; at the present pace, this many.
        pace = len(progress.losses) / max(progress.elapsed_s, LOOK_EVERY_S)
        progress.total_steps = max(len(progress.losses) + 1, round(pace * seconds))
        self._watch_victim(progress)
        self._view.show(self._picture(progress))

    def _kill_a_worker(self, progress: Progress) -> None:
        self._victim = self._cluster.pid("worker", 0)
        self._cluster.kill_worker(0)
        progress.mark("killed worker 0 on purpose (SIGKILL)")
        self._view.say(progress.notes[-1])

    def _watch_victim(self, progress: Progress) -> None:
        if self._victim is None or self._victim_is_back:
            return
        if self._eyes.worker_is_up(0) and self._eyes.life_of(0) > 1:
            self._victim_is_back = True
            progress.mark("worker 0 is back, and draws its rows again")
            self._view.say(progress.notes[-1])

    def _picture(self, progress: Progress) -> Picture:
        mean, largest = self._eyes.staleness()
        return Picture(
            title="click-through model: asynchronous workers around parameter servers",
            done_steps=len(progress.losses),
            total_steps=progress.total_steps,
            elapsed_s=progress.elapsed_s,
            examples_per_s=len(progress.losses) * BATCH / max(progress.elapsed_s, 1e-9),
            losses=progress.losses,
            workers=self._eyes.workers(progress.steps_of),
            servers=self._eyes.servers(),
            staleness_mean=mean,
            staleness_max=largest,
            notes=progress.notes,
        )


def _report(
    view: View,
    world: ClickWorld,
    held_out: Clicks,
    model: nn.Module,
    progress: Progress,
    output: Path,
) -> None:
    """Evaluate, write the files, and prove that plain PyTorch can use them."""
    with torch.no_grad():
        reached = auc(model(held_out.ids, held_out.dense), held_out.label)
    best = held_out.best_auc()
    view.say(
        f"trained {len(progress.losses):,} steps ({len(progress.losses) * BATCH:,} examples) "
        f"in {progress.times_s[-1]:.0f} s"
    )
    view.say(f"AUC on {ROWS_HELD_OUT:,} held-out rows: {reached:.4f} (best possible {best:.4f})")
    output.mkdir(parents=True, exist_ok=True)
    saved = save_model(model, output / "model.pt")
    view.say(f"wrote {saved}: an ordinary state_dict")
    sample = held_out.ids[:1], held_out.dense[:1]
    probability = predict_without_stratagem(
        saved,
        shape=(world.num_categories, len(world.vocabulary), held_out.dense.shape[1]),
        ids=sample[0],
        dense=sample[1],
    )
    view.say(
        f"a process without Stratagem loaded it and predicts a click with p = {probability:.3f} "
        f"(the formula says {float(held_out.probability[0]):.3f})"
    )
    picture = draw_curves(progress.times_s, progress.losses, progress.marks, output / "curves.png")
    view.say(f"wrote {picture}" if picture else "no curves.png: matplotlib is not installed")
    sys.stdout.flush()
