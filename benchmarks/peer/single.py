"""The one-machine rows in TensorFlow: one device, and central storage with two logical CPUs.

Runs in the peer's environment only. One thread each (intra-op and inter-op), as the limit: that is also
TensorFlow's fastest setting for these rows on two cores.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from benchmarks import work
from benchmarks.peer import models
from benchmarks.protocol import Work


def _one_thread(replicas: int) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(replicas)]
    tf.config.set_logical_device_configuration(cpu, logical)


class SingleWork(Work):
    """Common part of both rows: batches as tensors, and a step, eager or traced."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.size = size
        self.done = 0
        _one_thread(size.get("replicas", 1))
        self.strategy = self.make_strategy()
        with self.strategy.scope():
            self.variables = models.mlp_variables(size, **self.variable_options())
        batches = zip(*work.mlp_batches(size), strict=True)
        self.batches = [self.place(*batch) for batch in batches]
        self.step = self.make_step()
        if size["form"] == "tf.function":
            self.step = tf.function(self.step)

    def make_strategy(self) -> Any:
        """Return the strategy of the row."""
        raise NotImplementedError

    def variable_options(self) -> dict[str, Any]:
        """Create the row's variables."""
        return {}

    def place(self, inputs: Any, labels: Any) -> tuple[Any, Any]:
        """Return one batch as the step takes it."""
        return tf.constant(inputs), tf.constant(labels)

    def make_step(self) -> Any:
        """Return the function of one batch."""
        raise NotImplementedError

    def steps(self, count: int) -> None:
        step, batches = self.step, self.batches
        for _ in range(count):
            step(*batches[self.done % len(batches)])
            self.done += 1
        self.variables[-1].numpy()

    def check(self) -> dict[str, Any]:
        batches = work.mlp_batches(self.size)
        before = models.mlp_mean_loss(self.variables, batches)
        self.steps(self.size["check_steps"])
        after = models.mlp_mean_loss(self.variables, batches)
        now = [variable.numpy() for variable in self.variables]
        # PyTorch's layout, so that all sides have the same order.
        prints = [work.fingerprint(value.T if value.ndim == 2 else value) for value in now]
        return {"loss_before": before, "loss_after": after, "parameters": prints}


class OneDevice(SingleWork):
    """The MLP step under OneDeviceStrategy."""

    def make_strategy(self) -> Any:
        return tf.distribute.OneDeviceStrategy("/cpu:0")

    def make_step(self) -> Any:
        strategy, variables = self.strategy, self.variables

        def step(inputs: Any, labels: Any) -> Any:
            return strategy.run(lambda x, y: models.mlp_sgd(variables, x, y), args=(inputs, labels))

        return step


class Central(SingleWork):
    """The MLP step over the replicas of CentralStorageStrategy; gradients are combined in one merge call."""

    def make_strategy(self) -> Any:
        devices = [f"/cpu:{index}" for index in range(self.size["replicas"])]
        return tf.distribute.experimental.CentralStorageStrategy(
            compute_devices=devices, parameter_device="/cpu:0"
        )

    def variable_options(self) -> dict[str, Any]:
        return {"aggregation": tf.VariableAggregation.MEAN}

    def place(self, inputs: Any, labels: Any) -> tuple[Any, Any]:
        split = self.strategy.experimental_distribute_values_from_function

        def part(whole: Any) -> Any:
            parts = tf.split(whole, self.size["replicas"])
            return split(lambda context: parts[context.replica_id_in_sync_group])

        return part(inputs), part(labels)

    def make_step(self) -> Any:
        strategy, variables = self.strategy, self.variables

        def merge(strategy: Any, *gradients: Any) -> None:
            pairs = list(zip(gradients, variables, strict=True))
            reduced = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.MEAN, pairs)
            for gradient, variable in zip(reduced, variables, strict=True):
                strategy.extended.update(variable, models.apply_sgd, args=(gradient,), group=False)

        def replica(inputs: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = models.mlp_loss(variables, inputs, labels)
            gradients = tape.gradient(loss, variables)
            tf.distribute.get_replica_context().merge_call(merge, args=gradients)
            return loss

        def step(inputs: Any, labels: Any) -> Any:
            return strategy.run(replica, args=(inputs, labels))

        return step
