"""Page 003's example of checkpoints, translated: stopped, and started again at the right epoch.

The page has it for parameter servers; here it runs there, and on a synchronous strategy. The lines in question::

    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    checkpoint_manager = tf.train.CheckpointManager(checkpoint, checkpoint_dir, max_to_keep=2)
    # `load_checkpoint` infers initial epoch from `optimizer.iterations`.
    initial_epoch = load_checkpoint(checkpoint_manager) or 0
    …
    for epoch in range(initial_epoch, num_epoch):
        …
        checkpoint_manager.save()
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from warm_start import run_program

PROGRAM = """
import os, signal, sys
import torch
from torch import nn
import stratagem as sg

checkpoint_dir, stop_in_epoch = sys.argv[1], int(sys.argv[2])
num_epoch, steps_per_epoch = 4, 5
torch.manual_seed(0)
rows, labels = torch.randn(80, 3), torch.randn(80, 1)
dataset = sg.data.Dataset.from_tensor_slices((rows, labels)).shuffle(seed=1).repeat().batch(16)

# Prepare a strategy.
strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
distributed_dataset = strategy.distribute_dataset(dataset)

with strategy.scope():
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train_loss = sg.Variable(0.0, aggregation="SUM")
    checkpoint = sg.Checkpoint(model=model, optimizer=optimizer)
    checkpoint_manager = sg.CheckpointManager(checkpoint, checkpoint_dir, max_to_keep=2)
    initial_epoch = checkpoint_manager.restore_or_initialize()


def replica_fn(inputs):
    batch_data, labels = inputs
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch_data), labels)
    loss.backward()
    optimizer.step()
    train_loss.assign_add(loss.detach())


for epoch in range(initial_epoch, num_epoch):
    distributed_iterator = iter(distributed_dataset)  # Reset iterator state.
    for step in range(steps_per_epoch):
        strategy.run(replica_fn, args=(next(distributed_iterator),))
        if epoch == stop_in_epoch and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"epoch {epoch}: loss {float(train_loss):.12f}", flush=True)
    train_loss.assign(0.0)
    checkpoint_manager.save()

distributed_iterator.close()
checkpoint_manager.close()
torch.save(model.state_dict(), os.path.join(checkpoint_dir, "..", f"weights-{stop_in_epoch}.pt"))
strategy.close()
"""


def run(directory: Path, stop_in_epoch: int) -> list[str]:
    done = run_program(
        [sys.executable, "-c", PROGRAM, str(directory), str(stop_in_epoch)],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == (-9 if stop_in_epoch >= 0 else 0), done.stderr
    return done.stdout.splitlines()


@pytest.mark.process
def test_the_example_of_page_003_resumes_at_the_right_epoch(tmp_path: Path) -> None:
    lines = run(tmp_path / "checkpoints", stop_in_epoch=2)
    assert [line.split(":")[0] for line in lines] == ["epoch 0", "epoch 1"]
    again = run(tmp_path / "checkpoints", stop_in_epoch=-1)
    # The save of epoch 1 may have been killed with the program: it saves while training goes on.
    assert [line.split(":")[0] for line in again][-2:] == ["epoch 2", "epoch 3"]
    kept = sorted(each.name for each in (tmp_path / "checkpoints").glob("step_*"))
    assert kept == ["step_00000003", "step_00000004"]
    saved = torch.load(tmp_path / "weights--1.pt", weights_only=True)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    model.load_state_dict(saved)


ON_SERVERS = """
import os, signal, sys
import torch
from torch import nn
import stratagem as sg

checkpoint_dir, stop_in_epoch = sys.argv[1], int(sys.argv[2])
num_epoch, steps_per_epoch = 4, 5
cluster = sg.LocalCluster(workers=2, ps=2)

# Prepare a strategy to use with the cluster and variable partitioning info.
strategy = sg.ParameterServerStrategy(
    cluster_resolver=cluster.resolver, variable_partitioner=sg.partitioners.FixedShardsPartitioner(2)
)
coordinator = sg.ClusterCoordinator(strategy=strategy)


def dataset_fn():
    rows = torch.randn(80, 3, generator=torch.Generator().manual_seed(0))
    return sg.data.Dataset.from_tensor_slices((rows, rows.sum(1, keepdim=True))).shuffle().repeat().batch(16)


# Prepare a distribute dataset that will place datasets on the workers.
distributed_dataset = coordinator.create_per_worker_dataset(dataset_fn=dataset_fn)

with strategy.scope():
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    metric = sg.Variable(torch.zeros((), dtype=torch.float64), name="metric")
    checkpoint = sg.Checkpoint(model=model, optimizer=optimizer)
    checkpoint_manager = sg.CheckpointManager(checkpoint, checkpoint_dir, max_to_keep=2)
    initial_epoch = checkpoint_manager.restore_or_initialize()


def worker_fn(iterator):
    def replica_fn(inputs):
        batch_data, labels = inputs
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch_data), labels)
        loss.backward()
        optimizer.step()
        metric.assign_add(loss.detach().double())

    strategy.run(replica_fn, args=(next(iterator),))


for epoch in range(initial_epoch, num_epoch):
    distributed_iterator = iter(distributed_dataset)  # Reset iterator state.
    for step in range(steps_per_epoch):
        coordinator.schedule(worker_fn, args=(distributed_iterator,))
        if epoch == stop_in_epoch and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    coordinator.join()
    steps = {float(each["step"]) for each in optimizer.state_dict()["state"].values()}
    print(f"epoch {epoch}: loss {float(metric) / steps_per_epoch:.6f} steps {steps}", flush=True)
    metric.assign(0.0)
    checkpoint_manager.save()

checkpoint_manager.close()
coordinator.close()
strategy.close()
cluster.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_on_parameter_servers_resumes_at_the_right_epoch(tmp_path: Path) -> None:
    """The program owns its cluster, which ends with it; the second run has every step of the complete epochs."""
    directory = tmp_path / "checkpoints"

    def run(stop_in_epoch: int) -> list[str]:
        command = [sys.executable, "-c", ON_SERVERS, str(directory), str(stop_in_epoch)]
        done = run_program(command, capture_output=True, text=True, timeout=250)
        assert done.returncode == (-9 if stop_in_epoch >= 0 else 0), done.stderr
        return done.stdout.splitlines()

    assert [line.split(":")[0] for line in run(2)] == ["epoch 0", "epoch 1"]
    again = run(-1)
    # The save of epoch 1 may have been killed with the program.
    numbers = [int(line.split(":")[0].removeprefix("epoch ")) for line in again]
    assert numbers in ([2, 3], [1, 2, 3])
    for number, line in zip(numbers, again, strict=True):
        assert line.endswith(f"steps {{{5.0 * (number + 1)}}}")
    kept = sorted(each.name for each in directory.glob("step_*"))
    assert kept == ["step_00000003", "step_00000004"]
