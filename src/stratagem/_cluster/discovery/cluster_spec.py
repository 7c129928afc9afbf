"""`ClusterSpec`: the tasks of a cluster and their addresses.

Plain data, checked on construction. Resolvers produce specs; servers, strategies and the coordinator read
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import SupportsIndex

from typing_extensions import override

Tasks = Mapping[int, str] | Mapping[str, str] | Sequence[str]


class ClusterSpec:
    """The jobs of a cluster, and the addresses of their tasks.

    Args:
        cluster: a mapping from job name to its addresses, as a list (tasks 0, 1, …) or as a mapping
            from task index to address (for jobs with gaps); or another `ClusterSpec`.

    Raises:
        TypeError: anything else, or an address or job name that is not a string.

    Example:
        >>> import stratagem as sg
        >>> spec = sg.ClusterSpec({"worker": ["a:1", "b:1"], "ps": {"1": "c:1"}})
        >>> spec.num_tasks("worker"), spec.task_indices("ps"), spec.job_tasks("ps")
        (2, [1], [None, 'c:1'])
        >>> spec.task_address("worker", 1)
        'b:1'
    """

    def __init__(self, cluster: Mapping[str, Tasks] | ClusterSpec) -> None:
        if isinstance(cluster, ClusterSpec):
            self._jobs: dict[str, dict[int, str]] = {
                job: dict(tasks) for job, tasks in cluster._jobs.items()
            }
        elif isinstance(cluster, Mapping):
            self._jobs = {_checked_job(job): _tasks(job, tasks) for job, tasks in cluster.items()}
        else:
            raise TypeError(
                f"ClusterSpec({cluster!r}): expected a mapping from job name to addresses, such as "
                "{'worker': ['localhost:2222'], 'ps': ['localhost:2223']}, or a ClusterSpec; "
                f"got {type(cluster).__name__}."
            )

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs, in the order given."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a job."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of a job's tasks, sorted."""
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of one task."""
        job = self._job(job_name)
        if task_index not in job:
            raise ValueError(
                f"job {job_name!r} has no task {task_index!r}: its tasks are {sorted(job)}."
            )
        return job[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a job's tasks by index, None for an unused index."""
        job = self._job(job_name)
        if not job:
            raise ValueError(f"job {job_name!r} has no tasks.")
        return [job.get(index) for index in range(max(job) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return a dense job as a list, one with gaps (or without tasks) as a dictionary."""
        result: dict[str, list[str] | dict[int, str]] = {}
        for job, tasks in self._jobs.items():
            dense = bool(tasks) and max(tasks) + 1 == len(tasks)
            result[job] = (
                [tasks[index] for index in range(len(tasks))]
                if dense
                else {index: tasks[index] for index in sorted(tasks)}
            )
        return result

    def _job(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise ValueError(f"no job {job_name!r} in this cluster: its jobs are {self.jobs}.")
        return self._jobs[job_name]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    @override
    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._jobs == other._jobs
        if isinstance(other, Mapping):
            tasks = {
                job: dict(enumerate(given)) if isinstance(given, (list, tuple)) else given
                for job, given in other.items()
            }
            return self._jobs == tasks
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal to dictionaries, which have no hash

    @override
    def __repr__(self) -> str:
        jobs = self.as_dict()
        return f"ClusterSpec({{{', '.join(f'{job!r}: {jobs[job]!r}' for job in sorted(jobs))}}})"


def _checked_job(job: object) -> str:
    if not isinstance(job, str):
        raise TypeError(f"job name {job!r} is not a string.")
    return job


def _tasks(job: str, tasks: object) -> dict[int, str]:
    if isinstance(tasks, (list, tuple)):
        pairs: list[tuple[int, object]] = list(enumerate(tasks))
    elif isinstance(tasks, Mapping):
        pairs = [(_index(job, index), address) for index, address in tasks.items()]
    else:
        raise TypeError(
            f"tasks of job {job!r} are {tasks!r}: expected a list of addresses, or a mapping from "
            "task index to address."
        )
    result = {}
    for index, address in pairs:
        if not isinstance(address, str):
            raise TypeError(
                f"address of task {index} of job {job!r} is {address!r}: expected a string such as "
                "'host:2222'."
            )
        result[index] = address
    return result


def _index(job: str, index: object) -> int:
    if isinstance(index, SupportsIndex) or (isinstance(index, str) and index.isdecimal()):
        return int(index)
    raise TypeError(f"task index {index!r} of job {job!r} is not a number.")
