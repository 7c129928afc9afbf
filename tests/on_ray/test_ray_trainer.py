"""The coordinator as a job of Ray Train: failures, checkpoints, metrics and datasets are Ray's."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_nodes import RayNodes, ray_nodes
from waiting import wait_until

import stratagem as sg
from stratagem.integrations.ray import ParameterServerTrainer


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"train_loop": 3}, "train_loop=3: expected a function"),
        ({"train_loop": print, "cluster": {"nodes": 2}}, r"cluster has \['nodes'\]: expected"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        ParameterServerTrainer(**arguments)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes() as made:
        yield made


EPOCHS, STEPS = 4, 10


def train(config: dict[str, Any]) -> None:
    """Train; in the first attempt kill the parameter server during the third epoch."""
    import ray.train

    strategy = sg.auto_strategy()
    shard = sg.data.as_dataset(ray.train.get_dataset_shard("rows"))
    rows = sum(len(batch["id"]) for batch in shard)
    with sg.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
            steps = sg.Variable(torch.zeros((), dtype=torch.float64))

        def step() -> int:
            optimizer.zero_grad()
            model(torch.ones(8, 4)).square().mean().backward()
            optimizer.step()
            steps.assign_add(torch.ones((), dtype=torch.float64))
            return os.getpid()

        def server() -> int:
            address = strategy.cluster_resolver.cluster_spec().task_address("ps", 0)
            return listener(address)

        checkpoint = sg.Checkpoint(model=model, optimizer=optimizer, steps=steps)
        first = sg.integrations.ray.restore(checkpoint)
        for epoch in range(first, EPOCHS):
            for number in range(STEPS):
                coordinator.schedule(step)
                if epoch == 2 and number == 5 and first == 0:
                    os.kill(server(), signal.SIGKILL)
            coordinator.join(timeout_s=120)
            metrics = {
                "epoch": epoch,
                "first": first,
                "steps": float(steps.read_value()),
                "rows": rows,
            }
            sg.integrations.ray.report(metrics, checkpoint, step=epoch + 1)


def listener(address: str) -> int:
    """Return the process that listens at an address of this machine."""
    port = int(address.rpartition(":")[2])
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (inode,) = [
        line[9] for line in lines if int(line[1].split(":")[1], 16) == port and line[3] == "0A"
    ]
    for entry in os.listdir("/proc"):
        try:
            links = [
                os.readlink(f"/proc/{entry}/fd/{fd}") for fd in os.listdir(f"/proc/{entry}/fd")
            ]
        except OSError:
            continue
        if f"socket:[{inode}]" in links:
            return int(entry)
    raise AssertionError(f"no process listens at {address}")


@pytest.mark.soak
def test_a_failed_run_is_retried_and_resumes(
    nodes: RayNodes, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The server's loss ends the first attempt; the second one begins at the checkpoint, and every step counts once."""
    import ray.data
    import ray.train

    # Ray's processes cannot import this file.
    this = sys.modules[train.__module__]
    ray.cloudpickle.register_pickle_by_value(this)
    request.addfinalizer(lambda: ray.cloudpickle.unregister_pickle_by_value(this))
    trainer = ParameterServerTrainer(
        train,
        train_loop_config={"lr": 0.1},
        workers=1,
        ps=1,
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(tmp_path),
            failure_config=ray.train.FailureConfig(max_failures=1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
        datasets={"rows": ray.data.range(30)},
    )
    result = trainer.fit()
    assert result.error is None
    assert result.metrics == {"epoch": 3, "first": 2, "steps": EPOCHS * STEPS, "rows": 30}
    assert len(result.best_checkpoints) == 2
    with result.checkpoint.as_directory() as directory:
        model = torch.nn.Linear(4, 1)
        saved = sg.Checkpoint(model=model)
        assert saved.restore(Path(directory, "stratagem"), strict=False).step == EPOCHS
    wait_until(lambda: ray.available_resources().get("CPU") == 4.0)
