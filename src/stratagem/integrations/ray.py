"""Parameter-server training as a Ray Train job.

Ray Train runs the *coordinator*: its checkpoints, failures and metrics are handled as for every other trainer of Ray.
Workers and parameter servers run in an `sg.RayCluster` that the coordinator owns.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, final

from typing_extensions import override

from stratagem import launch
from stratagem._checkpoint.checkpoint import Checkpoint
from stratagem._cluster.launch.ray_cluster import RayCluster
from stratagem._cluster.launch.ray_placement import import_ray
from stratagem._strategies.parameter_server import ParameterServerStrategy

__all__ = ["ParameterServerTrainer", "report", "restore"]

_SAVED: Final = "stratagem"
"""Name of our checkpoint in the directory that Ray stores."""


@final
class ParameterServerTrainer:
    """Trainer of Ray for asynchronous training with parameter servers.

    `fit` starts a cluster, calls the training function on one process of Ray (the coordinator), and returns the
    `ray.train.Result`. In the function, `sg.auto_strategy()` returns the strategy, and everything of `ray.train`
    works: `report`, `get_checkpoint`, `get_context`, `get_dataset_shard`. A lost worker does not end the function.
    If the function fails, the `FailureConfig` of the run decides whether Ray calls it again, with a new cluster;
    it then resumes from the last reported checkpoint (`restore`).

    Args:
        train_loop: the training function, with one parameter for `train_loop_config` or with none.
        train_loop_config: its argument.
        workers: number of workers, or the smallest and the largest number, as for `sg.RayCluster`.
        ps: number of parameter servers.
        cluster: further arguments of `sg.RayCluster`, by name.
        coordinator_resources: resources of the coordinator; a CPU by default.
        run_config: a `ray.train.RunConfig`: name, storage, `FailureConfig`, `CheckpointConfig`.
        datasets: datasets of Ray by name; the function gets each whole one from `ray.train.get_dataset_shard`.

    Raises:
        TypeError: the training function is not callable, or `cluster` has an unknown argument.
        ImportError: Ray is not installed.

    Example::

        def train(config):
            strategy = sg.auto_strategy()
            with sg.ClusterCoordinator(strategy) as coordinator:
                with strategy.scope():
                    model = torch.nn.Linear(20, 1)
                    optimizer = torch.optim.Adagrad(model.parameters(), lr=config["lr"])
                checkpoint = sg.Checkpoint(model=model, optimizer=optimizer)
                for epoch in range(sg.integrations.ray.restore(checkpoint), 10):
                    loss = train_one_epoch(coordinator, model, optimizer)
                    sg.integrations.ray.report({"loss": loss}, checkpoint, step=epoch + 1)


        trainer = sg.integrations.ray.ParameterServerTrainer(
            train,
            train_loop_config={"lr": 0.1},
            workers=(2, 8),
            ps=2,
            run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3)),
        )
        result = trainer.fit()

    Arguments are checked before anything starts:

        >>> import stratagem as sg
        >>> sg.integrations.ray.ParameterServerTrainer("train.py")
        Traceback (most recent call last):
        ...
        TypeError: train_loop='train.py': expected a function.
    """

    def __init__(
        self,
        train_loop: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        workers: int | tuple[int, int] = 2,
        ps: int = 1,
        cluster: Mapping[str, Any] | None = None,
        coordinator_resources: Mapping[str, float] | None = None,
        run_config: Any = None,
        datasets: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(train_loop):
            raise TypeError(f"train_loop={train_loop!r}: expected a function.")
        known = set(inspect.signature(RayCluster).parameters) - {"workers", "ps"}
        unknown = set(cluster or ()) - known
        if unknown:
            raise TypeError(
                f"cluster has {sorted(unknown)}: expected arguments of sg.RayCluster, {sorted(known)}."
            )
        import_ray()
        self._train_loop = train_loop
        self._config = dict(train_loop_config or {})
        self._size = {"workers": workers, "ps": ps, **(cluster or {})}
        self._resources = dict(coordinator_resources or {"CPU": 1})
        self._run_config = run_config
        self._datasets = dict(datasets or {})

    def fit(self) -> Any:
        """Train, and return the `ray.train.Result`.

        Raises:
            ray.train.TrainingFailedError: the function failed more often than the `FailureConfig` allows.
        """
        from ray import train
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        train_loop, config, size = self._train_loop, self._config, self._size

        def coordinate() -> Any:
            return _coordinate(train_loop, config, size)

        trainer = DataParallelTrainer(
            coordinate,
            scaling_config=train.ScalingConfig(num_workers=1, resources_per_worker=self._resources),
            run_config=self._run_config,
            datasets=self._datasets,
        )
        return trainer.fit()

    @override
    def __repr__(self) -> str:
        name = getattr(self._train_loop, "__name__", repr(self._train_loop))
        return f"<ParameterServerTrainer of {name}, {self._size}>"


def report(
    metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None, *, step: int = 0
) -> None:
    """Report metrics to Ray Train, with a checkpoint that Ray stores and `restore` reads.

    Ray's `CheckpointConfig` decides which checkpoints are kept. Saving waits for the closures that run, and for the
    upload to the storage of the run.

    Args:
        metrics: as for `ray.train.report`.
        checkpoint: the objects to save.
        step: number to keep with it, which `restore` returns.

    Example::

        sg.integrations.ray.report({"loss": loss}, checkpoint, step=epoch + 1)
    """
    from ray import train

    if checkpoint is None:
        train.report(dict(metrics))
        return
    with tempfile.TemporaryDirectory(prefix="stratagem-") as directory:
        checkpoint.save(Path(directory, _SAVED), step=step)
        train.report(dict(metrics), checkpoint=train.Checkpoint.from_directory(directory))


def restore(checkpoint: Checkpoint) -> int:
    """Restore the objects from the last checkpoint that `report` gave to Ray, if there is one.

    Returns:
        the step of that checkpoint; 0 without one.

    Example::

        first = sg.integrations.ray.restore(checkpoint)
    """
    from ray import train

    found = train.get_checkpoint()
    if found is None:
        return 0
    with found.as_directory() as directory:
        return checkpoint.restore(Path(directory, _SAVED)).step


def _coordinate(
    train_loop: Callable[..., Any], config: dict[str, Any], size: Mapping[str, Any]
) -> Any:
    """Run the training function with a cluster, on the process that Ray Train has started."""
    with (
        RayCluster(**size) as cluster,
        ParameterServerStrategy(cluster.resolver) as strategy,
        launch.announced(strategy),
    ):
        return train_loop(config) if inspect.signature(train_loop).parameters else train_loop()
