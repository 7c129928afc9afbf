"""A TensorFlow cluster of real processes on this machine, and the rows that run on it.

Runs in the peer's environment only. Written in TensorFlow's fastest reasonable form: raw variables, fused
optimizer kernels on the parameter servers (what ``apply_gradients`` of its own optimizers ends in), data from a
per-worker dataset of batches made beforehand, and its default thread pools, which measured faster than one
thread each (one inter-op thread makes the MLP row hang).
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from typing import Any

import tensorflow as tf

from benchmarks import work
from benchmarks.peer import models
from benchmarks.protocol import Work

CLOSE_TIMEOUT_S = 10.0


def serve_task(spec: str, job: str, index: str) -> None:
    """Run one task of the cluster until it is killed."""
    server = tf.distribute.Server(
        tf.train.ClusterSpec(json.loads(spec)), job_name=job, task_index=int(index), protocol="grpc"
    )
    server.join()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Cluster:
    """Workers and parameter servers in their own processes; strategy and coordinator in this one."""

    def __init__(self, *, workers: int, servers: int) -> None:
        ports = [f"127.0.0.1:{port}" for port in _free_ports(workers + servers)]
        self.spec = {"worker": ports[:workers], "ps": ports[workers:]}
        self.tasks: dict[str, subprocess.Popen[bytes]] = {}
        for job, addresses in self.spec.items():
            for index in range(len(addresses)):
                self.start(job, index)
        try:
            resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec(self.spec), rpc_layer="grpc"
            )
            self.strategy = tf.distribute.ParameterServerStrategy(resolver)
            self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        except BaseException:
            self.close()
            raise

    def start(self, job: str, index: int) -> None:
        """Start one task's process (again)."""
        command = [sys.executable, "-m", "benchmarks.peer.side", "task"]
        command += [json.dumps(self.spec), job, str(index)]
        self.tasks[f"{job} {index}"] = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def close(self) -> None:
        """End the tasks. (TensorFlow has no orderly way to end a server.)"""
        for task in self.tasks.values():
            task.kill()
        for task in self.tasks.values():
            task.wait(CLOSE_TIMEOUT_S)


class ClusterWork(Work):
    """Common part of the cluster rows: a cluster, scheduled steps, join."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.size = size
        self.scheduled = 0
        self.cluster = Cluster(workers=size["workers"], servers=size["servers"])
        self.strategy = self.cluster.strategy
        self.coordinator = self.cluster.coordinator
        try:
            self.step, self.arguments = self.build()
        except BaseException:
            self.cluster.close()
            raise

    def build(self) -> tuple[Any, tuple[Any, ...]]:
        """Create the variables; return the step and its arguments."""
        raise NotImplementedError

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.coordinator.schedule(self.step, args=self.arguments)
        self.coordinator.join()
        self.scheduled += count

    def processes(self) -> dict[str, int]:
        tasks = {name: task.pid for name, task in self.cluster.tasks.items()}
        return {**super().processes(), **tasks}

    def close(self) -> None:
        self.cluster.close()


class Empty(ClusterWork):
    """Add 1 to a variable."""

    def build(self) -> tuple[Any, tuple[Any, ...]]:
        with self.strategy.scope():
            self.counter = tf.Variable(0.0)
        counter = self.counter

        @tf.function
        def step() -> None:
            counter.assign_add(1.0, read_value=False)

        return step, ()

    def check(self) -> dict[str, Any]:
        self.steps(20)
        return {"counted": float(self.counter.numpy()), "scheduled": float(self.scheduled)}


class Mlp(ClusterWork):
    """The MLP step on data of a per-worker dataset."""

    def build(self) -> tuple[Any, tuple[Any, ...]]:
        batches = work.mlp_batches(self.size)
        with self.strategy.scope():
            self.variables = models.mlp_variables(self.size)
        variables = self.variables

        def dataset() -> Any:
            return tf.data.Dataset.from_tensor_slices(tuple(batches)).repeat()

        @tf.function
        def step(iterator: Any) -> None:
            models.mlp_sgd(variables, *next(iterator))

        return step, (iter(self.coordinator.create_per_worker_dataset(dataset)),)

    def check(self) -> dict[str, Any]:
        batches = work.mlp_batches(self.size)
        before = models.mlp_mean_loss(self.variables, batches)
        self.steps(self.size["check_steps"])
        after = models.mlp_mean_loss(self.variables, batches)
        return {"loss_before": before, "loss_after": after}


class Embedding(ClusterWork):
    """A table on the servers, a linear layer, Adagrad on the rows in use."""

    def build(self) -> tuple[Any, tuple[Any, ...]]:
        batches = work.embedding_batches(self.size)
        with self.strategy.scope():
            self.model = models.Table(self.size, self.strategy)
        model = self.model

        def dataset() -> Any:
            return tf.data.Dataset.from_tensor_slices(tuple(batches)).repeat()

        @tf.function
        def step(iterator: Any) -> None:
            model.adagrad(*next(iterator))

        return step, (iter(self.coordinator.create_per_worker_dataset(dataset)),)

    def check(self) -> dict[str, Any]:
        batches = work.embedding_batches(self.size)
        before = self.model.mean_loss(batches)
        self.steps(self.size["check_steps"])
        return {"loss_before": before, "loss_after": self.model.mean_loss(batches)}


class Read(ClusterWork):
    """Read every variable in a step; the worker computes the sum, so that every byte has arrived."""

    def build(self) -> tuple[Any, tuple[Any, ...]]:
        self.amount_per_step = work.gigabytes(self.size)
        with self.strategy.scope():
            self.variables = [tf.Variable(tf.ones(shape)) for shape in work.byte_shapes(self.size)]
        variables = self.variables
        changed = self.size.get("changed", False)

        @tf.function
        def step() -> Any:
            if changed:
                for variable in variables:
                    variable.scatter_add(tf.IndexedSlices(tf.zeros([1]), tf.constant([0])))
            return tf.add_n([tf.reduce_sum(v.read_value()) for v in variables])

        return step, ()

    def check(self) -> dict[str, Any]:
        value = self.coordinator.schedule(self.step, args=()).fetch()
        return {"sum": float(value), "expected": self.amount_per_step * 1e9 / 4}


class Add(ClusterWork):
    """Add tensors to all variables; the tensors are prepared in the worker."""

    def build(self) -> tuple[Any, tuple[Any, ...]]:
        self.amount_per_step = work.gigabytes(self.size)
        shapes = work.byte_shapes(self.size)
        with self.strategy.scope():
            self.variables = [tf.Variable(tf.zeros(shape)) for shape in shapes]
        variables = self.variables

        def dataset() -> Any:
            return tf.data.Dataset.from_tensors(tuple(tf.ones(s) for s in shapes)).repeat()

        @tf.function
        def step(iterator: Any) -> None:
            for variable, delta in zip(variables, next(iterator), strict=True):
                variable.assign_add(delta, read_value=False)

        return step, (iter(self.coordinator.create_per_worker_dataset(dataset)),)

    def check(self) -> dict[str, Any]:
        self.steps(4)
        return {
            "counted": float(tf.reduce_mean(self.variables[-1]).numpy()),
            "scheduled": float(self.scheduled),
        }


class StartUp(Work):
    """Start a cluster, run the first step, end the cluster."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.size = size

    def steps(self, count: int) -> None:
        raise NotImplementedError("start-up is measured by sample()")

    def sample(self, seconds: float) -> dict[str, Any]:
        begin = time.perf_counter()
        work_on_cluster = Empty(self.size)
        try:
            work_on_cluster.steps(1)
            taken = time.perf_counter() - begin
        finally:
            work_on_cluster.close()
        return {"value": taken, "seconds": taken}
