"""The coordinator dies and comes back: real processes are killed; a new coordinator continues the named job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from job_training import train
from waiting import wait_until
from warm_start import Program

import stratagem as sg
from stratagem.errors import (
    CheckpointError,
    CoordinatorReplaced,
    JobInUse,
    JobMismatch,
    ParameterServerLost,
)

LIMIT_S = 250.0  # a script starts cold: many seconds on a busy machine
STEPS = 60
SCRIPT = Path(__file__).parents[1] / "plugins" / "job_training.py"


@contextmanager
def script(
    cluster: sg.LocalCluster, directory: Path, kill: str, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Run the training script in a process of its own."""
    directory.mkdir(exist_ok=True)
    spec = json.dumps(cluster.cluster_spec.as_dict())
    arguments = [spec, cluster._key, str(directory), str(STEPS), kill]
    with Program(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def killed(cluster: sg.LocalCluster, directory: Path, kill: str) -> None:
    """Run the script until it is killed."""
    with script(cluster, directory, kill) as process:
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == -signal.SIGKILL, errors


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with sg.LocalCluster(workers=1, ps=2) as cluster:
        return train(cluster.resolver, str(tmp_path_factory.mktemp("whole")), STEPS, job=None)


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for key in ("weights", "moments"):
        for mine, theirs in zip(one[key], other[key], strict=True):
            assert torch.equal(mine, theirs)
    assert one["rate"] == other["rate"]


@pytest.mark.process
@pytest.mark.parametrize(
    "kill", ["step:30", "unsent:25", "unnoted:5", "noting:1", "before the manifest:1"]
)
def test_a_killed_script_goes_on_bit_for_bit(
    tmp_path: Path, unbroken: dict[str, Any], kill: str
) -> None:
    """With one worker the result is that of an unbroken run, wherever the coordinator was killed."""
    with sg.LocalCluster(workers=1, ps=2) as cluster:
        killed(cluster, tmp_path / "c", kill)
        found = train(cluster.resolver, str(tmp_path / "c"), STEPS)
    assert found["counters"] == [STEPS, STEPS]
    assert_equal(found, unbroken)


@pytest.mark.process
@pytest.mark.parametrize("kill", ["step:40", "between cuts:1"])
def test_every_closure_counts_once_with_two_workers(tmp_path: Path, kill: str) -> None:
    with sg.LocalCluster(workers=2, ps=2) as cluster:
        killed(cluster, tmp_path / "c", kill)
        found = train(cluster.resolver, str(tmp_path / "c"), STEPS)
    assert found["counters"] == [STEPS, STEPS]


@pytest.mark.process
def test_a_coordinator_killed_while_it_attaches_changes_nothing(
    tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    """The second coordinator dies between its claims on two servers; the third one continues the job."""
    with sg.LocalCluster(workers=1, ps=2) as cluster:
        killed(cluster, tmp_path / "c", "step:30")
        killed(cluster, tmp_path / "c", "attach:4")  # two questions, the first claim, the second
        found = train(cluster.resolver, str(tmp_path / "c"), STEPS)
    assert found["counters"] == [STEPS, STEPS]
    assert_equal(found, unbroken)


@pytest.mark.slow
def test_lost_servers_restore_the_checkpoint_or_start_again(tmp_path: Path) -> None:
    with sg.LocalCluster(workers=1, ps=2) as cluster:
        killed(cluster, tmp_path / "c", "saved:30")
    with sg.LocalCluster(workers=1, ps=2) as cluster:
        found = train(cluster.resolver, str(tmp_path / "c"), STEPS)
        assert found["first"] == 20
        # A save does not wait for closures: those that had not run at its cut are lost with the servers.
        assert all(STEPS - 20 <= count <= STEPS for count in found["counters"])
        again = train(cluster.resolver, str(tmp_path / "other"), STEPS)
        assert again["first"] == 0
        assert again["counters"] == [STEPS, STEPS]


@pytest.mark.process
def test_a_server_lost_after_a_takeover_without_a_checkpoint(tmp_path: Path) -> None:
    """Neither a checkpoint nor all servers: the error says so, and the next run starts from the beginning."""
    with sg.LocalCluster(workers=1, ps=2) as cluster:
        killed(cluster, tmp_path / "c", "step:5")
        pending = [0]

        def kill_once(step: int) -> None:
            if pending:
                cluster.kill_ps(pending.pop())

        with pytest.raises(ParameterServerLost, match="or from the beginning if there is none"):
            train(
                cluster.resolver,
                str(tmp_path / "c"),
                STEPS,
                after_step=kill_once,
                every_steps=None,
                paced=True,
            )
        assert not pending
        found = train(cluster.resolver, str(tmp_path / "c"), STEPS)
        assert found["first"] == 0
        assert found["counters"] == [STEPS, STEPS]


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_server_lost_after_a_takeover_is_restored_from_the_jobs_checkpoint(
    tmp_path: Path,
) -> None:
    """The new coordinator saves nothing by itself; the checkpoint of the killed one is enough."""
    with sg.LocalCluster(workers=1, ps=2) as cluster:
        killed(cluster, tmp_path / "c", "saved:30")
        pending = [0]

        def kill_once(step: int) -> None:
            if pending:
                cluster.kill_ps(pending.pop())

        found = train(
            cluster.resolver,
            str(tmp_path / "c"),
            STEPS,
            after_step=kill_once,
            every_steps=None,
            paced=True,
        )
    assert not pending
    (recovery,) = found["recoveries"]
    assert (recovery.task, recovery.step) == ("/job:ps/task:0", 20)
    lost, kept = found["counters"] if "counter0" in recovery.variables else found["counters"][::-1]
    assert kept == STEPS
    reported = recovery.updates.get("counter0", recovery.updates.get("counter1"))
    # Closures that the restored server had not finished, or that are repeated, count there.
    assert 0 < reported < STEPS
    assert STEPS - reported <= lost <= STEPS
    assert recovery.lost_s > 0


def test_steps_after_a_checkpoint_restored_after_a_takeover_count(tmp_path: Path) -> None:
    """The servers know closures of the first coordinator that the checkpoint lacks; new ones are not taken for them."""
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
        for is_first in (True, False):
            strategy = sg.ParameterServerStrategy(cluster.resolver, job="job")
            with (
                pytest.raises(Boom) if is_first else nullcontext(),
                strategy,
                sg.ClusterCoordinator(strategy) as coordinator,
            ):
                with strategy.scope():
                    total = sg.Variable(torch.zeros(()), name="total")

                def add(times: int, coordinator: Any = coordinator, total: Any = total) -> float:
                    def step() -> None:
                        total.assign_add(torch.ones(()))

                    for _ in range(times):
                        coordinator.schedule(step)
                    coordinator.join()
                    return float(total.read_value())

                with sg.CheckpointManager(sg.Checkpoint(total=total), tmp_path) as manager:
                    assert manager.restore_or_initialize() == 0
                    if is_first:
                        assert add(1) == 1.0
                        manager.save(1, wait=True)
                        assert add(4) == 5.0
                        raise Boom
                    assert float(total.read_value()) == 5.0
                    assert manager.restore_or_initialize() == 1
                    assert float(total.read_value()) == 1.0
                    assert add(3) == 4.0


@pytest.mark.slow
def test_a_stopped_coordinator_is_replaced_and_fenced_when_it_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGSTOP the job goes to another coordinator; SIGCONT finds the first one unable to write."""
    monkeypatch.setenv("STRATAGEM_JOB_LIMIT_S", "2")
    directory = tmp_path / "c"
    ends: list[tuple[int | None, str]] = []
    with sg.LocalCluster(workers=2, ps=2) as cluster, script(cluster, directory, "stop:30") as old:

        def wake_the_old_one(step: int) -> None:
            if step == STEPS - 1:
                os.kill(old.pid, signal.SIGCONT)
                errors = old.communicate(timeout=LIMIT_S)[1]
                ends.append((old.returncode, errors))

        wait_until((directory / "stopped").exists, LIMIT_S)
        found = train(cluster.resolver, str(directory), STEPS, after_step=wake_the_old_one)
    assert found["counters"] == [STEPS, STEPS]
    [(code, errors)] = ends
    assert code == 1
    assert "CoordinatorReplaced" in errors


class Boom(Exception):
    """The script fails."""


def first_run(cluster: sg.LocalCluster, directory: Path, job_lease_s: float | None = None) -> None:
    """Build a live job of two variables and an optimizer, as a script that fails after a step."""
    with pytest.raises(Boom):
        strategy = sg.ParameterServerStrategy(cluster.resolver, job="job", job_lease_s=job_lease_s)
        with strategy, sg.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                model = torch.nn.Linear(2, 1)
                optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
                total = sg.Variable(torch.zeros(3), name="total")
            checkpoint = sg.Checkpoint(model=model, optimizer=optimizer, total=total, seen=0)
            with sg.CheckpointManager(checkpoint, directory) as manager:
                assert manager.restore_or_initialize() == 0
                total.assign(torch.tensor([1.0, 2.0, 3.0]))

                def step() -> None:
                    model(torch.ones(1, 2)).sum().backward()
                    optimizer.step()

                coordinator.schedule(step)
                coordinator.join()
                raise Boom


def test_variables_and_optimizer_state_are_adopted(tmp_path: Path) -> None:
    """Initial values, and writes before restore_or_initialize, do not replace live ones."""
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
        first_run(cluster, tmp_path / "c")
        strategy = sg.ParameterServerStrategy(cluster.resolver, job="job")
        with strategy, sg.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                model = torch.nn.Linear(2, 1)
                optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
                total = sg.Variable(torch.zeros(3), name="total")
            torch.nn.init.zeros_(model.weight)
            total.assign(torch.zeros(3))
            with pytest.raises(sg.StratagemError, match="restore_or_initialize"):
                coordinator.schedule(lambda: None)
            checkpoint = sg.Checkpoint(model=model, optimizer=optimizer, total=total, seen=0)
            with sg.CheckpointManager(checkpoint, tmp_path / "c") as manager:
                assert manager.restore_or_initialize() == 0
                assert total.numpy().tolist() == [1.0, 2.0, 3.0]
                assert bool(model.weight.any())
                sums = [float(one["sum"].sum()) for one in optimizer.state_dict()["state"].values()]
                assert sums == [2.0, 1.0]
                # The first closure of this run has the number of the first run's: it is recognised.
                before = model.weight.detach().clone()

                def step() -> None:
                    model(torch.ones(1, 2)).sum().backward()
                    optimizer.step()

                coordinator.schedule(step)
                coordinator.join()
                assert torch.equal(model.weight, before)
                coordinator.schedule(step)
                coordinator.join()
                assert not torch.equal(model.weight, before)


def test_a_job_is_gone_after_its_lease(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Servers free it; without a checkpoint the next run starts from the beginning, also with another model."""
    with (
        sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster,
        caplog.at_level("INFO", "stratagem.ps"),
    ):
        first_run(cluster, tmp_path / "c", job_lease_s=0.25)
        wait_until(lambda: caplog.text.count("its coordinator has been gone for 0.25 s") == 2)
        strategy = sg.ParameterServerStrategy(cluster.resolver, job="job")
        with strategy, sg.ClusterCoordinator(strategy):
            with strategy.scope():
                total = sg.Variable(torch.zeros(5), name="total")
            with sg.CheckpointManager(sg.Checkpoint(total=total), tmp_path / "c") as manager:
                assert manager.restore_or_initialize() == 0
                assert total.numpy().tolist() == [0.0] * 5


def test_another_model_is_refused_with_a_list_of_differences(tmp_path: Path) -> None:
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
        first_run(cluster, tmp_path / "c")
        with sg.ParameterServerStrategy(cluster.resolver, job="job") as strategy:
            with pytest.raises(JobMismatch) as caught, strategy.scope():
                model = torch.nn.Linear(3, 1)
            assert len(caught.value.differences) == 1
            assert "'weight' (1, 3) float32 is 'weight' (1, 2) float32" in str(caught.value)
            assert model.in_features == 3


def test_missing_variables_other_optimizers_and_objects_are_differences(tmp_path: Path) -> None:
    def attach(build: Any) -> str:
        try:
            with sg.ParameterServerStrategy(cluster.resolver, job="job") as strategy:
                with strategy.scope():
                    objects = build()
                with sg.CheckpointManager(sg.Checkpoint(**objects), tmp_path / "c") as manager:
                    manager.restore_or_initialize()
        except JobMismatch as error:
            return str(error)
        return ""

    def without_variable() -> dict[str, Any]:
        return {"model": torch.nn.Linear(2, 1)}

    def with_sgd() -> dict[str, Any]:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        total = sg.Variable(torch.zeros(3), name="total")
        return {"model": model, "optimizer": optimizer, "total": total, "seen": 0}

    def with_another_object() -> dict[str, Any]:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        total = sg.Variable(torch.zeros(3), name="total")
        return {"model": model, "optimizer": optimizer, "total": total, "epoch": 0}

    with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
        first_run(cluster, tmp_path / "c")
        assert "'total' (3,) float32 of the live job is not created" in attach(without_variable)
        assert "torch.optim.sgd.SGD in the script, a torch.optim.adagrad.Adagrad" in attach(
            with_sgd
        )
        assert "'epoch' of the checkpoint's objects is not in the live job" in attach(
            with_another_object
        )


def test_a_job_of_a_live_coordinator_is_in_use(tmp_path: Path) -> None:
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
        with sg.ParameterServerStrategy(cluster.resolver, job="job") as strategy:
            with pytest.raises(JobInUse, match=f"process {os.getpid()} on .* since 20") as caught:
                sg.ParameterServerStrategy(cluster.resolver, job="job")
            assert caught.value.job == "job"
            with strategy.scope():
                assert float(sg.Variable(torch.ones(())).read_value()) == 1.0
        with sg.ParameterServerStrategy(cluster.resolver, job="job"):
            pass  # the first one has ended its job


@pytest.mark.slow
def test_of_coordinators_that_start_together_one_gets_the_job() -> None:
    """The others find it in use; the one that has it can use it."""
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
        for _ in range(5):
            together = threading.Barrier(3)
            made: list[sg.ParameterServerStrategy] = []
            refused: list[JobInUse] = []

            def start(
                together: threading.Barrier = together,
                made: list[sg.ParameterServerStrategy] = made,
                refused: list[JobInUse] = refused,
            ) -> None:
                together.wait(LIMIT_S)
                try:
                    made.append(sg.ParameterServerStrategy(cluster.resolver, job="job"))
                except JobInUse as error:
                    refused.append(error)

            threads = [threading.Thread(target=start) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LIMIT_S)
            assert len(made) == 1
            assert len(refused) == 2
            with made[0] as strategy, strategy.scope():
                assert float(sg.Variable(torch.ones(())).read_value()) == 1.0


def is_replaced(coordinator: sg.ClusterCoordinator) -> bool:
    try:
        coordinator.done()
    except CoordinatorReplaced:
        return True
    return False


def test_every_call_of_a_replaced_coordinator_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that is cut off raises the same error from every call, and its close harms nothing."""
    monkeypatch.setenv("STRATAGEM_JOB_LIMIT_S", "0.01")  # any silence counts as gone
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
        old = sg.ParameterServerStrategy(cluster.resolver, job="job")
        coordinator = sg.ClusterCoordinator(old)
        with old.scope():
            value = sg.Variable(torch.ones(()))
        with sg.ParameterServerStrategy(cluster.resolver, job="job") as new:
            with new.scope():
                fresh = sg.Variable(torch.zeros(()))
            wait_until(lambda: is_replaced(coordinator))
            for call in (
                lambda: coordinator.schedule(lambda: None),
                lambda: coordinator.schedule(lambda: None),
                coordinator.join,
                coordinator.done,
                lambda: value.assign_add(torch.ones(())),
            ):
                with pytest.raises(CoordinatorReplaced, match="epoch 2"):
                    call()
            old.close()
            assert float(fresh.read_value()) == 0.0


def test_a_directory_of_another_job_is_refused_and_kept(tmp_path: Path) -> None:
    """Jobs with equal models: the second one neither continues the first one's run nor replaces its checkpoints."""
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        for name in ("first", "second"):
            strategy = sg.ParameterServerStrategy(cluster.resolver, job=name)
            with strategy, sg.ClusterCoordinator(strategy):
                with strategy.scope():
                    total = sg.Variable(torch.full((), 7.0 if name == "first" else 0.0))
                checkpoint = sg.Checkpoint(total=total)
                if name == "first":
                    with sg.CheckpointManager(checkpoint, tmp_path) as manager:
                        saved = manager.save(5, wait=True).path
                    assert saved is not None
                    continue
                with pytest.raises(
                    CheckpointError, match=r"checkpoints of job 'first'.*job 'second'"
                ):
                    sg.CheckpointManager(checkpoint, tmp_path)
                checkpoint.restore(saved)  # as the error says
                assert float(total) == 7.0
    with sg.CheckpointManager(sg.Checkpoint(total=sg.Variable(torch.zeros(()))), tmp_path) as plain:
        assert plain.restore_or_initialize() == 5  # without a job the directory may be used


@pytest.mark.parametrize("job", ["", "a b", "x" * 101, 7])
def test_bad_names_of_jobs(job: Any) -> None:
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        with pytest.raises(ValueError, match="not a valid job name"):
            sg.ParameterServerStrategy(cluster.resolver, job=job)
        with pytest.raises(ValueError, match="without a job"):
            sg.ParameterServerStrategy(cluster.resolver, job_lease_s=5.0)
