"""The Keras model of a worker: the coordinator's, rebuilt over the parameters of the servers.

A worker has one `WorkerModel` (a per-worker resource, so a replaced worker builds it again). Its variables are the worker's views of the
coordinator's parameters; its optimizers send gradients to the servers. The model's own ``train_step`` and ``test_step`` run unchanged. A
step returns how it changed the states of its metrics, which the coordinator adds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem._core import context
from stratagem._core.torch_patches.compiling import eagerly
from stratagem._keras.keras_names import names
from stratagem._keras.metric_checks import check_metrics, flat_metrics, metric_variables
from stratagem._keras.model_by_value import PackedModel, unpack_model
from stratagem._keras.server_update import import_keras
from stratagem._ps.tables.table_parameter import TableParameter
from stratagem.errors import DataError


@dataclass(frozen=True)
class ModelRecipe:
    """Data from which a worker builds the model.

    Attributes:
        packed: the model as data.
        parameters: of the variables; on a worker its views of them.
        modules: torch modules in its layers.
        optimizers: those on the servers, each with the settings that workers apply: clipping and the scale of the loss.
    """

    packed: PackedModel
    parameters: Sequence[Tensor]
    modules: Sequence[nn.Module]
    optimizers: Sequence[tuple[Optimizer, dict[str, Any]]]


class StepResult(NamedTuple):
    """The result of a training or test step.

    Attributes:
        logs: returned by the step.
        metrics: numbers of the metrics (in `flat_metrics`) whose results are entries of ``logs``, by name.
        changes: of the variables of all metrics.
        updates: how often each optimizer on the servers updated the variables.
    """

    logs: Any
    metrics: dict[str, int]
    changes: list[np.ndarray]
    updates: list[int]


class WorkerModel:
    """A model on a worker."""

    def __init__(self, recipe: ModelRecipe) -> None:
        import_keras("a worker")
        self._optimizers = [WorkerOptimizer(*each) for each in recipe.optimizers]
        self._model = unpack_model(
            recipe.packed, recipe.parameters, recipe.modules, self._optimizers
        )
        self._parameters = list(recipe.parameters)
        for layer in self._model._flatten_layers():
            object.__setattr__(layer, "zero_grad", self._zero_grad)
            if isinstance(layer, names().keras.layers.Embedding) and layer.built:
                table = layer._embeddings._value
                if isinstance(table, TableParameter):
                    object.__setattr__(layer, "call", _Lookup(layer, table))
        steps = [self._model.train_step, self._model.test_step, self._model.predict_step]
        if self._model.jit_compile:
            steps = [torch.compile(step) for step in steps]
        self._train_step, self._test_step, self._predict_step = steps
        self._results: list[tuple[Any, int]] = []
        self._model.reset_metrics()
        self._start = self._states()
        check_metrics(self._model)
        for number, metric in enumerate(flat_metrics(self._model)):
            object.__setattr__(metric, "result", self._recording(metric.result, number))

    def _recording(self, result: Any, number: int) -> Any:
        def recorded() -> Any:
            value = result()
            self._results.append((value, number))
            return value

        return recorded

    def _zero_grad(self, set_to_none: bool = True) -> None:
        del set_to_none
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameter.grad = None

    # -------------------------------------------------------------- steps

    def train(self, data: Any) -> StepResult:
        """Train on one batch."""
        self._model.train()
        self._begin()
        self._zero_grad()
        logs = self._train_step(data)
        self._zero_grad()
        return self._end(logs)

    def test(self, data: Any) -> StepResult:
        """Evaluate one batch."""
        self._model.eval()
        self._begin()
        with torch.no_grad():
            logs = self._test_step(data)
        return self._end(logs)

    def predict(self, data: Any) -> Any:
        """Return the outputs for one batch, as arrays."""
        self._model.eval()
        with torch.no_grad():
            outputs = self._predict_step(data)
        return names().tree.map_structure(names().backend.convert_to_numpy, outputs)

    def _begin(self) -> None:
        self._model.reset_metrics()
        self._results.clear()
        for optimizer in self._optimizers:
            optimizer.updates = 0

    def _end(self, logs: Any) -> StepResult:
        metrics = {}
        for name, value in logs.items() if isinstance(logs, dict) else ():
            for result, number in self._results:
                if result is value:
                    metrics[name] = number
        changes = [now - start for now, start in zip(self._states(), self._start, strict=True)]
        updates = [optimizer.updates for optimizer in self._optimizers]
        return StepResult(_plain(logs), metrics, changes, updates)

    def _states(self) -> list[np.ndarray]:
        return [np.array(variable.numpy()) for variable in metric_variables(self._model)]


def train_from_iterator(model: WorkerModel, batches: Any) -> Any:
    """Train a worker's model on the next batch of the worker's own dataset."""
    try:
        data = next(batches)
    except StopIteration:
        raise DataError(
            f"the dataset of worker {context.get_current_worker_index()} ended before the last step of fit(). Workers "
            "take steps at their own pace, so none may run out: call .repeat() on the dataset in dataset_fn."
        ) from None
    return model.train(data)


def train_on_shared(model: WorkerModel, batches: Any) -> StepResult:
    """Train a worker's model on its elements of a shared dataset."""
    return _sum([model.train(data) for data in batches])


def test_on_shared(model: WorkerModel, batches: Any) -> StepResult:
    """Evaluate a worker's model on its elements of a shared dataset."""
    return _sum([model.test(data) for data in batches])


def _sum(results: Sequence[StepResult]) -> StepResult:
    """Return several steps as one."""
    last = results[-1]
    return StepResult(
        last.logs,
        last.metrics,
        [np.sum(parts, axis=0) for parts in zip(*[each.changes for each in results], strict=True)],
        [sum(parts) for parts in zip(*[each.updates for each in results], strict=True)],
    )


def _plain(logs: Any) -> Any:
    """Return logs as data: arrays for tensors and variables."""
    keras = names()

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, keras.Variable):
            leaf = leaf.value
        return leaf.detach().cpu().numpy() if isinstance(leaf, Tensor) else leaf

    return keras.tree.map_structure(plain, logs)


class _Lookup:
    """The call of an Embedding layer whose rows are on the servers: it fetches only the rows needed."""

    def __init__(self, layer: Any, table: TableParameter) -> None:
        self._layer = layer
        self._table = table

    def __call__(self, inputs: Any) -> Any:
        rows = torch.nn.functional.embedding(inputs.long(), self._table)
        return names().keras.ops.cast(rows, self._layer.compute_dtype)


class WorkerOptimizer:
    """The ``optimizer`` of a model on a worker: it sends gradients to the servers.

    Args:
        on_servers: the worker's view of the optimizer that the servers run.
        settings: ``clipnorm``, ``clipvalue``, ``global_clipnorm`` and ``loss_scale_factor``.

    Attributes:
        updates: how often the servers updated the variables in this step.
    """

    built = True

    def __init__(self, on_servers: Optimizer, settings: dict[str, Any]) -> None:
        self.updates = 0
        self._on_servers = on_servers
        self._scale = settings.get("loss_scale_factor")
        clipping = {name: value for name, value in settings.items() if name != "loss_scale_factor"}
        self._clipper = names().keras.optimizers.SGD(0.0, **clipping)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"optimizer.{name} is not available in a step on a worker: the optimizer runs on the parameter servers. Workers have "
            "apply(), scale_loss() and learning_rate. Use the optimizer's other attributes in callbacks, which run on the "
            "coordinator."
        )

    @property
    @eagerly
    def learning_rate(self) -> Any:
        """The learning rate of this step."""
        rate = self._on_servers.param_groups[0]["lr"]
        if rate is None:
            raise RuntimeError(
                "optimizer.learning_rate is not a number in a step on a worker: the servers compute a schedule for each "
                "update. Read it in a callback, on the coordinator."
            )
        return rate

    def scale_loss(self, loss: Any) -> Any:
        """Multiply the loss, as the Keras optimizer does."""
        return loss if self._scale is None else loss * self._scale

    @eagerly
    def apply(self, grads: Sequence[Any], trainable_variables: Any) -> None:
        """Clip the gradients and send them; the servers update the variables."""
        present = [
            (gradient, variable._value)
            for gradient, variable in zip(grads, trainable_variables, strict=True)
            if gradient is not None
        ]
        if not present:
            raise ValueError("No gradients provided for any variable.")
        groups = self._on_servers.param_groups
        own = [parameter for group in groups for parameter in group["params"]]
        trained = {id(parameter) for _, parameter in present}
        if not trained <= {id(parameter) for parameter in own}:
            raise ValueError(
                "optimizer.apply() got a variable that the optimizer was not built with. Give it the variables that "
                "optimizer.build() or compile() got."
            )
        found = [
            gradient if self._scale is None else gradient / self._scale for gradient, _ in present
        ]
        clipped = self._clipper._clip_gradients(found)
        with torch.no_grad():
            for (gradient, parameter), value in zip(present, clipped, strict=True):
                if value is not gradient and parameter.grad is not None:
                    parameter.grad.copy_(value)
                elif parameter.grad is None:
                    parameter.grad = value
        for parameter in own:
            if id(parameter) not in trained:
                parameter.grad = None
        self._on_servers.step()
        self.updates += 1

    def apply_gradients(self, grads_and_vars: Any) -> None:
        """Send pairs of gradients and variables."""
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables)
