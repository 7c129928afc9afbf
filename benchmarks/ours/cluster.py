"""The parameter-server rows on our side, on real processes.

Scheduled functions are local functions, which are sent by value: worker processes need not import this
package.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import stratagem as sg
from benchmarks import models, work
from benchmarks.protocol import Work

JOIN_TIMEOUT_S = 300.0


class GivenCluster:
    """A cluster whose tasks run already, perhaps on other hosts: addresses, key and processes are in the size."""

    def __init__(self, size: dict[str, Any]) -> None:
        self.resolver = sg.cluster_resolver.SimpleClusterResolver(
            sg.ClusterSpec(size["addresses"]), cluster_key=size["key"]
        )
        self._pids = size["pids"]

    def pid(self, job: str, index: int) -> int:
        """Return the process of a task."""
        return int(self._pids[job][index])

    def close(self) -> None:
        """Leave the tasks alone."""


class ClusterWork(Work):
    """Common part of the cluster rows: a cluster, scheduled steps, join."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.size = size
        self.scheduled = 0
        self.cluster: Any = (
            GivenCluster(size)
            if "addresses" in size
            else sg.LocalCluster(
                workers=size["workers"],
                ps=size["servers"],
                # Threads instead of processes: for the test suite, never measured.
                in_process=size.get("in_process", False),
            )
        )
        try:
            self.strategy = sg.ParameterServerStrategy(
                self.cluster.resolver,
                variable_partitioner=self.partitioner(),
                backups=size.get("backups", 0),
                job=size.get("job"),
            )
            self.coordinator = sg.ClusterCoordinator(self.strategy)
            self.step, self.arguments = self.build()
        except BaseException:
            self.cluster.close()
            raise

    def partitioner(self) -> Any:
        """Return the partitioner of the row's variables; None by default."""
        return None

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Create the variables; return the step and its arguments."""
        raise NotImplementedError

    def steps(self, count: int) -> None:
        schedule, step, arguments = self.coordinator.schedule, self.step, self.arguments
        closures = -(-count // self.steps_together)
        for _ in range(closures):
            schedule(step, args=arguments)
        self.coordinator.join(timeout_s=JOIN_TIMEOUT_S)
        self.scheduled += closures * self.steps_together

    def processes(self) -> dict[str, int]:
        tasks = [("worker", i) for i in range(self.size["workers"])]
        tasks += [("ps", i) for i in range(self.size["servers"])]
        pids = {f"{job} {index}": self.cluster.pid(job, index) for job, index in tasks}
        return {**super().processes(), **pids}

    def resize(self, workers: int) -> None:
        for _ in range(workers - self.size["workers"]):
            self.cluster.add_worker()
        self.size["workers"] = workers
        end = time.monotonic() + JOIN_TIMEOUT_S
        while len(self.coordinator.workers) < workers:
            if time.monotonic() > end:
                raise TimeoutError(f"{workers} workers expected, {self.coordinator.workers} found")
            time.sleep(0.05)
        self._rate = 0.0  # calibrate again

    def close(self) -> None:
        self.coordinator.close()
        self.strategy.close()
        self.cluster.close()


class Empty(ClusterWork):
    """Add 1 to a variable."""

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        with self.strategy.scope():
            self.counter = sg.Variable(0.0)
        counter = self.counter

        def step() -> None:
            counter.assign_add(1.0)

        return step, ()

    def check(self) -> dict[str, Any]:
        self.steps(20)
        return {"counted": float(self.counter.numpy()), "scheduled": float(self.scheduled)}


class Training(ClusterWork):
    """An ordinary training step on data of a per-worker dataset."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batches: work.Batches
    loss: Callable[..., Any]

    def make_step(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the step and its iterators for a model and an optimizer."""
        model, optimizer, loss_of = self.model, self.optimizer, self.loss
        inputs, labels = (torch.from_numpy(part) for part in self.batches)
        self.steps_together = per_closure = self.size.get("per_closure", 1)

        def dataset() -> Any:
            return sg.data.Dataset.from_tensor_slices((inputs, labels)).repeat()

        def step(iterator: Any) -> None:
            for _ in range(per_closure):
                batch, truth = next(iterator)
                optimizer.zero_grad()
                loss_of(model(batch), truth).backward()
                optimizer.step()

        return step, (iter(self.coordinator.create_per_worker_dataset(dataset)),)

    def check(self) -> dict[str, Any]:
        before = models.mean_loss(self.model, self.loss, self.batches)
        self.steps(self.size["check_steps"])
        after = models.mean_loss(self.model, self.loss, self.batches)
        prints = models.fingerprints(self.model, self.size)
        return {"loss_before": before, "loss_after": after, "parameters": prints}


class Mlp(Training):
    """The MLP step."""

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        self.loss = F.cross_entropy
        self.batches = work.mlp_batches(self.size)
        with self.strategy.scope():
            self.model = model = models.Mlp(self.size)
            models.set_mlp(model, self.size)
            self.optimizer = torch.optim.SGD(model.parameters(), work.MLP_LEARNING_RATE)
        return self.make_step()


class Embedding(Training):
    """A table on the servers, a linear layer, Adagrad on the rows in use."""

    def partitioner(self) -> Any:
        return sg.partitioners.MinSizePartitioner(
            min_shard_bytes=2**18, max_shards=self.size["shards"]
        )

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        self.loss = F.binary_cross_entropy_with_logits
        self.batches = work.embedding_batches(self.size)
        with self.strategy.scope():
            self.model = model = models.Table(self.size)
            if self.size.get("same_start", True):
                models.set_table(model, self.size)
            self.optimizer = torch.optim.Adagrad(
                model.parameters(), work.EMBEDDING_LEARNING_RATE, eps=work.EMBEDDING_EPSILON
            )
        return self.make_step()


class Read(ClusterWork):
    """Read every variable in a step; the worker computes the sum, so that every byte is read."""

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        self.amount_per_step = work.gigabytes(self.size)
        with self.strategy.scope():
            made = [sg.Variable(torch.ones(shape)) for shape in work.byte_shapes(self.size)]
        # A tuple: a captured list could change between two steps and would be packed for each.
        variables = tuple(made)
        changed = self.size.get("changed", False)
        nothing = tuple(
            torch.sparse_coo_tensor([[0]], torch.zeros(1), shape)
            for shape in work.byte_shapes(self.size)
        )

        def step() -> float:
            if changed:  # a new version of each variable: its bytes must be sent
                for variable, rows in zip(variables, nothing, strict=True):
                    variable.scatter_add(rows)
            return sum(float(sg.convert_to_tensor(variable).sum()) for variable in variables)

        return step, ()

    def check(self) -> dict[str, Any]:
        value = self.coordinator.schedule(self.step, args=()).fetch()
        return {"sum": float(value), "expected": self.amount_per_step * 1e9 / 4}


class Add(ClusterWork):
    """Add tensors to all variables; the tensors are prepared in the worker."""

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        self.amount_per_step = work.gigabytes(self.size)
        shapes = work.byte_shapes(self.size)
        with self.strategy.scope():
            self.variables = tuple(sg.Variable(torch.zeros(shape)) for shape in shapes)
        variables = self.variables

        def deltas() -> tuple[torch.Tensor, ...]:
            return tuple(torch.ones(shape) for shape in shapes)

        def step(ready: tuple[torch.Tensor, ...]) -> None:
            for variable, delta in zip(variables, ready, strict=True):
                variable.assign_add(delta)

        # Not a dataset: ours hands out copies, so that a step may change what it gets; TensorFlow's
        # tensors cannot be changed and are handed out as they are.
        return step, (self.coordinator.create_per_worker_resource(deltas),)

    def check(self) -> dict[str, Any]:
        self.steps(4)
        mean = float(sg.convert_to_tensor(self.variables[-1]).mean())
        return {"counted": mean, "scheduled": float(self.scheduled)}


class Variables(ClusterWork):
    """A training step over many parameters."""

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        with self.strategy.scope():
            model = models.Many(self.size)
            optimizer = torch.optim.SGD(model.parameters(), 1e-6)

        def step() -> None:
            optimizer.zero_grad()
            model().backward()
            optimizer.step()

        return step, ()


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


class Recovery(ClusterWork):
    """Kill worker 0 and wait for the first step of its replacement."""

    limit_s = 90.0

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        with self.strategy.scope():
            counter = sg.Variable(0.0)

        def step() -> int:
            counter.assign_add(1.0)
            return int(sg.get_current_worker_index())

        return step, ()

    def sample(self, seconds: float) -> dict[str, Any]:
        self.steps(20)
        self.cluster.kill_worker(0)
        begin = time.perf_counter()
        old = self.cluster.pid("worker", 0)
        while time.perf_counter() - begin < self.limit_s:
            done = [self.coordinator.schedule(self.step, args=()) for _ in range(20)]
            self.coordinator.join(timeout_s=self.limit_s)
            replaced = self.cluster.pid("worker", 0) != old
            if replaced and any(int(index.fetch()) == 0 for index in done):
                taken = time.perf_counter() - begin
                return {"value": taken, "seconds": taken}
        raise TimeoutError(f"worker 0 did no step within {self.limit_s} s after it was killed")


class Failover(ClusterWork):
    """Kill a parameter server that has a backup, and wait for the next step, which writes to all servers."""

    limit_s = 90.0

    def partitioner(self) -> Any:
        return sg.partitioners.FixedShardsPartitioner(self.size["servers"])

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        elements = int(self.size["megabytes"] * (1 << 20)) // 4
        with self.strategy.scope():
            table = torch.nn.Embedding(elements // 16, 16)
            optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        ids = torch.arange(0, elements // 16, max(1, elements // 16 // 1000))

        def step() -> None:
            optimizer.zero_grad()
            table(ids).sum().backward()
            optimizer.step()

        return step, ()

    def sample(self, seconds: float) -> dict[str, Any]:
        self.steps(20)
        servers, backups = self.strategy._cluster_views().servers, self.strategy._variables.backups
        assert backups is not None
        end = time.monotonic() + self.limit_s
        while servers.lack_backups():  # after the sample before
            if time.monotonic() > end:
                raise TimeoutError(f"a server has no backup {self.limit_s} s after the last kill")
            time.sleep(0.05)
        self.cluster.kill_ps(backups.holders.holders[0])
        begin = time.perf_counter()
        self.steps(1)
        taken = time.perf_counter() - begin
        return {"value": taken, "seconds": taken}
