"""A Keras model under a strategy trains as asked, or raises an error with the remedy."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras_models import dense, rows

import stratagem as sg
from stratagem._keras import keras_patches

X, Y = rows()


@pytest.fixture
def strategy() -> Any:
    with sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as made:
        yield made


class Who(keras.layers.Layer):
    """Notes the replica and the rows of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int]] = []

    def call(self, x: Any) -> Any:
        context = sg.get_replica_context()
        if x.device.type != "meta" and context is not None:
            self.calls.append((context.replica_id_in_sync_group, len(x)))
        return x


@pytest.mark.parametrize("inside", [True, False])
def test_every_method_runs_on_all_replicas_inside_and_outside_the_scope(
    strategy: Any, inside: bool
) -> None:
    """KER-1: in both cases the model's own strategy runs it, in order, on all rows."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), who := Who(), keras.layers.Dense(2)])
        model.compile(loss="mse", optimizer="sgd")
    y = np.zeros((len(X), 2))
    methods = {
        "fit": lambda: model.fit(X[:8], y[:8], batch_size=8, verbose=0),
        "evaluate": lambda: model.evaluate(X[:8], y[:8], batch_size=8, verbose=0),
        "predict": lambda: model.predict(X[:8], verbose=0),
        "train_on_batch": lambda: model.train_on_batch(X[:8], y[:8]),
        "test_on_batch": lambda: model.test_on_batch(X[:8], y[:8]),
        "predict_on_batch": lambda: model.predict_on_batch(X[:8]),
    }
    for name, method in methods.items():
        who.calls.clear()
        if inside:
            with strategy.scope():
                method()
        else:
            method()
        assert who.calls == [(0, 3), (1, 3), (2, 2)], name
    who.calls.clear()
    model.predict(X[:2], verbose=0)  # fewer rows than replicas
    assert who.calls == [(0, 1), (1, 1)]


def test_a_call_of_the_model_itself_is_not_distributed(strategy: Any) -> None:
    """KER-1."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), who := Who()])
    assert len(model(X)) == len(X)
    assert who.calls in ([], [(0, len(X))])


def test_a_model_of_another_scope_is_refused(strategy: Any) -> None:
    """KER-1: built outside and compiled or trained inside, or under another strategy."""
    outside = dense()
    with strategy.scope():
        with pytest.raises(ValueError, match="constructed outside any scope"):
            outside.compile(loss="mse")
        with pytest.raises(ValueError, match="constructed outside any scope"):
            outside.fit(X, Y, verbose=0)
        inside = dense()
    outside.fit(X, Y, verbose=0)
    with sg.OneDeviceStrategy("cpu:0") as other, other.scope():
        with pytest.raises(ValueError, match="constructed under MirroredStrategy"):
            inside.fit(X, Y, verbose=0)


def test_fit_inside_run_is_refused(strategy: Any) -> None:
    with strategy.scope():
        model = dense()
    with pytest.raises(RuntimeError, match="outside the function given to run"):
        strategy.run(lambda: model.fit(X, Y, verbose=0))


def test_sums_over_replicas_are_refused() -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], gradient_aggregation="sum") as strategy:
        with pytest.raises(ValueError, match="gradient_aggregation='mean'"), strategy.scope():
            dense()


def test_values_that_replicas_cannot_combine_are_refused(strategy: Any) -> None:
    class Last(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.last = self.add_weight(initializer="zeros", trainable=False)

        def call(self, x: Any) -> Any:
            self.last.assign(keras.ops.sum(x))
            return x

    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), Last()])
    with pytest.raises(ValueError, match="aggregation='mean'"):
        model.predict(X, verbose=0)


def test_outputs_without_rows_are_refused(strategy: Any) -> None:
    class Mean(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return keras.ops.mean(x)

    with strategy.scope():
        model = keras.Sequential([Mean()])
    with pytest.raises(sg.errors.ReplicaError, match="one entry per input row"):
        model.predict_on_batch(X)


def test_inputs_with_different_rows_are_refused(strategy: Any) -> None:
    with strategy.scope():
        a, b = keras.Input((6,)), keras.Input((6,))
        model = keras.Model([a, b], a + keras.ops.mean(b))
    with pytest.raises(sg.errors.ReplicaError, match=r"\[3, 4\] rows"):
        model.predict_on_batch([X[:3], X[:4]])


def test_an_error_in_a_replica_leaves_the_model_usable(strategy: Any) -> None:
    class Fails(keras.layers.Layer):
        fails = True

        def call(self, x: Any) -> Any:
            if self.fails and x.device.type != "meta":
                raise OSError("no more rows")
            return x

    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), layer := Fails(), keras.layers.Dense(2)])
    with pytest.raises(OSError, match="no more rows"):
        model.predict(X, verbose=0)
    layer.fails = False
    assert model.predict(X, verbose=0).shape == (len(X), 2)


# ------------------------------------------------------------------ strategy.run


@pytest.mark.parametrize("kind", ["torch", "keras", "keras, gradients by autograd.grad"])
def test_a_training_loop_of_ones_own_gives_the_numbers_of_one_device(
    strategy: Any, kind: str
) -> None:
    """KER-3, KER-5, KER-6: a Keras model in ``strategy.run``, with a loss and an optimizer of torch or of Keras.

    Losses with the default reduction, a mean over the rows of the replica, and clipping give the numbers of one device.
    """
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train(run: Any) -> Any:
        keras.utils.set_random_seed(1)
        with strategy.scope() if run else torch.enable_grad():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
            if kind == "torch":
                optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            else:
                optimizer = keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=0.2)
                optimizer.build(model.trainable_variables)

        def step(x: Any, y: Any) -> Any:
            variables = model.trainable_variables
            loss = loss_fn(y, model(x))
            if kind == "torch":
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            elif kind == "keras":
                model.zero_grad()
                loss.backward()
                optimizer.apply([v.value.grad for v in variables], variables)
            else:
                found = torch.autograd.grad(loss, [v.value for v in variables])
                optimizer.apply(found, variables)

        for first in range(0, 50, 16):
            x = torch.from_numpy(X[first : first + 16])
            y = torch.from_numpy(Y[first : first + 16])
            if run:
                (batch,) = strategy.distribute_dataset([(x, y)])
                strategy.run(step, args=batch)
            else:
                step(x, y)
        return model.get_weights()

    for one, other in zip(train(False), train(True), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ importing

PROGRAM = """
import sys
import stratagem as sg
strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
assert "keras" not in sys.modules
with strategy.scope():
    import keras
    calls = []
    class Who(keras.layers.Layer):
        def call(self, x):
            context = sg.get_replica_context()
            if context is not None and x.device.type != "meta":
                calls.append(context.replica_id_in_sync_group)
            return x
    model = keras.Sequential([Who()])
import numpy as np
model.predict(np.ones((4, 2), "float32"), verbose=0)
assert calls == [0, 1], calls
assert keras.__spec__.loader.get_source("keras")
assert not [name for name in sys.modules if name.split(".")[0] == "tensorflow"]
"""


@pytest.mark.slow
def test_keras_may_be_imported_after_the_strategy_was_created() -> None:
    """Also inside the scope. Nothing imports TensorFlow, and ``import stratagem`` does not import Keras."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=250)


def test_another_backend_is_refused(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras reports jax here, whose package is not installed."""
    monkeypatch.setattr(keras_patches, "_installed", set())
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    monkeypatch.setattr(keras.Model, "__new__", keras.Model.__new__)  # to be put back
    keras_patches.install({"strategy", "replicas"})
    with strategy.scope(), pytest.raises(RuntimeError, match="KERAS_BACKEND=torch"):
        keras.Sequential([])
    keras.Sequential([])
