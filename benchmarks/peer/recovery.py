"""Time that TensorFlow's cluster needs to recover from a killed worker.

Runs in the peer's environment only. It has recovered when the steps that were scheduled at the kill are
done and the restarted worker has run some of them.
"""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from benchmarks.peer.cluster import ClusterWork

LIMIT_S = 90.0


class Recovery(ClusterWork):
    """Kill worker 0, start it again, and wait for its first step."""

    def build(self) -> tuple[Any, tuple[Any, ...]]:
        with self.strategy.scope():
            self.counter = tf.Variable(0.0)
        counter = self.counter

        @tf.function
        def step() -> Any:
            counter.assign_add(1.0, read_value=False)
            return tf.distribute.coordinator.experimental_get_current_worker_index()

        return step, ()

    def sample(self, seconds: float) -> dict[str, Any]:
        self.steps(20)
        task = self.cluster.tasks["worker 0"]
        task.kill()
        task.wait(LIMIT_S)
        begin = time.perf_counter()
        self.cluster.start("worker", 0)
        while time.perf_counter() - begin < LIMIT_S:
            done = [self.coordinator.schedule(self.step, args=()) for _ in range(20)]
            self.coordinator.join()
            if any(int(index.fetch()) == 0 for index in done):
                taken = time.perf_counter() - begin
                return {"value": taken, "seconds": taken}
        raise TimeoutError(f"worker 0 did no step within {LIMIT_S} s after it was killed")
