"""Base class of resolvers, and resolvers that query no other system.

`platform_resolvers.py` has those that ask Slurm, Kubernetes and clouds. Resolvers read; they start nothing.
Strategies, `Server` and users' scripts (`resolver.task_type`) use them.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from typing_extensions import override

from stratagem import config
from stratagem._cluster.discovery.cluster_spec import ClusterSpec


class Found(NamedTuple):
    """Job and index of this task as a resolver finds them; values set by the user take precedence."""

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None


class ClusterResolver(ABC):
    """Base class of resolvers, which find the tasks of the cluster and the task of this process.

    Stratagem calls `cluster_spec` before every attempt to connect, so a task may return at another address.

    Example:
        >>> import stratagem as sg
        >>> class OneWorker(sg.cluster_resolver.ClusterResolver):
        ...     def cluster_spec(self):
        ...         return sg.ClusterSpec({"worker": ["localhost:2222"]})
        >>> OneWorker().master("worker", 0, rpc_layer="grpc")
        'grpc://localhost:2222'
    """

    def __init__(
        self,
        *,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str = "",
    ) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the current cluster."""

    def cluster_key_text(self) -> str | None:
        """Return the key that tasks of this cluster prove to each other; None for the default key.

        The default key is that of the environment (``STRATAGEM_CLUSTER_KEY``,
        ``STRATAGEM_CLUSTER_KEY_FILE``), else the one in the user's key file.
        """
        return config.cluster_key_text()

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task, by default of this one; '' if neither is known."""
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        if job is None or index is None:
            return ""
        return _url(self.cluster_spec().task_address(job, index), rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the number of accelerators by kind; {} if there are none."""
        return self._accelerators()

    @property
    def environment(self) -> str:
        """Name of the system that runs the cluster; '' by default."""
        return self._environment

    @property
    def task_type(self) -> str | None:
        """Job of this task; None if unknown."""
        return self._task_type if self._task_type is not None else self._found().task_type

    @task_type.setter
    def task_type(self, value: str | None) -> None:
        self._set_task_type(value)

    @property
    def task_id(self) -> int | None:
        """Index of this task within its job; None if unknown."""
        return self._task_id if self._task_id is not None else self._found().task_id

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        self._task_id = value

    @property
    def rpc_layer(self) -> str | None:
        """Name put before addresses by `master`."""
        return self._rpc_layer if self._rpc_layer is not None else self._found().rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, value: str | None) -> None:
        self._rpc_layer = value

    def _accelerators(self) -> dict[str, int]:
        import torch

        count = torch.cuda.device_count()
        return {"GPU": count} if count else {}

    def _found(self) -> Found:
        return Found()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the key: a function that captures a resolver is sent over the network."""
        return {name: value for name, value in vars(self).items() if name != "_cluster_key"}

    def _set_task_type(self, value: str | None) -> None:
        self._task_type = value

    @override
    def __repr__(self) -> str:
        task = f"{self.task_type}:{self.task_id}" if self.task_type else "no task"
        return f"<{type(self).__name__} [{task}, {self.cluster_spec()!r}]>"


@final
class SimpleClusterResolver(ClusterResolver):
    """Resolver of a known cluster.

    Example:
        >>> import stratagem as sg
        >>> spec = sg.ClusterSpec({"worker": ["localhost:2222"], "ps": ["localhost:2223"]})
        >>> resolver = sg.cluster_resolver.SimpleClusterResolver(
        ...     spec, task_type="worker", task_id=0
        ... )
        >>> resolver.cluster_spec().task_address("ps", 0)
        'localhost:2223'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
        *,
        cluster_key: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                f"cluster_spec={cluster_spec!r}: expected a ClusterSpec; "
                "wrap a dictionary in sg.ClusterSpec(...)."
            )
        if not isinstance(master, str):
            raise TypeError(f"master={master!r}: expected a string.")
        super().__init__(
            task_type=task_type, task_id=task_id, rpc_layer=rpc_layer, environment=environment
        )
        self._spec = cluster_spec
        self._master = master
        self._num_accelerators = dict(num_accelerators or {})
        self._cluster_key = cluster_key

    @override
    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec(self._spec)

    @override
    def cluster_key_text(self) -> str | None:
        return self._cluster_key or super().cluster_key_text()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _cluster_key=None)

    @override
    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        if task_type is not None and task_id is not None:
            return _url(self._spec.task_address(task_type, task_id), rpc_layer or self.rpc_layer)
        return _url(self._master, rpc_layer or self.rpc_layer) if self._master else ""

    @override
    def _accelerators(self) -> dict[str, int]:
        return dict(self._num_accelerators)


@final
class TFConfigClusterResolver(ClusterResolver):
    """Resolver that reads the environment variable ``TF_CONFIG`` at every access.

    Arguments override the variable.

    Example:
        >>> import json, os
        >>> import stratagem as sg
        >>> os.environ["TF_CONFIG"] = json.dumps(
        ...     {
        ...         "cluster": {
        ...             "worker": ["localhost:2222", "localhost:2223"],
        ...             "ps": ["localhost:2224"],
        ...         },
        ...         "task": {"type": "worker", "index": 1},
        ...     }
        ... )
        >>> resolver = sg.cluster_resolver.TFConfigClusterResolver()
        >>> resolver.task_type, resolver.task_id, resolver.master()
        ('worker', 1, 'localhost:2223')
        >>> del os.environ["TF_CONFIG"]
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | str | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        super().__init__(
            task_type=None if task_type is None else str(task_type),
            task_id=None if task_id is None else int(task_id),
            rpc_layer=rpc_layer,
            environment=environment or "",
        )
        self._own_environment = environment

    @override
    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec(_tf_config().get("cluster", {}))

    @override
    @property
    def environment(self) -> str:
        return self._own_environment or str(_tf_config().get("environment", "") or "")

    @override
    def _found(self) -> Found:
        settings = _tf_config()
        task = settings.get("task", {})
        kind, index, layer = task.get("type"), task.get("index"), settings.get("rpc_layer")
        return Found(
            None if kind is None else str(kind),
            None if index is None else int(index),
            None if layer is None else str(layer),
        )

    @override
    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        session_master = _tf_config().get("session_master")
        if session_master is not None:
            return _url(str(session_master), rpc_layer or self.rpc_layer)
        spec = self.cluster_spec()
        if sum(spec.num_tasks(job) for job in spec.jobs) <= 1:
            return ""
        return super().master(task_type, task_id, rpc_layer)


@final
class LiveResolver(ClusterResolver):
    """Resolver of a running cluster of this user, which asks for addresses and key at every access."""

    def __init__(self, spec: Callable[[], ClusterSpec], key: Callable[[], str]) -> None:
        super().__init__(rpc_layer="grpc")
        self._spec = spec
        self._key = key

    @override
    def cluster_spec(self) -> ClusterSpec:
        return self._spec()

    @override
    def cluster_key_text(self) -> str | None:
        return self._key()

    @override
    def _accelerators(self) -> dict[str, int]:
        return {}

    @override
    def __reduce__(self) -> Any:
        return SimpleClusterResolver, (self.cluster_spec(),)  # without the key


@final
class UnionResolver(ClusterResolver):
    """Resolver that joins several clusters into one.

    Lists of the same job are concatenated in order; if one of them has gaps, they are merged by index.

    Example:
        >>> import stratagem as sg
        >>> simple = sg.cluster_resolver.SimpleClusterResolver
        >>> union = sg.cluster_resolver.UnionResolver(
        ...     simple(sg.ClusterSpec({"worker": ["a:1"]})),
        ...     simple(sg.ClusterSpec({"worker": ["b:1"]})),
        ... )
        >>> union.cluster_spec()
        ClusterSpec({'worker': ['a:1', 'b:1']})
    """

    def __init__(self, *resolvers: ClusterResolver, **options: Any) -> None:
        unknown = set(options) - {"rpc_layer", "task_type", "task_id"}
        if unknown:
            raise ValueError(
                f"unknown keyword {sorted(unknown)}: expected rpc_layer, task_type or task_id."
            )
        if not resolvers:
            raise ValueError("UnionResolver() needs at least one resolver.")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"{resolver!r} is not a ClusterResolver.")
        super().__init__(**options)
        self._resolvers = resolvers

    @override
    def cluster_spec(self) -> ClusterSpec:
        merged: dict[str, list[str] | dict[int, str]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                before = merged.get(job)
                if before is None:
                    merged[job] = tasks
                elif isinstance(before, list) and isinstance(tasks, list):
                    merged[job] = [*before, *tasks]
                else:
                    merged[job] = _joined(job, before, tasks)
        return ClusterSpec(merged)

    @override
    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        if task_type is not None and task_id is not None:
            return _url(
                self.cluster_spec().task_address(task_type, task_id), rpc_layer or self.rpc_layer
            )
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    @override
    def _accelerators(self) -> dict[str, int]:
        return self._resolvers[0].num_accelerators()

    @override
    @property
    def environment(self) -> str:
        return self._resolvers[0].environment

    @override
    def _found(self) -> Found:
        first = self._resolvers[0]
        return Found(first.task_type, first.task_id, first.rpc_layer)


_EXPECTED: Final = "expected a JSON object with 'cluster' and 'task'."


def _tf_config() -> dict[str, Any]:
    """Return the whole setting; {} if it is unset. Raise ValueError if it is not JSON."""
    text = config.environment("TF_CONFIG")
    if text is None:
        return {}
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise ValueError(f"TF_CONFIG={text!r} is not JSON ({error}): {_EXPECTED}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"TF_CONFIG={text!r}: {_EXPECTED}")
    return settings


def _url(address: str, rpc_layer: str | None) -> str:
    return f"{rpc_layer}://{address}" if rpc_layer else address


def _joined(
    job: str, first: list[str] | dict[int, str], second: list[str] | dict[int, str]
) -> dict[int, str]:
    result = dict(enumerate(first)) if isinstance(first, list) else dict(first)
    for index, address in enumerate(second) if isinstance(second, list) else second.items():
        if index in result:
            raise KeyError(f"task {index} of job {job!r} is given by two resolvers.")
        result[index] = address
    return result


@final
class FileResolver(ClusterResolver):
    """Resolver that reads the cluster from a JSON file at every access.

    The file holds a cluster specification, ``{"worker": [...], "ps": [...]}``, or the content of
    ``TF_CONFIG``, ``{"cluster": {...}, "task": {...}}``. A running coordinator follows the workers in the file.
    List workers by index, ``{"worker": {"0": "a:1", "4": "b:1"}}``, so that the other workers keep their indices
    when one leaves. Replace the file by renaming: a coordinator that reads half a file ignores it and logs a warning.

    Args:
        path: the file.
        task_type: job of this task; by default from the file.
        task_id: index of this task; by default from the file.
        rpc_layer: name that `master` puts before addresses.

    Raises:
        FileNotFoundError: there is no such file (at an access).
        ValueError: the file holds no JSON object (at an access).

    Example:
        >>> import json, tempfile
        >>> import stratagem as sg
        >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        ...     json.dump({"worker": {"0": "a:1", "4": "b:1"}, "ps": ["c:1"]}, file)
        ...     file.flush()
        ...     sg.cluster_resolver.FileResolver(file.name).cluster_spec().task_indices("worker")
        [0, 4]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        super().__init__(task_type=task_type, task_id=task_id, rpc_layer=rpc_layer)
        self._path = Path(path)

    @override
    def cluster_spec(self) -> ClusterSpec:
        found = self._read()
        cluster = found.get("cluster")
        return ClusterSpec(found if cluster is None else cluster)

    @override
    def _found(self) -> Found:
        found = self._read()
        task = found.get("task") if "cluster" in found else None
        if not isinstance(task, dict) or "type" not in task or "index" not in task:
            return Found()
        return Found(str(task["type"]), int(task["index"]))

    def _read(self) -> dict[str, Any]:
        text = self._path.read_text(encoding="utf-8")
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{str(self._path)!r} is not valid JSON: {error}.") from error
        if not isinstance(found, dict):
            raise ValueError(
                f"{str(self._path)!r} holds {found!r}: expected an object such as "
                '{"worker": ["host:2222"], "ps": ["host:2223"]}.'
            )
        return found
