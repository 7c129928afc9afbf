"""The Keras model of a worker: built from the coordinator's configuration, over the parameters of the servers.

A worker has one `WorkerModel` (a per-worker resource, so a replaced worker builds it again). Its variables are the worker's views of the
coordinator's parameters; its optimizer sends gradients to the servers. The model's own ``train_step`` and ``test_step`` run unchanged. A
step returns the states of its metrics, which the coordinator adds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from stratagem._core import context
from stratagem._keras.keras_names import names
from stratagem._keras.server_update import import_keras
from stratagem._ps.tables.table_parameter import TableParameter
from stratagem.errors import DataError, MisuseError


@dataclass(frozen=True)
class ModelRecipe:
    """What a worker needs to build the model.

    Attributes:
        config: Keras' serialized model.
        custom_objects: the program's own classes and functions in it, by name.
        compile_arguments: Keras' serialized arguments of ``compile``, without the optimizer.
        paths: of the variables, in order.
        parameters: of the variables; on a worker its views of them.
        optimizer: the optimizer on the servers; None if the model is not trained.
        optimizer_settings: clipping and loss scale.
    """

    config: dict[str, Any]
    custom_objects: dict[str, Any]
    compile_arguments: dict[str, Any]
    paths: Sequence[str]
    parameters: Sequence[Any]
    optimizer: Optimizer | None
    optimizer_settings: dict[str, Any] = field(default_factory=dict)


class WorkerModel:
    """A model on a worker."""

    def __init__(self, recipe: ModelRecipe) -> None:
        keras = import_keras("a worker")
        with keras.saving.custom_object_scope(recipe.custom_objects):
            with keras.device("meta"):  # its variables are on the servers: no memory here
                self._model = keras.saving.deserialize_keras_object(recipe.config)
            arguments = keras.saving.deserialize_keras_object(recipe.compile_arguments)
        self._bind(recipe)
        self._optimizer = recipe.optimizer
        self._parameters = list(recipe.parameters)
        if arguments:
            self._model.compile(optimizer=None, **arguments)
        if recipe.optimizer is not None:
            step = WorkerOptimizer(recipe.optimizer, recipe.optimizer_settings)
            object.__setattr__(self._model, "optimizer", step)
        for layer in self._model._flatten_layers():
            object.__setattr__(layer, "zero_grad", self._zero_grad)

    def _bind(self, recipe: ModelRecipe) -> None:
        """Make the variables those of the servers."""
        variables = self._model.variables
        shapes = [tuple(variable.shape) for variable in variables]
        if shapes != [tuple(parameter.shape) for parameter in recipe.parameters]:
            raise MisuseError(
                f"Keras model {self._model.name!r}, built from its configuration, has variables of other shapes: "
                f"{shapes}, expected {dict(zip(recipe.paths, recipe.parameters, strict=True))!r:.500}. Let get_config() "
                "and build() of its classes describe all layers and weights."
            )
        for variable, parameter, path in zip(
            variables, recipe.parameters, recipe.paths, strict=True
        ):
            variable._value = parameter
            variable._path = path
        for layer in self._model._flatten_layers():
            if isinstance(layer, names().keras.layers.Embedding):
                table = layer._embeddings._value if layer.built else None
                if isinstance(table, TableParameter):
                    object.__setattr__(layer, "call", _Lookup(layer, table))

    def _zero_grad(self, set_to_none: bool = True) -> None:
        del set_to_none
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameter.grad = None

    # -------------------------------------------------------------- steps

    def train(self, data: Any) -> Any:
        """Train on one batch; return the logs of the step and the states of its metrics."""
        self._model.train()
        self._model.reset_metrics()
        self._zero_grad()
        logs = self._model.train_step(data)
        self._zero_grad()
        return _plain(logs), self._states()

    def test(self, data: Any) -> Any:
        """Evaluate one batch; return the logs of the step and the states of its metrics."""
        self._model.eval()
        self._model.reset_metrics()
        with torch.no_grad():
            logs = self._model.test_step(data)
        return _plain(logs), self._states()

    def predict(self, data: Any) -> Any:
        """Return the outputs for one batch, as arrays."""
        self._model.eval()
        with torch.no_grad():
            outputs = self._model.predict_step(data)
        return names().tree.map_structure(names().backend.convert_to_numpy, outputs)

    def _states(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in metric_variables(self._model)]


def train_on_worker(model: WorkerModel, data: Any) -> Any:
    """Train a worker's model on a batch that the coordinator sent."""
    return model.train(data)


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


def test_on_worker(model: WorkerModel, data: Any) -> Any:
    """Evaluate a worker's model on a batch that the coordinator sent."""
    return model.test(data)


def predict_on_worker(model: WorkerModel, data: Any) -> Any:
    """Return the outputs of a worker's model."""
    return model.predict(data)


def metric_variables(model: Any) -> list[Any]:
    """Return the variables of all metrics of a model, in order."""
    return [variable for metric in model.metrics for variable in metric.variables]


def _plain(logs: Any) -> Any:
    return names().tree.map_structure(
        lambda leaf: leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else leaf, logs
    )


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
    """

    built = True

    def __init__(self, on_servers: Optimizer, settings: dict[str, Any]) -> None:
        self._on_servers = on_servers
        self._scale = settings.get("loss_scale_factor")
        clipping = {name: value for name, value in settings.items() if name != "loss_scale_factor"}
        self._clipper = names().keras.optimizers.SGD(0.0, **clipping)

    @property
    def learning_rate(self) -> Any:
        """The learning rate of this step."""
        return self._on_servers.param_groups[0]["lr"]

    def scale_loss(self, loss: Any) -> Any:
        """Multiply the loss, as the Keras optimizer does."""
        return loss if self._scale is None else loss * self._scale

    def apply(self, grads: Sequence[Any], trainable_variables: Any) -> None:
        """Clip the gradients and send them; the servers update the variables."""
        present = [
            (gradient, variable._value)
            for gradient, variable in zip(grads, trainable_variables, strict=True)
            if gradient is not None
        ]
        if not present:
            raise ValueError("No gradients provided for any variable.")
        found = [gradient for gradient, _ in present]
        if self._scale is not None:
            found = [gradient / self._scale for gradient in found]
        clipped = self._clipper._clip_gradients(found)
        trained = {id(parameter) for _, parameter in present}
        with torch.no_grad():
            for (gradient, parameter), value in zip(present, clipped, strict=True):
                if value is not gradient and parameter.grad is not None:
                    parameter.grad.copy_(value)
                elif parameter.grad is None:
                    parameter.grad = value
        for group in self._on_servers.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in trained:
                    parameter.grad = None
        self._on_servers.step()

    def apply_gradients(self, grads_and_vars: Any) -> None:
        """Send pairs of gradients and variables."""
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables)
