"""Resolvers that query another system: Slurm, Kubernetes, Google Compute Engine.

Client libraries are imported only when used, and every resolver accepts a client instead.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any, final

from typing_extensions import override

from stratagem import config
from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._cluster.discovery.resolvers import ClusterResolver, Found
from stratagem._wire.connecting import join_address

_HOST_PART = re.compile(r"([^\[\],]+)(?:\[([^\]]*)\])?([^\[\],]*)")
_TASKS_PART = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Expand Slurm's short form of host names.

    Example:
        >>> expand_hostlist("n[01-03,7],m5")
        ['n01', 'n02', 'n03', 'n7', 'm5']
    """
    hosts: list[str] = []
    rest = hostlist.strip()
    while rest:
        part = _HOST_PART.match(rest)
        if part is None or (part.end() < len(rest) and rest[part.end()] != ","):
            raise ValueError(
                f"host list {hostlist!r} cannot be read at {rest!r}: expected a form such as 'n[01-03],m5'."
            )
        prefix, ranges, suffix = part.groups()
        numbers = [""] if ranges is None else _numbers(ranges, hostlist)
        hosts += [f"{prefix}{number}{suffix}" for number in numbers]
        rest = rest[part.end() + 1 :]
    return hosts


def expand_tasks_per_node(tasks: str) -> list[int]:
    """Expand Slurm's short form of tasks per node.

    Example:
        >>> expand_tasks_per_node("3(x2),2,1")
        [3, 3, 2, 1]
    """
    counts: list[int] = []
    for piece in tasks.split(","):
        part = _TASKS_PART.fullmatch(piece.strip())
        if part is None:
            raise ValueError(
                f"tasks per node {tasks!r} cannot be read at {piece!r}: expected a form such as '3(x2),2,1'."
            )
        counts += [int(part[1])] * int(part[2] or 1)
    return counts


def _numbers(ranges: str, hostlist: str) -> list[str]:
    numbers: list[str] = []
    for piece in ranges.split(","):
        first, dash, last = piece.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"host list {hostlist!r} cannot be read at [{ranges}].")
        if dash and int(last) < int(first):
            raise ValueError(f"host list {hostlist!r}: the range {piece} goes backwards.")
        stop = int(last or first) + 1
        numbers += [str(number).zfill(len(first)) for number in range(int(first), stop)]
    return numbers


@final
class SlurmClusterResolver(ClusterResolver):
    """Resolver of a Slurm job step, with one task per Slurm task.

    Hosts are sorted. Task k of a host listens on ``port_base + k``. Tasks are assigned to jobs in the order of
    the job names. Omit the GPU arguments on machines without GPUs.

    Args:
        jobs: number of tasks of each job; by default all are workers.
        port_base: port of the first task on every host.
        gpus_per_node: GPUs of a node; by default those of this machine.
        gpus_per_task: GPUs of each task; by default an equal share.
        tasks_per_node: tasks on each node; by default from Slurm.
        auto_set_gpu: set ``CUDA_VISIBLE_DEVICES`` for this process when its tasks share GPUs.
        rpc_layer: name that `master` puts before addresses.

    Raises:
        RuntimeError: not started by Slurm, too many GPUs asked for, or `jobs` does not add up to the tasks
            that Slurm started.

    Example:
        >>> import stratagem as sg
        >>> from unittest import mock
        >>> slurm = {
        ...     "SLURM_PROCID": "2",
        ...     "SLURM_STEP_NUM_TASKS": "4",
        ...     "SLURM_STEP_NODELIST": "n[1-2]",
        ...     "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        ... }
        >>> with mock.patch.dict("os.environ", slurm):
        ...     resolver = sg.cluster_resolver.SlurmClusterResolver({"ps": 1, "worker": 3})
        >>> resolver.cluster_spec().as_dict()
        {'ps': ['n1:8888'], 'worker': ['n1:8889', 'n2:8888', 'n2:8889']}
        >>> resolver.task_type, resolver.task_id
        ('worker', 1)
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Sequence[int] | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        super().__init__(rpc_layer=rpc_layer)
        rank = int(_slurm("SLURM_PROCID"))
        hosts = expand_hostlist(_slurm("SLURM_STEP_NODELIST"))
        counts = _tasks_on(hosts, tasks_per_node)
        total = sum(counts.values())
        if jobs is None:
            jobs = {"worker": int(_slurm("SLURM_STEP_NUM_TASKS"))}
        if sum(jobs.values()) != total:
            raise RuntimeError(
                f"jobs={dict(jobs)!r} need {sum(jobs.values())} tasks, Slurm started {total} "
                f"({counts!r}): make the two agree."
            )
        self._gpus = _gpu_share(gpus_per_node, gpus_per_task, max(counts.values()))
        # Slurm numbers ranks along the host list as given; addresses are given out sorted.
        places = [(host, k) for host in hosts for k in range(counts[host])]
        sorted_places = iter(sorted(places))
        self._spec: dict[str, list[str]] = {}
        for job in sorted(jobs):
            self._spec[job] = []
            for index in range(jobs[job]):
                host, k = next(sorted_places)
                self._spec[job].append(f"{host}:{port_base + k}")
                if (host, k) == places[rank]:
                    self.task_type, self.task_id = job, index
        if auto_set_gpu and self._gpus:
            first = places[rank][1] * self._gpus
            visible = ",".join(str(first + n) for n in range(self._gpus))
            config.set_environment("CUDA_VISIBLE_DEVICES", visible)

    @override
    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec(self._spec)

    @override
    def _accelerators(self) -> dict[str, int]:
        return {"GPU": self._gpus} if self._gpus else {}


def _gpu_share(per_node: int | None, per_task: int | None, tasks: int) -> int:
    """Return the number of GPUs of each task of a node."""
    if per_node is None:
        import torch

        per_node = torch.cuda.device_count()
    if per_task is None:
        per_task = per_node // tasks
    if per_task * tasks > per_node:
        raise RuntimeError(
            f"{tasks} tasks on a node with gpus_per_task={per_task} need {per_task * tasks} GPUs, a "
            f"node has {per_node}."
        )
    return per_task


def _slurm(name: str) -> str:
    value = config.environment(name)
    if value is None:
        raise RuntimeError(
            f"{name} is not set: SlurmClusterResolver works in a process started by srun."
        )
    return value


def _tasks_on(
    hosts: list[str], tasks_per_node: int | Sequence[int] | Mapping[str, int] | None
) -> dict[str, int]:
    if isinstance(tasks_per_node, Mapping):
        return {host: int(tasks_per_node[host]) for host in hosts}
    if tasks_per_node is None:
        counts = expand_tasks_per_node(_slurm("SLURM_STEP_TASKS_PER_NODE"))
    elif isinstance(tasks_per_node, int):
        counts = [tasks_per_node] * len(hosts)
    else:
        counts = [int(count) for count in tasks_per_node]
    if len(counts) != len(hosts):
        raise RuntimeError(f"{len(hosts)} hosts {hosts!r}, but tasks per node are {counts!r}.")
    return dict(zip(hosts, counts, strict=True))


class ExecutableLocation(enum.Enum):
    """Location of the program that queries Kubernetes: in the cluster or outside it.

    Example:
        >>> import stratagem as sg
        >>> sg.cluster_resolver.ExecutableLocation.OFF_CLUSTER.value
        1
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


@final
class KubernetesClusterResolver(ClusterResolver):
    """Resolver of the running Kubernetes pods that have certain labels.

    Args:
        job_to_label_mapping: job name → label selectors of its pods.
        tf_server_port: port that every pod's task listens on.
        rpc_layer: name that `master` puts before addresses.
        override_client: an object with ``list_pod_for_all_namespaces(label_selector=...)``, used instead
            of the kubernetes package's client.
        executable_location: whether this program runs inside the Kubernetes cluster.
        elastic: let pods join and leave during training. The task index is then the number at the end of the
            pod's name, as in a StatefulSet, so that pods keep their index. Pods that do not run are omitted.

    Example:
        >>> from types import SimpleNamespace as Bag
        >>> import stratagem as sg
        >>> pod = Bag(metadata=Bag(name="w-0"), status=Bag(phase="Running", host_ip="10.0.0.7"))
        >>> client = Bag(list_pod_for_all_namespaces=lambda label_selector: Bag(items=[pod]))
        >>> sg.cluster_resolver.KubernetesClusterResolver(override_client=client).cluster_spec()
        ClusterSpec({'worker': ['10.0.0.7:8470']})
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: ExecutableLocation = ExecutableLocation.WITHIN_CLUSTER,
        *,
        elastic: bool = False,
    ) -> None:
        super().__init__(rpc_layer=rpc_layer)
        self._elastic = elastic
        if not isinstance(executable_location, ExecutableLocation):
            raise ValueError(
                f"executable_location={executable_location!r}: expected one of "
                f"{[place.name for place in ExecutableLocation]}."
            )
        self._labels = dict(job_to_label_mapping or {"worker": ["job-name=tensorflow"]})
        self._port = tf_server_port
        self._client = override_client or _kubernetes_client(executable_location)

    @override
    def cluster_spec(self) -> ClusterSpec:
        cluster: dict[str, dict[int, str]] = {}
        for job, selectors in self._labels.items():
            for selector in selectors:
                pods = self._client.list_pod_for_all_namespaces(label_selector=selector).items
                for pod in sorted(pods, key=lambda pod: str(pod.metadata.name)):
                    tasks = cluster.setdefault(job, {})
                    if self._elastic:
                        if (
                            pod.status.phase == "Running"
                            and pod.metadata.deletion_timestamp is None
                        ):
                            index = _ordinal(pod.metadata.name, tasks)
                            tasks[index] = join_address(pod.status.host_ip, self._port)
                        continue
                    if pod.status.phase != "Running":
                        raise RuntimeError(
                            f"pod {pod.metadata.name!r} is {pod.status.phase!r}, not 'Running': "
                            "wait until every pod of the cluster runs."
                        )
                    tasks[len(tasks)] = join_address(pod.status.host_ip, self._port)
        return ClusterSpec(cluster)


def _ordinal(pod: str, taken: Mapping[int, str]) -> int:
    """Return the number at the end of a pod's name."""
    number = re.search(r"-(\d+)$", pod)
    if number is None or int(number[1]) in taken:
        raise RuntimeError(
            f"pod {pod!r}: with elastic=True the names of a job's pods must end in different numbers, as "
            "those of one StatefulSet do (worker-0, worker-1, …)."
        )
    return int(number[1])


def _kubernetes_client(location: ExecutableLocation) -> Any:
    try:
        from kubernetes import client
        from kubernetes import config as kubernetes_config
    except ImportError as error:
        raise ImportError(
            "KubernetesClusterResolver needs the package 'kubernetes': install it, or pass "
            "override_client."
        ) from error
    if location is ExecutableLocation.WITHIN_CLUSTER:
        kubernetes_config.load_incluster_config()
    else:
        kubernetes_config.load_kube_config()
    return client.CoreV1Api()


@final
class GCEClusterResolver(ClusterResolver):
    """Resolver of the running machines of a Google Compute Engine instance group, as one job.

    Args:
        project: the project's name.
        zone: the zone's name.
        instance_group: the instance group's name.
        port: port that every machine's task listens on.
        task_type: the job's name.
        task_id: index of this task.
        rpc_layer: name that `master` puts before addresses.
        credentials: passed to the client library.
        service: a client of the Compute Engine API, used instead of making one.

    Example:
        >>> import stratagem as sg
        >>> resolver = sg.cluster_resolver.GCEClusterResolver("p", "z", "g", 8470, service=object())
        >>> resolver.task_type, resolver.task_id
        ('worker', 0)
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ) -> None:
        super().__init__(task_id=task_id, rpc_layer=rpc_layer)
        self._job = task_type
        self._place = {"project": project, "zone": zone}
        self._group = instance_group
        self._port = port
        self._service = service or _compute_service(credentials)

    @override
    def cluster_spec(self) -> ClusterSpec:
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            **self._place, instanceGroup=self._group, body={"instanceState": "RUNNING"}
        )
        addresses = []
        while request is not None:
            response = request.execute()
            addresses += [self._address(item["instance"]) for item in response.get("items", ())]
            request = groups.listInstances_next(request, response)
        return ClusterSpec({self._job: sorted(addresses)})

    def _address(self, instance: str) -> str:
        name = instance.rsplit("/", 1)[-1]
        details = self._service.instances().get(**self._place, instance=name).execute()
        return join_address(details["networkInterfaces"][0]["networkIP"], self._port)

    @override
    def _found(self) -> Found:
        return Found(task_type=self._job)

    @override
    def _set_task_type(self, value: str | None) -> None:
        raise RuntimeError(
            f"task_type={value!r}: the job of an instance group is given to the constructor."
        )


def _compute_service(credentials: Any) -> Any:
    try:
        from googleapiclient import discovery
    except ImportError as error:
        raise ImportError(
            "GCEClusterResolver needs the package 'google-api-python-client': install it, or pass "
            "service."
        ) from error
    given = {} if credentials == "default" else {"credentials": credentials}
    return discovery.build("compute", "v1", **given)
