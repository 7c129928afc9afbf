"""Check the arguments of `ParameterServerStrategy`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

_JOBS: Final = ("chief", "worker", "evaluator", "ps")
_NAME: Final = re.compile(r"[\w.-]{1,100}")


def check_cluster(resolver: Any) -> Any:
    """Return the resolver's cluster, if a parameter-server strategy can use it.

    Raises:
        ValueError: it cannot; the message says which rule is broken.
        TypeError: it is no resolver, or it has a task type without a task id.
        AttributeError: it is None.
    """
    if resolver is None:
        raise AttributeError(
            "cluster_resolver=None has no cluster_spec(): expected a resolver, such as "
            "sg.cluster_resolver.TFConfigClusterResolver() or the resolver of an sg.LocalCluster."
        )
    if not callable(getattr(resolver, "cluster_spec", None)):
        raise TypeError(
            f"cluster_resolver={resolver!r} has type {type(resolver).__name__}: expected a resolver, such as "
            "cluster.resolver of an sg.LocalCluster, or sg.cluster_resolver.TFConfigClusterResolver()."
        )
    spec = resolver.cluster_spec()
    if not spec:
        raise ValueError(
            "the cluster spec is empty: expected jobs 'worker' and 'ps' with an address per task. "
            "Set TF_CONFIG, or use sg.LocalCluster."
        )
    unknown = [job for job in spec.jobs if job not in _JOBS]
    if unknown:
        raise ValueError(f"unknown job {unknown[0]!r} in the cluster: expected {', '.join(_JOBS)}.")
    task_type, task_id = resolver.task_type, resolver.task_id
    if task_type is not None and task_type not in _JOBS:
        raise ValueError(f"task_type={task_type!r} is not known: expected {', '.join(_JOBS)}.")
    if task_type is not None and task_type != "evaluator" and task_type not in spec.jobs:
        raise ValueError(f"task_type={task_type!r} is not a job of the cluster: {spec.jobs!r}.")
    for job in ("chief", "evaluator"):
        if job in spec.jobs and spec.num_tasks(job) > 1:
            raise ValueError(
                f"the cluster has {spec.num_tasks(job)} tasks of {job!r}: expected one."
            )
    if task_type is not None:
        if task_id is None:
            raise TypeError(f"task_type={task_type!r} without a task_id: expected its number.")
        if task_type in spec.jobs and task_id not in spec.task_indices(task_type):
            raise ValueError(
                f"task_id={task_id!r} of {task_type!r} is not in the cluster, which has the tasks "
                f"{', '.join(map(str, spec.task_indices(task_type)))} of it."
            )
    for job, what in (("ps", "parameter server"), ("worker", "worker")):
        if job not in spec.jobs or spec.num_tasks(job) == 0:
            raise ValueError(f"the cluster has no {what}: expected at least one task of {job!r}.")
    return spec


def worker_device_names(resolver: Any, given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the devices that each worker computes on, relative to the worker."""
    if given is not None:
        if isinstance(given, str) or not given:
            raise ValueError(
                f"worker_devices={given!r}: expected a list of at least one device, such as "
                '["cpu:0", "cpu:1"].'
            )
        return tuple(given)
    found = resolver.num_accelerators() if resolver.task_type == "worker" else {}
    gpus = int(found.get("GPU", 0))
    return tuple(f"gpu:{index}" for index in range(gpus)) or ("cpu:0",)


def check_job(job: object, lease_s: float | None) -> None:
    """Raise if the name or lease of a job is invalid."""
    if job is None:
        if lease_s is not None:
            raise ValueError(f"job_lease_s={lease_s!r} without a job: pass job='a name', too.")
        return
    if not isinstance(job, str) or not _NAME.fullmatch(job):
        raise ValueError(
            f"job={job!r} is not a valid job name: expected up to 100 letters, digits, dots, dashes and "
            "underscores, such as 'ctr-v3'."
        )
    if lease_s is not None and not lease_s > 0:
        raise ValueError(f"job_lease_s={lease_s!r}: expected a positive number of seconds.")


def check_backups(backups: object, servers: int) -> None:
    """Raise if a number of backups cannot be kept."""
    if isinstance(backups, bool) or not isinstance(backups, int) or backups < 0:
        raise ValueError(f"backups={backups!r}: expected 0 or 1.")
    if backups > 1:
        raise ValueError(f"backups={backups}: expected 0 or 1, since a server has one backup.")
    if backups and servers < 2:
        raise ValueError(
            f"backups={backups} with one parameter server: a backup is on another server. Start two servers "
            "or more, or use backups=0."
        )


def check_staleness(staleness: object, backups: int) -> None:
    """Raise if the limit of the staleness is no such number."""
    if staleness is None:
        return
    if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
        raise ValueError(
            f"staleness={staleness!r}: expected 0 for synchronous rounds; 1 or more, the number of other workers' "
            "updates that a function may miss; or None for no limit."
        )
    if staleness == 0 and backups:
        raise ValueError(
            f"staleness=0 with backups={backups}: backups do not hold the gradients of a round. Use staleness=1 or "
            "more, or save checkpoints (CheckpointManager) instead of backups."
        )
