"""``fit``, ``evaluate`` and ``predict`` of a Keras model under parameter servers: the coordinator's side.

Keras' own loops run on the coordinator, with their callbacks. Their train and test functions schedule one step on a worker and return the
metrics of the steps that have finished so far. Before an epoch's logs are read, all its steps have finished (KER-20).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, cast

import numpy as np
import torch

from stratagem._cluster.coordinator.coordinator import ClusterCoordinator
from stratagem._cluster.coordinator.remote_values import RemoteValue, RemoteValueStatus
from stratagem._cluster.coordinator.shared_dataset import SharedDataset
from stratagem._core.managed import find_managed
from stratagem._keras.backups import Backup
from stratagem._keras.keras_names import names
from stratagem._keras.metric_checks import flat_metrics, metric_variables
from stratagem._keras.model_by_value import ModelParts
from stratagem._keras.model_on_worker import (
    ModelRecipe,
    WorkerModel,
    test_on_shared,
    train_from_iterator,
    train_on_shared,
)
from stratagem._keras.model_strategies import strategy_of
from stratagem._keras.optimizers_on_servers import OptimizerOnServers, refuse
from stratagem._ps.coordinator.coordinator_variables import CoordinatorParameter, Use
from stratagem._strategies.parameter_server import ParameterServerStrategy
from stratagem.errors import EndOfData, ForeignParameterError, UnsupportedOptimizer

_AHEAD_PER_WORKER = 4
_AHEAD = 4
"""Steps that are scheduled ahead of the results: for each worker, and beyond that for all of them."""

ON_SERVERS = "_stratagem_on_servers"
"""The attribute of a model and of a Keras optimizer that holds its object of this package."""

NEXT_OF_WORKER = "the next batch of the worker's own dataset"


class ModelOnServers:
    """A Keras model on the coordinator, and its copies on the workers."""

    def __init__(self, model: Any, strategy: ParameterServerStrategy) -> None:
        self._model = model
        self._strategy = strategy
        self._coordinator = ClusterCoordinator.of(strategy)
        self._copies: Any = None
        self._digest = b""
        self._is_prepared = False
        self._batches: Any = None
        self._waiting: deque[Any] = deque()
        self._logs: Any = None
        self._metrics: dict[str, int] = {}
        self.optimizers: list[OptimizerOnServers] = []
        self.backup: Backup | None = None
        self.waits = False  # whether each step is waited for: train_on_batch

    # -------------------------------------------------------------- preparation

    def prepare(self) -> Any:
        """Send the model to the workers if it is new or has changed; return the per-worker copies."""
        if self._is_prepared:
            return self._copies
        model = self._model
        if len(self._strategy._compute_devices) > 1:
            raise NotImplementedError(
                f"a Keras model under parameter servers needs workers with one device each, but {self._strategy!r} gives "
                "each worker several (worker_devices). Start more workers instead."
            )
        if self._strategy.staleness == 0:
            raise NotImplementedError(
                f"Keras model {model.name!r} under {self._strategy!r}: synchronous rounds (staleness=0) are not available "
                "for Keras models. Use staleness=1 or more, or MirroredStrategy."
            )
        self._adopt()
        parts = ModelParts(model)
        packed = parts.pack()
        before = self.optimizers
        self.optimizers = [_on_servers(self._built(each)) for each in parts.optimizers]
        if self._copies is None or packed.digest != self._digest or before != self.optimizers:
            recipe = ModelRecipe(
                packed=packed,
                parameters=parts.parameters,
                modules=parts.modules,
                optimizers=[(each.on_servers, each.worker_settings) for each in self.optimizers],
            )
            self._copies = self._coordinator.create_per_worker_resource(WorkerModel, args=(recipe,))
            self._digest = packed.digest
        for optimizer in self.optimizers:
            optimizer.send_changes()
        self._is_prepared = True
        return self._copies

    def _built(self, optimizer: Any) -> Any:
        """Return a Keras optimizer of the model, with its variables created."""
        model = self._model
        refuse(optimizer)
        if not optimizer.built and optimizer is model.optimizer:
            optimizer.build(model.trainable_variables)
        if not optimizer.built:
            raise UnsupportedOptimizer(
                f"optimizer {optimizer.name!r} of Keras model {model.name!r} was not given to compile(optimizer=…), so that "
                "its variables are not known. Name them before fit(): optimizer.build(variables)."
            )
        known = {id(variable) for variable in model.variables}
        for variable in optimizer._trainable_variables:
            if id(variable) not in known:
                raise ValueError(
                    f"optimizer {optimizer.name!r} of Keras model {model.name!r} trains {variable.path!r}, which belongs to "
                    "another model. Give each model its own optimizer."
                )
        return optimizer

    def changed(self) -> None:
        """Look, before the next step, whether the program has changed the model."""
        self._is_prepared = False

    def _adopt(self) -> None:
        """Check that every variable is on the servers; rows of embeddings are looked up there."""
        model = self._model
        for layer in model._flatten_layers():
            layer._track_variables()  # registers the variables that were created since
        for variable in model.variables:
            managed = find_managed(variable._value)
            if not isinstance(managed, CoordinatorParameter):
                raise ForeignParameterError(
                    f"variable {variable.path!r} of Keras model {model.name!r} is not on the parameter servers: it was "
                    "created outside the scope, or shares its path with another one. Build the whole model under "
                    "`with strategy.scope():`, with a unique name for every layer."
                )
        for layer in model._flatten_layers():
            if isinstance(layer, names().keras.layers.SpectralNormalization):
                raise NotImplementedError(
                    f"layer {layer.name!r} of Keras model {model.name!r} is a SpectralNormalization: it assigns the trained weights "
                    "of its layer in every call, which the servers hold and only optimizers update. Use a "
                    "kernel_constraint, which the servers apply after each update, or a strategy of one machine."
                )
            if isinstance(layer, names().keras.layers.Embedding) and layer.built:
                managed = find_managed(layer._embeddings._value)
                if isinstance(managed, CoordinatorParameter):
                    managed.use = Use.ROWS

    def read_on_workers(self, dataset_fn: Callable[..., Any]) -> None:
        """Let every worker read its own dataset in the coming steps."""
        self._batches = iter(self._coordinator.create_per_worker_dataset(dataset_fn))

    # -------------------------------------------------------------- steps

    def train(self, data: Any) -> Any:
        """Schedule a training step; return the logs of the steps that have finished."""
        copies = self.prepare()
        for optimizer in self.optimizers:
            optimizer.before_step()
        if isinstance(data, str) and data == NEXT_OF_WORKER:
            return self._schedule(train_from_iterator, copies, self._batches)
        if isinstance(data, SharedDataset):
            return self._schedule(train_on_shared, copies, data)
        return self._schedule(WorkerModel.train, copies, data)

    def test(self, data: Any) -> Any:
        """Schedule the evaluation of a batch; return the logs of the batches that have finished."""
        test = test_on_shared if isinstance(data, SharedDataset) else WorkerModel.test
        return self._schedule(test, self.prepare(), data)

    def _schedule(self, function: Any, *args: Any) -> Any:
        waiting = self._waiting
        try:
            waiting.append(self._coordinator.schedule(function, args=args))
        except EndOfData:  # raised once, at the end of each epoch of a shared dataset
            waiting.append(self._coordinator.schedule(function, args=args))
        # The first step is waited for, so that there are logs.
        while waiting and (
            self.waits
            or self._logs is None
            or len(waiting) > self._ahead
            or waiting[0].status is not RemoteValueStatus.NOT_READY
        ):
            self._collect()
        return self._result()

    @property
    def _ahead(self) -> int:
        return _AHEAD + _AHEAD_PER_WORKER * len(self._strategy._workers)

    def _collect(self) -> None:
        """Take the result of the oldest step: add its metrics to the model's."""
        try:
            result = self._waiting.popleft().get()
        except BaseException:
            self._waiting.clear()
            raise
        self._logs, self._metrics = result.logs, result.metrics
        for optimizer, count in zip(self.optimizers, result.updates, strict=True):
            optimizer.count_steps(count)
        with torch.no_grad():
            for variable, change in zip(metric_variables(self._model), result.changes, strict=True):
                variable.assign(variable.value + torch.from_numpy(np.asarray(change)))

    def _result(self) -> Any:
        """Return the metrics over all finished steps; other values in the logs are those of the last one."""
        found = self._model.get_metrics_result()
        logs = self._logs
        if not isinstance(logs, dict) or set(logs) == set(found):
            return found
        metrics = flat_metrics(self._model)
        found |= {name: metrics[number].result() for name, number in self._metrics.items()}
        return {name: found.get(name, value) for name, value in logs.items()}

    def begin(self) -> None:
        """Begin to count: the metrics were reset."""
        self.finish()
        self.changed()
        self._logs = None

    def finish(self) -> None:
        """Wait for all scheduled steps."""
        while self._waiting:
            self._collect()

    def predictions(self, batches: Iterable[Any]) -> Iterator[RemoteValue]:
        """Schedule the prediction of batches; yield the results in order."""
        copies = self.prepare()
        waiting: deque[RemoteValue] = deque()
        for data in batches:
            waiting.append(self._coordinator.schedule(WorkerModel.predict, args=(copies, data)))
            if len(waiting) > self._ahead:
                yield waiting.popleft()
        yield from waiting

    def predict(self, data: Any) -> Any:
        """Return the outputs for a batch, or those of a prediction that was scheduled."""
        found = data if isinstance(data, RemoteValue) else next(self.predictions([data]))
        return found.get()

    def end_of_epoch(self) -> Any:
        """Wait for all scheduled steps; return their logs."""
        self.finish()
        return self._result()

    def set_backup(self, backup: Backup | None) -> None:
        """Own the backup of a ``fit`` that begins, or, with None, close that of one that has ended."""
        before, self.backup = self.backup, backup
        if before is not None:
            before.close()

    def give_up(self) -> None:
        """Wait for the steps that still run after an error, and forget their results."""
        self._waiting.clear()
        self._logs = None
        self.changed()
        with suppress(Exception):  # it repeats the error
            self._coordinator.join()


def _on_servers(optimizer: Any) -> OptimizerOnServers:
    """Return the servers' optimizer of a Keras optimizer."""
    found = getattr(optimizer, ON_SERVERS, None)
    if found is None or not found.trains(optimizer._trainable_variables):
        found = OptimizerOnServers(optimizer, optimizer._trainable_variables)
        object.__setattr__(optimizer, ON_SERVERS, found)
    return cast("OptimizerOnServers", found)


def on_servers_of(model: Any) -> ModelOnServers | None:
    """Return the object of a model under parameter servers; None for other models."""
    strategy = strategy_of(model)
    if not isinstance(strategy, ParameterServerStrategy):
        return None
    found = getattr(model, ON_SERVERS, None)
    if found is None:
        found = ModelOnServers(model, strategy)
        object.__setattr__(model, ON_SERVERS, found)
    return found
