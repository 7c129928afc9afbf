"""Demonstration: a minute of training on this machine, a killed worker and a killed parameter server.

Steps: start a local cluster, train the click model asynchronously, kill a worker and watch it come back, kill a
parameter server and watch its variables return from a checkpoint, compare the AUC with the best possible one,
write the model as a plain PyTorch file, load that file in a process that cannot import Stratagem, draw the
curves. Ctrl-C ends the training early; the files are written all the same.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import math
import secrets
import subprocess
import sys
import tempfile
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stratagem import config, metrics
from stratagem._checkpoint.checkpoint import Checkpoint
from stratagem._checkpoint.manager import CheckpointManager
from stratagem._cluster.coordinator.coordinator import ClusterCoordinator
from stratagem._cluster.coordinator.remote_values import RemoteValue
from stratagem._cluster.launch.local_cluster import LocalCluster
from stratagem._data.dataset import Dataset
from stratagem._demo.clicks import Clicks, ClickWorld, WideAndDeep, auc
from stratagem._monitor.cluster_view import ClusterView
from stratagem._monitor.dashboard import dashboard
from stratagem._monitor.monitor import Monitor
from stratagem._monitor.sample_sources import ProgramSource
from stratagem._monitor.terminal_view import Curve, Picture, TerminalView
from stratagem._ps.partition import MinSizePartitioner
from stratagem._strategies.parameter_server import ParameterServerStrategy
from stratagem.errors import StartupError

# 1.26 million rows of 17 numbers: 86 MB, and as much optimizer state.
VOCABULARY = (1_000_000, 200_000, 50_000, 10_000, 2_000, 500, 100, 20)
WIDTH = 16
BATCH = 512
LEARNING_RATE = 0.05
ROWS_HELD_OUT = 20_000
# The evaluations during the training use fewer rows, to take little time from it.
ROWS_EVALUATED = 5_000
# Enough closures ahead that no worker waits, few enough that the step count stays accurate.
STEPS_AHEAD = 40
LOOK_EVERY_S = 0.1
EVALUATE_EVERY_S = 2.0
# A lost server loses at most this much training; a save takes about a second.
SAVE_EVERY_S = 8.0
INTERRUPTED = 130


def run_demo(options: Namespace, vocabulary: tuple[int, ...] = VOCABULARY) -> int:
    """Run the demonstration with these options of the command line; return the exit code."""
    torch.manual_seed(0)
    view = TerminalView(plain=options.plain or config.environment("CI") is not None)
    Path(options.output).mkdir(parents=True, exist_ok=True)  # fail before the training
    view.say(f"starting {options.workers} workers and {options.ps} parameter servers …")
    with LocalCluster(workers=options.workers, ps=options.ps) as cluster:
        # Tables are split into one shard per server; layers stay whole.
        partitioner = MinSizePartitioner(min_shard_bytes=16 << 10, max_shards=options.ps)
        strategy = ParameterServerStrategy(cluster.resolver, partitioner)
        with strategy, ClusterCoordinator(strategy) as coordinator:
            training = _Training(options, vocabulary, cluster, coordinator, view)
            interrupted = training.train()
            try:
                training.write_files(Path(options.output))
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                view.say(
                    "stopped by Ctrl-C; writing the files all the same (Ctrl-C again to skip) …"
                )
                training.write_files(Path(options.output))
    view.say("all processes have ended; only the files above are left")
    return INTERRUPTED if interrupted else 0


class _Training:
    """One run: model, data, live view, and the tasks that are killed."""

    def __init__(
        self,
        options: Namespace,
        vocabulary: tuple[int, ...],
        cluster: LocalCluster,
        coordinator: ClusterCoordinator,
        view: TerminalView,
    ) -> None:
        self._options = options
        self._coordinator = coordinator
        self._view = view
        self._world = ClickWorld(vocabulary=vocabulary, exponent=1.2, seed=0)
        self._held_out = self._world.sample(ROWS_HELD_OUT, seed=999)
        self._sizes = {
            "num_categories": self._world.num_categories,
            "num_fields": len(vocabulary),
            "num_dense": self._held_out.dense.shape[1],
            "width": WIDTH,
        }
        view.say(f"creating a model with {self._sizes['num_categories']:,} embedding rows …")
        with coordinator.strategy.scope():
            self._model = WideAndDeep(**self._sizes)
            optimizer = torch.optim.Adagrad(self._model.parameters(), lr=LEARNING_RATE)
        self._checkpoint = Checkpoint(model=self._model, optimizer=optimizer)
        # Counted once: asking a model for its parameters fetches their values from the servers.
        self._size = sum(parameter.numel() for parameter in self._model.parameters())
        self._step = _make_step(self._model, optimizer)
        self._evaluate = _make_evaluation(self._model, self._held_out)
        self._best = self._held_out.best_auc()
        self._started_at = time.monotonic()
        self._scheduled = 0
        self._next_evaluation_s = 0.0
        # Times in seconds of training, with losses, AUCs and events.
        self._losses: list[tuple[float, float]] = []
        self._aucs: list[tuple[float, float]] = []
        self._marks: list[tuple[float, str]] = []
        self._kills = [
            (1 / 3, "worker 0", cluster.kill_worker, self._worker_is_back),
            (2 / 3, "parameter server 0", cluster.kill_ps, self._server_is_back),
        ]
        self._awaited: Callable[[], str] | None = None

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_at

    def train(self) -> bool:
        """Train for about ``options.seconds``, or until Ctrl-C; return whether it was Ctrl-C."""
        clicks = functools.partial(_endless_clicks, self._world)
        iterators = iter(self._coordinator.create_per_worker_dataset(clicks))
        self._view.say("each worker draws its own clicks …")
        for _ in range(10 * self._options.workers):  # the first steps also set up the workers
            self._coordinator.schedule(self._step, args=(iterators,))
        self._coordinator.join(timeout_s=300)
        with (
            tempfile.TemporaryDirectory(prefix="stratagem-demo-") as folder,
            CheckpointManager(
                self._checkpoint, folder, max_to_keep=1, every_s=SAVE_EVERY_S
            ) as manager,
        ):
            self._view.say("saving a first checkpoint …")
            manager.save(0, wait=True)
            return self._train(iterators, manager)

    def _train(self, iterators: Any, manager: CheckpointManager) -> bool:
        interrupted = False
        with self._watch() as monitor, self._view:
            self._started_at = time.monotonic()  # making the page takes seconds on a busy machine
            try:
                while self._elapsed_s < self._options.seconds or self._kills or self._awaited:
                    while self._scheduled < len(self._losses) + STEPS_AHEAD:
                        self._scheduled += 1
                        value = self._coordinator.schedule(self._step, args=(iterators,))
                        value.add_done_callback(self._note_loss)
                    if self._elapsed_s > self._next_evaluation_s:
                        self._next_evaluation_s = math.inf  # until this one has ended
                        value = self._coordinator.schedule(self._evaluate)
                        value.add_done_callback(self._note_auc)
                    self._kill_now_and_then()
                    manager.step(len(self._losses))
                    self._view.show(self._picture(monitor.view))
                    time.sleep(LOOK_EVERY_S)
            except KeyboardInterrupt:
                interrupted = True
            self._coordinator.join(timeout_s=120)
            self._view.show(self._picture(monitor.view, finished=True))
        if interrupted:
            self._view.say("stopped by Ctrl-C; saving the model so far (Ctrl-C again to skip) …")
        return interrupted

    @contextmanager
    def _watch(self) -> Iterator[Monitor]:
        """Sample the cluster; serve the live page if Bokeh is installed, and write a report at the end."""
        if importlib.util.find_spec("bokeh") is None:
            self._view.say("no live page: pip install 'stratagem[dashboard]'")
            with Monitor(ProgramSource(self._coordinator)).start() as monitor:
                yield monitor
            return
        with dashboard(self._coordinator, title="Stratagem: make demo") as page:
            self._view.say(f"live page: {page.url}")
            yield page.monitor
            report = page.save(Path(self._options.output) / "report.html")
        self._view.say(f"wrote {report}: the page of this run, one file")

    def _note_loss(self, value: RemoteValue) -> None:
        self._losses.append((self._elapsed_s, float(value.fetch())))

    def _note_auc(self, value: RemoteValue) -> None:
        reached = value.fetch()
        metrics.log("AUC", reached)
        self._aucs.append((self._elapsed_s, reached))
        self._next_evaluation_s = self._elapsed_s + EVALUATE_EVERY_S

    def _kill_now_and_then(self) -> None:
        """Kill the next task when its time has come; say when the one before is back."""
        if self._awaited is not None:
            back = self._awaited()
            if back:
                self._awaited = None
                self._mark(back)
        elif self._kills and self._elapsed_s > self._kills[0][0] * self._options.seconds:
            _, task, kill, self._awaited = self._kills.pop(0)
            kill(0)
            self._mark(f"{task} killed (SIGKILL)")

    def _worker_is_back(self) -> str:
        status = self._coordinator.workers[0]
        is_back = status.connected and status.incarnation > 1
        return "worker 0 restarted and training again" if is_back else ""

    def _server_is_back(self) -> str:
        if not self._coordinator.recoveries:
            return ""
        found = self._coordinator.recoveries[0]
        lost = sum(found.updates.values())
        return (
            f"parameter server 0 restarted and restored from step {found.step} in {found.seconds:.1f} s; "
            f"lost: {found.lost_s:.1f} s of its variables ({lost} updates)"
        )

    def _mark(self, what: str) -> None:
        """Record an event, for the picture and for the curves."""
        self._marks.append((self._elapsed_s, what))
        if not self._view.is_live:
            self._view.say(f"{self._elapsed_s:.1f} s: {what}")

    def _picture(self, cluster: ClusterView, *, finished: bool = False) -> Picture:
        done, elapsed_s = len(self._losses), max(self._elapsed_s, LOOK_EVERY_S)
        best = f"(best possible {self._best:.4f})"
        return Picture(
            title="Stratagem: click-through model, asynchronous workers and parameter servers",
            subtitle=(
                f"{self._size / 1e6:.1f} million parameters, "
                f"{self._sizes['num_categories']:,} embedding rows, batches of {BATCH}; Ctrl-C stops"
            ),
            done_steps=done,
            # The final number is unknown; at the current rate it will be this.
            total_steps=done if finished else round(done / elapsed_s * self._options.seconds),
            elapsed_s=elapsed_s,
            examples_per_s=done * BATCH / elapsed_s,
            curves=[
                Curve(label="loss", values=[loss for _, loss in self._losses]),
                Curve(label="AUC", values=[value for _, value in self._aucs], note=best),
            ],
            notes=[f"{when:5.1f} s  {what}" for when, what in self._marks],
            cluster=cluster,
        )

    def write_files(self, output: Path) -> None:
        """Evaluate, write the files, and show that plain PyTorch can use them."""
        losses, held_out, say = self._losses, self._held_out, self._view.say
        if not losses:
            say("no step was finished, so there is nothing to save")
            return
        with torch.no_grad():
            reached = auc(self._model(held_out.ids, held_out.dense), held_out.label)
        self._aucs.append((losses[-1][0], reached))
        say(
            f"trained {len(losses):,} steps ({len(losses) * BATCH:,} rows) in {losses[-1][0]:.0f} s"
        )
        say(
            f"AUC on {ROWS_HELD_OUT:,} held-out rows: {reached:.4f} (best possible {self._best:.4f})"
        )
        saved = save_model(self._model, output / "model.pt")
        say(f"wrote {saved}: an ordinary state_dict, {saved.stat().st_size / 1e6:.0f} MB")
        probability = predict_without_stratagem(
            saved, sizes=self._sizes, ids=held_out.ids[:1], dense=held_out.dense[:1]
        )
        say(
            f"a process without Stratagem loaded it and predicts a click with p = {probability:.3f} "
            f"(the true probability is {float(held_out.probability[0]):.3f})"
        )
        path = output / "curves.png"
        picture = draw_curves(losses, self._aucs, best_auc=self._best, marks=self._marks, path=path)
        say(f"wrote {picture}" if picture else "no curves.png: matplotlib is not installed")


def _endless_clicks(world: ClickWorld) -> Dataset:
    """Return batches without end; a restarted worker, which begins again, draws other rows than before."""
    return Dataset.from_generator(lambda: world.stream(BATCH, seed=secrets.randbits(48)))


def _make_step(model: nn.Module, optimizer: Any) -> Callable[[Any], torch.Tensor]:
    """Return the training step: ordinary PyTorch, run on a worker."""

    def step(iterator: Any) -> torch.Tensor:
        ids, dense, label = next(iterator)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids, dense), label)
        loss.backward()
        optimizer.step()
        metrics.log("loss", loss)  # the live page draws it
        return loss.detach()

    return step


def _make_evaluation(model: nn.Module, held_out: Clicks) -> Callable[[], float]:
    """Return a function that computes the held-out AUC on a worker."""
    rows = slice(ROWS_EVALUATED)
    ids, dense, label = held_out.ids[rows], held_out.dense[rows], held_out.label[rows]

    def evaluate() -> float:
        with torch.no_grad():
            return auc(model(ids, dense), label)

    return evaluate


_PREDICT_LIMIT_S = 120.0

Points = Sequence[tuple[float, float]]


def save_model(model: nn.Module, path: Path) -> Path:
    """Write the model's state_dict as plain tensors."""
    torch.save({name: value.clone() for name, value in model.state_dict().items()}, path)
    return path


def predict_without_stratagem(
    saved: Path, *, sizes: dict[str, int], ids: Tensor, dense: Tensor
) -> float:
    """Return a prediction of a new Python process in which Stratagem cannot be imported.

    The process gets the model's source, which is ordinary PyTorch, and the file; nothing else.
    """
    source = inspect.getsource(WideAndDeep)
    script = f"""
import json, sys
sys.modules["stratagem"] = None  # any attempt to import it would fail
import torch
from torch import Tensor, nn
{source}
model = WideAndDeep(**{sizes!r})
model.load_state_dict(torch.load({str(saved)!r}, weights_only=True))
model.eval()
with torch.no_grad():
    logit = model(torch.tensor({ids.tolist()!r}), torch.tensor({dense.tolist()!r}))
print(json.dumps(torch.sigmoid(logit).item()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=_PREDICT_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise StartupError(
            f"the process without Stratagem ended with code {done.returncode}: {done.stderr[-2000:]}"
        )
    return float(json.loads(done.stdout))


def draw_curves(
    losses: Points, aucs: Points, *, best_auc: float, marks: Sequence[tuple[float, str]], path: Path
) -> Path | None:
    """Draw loss and AUC against time as a PNG; return None where matplotlib is missing.

    Args:
        losses: time in seconds and loss of each step.
        aucs: time in seconds and AUC of each evaluation.
        best_auc: the best AUC that any model can reach.
        marks: time in seconds and description of each event; listed in the legend.
        path: the file to write.
    """
    if importlib.util.find_spec("matplotlib") is None or not losses:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5))
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    times, values = zip(*losses, strict=True)
    upper.plot(times, values, color="0.8", linewidth=0.5, label="one step")
    width = max(1, len(values) // 100)
    means = torch.tensor(values).unfold(0, width, 1).mean(1)
    upper.plot(times[width - 1 :], means, color="tab:blue", label=f"mean of {width} steps")
    upper.set_ylabel("loss (binary cross-entropy)")
    if aucs:
        times, values = zip(*aucs, strict=True)
        label = f"held-out rows (last: {values[-1]:.3f})"
        lower.plot(times, values, color="tab:green", marker=".", label=label)
    lower.axhline(best_auc, color="0.4", linewidth=1, label=f"best possible: {best_auc:.3f}")
    lower.set_ylabel("AUC")
    lower.set_xlabel("seconds of training")
    for axes in (upper, lower):
        for (when, what), style in zip(marks, ("--", ":", "-.", "--"), strict=False):
            caption = textwrap.fill(f"{when:.1f} s: {what}", 60) if axes is lower else None
            axes.axvline(when, color="tab:red", linestyle=style, linewidth=1, label=caption)
        axes.grid(alpha=0.3)
    # Legends are outside the axes, where they cover no curve.
    upper.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False)
    lower.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=8, frameon=False)
    upper.set_title("Click-through model, asynchronous training", loc="left", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return path
