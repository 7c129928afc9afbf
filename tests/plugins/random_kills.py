"""Kill random tasks of training jobs, all roles, and count what was lost and what was doubled.

    python tests/plugins/random_kills.py --kills 1000 --doubles 100 --seed 7

Each round trains a named job on 2 workers and 2 parameter servers to a fixed number of steps, while workers, servers and
the coordinator are killed at random moments, sometimes two at once; some are stopped instead (SIGSTOP) and continue after up
to ten seconds. In rounds with ``on_server_loss="rewind"`` every step must count exactly once in the end. In the others
("partial", and "backups": the same with ``backups=1``) no step may count twice, and a round without a lost coordinator may lack
at most the updates that `coordinator.recoveries` reported: none where backups took over. Meanwhile a thread verifies the
newest checkpoint in a loop: it must never see an incomplete one.

The coordinator is a fork of a process that has imported torch: a restart takes a fraction of a second.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from conserved import ConservedRun
from waiting import wait_until

import stratagem as sg
from stratagem._checkpoint.directory import CheckpointDirectory
from stratagem._cluster.launch.cluster_file import ClusterFile, resolver_of
from stratagem.errors import CheckpointCorrupt

STEPS = 600
EVERY_STEPS = 40
STEP_S = 0.004
ROUND_LIMIT_S = 300.0
"""How long a job may go without a step; a busy machine may take longer for the whole job."""
NAMES = ("SGD", "Adagrad", "Adam")
MODES = ("rewind", "rewind", "backups", "partial")
STOPPED_S = (0.2, 10.0)
"""How long tasks are stopped: some count as lost meanwhile."""
RESULT = "result.json"
LOSSES = "losses.jsonl"
PROGRESS = "progress"
WAITS = "waits"
"""File of a round whose steps wait for saves: the kills of a plan fit between its steps, however slow the disk is."""
READ_S = 0.05
"""Pause between two reads of the newest checkpoint."""
PROGRESS_S = 15.0
"""How long a kill waits for steps since the last one. The next kill waits for steps without a limit."""


def train(cluster: Path, folder: Path, mode: str, name: str) -> None:
    """Run one coordinator of a round to its end, and write what it found."""
    options = sg.config.ClusterOptions(poison_limit=10_000, restart_pause_s=0.05)
    strategy = sg.ParameterServerStrategy(
        resolver_of(cluster), job=folder.name, backups=int(mode == "backups")
    )
    with strategy, sg.ClusterCoordinator(strategy, options=options) as coordinator:
        mine = ConservedRun(strategy, name, pause_s=STEP_S)
        with sg.CheckpointManager(
            mine.checkpoint,
            folder / "saves",
            max_to_keep=2,
            every_steps=EVERY_STEPS,
            on_server_loss="rewind" if mode == "rewind" else "partial",
        ) as manager:
            noted = 0
            saving = None
            for step in manager.steps(STEPS):
                mine.schedule(coordinator)
                with (folder / PROGRESS).open("ab") as file:
                    file.write(b".")
                saving = manager.step(step + 1) or saving
                if saving is not None and (folder / WAITS).exists():
                    wait_until(lambda last=saving: last.done, ROUND_LIMIT_S)  # type: ignore[misc]
                if saving is not None and saving.done and saving.path is not None:
                    (folder / f"safe-{os.getpid()}").touch()
                if step % 25 == 0:  # so that a kill does not find all steps scheduled and none done
                    coordinator.join(timeout_s=ROUND_LIMIT_S)
                for one in coordinator.recoveries[noted:]:
                    noted += 1
                    with (folder / LOSSES).open("a") as file:
                        file.write(json.dumps(dict(one.updates)) + "\n")
            coordinator.join(timeout_s=ROUND_LIMIT_S)
            found = {"values": mine.values(), "error": ""}
            if mode == "rewind":
                try:
                    mine.check(STEPS)
                except AssertionError as error:
                    found["error"] = str(error)[:500]
            with (folder / LOSSES).open("a") as file:
                for one in coordinator.recoveries[noted:]:
                    file.write(json.dumps(dict(one.updates)) + "\n")
    (folder / f"{RESULT}.new").write_text(json.dumps(found))
    (folder / f"{RESULT}.new").rename(folder / RESULT)


def forks() -> None:
    """Fork one coordinator per input line; say its process number, then how it ended."""
    # Imported once: on a busy machine each coordinator would else need more time for this than for its steps.
    for name in sg.__all__:
        getattr(sg, name)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # imports torch._dynamo
    faulthandler.register(signal.SIGUSR1)  # say where all threads are
    print("ready", flush=True)
    for line in sys.stdin:
        cluster, folder, mode, name = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                train(Path(cluster), Path(folder), mode, name)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(f"ended {os.waitstatus_to_exitcode(status)}", flush=True)


class Coordinator:
    """The process that trains; started again when it was killed."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("a")
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._line() == "ready"
        self.pid = 0

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def start(self, *words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        self.pid = int(self._line())

    def ended(self, within_s: float) -> int | None:
        """Return its exit code if it ends within the time, else None."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], within_s)[0]:
            return None
        return int(self._line().split()[1])

    def close(self) -> None:
        if self.pid:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._process.kill()
        self._process.communicate()
        self._log.close()


def progress(folder: Path) -> int:
    """Return how many steps all coordinators of a round have scheduled."""
    path = folder / PROGRESS
    return path.stat().st_size if path.exists() else 0


def send(pid: int, number: int) -> None:
    """Send a signal to a process, if it is still there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def pid_of(task: str, cluster: sg.LocalCluster, coordinator: Coordinator) -> int:
    """Return the process number of a task, such as ``"ps 1"``."""
    job, index = task.split()
    return coordinator.pid if job == "chief" else cluster.pid(job, int(index))


def kill(task: str, cluster: sg.LocalCluster, coordinator: Coordinator) -> None:
    """Kill one task, such as ``"ps 1"``."""
    job, index = task.split()
    if job == "chief":
        os.kill(coordinator.pid, signal.SIGKILL)
    elif job == "worker":
        cluster.kill_worker(int(index))
    else:
        cluster.kill_ps(int(index))


class Reader:
    """Thread that verifies the newest checkpoint of a directory, again and again."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.reads = 0
        self.incomplete: list[str] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reader")
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(READ_S):
            if self.directory is None or not self.directory.exists():
                continue
            try:
                self._read(CheckpointDirectory(self.directory))
            except Exception as error:  # a reader that ends would find nothing
                self.incomplete.append(repr(error))

    def _read(self, directory: CheckpointDirectory) -> None:
        newest = directory.latest()
        self.incomplete += map(str, directory.damaged.values())
        if newest is None:
            return
        try:
            newest.verify()
            self.reads += 1
        except CheckpointCorrupt as error:
            if newest.path.exists():  # else its manager has deleted it
                self.incomplete.append(str(error))

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


class Soak:
    """Rounds of training and killing, and their totals."""

    def __init__(self, folder: Path, seed: int, reader: Reader, stop_share: float = 0.0) -> None:
        self.stop_share = stop_share
        self._timers: list[threading.Timer] = []
        self.folder = folder
        self.reader = reader
        self.chance = random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.stops: Counter[str] = Counter()
        self.backup_rounds = 0
        self.doubles = self.rounds = self.lost = self.reported = self.doubled = self.verified = 0
        self.errors = 0
        self.failures: list[str] = []

    def kill_some(
        self, cluster: sg.LocalCluster, coordinator: Coordinator, *, two: bool
    ) -> set[str]:
        """Kill one task, or two at once; return their jobs."""
        tasks = ["worker 0", "worker 1", "ps 0", "ps 1", "chief 0"]
        chosen = self.chance.sample(tasks, 2 if two else 1)
        self.doubles += two
        for task in chosen:
            if self.chance.random() < self.stop_share:
                self.stops[task.split()[0]] += 1
                self.stop(pid_of(task, cluster, coordinator))
            else:
                self.kills[task.split()[0]] += 1
                kill(task, cluster, coordinator)
        return {task.split()[0] for task in chosen}

    def stop(self, pid: int) -> None:
        """Stop a process for some seconds."""
        signals = [(signal.SIGSTOP, 0.0), (signal.SIGCONT, self.chance.uniform(*STOPPED_S))]
        for number, after_s in signals:
            timer = threading.Timer(after_s, send, (pid, number))
            timer.daemon = True
            timer.start()
            self._timers.append(timer)

    def close(self) -> None:
        """Let stopped processes continue."""
        for timer in self._timers:
            timer.join(STOPPED_S[1] + 30)

    def round(
        self,
        cluster: sg.LocalCluster,
        file: ClusterFile,
        path: Path,
        coordinator: Coordinator,
        wanted: int,
        doubles: float,
    ) -> None:
        """Train one job to its end while tasks are killed."""
        self.rounds += 1
        mode = MODES[(self.rounds - 1) % len(MODES)]
        self.backup_rounds += mode == "backups"
        name = NAMES[self.rounds % len(NAMES)]
        folder = self.folder / f"round-{self.rounds}"
        folder.mkdir()
        self.reader.directory = folder / "saves"
        chiefs = 0
        words = (str(path), str(folder), mode, name)
        key = cluster.resolver.cluster_key_text() or ""
        coordinator.start(*words)
        code: int | None = None
        seen, since = 0, time.monotonic()
        steps, moved = 0, time.monotonic()
        was_stuck = False
        while time.monotonic() < moved + ROUND_LIMIT_S:
            file.write(cluster.cluster_spec, key)
            code = coordinator.ended(self.chance.uniform(0.05, 0.8))
            ended_early = not (folder / f"safe-{coordinator.pid}").exists()
            if code == -signal.SIGKILL or (code is not None and code != 0 and ended_early):
                # As `stratagem train --restarts` does. Before its first save a script cannot replace a server.
                self.errors += code != -signal.SIGKILL
                code = None
                coordinator.start(*words)
                continue
            if code is not None:
                break
            if progress(folder) > steps:
                steps, moved = progress(folder), time.monotonic()
            is_stuck = steps <= seen + 25
            may_kill = not is_stuck or (not was_stuck and time.monotonic() > since + PROGRESS_S)
            if sum(self.kills.values()) < wanted and may_kill:
                seen, since, was_stuck = steps, time.monotonic(), is_stuck
                chiefs += "chief" in self.kill_some(
                    cluster, coordinator, two=self.chance.random() < doubles
                )
        if code is None:
            self.failures.append(f"{folder.name} ({mode}, {name}): no step in {ROUND_LIMIT_S:g} s")
            os.kill(coordinator.pid, signal.SIGUSR1)
            time.sleep(1.0)
            os.kill(coordinator.pid, signal.SIGKILL)
            coordinator.ended(30.0)
            return
        if code != 0:
            self.failures.append(f"{folder.name} ({mode}, {name}): exit code {code}")
            return
        self.judge(folder, mode, name, chiefs)

    def judge(self, folder: Path, mode: str, name: str, chiefs: int) -> None:
        """Compare the result of a round with that of an unbroken one."""
        found: dict[str, Any] = json.loads((folder / RESULT).read_text())
        lines = (folder / LOSSES).read_text().splitlines() if (folder / LOSSES).exists() else []
        reported = sum(sum(json.loads(line).values()) for line in lines)
        least, most = found["values"][::2], found["values"][1::2]
        missing = sum(max(0.0, STEPS - value) for value in least)
        more = sum(max(0.0, value - STEPS) for value in most)
        self.doubled += int(more)
        if mode != "rewind":
            self.lost += int(missing)
            self.reported += reported
        if more or found["error"] or (mode == "rewind" and missing):
            self.failures.append(f"{folder.name} ({mode}, {name}): {found}")
        if mode != "rewind" and not chiefs and missing > reported:
            self.failures.append(f"{folder.name}: {missing} lost, {reported} reported")
        directory = CheckpointDirectory(folder / "saves")
        for saved in directory.scan():
            saved.verify()
            self.verified += 1
        if directory.damaged:
            self.failures.append(f"{folder.name}: {directory.damaged}")
        if self.reader.incomplete:
            self.failures.append(f"{folder.name}: a reader saw {self.reader.incomplete}")

    def __str__(self) -> str:
        roles = {"worker": "workers", "ps": "parameter servers", "chief": "coordinators"}
        kills, stops = (
            ", ".join(f"{count[job]} {title}" for job, title in roles.items())
            for count in (self.kills, self.stops)
        )
        return (
            f"{sum(self.kills.values())} kills ({kills}), {sum(self.stops.values())} stops ({stops}), of them "
            f"{self.doubles} times two at once; {self.rounds} jobs of {STEPS} steps, {self.backup_rounds} with backups; "
            f"updates lost with rewind: 0 expected, with partial recovery: {self.lost} (reported {self.reported}); doubled: {self.doubled}; {self.verified} checkpoints "
            f"verified in the end, {self.reader.reads} while tasks were killed; {self.errors} scripts lost a server before their first save and were run again; failures: {len(self.failures)}"
        )


def planned(
    plan: list[str], folder: Path, *, mode: str = "rewind", name: str = "SGD"
) -> list[float]:
    """Train one job; kill the tasks of a plan (``"ps 0"``, ``"chief 0"``) one after the other; return the values."""
    left, target = list(plan), 100
    path, round_ = folder / "cluster.json", folder / "round"
    round_.mkdir()
    (round_ / WAITS).touch()
    words = (str(path), str(round_), mode, name)
    coordinator = Coordinator(folder / "coordinator.log")
    deadline = time.monotonic() + ROUND_LIMIT_S
    try:
        with ClusterFile(path) as file, sg.LocalCluster(workers=2, ps=2) as cluster:
            file.write(cluster.cluster_spec, cluster.resolver.cluster_key_text() or "")
            coordinator.start(*words)
            while time.monotonic() < deadline:
                code = coordinator.ended(0.02)
                if code == -signal.SIGKILL:
                    coordinator.start(*words)
                elif code is not None:
                    log = (folder / "coordinator.log").read_text()
                    assert code == 0, log
                    assert not left, f"{left} were not killed"
                    values: list[float] = json.loads((round_ / RESULT).read_text())["values"]
                    return values
                elif (
                    left
                    and progress(round_) >= target
                    # Without a checkpoint, a coordinator ends when it loses a server.
                    and ("ps" not in left[0] or any(round_.glob("safe-*")))
                ):
                    task = left.pop(0)
                    kill(task, cluster, coordinator)
                    # Two saves later; after a takeover before the first save of the new coordinator.
                    target = progress(round_) + (5 if task == "chief 0" else 90)
    finally:
        coordinator.close()
    raise AssertionError((folder / "coordinator.log").read_text())


def soak(
    kills: int, *, doubles: int, seed: int, folder: Path, say: bool = False, stop_share: float = 0.1
) -> Soak:
    """Kill so many tasks; return the totals."""
    reader = Reader()
    made = Soak(folder, seed, reader, stop_share)
    path = folder / "cluster.json"
    coordinator = Coordinator(folder / "coordinator.log")
    try:
        with ClusterFile(path) as file, sg.LocalCluster(workers=2, ps=2) as cluster:
            file.write(cluster.cluster_spec, cluster.resolver.cluster_key_text() or "")
            while sum(made.kills.values()) < kills and len(made.failures) < 5:
                made.round(cluster, file, path, coordinator, kills, doubles / kills)
                if say:
                    print(made, flush=True)
    finally:
        made.close()
        reader.close()
        coordinator.close()
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--doubles", type=int, default=100)
    parser.add_argument("--stops", type=float, default=0.1, help="share of tasks that are stopped")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--forks", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.forks:
        forks()
        return 0
    began = time.monotonic()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="stratagem-soak-"))
    folder.mkdir(exist_ok=True)
    found = soak(
        options.kills,
        doubles=options.doubles,
        seed=options.seed,
        folder=folder,
        say=True,
        stop_share=options.stops,
    )
    print(f"{found}; {time.monotonic() - began:.0f} s; seed {options.seed}; files: {folder}")
    for one in found.failures:
        print("FAILED", one)
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
