"""Kill a worker, a parameter server and the coordinator in turn while a model trains to its target.

This program owns the cluster. It starts itself a second time as the training script (the coordinator), reads its
progress, and kills one task after the other. A killed coordinator is started again.

    python examples/surviving_anything.py
    python examples/surviving_anything.py --steps 2000
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

import torch
from torch import nn

import stratagem as sg

# Settings.
STEPS = 600
TARGET = 1e-3
BATCH = 64
WEIGHTS = torch.tensor([[2.0, -3.0, 0.5, 1.0]])


def train(directory: str, steps: int) -> None:
    """The training script. It contains nothing about failures but a job name and a `CheckpointManager`."""
    resolver = sg.cluster_resolver.TFConfigClusterResolver()
    strategy = sg.ParameterServerStrategy(resolver, job="surviving-anything")
    with strategy, sg.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            model = nn.Linear(4, 1)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

        def step():
            x = torch.randn(BATCH, 4)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x @ WEIGHTS.T)
            loss.backward()
            optimizer.step()
            return loss.detach()

        checkpoint = sg.Checkpoint(model=model, optimizer=optimizer)
        with sg.CheckpointManager(checkpoint, directory, every_steps=25) as manager:
            first = manager.restore_or_initialize()  # live job, else newest checkpoint, else 0
            print(f"begins at step {first}", flush=True)
            for number in range(first, steps):
                loss = coordinator.schedule(step)
                manager.step(number + 1)
                if number % 10 == 9:
                    print(f"step {number + 1}: loss {float(loss.fetch()):.6f}", flush=True)
            coordinator.join()
            manager.save(steps, final=True, wait=True)
            for recovery in coordinator.recoveries:
                print(f"recovered: {recovery}", flush=True)


class Script:
    """The training script as a process, started again when it was killed."""

    def __init__(self, cluster: sg.LocalCluster, directory: str, steps: int) -> None:
        self._command = [sys.executable, __file__, "--train", directory, "--steps", str(steps)]
        self._environment = {
            **os.environ,
            "TF_CONFIG": json.dumps({"cluster": cluster.cluster_spec.as_dict()}),
            "STRATAGEM_CLUSTER_KEY": cluster.resolver.cluster_key_text() or "",
        }
        self.starts = 0
        self.process = self._start()

    def _start(self) -> subprocess.Popen:
        self.starts += 1
        return subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.PIPE, text=True
        )

    def lines(self):
        """Yield the lines of all runs."""
        while True:
            yield from self.process.stdout
            self.process.stdout.close()
            code = self.process.wait()
            if code == 0:
                return
            if code != -signal.SIGKILL:
                raise SystemExit(f"the training script failed with exit code {code}")
            self.process = self._start()

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def main(steps: int = STEPS) -> tuple[float, list[str]]:
    """Train to the target while tasks are killed; return the last loss and the tasks."""
    killed = []
    with (
        tempfile.TemporaryDirectory() as directory,
        sg.LocalCluster(workers=2, ps=2) as cluster,
    ):
        script = Script(cluster, directory, steps)
        kills = {
            steps // 4: ("worker 0", lambda: cluster.kill_worker(0)),
            steps // 2: ("parameter server 0", lambda: cluster.kill_ps(0)),
            steps * 3 // 4: ("coordinator", script.process.kill),
        }
        last = float("inf")
        try:
            for line in script.lines():
                print(line, end="")
                if not line.startswith("step "):
                    continue
                number, _, loss = line.removeprefix("step ").partition(": loss ")
                last = float(loss)
                due = [at for at in kills if int(number) >= at]
                if due:
                    name, kill = kills.pop(due[0])
                    print(f"--- killing the {name} (SIGKILL)")
                    kill()
                    killed.append(name)
        finally:
            script.close()
    print(f"killed: {', '.join(killed)}; loss {last:.6f} (target {TARGET})")
    return last, killed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--train", metavar="DIRECTORY", help="run as the training script")
    options = parser.parse_args()
    if options.train:
        train(options.train, options.steps)
    else:
        main(options.steps)
