"""The statements of the specification about Keras (KER-…) that no other test proves, on replicas and on servers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras_inputs import X, Y, dataset, fit, generator
from keras_models import STRATEGIES, assert_close, classifier, compare, dense

import stratagem as sg


@pytest.fixture(params=["mirrored", "servers"])
def strategy(request: pytest.FixtureRequest, cluster: Any) -> Iterator[Any]:
    if request.param == "servers":
        made: sg.Strategy = sg.ParameterServerStrategy(cluster.resolver)
    else:
        made = STRATEGIES[request.param]()
    with made:
        yield made


# ------------------------------------------------------------------ strategies of models


def test_save_works_inside_and_outside_the_scope(strategy: Any, tmp_path: Path) -> None:
    """KER-1."""
    with strategy.scope():
        model = dense()
    fit(model)
    for name, scope in (("inside", strategy.scope()), ("outside", nullcontext())):
        with scope:
            model.save(tmp_path / f"{name}.keras")
        assert_close(
            keras.saving.load_model(tmp_path / f"{name}.keras").get_weights(), model.get_weights()
        )


@pytest.mark.parametrize("is_built", [False, True])
def test_metrics_and_optimizers_may_be_made_outside_the_scope(
    strategy: Any, is_built: bool
) -> None:
    """KER-1 refuses those that have variables: here they work, and give the numbers of plain Keras."""

    def use(model: Any) -> Any:
        optimizer = keras.optimizers.Adam(0.05)
        if is_built:
            optimizer.build(model.trainable_variables)
        metric = keras.metrics.SparseCategoricalAccuracy(name="right")
        model.compile(optimizer=optimizer, loss=classifier()["loss"], metrics=[metric])
        return [fit(model), [variable.numpy() for variable in optimizer.variables]]

    compare(dense, use, strategy)


def test_an_optimizer_of_another_model_is_refused(strategy: Any) -> None:
    """KER-1: as in plain Keras."""
    optimizer = keras.optimizers.Adam(0.05)
    optimizer.build(dense().trainable_variables)
    with strategy.scope():
        model = dense(optimizer=optimizer)
    with pytest.raises(ValueError, match=r"[Uu]nknown variable|another model"):
        fit(model)


# ------------------------------------------------------------------ losses, gradients


def test_losses_with_every_reduction_may_be_called_under_a_scope(strategy: Any) -> None:
    """KER-3 refuses means over the batch: here they are what they are in plain Keras."""
    y, found = np.float32([[1.0], [3.0], [5.0]]), np.float32([[2.0], [3.0], [1.0]])
    with strategy.scope():
        for reduction, value in (("sum_over_batch_size", 17 / 3), ("sum", 17.0), ("mean", 17 / 3)):
            loss = keras.losses.MeanSquaredError(reduction=reduction)
            assert float(loss(y, found)) == pytest.approx(value)


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, [-2.0, -3.0]), ({"clipnorm": 1.0}, [0.4, 0.2])]
)
def test_an_optimizer_in_replicas_makes_one_update(settings: Any, expected: Any) -> None:
    """KER-5, KER-6: the mean of the gradients, which are the same in both replicas, clipped as a whole."""
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            variable = keras.Variable(np.ones(2, "float32"))
            optimizer = keras.optimizers.SGD(1.0, momentum=0.5, **settings)
            optimizer.build([variable])

        def step() -> None:
            optimizer.apply([torch.tensor([3.0, 4.0])], [variable])

        strategy.run(step)
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)
        assert int(optimizer.iterations) == 1
        for slot in optimizer.variables:
            assert slot.value.device == variable.value.device
        with pytest.raises(ValueError, match="No gradients provided"):
            strategy.run(lambda: optimizer.apply([None], [variable]))
        before = variable.numpy().copy()
        optimizer.apply([torch.zeros(2)], [variable])  # outside replicas: as in plain Keras
        assert int(optimizer.iterations) == 2
        assert variable.numpy().shape == before.shape


class WithoutGradients(keras.Model):
    """A training step that forgets ``backward``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.layer(x)

    def train_step(self, data: Any) -> Any:
        self(data[0])
        weights = self.trainable_weights
        self.optimizer.apply([None] * len(weights), weights)
        return {}


def test_a_step_without_gradients_raises(strategy: Any) -> None:
    """KER-5."""
    with strategy.scope():
        model = WithoutGradients()
        model.compile(optimizer="sgd")
    with pytest.raises(ValueError, match="No gradients provided"):
        fit(model)


# ------------------------------------------------------------------ inputs


def test_a_dataset_that_ends_early_warns_and_stops(strategy: Any) -> None:
    """KER-4: 4 batches of the 10 that were asked for."""
    with strategy.scope():
        model = dense()
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(dataset(), steps_per_epoch=10, verbose=0)
    assert int(model.optimizer.iterations) == 4
    with pytest.warns(UserWarning, match="ran out of data"):
        assert len(model.predict(dataset(), steps=10, verbose=0)) == len(X)


def test_a_dataset_without_end_needs_a_number_of_steps(strategy: Any) -> None:
    """KER-21: otherwise the epoch would never end."""
    endless = dataset().repeat()
    with strategy.scope():
        model = dense()
    for name, call in {
        "steps_per_epoch": lambda: model.fit(endless, verbose=0),
        "validation_steps": lambda: fit(model, validation_data=endless),
        "steps": lambda: model.evaluate(endless, verbose=0),
    }.items():
        with pytest.raises(ValueError, match=f"no {name}: it would never stop"):
            call()
    with pytest.raises(ValueError, match="no steps: it would never stop"):
        model.predict(endless, verbose=0)
    model.fit(endless, steps_per_epoch=2, verbose=0, validation_data=endless, validation_steps=1)
    assert len(model.predict(endless, steps=2, verbose=0)) == 32


def test_class_weights_apply_to_a_dataset(strategy: Any) -> None:
    """As to arrays. Targets and weights beside a dataset would be ignored: they are refused."""

    def use(model: Any) -> Any:
        weights = {0: 0.2, 1: 3.0}
        if not hasattr(model, "_stratagem_strategy"):
            return fit(model, class_weight=weights, shuffle=False)
        for name, value in (("y", Y), ("sample_weight", np.ones(len(X)))):
            with pytest.raises(ValueError, match=f"a dataset and {name}"):
                model.fit(dataset(), verbose=0, **{name: value})
        with pytest.raises(ValueError, match=r"elements \(x, y\)"):
            weighted = dataset().map(lambda x, y: (x, y, torch.ones(len(y))))
            model.fit(weighted, verbose=0, class_weight=weights)
        return fit(model, dataset(), None, class_weight=weights)

    compare(dense, use, strategy)


def batches(count: int, context: sg.InputContext) -> Any:
    """Return the endless dataset of one reader."""
    assert context.num_input_pipelines == 1
    return dataset().take(count).repeat()


def test_a_dataset_function_is_read_on_through_all_epochs(strategy: Any) -> None:
    """KER-22: also a partial function. Epochs of 3 steps over 4 batches: the second one begins with the last batch."""

    def use(model: Any) -> Any:
        remote = hasattr(model, "_stratagem_strategy")
        data = functools.partial(batches, 4) if remote else generator()
        history = fit(model, data, None, steps_per_epoch=3, shuffle=False)
        return [history, model.evaluate(X, Y, verbose=0)]

    compare(dense, use, strategy)


def test_the_result_of_a_dataset_function_is_checked(strategy: Any) -> None:
    """KER-22."""
    with strategy.scope():
        model = dense()
    with pytest.raises(TypeError, match="expected an iterable"):
        model.fit(lambda: 5, steps_per_epoch=1, verbose=0)
    with pytest.raises(ValueError, match="Unrecognized data type"):
        model.fit(object(), steps_per_epoch=1, verbose=0)


# ------------------------------------------------------------------ callbacks


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_backup_resumes_under_every_strategy(kind: str, tmp_path: Path) -> None:
    """KER-7 refuses one device and central storage: here a fit that failed goes on at the next epoch."""

    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise OSError("no power")

    def adam() -> Any:
        return dense(optimizer=keras.optimizers.Adam(0.05))

    def use(model: Any) -> Any:
        strategy = getattr(model, "_stratagem_strategy", None)
        folder = tmp_path / str(strategy is not None)
        arguments = {"batch_size": 16, "epochs": 4, "verbose": 0, "shuffle": False}
        backup = keras.callbacks.BackupAndRestore(str(folder))
        with pytest.raises(OSError, match="no power"):
            model.fit(X, Y, callbacks=[backup, Fail()], **arguments)
        with strategy.scope() if strategy else nullcontext():
            resumed = adam()
        backup = keras.callbacks.BackupAndRestore(str(folder), save_freq=3)
        history = resumed.fit(X, Y, callbacks=[backup], **arguments).history
        assert len(history["loss"]) == 2
        assert not folder.exists()
        return [history, resumed.get_weights()]

    compare(adam, use, STRATEGIES[kind](), "backup")


def test_progress_bars_and_eager_steps_work(
    strategy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """KER-20 refuses verbose=1 and run_eagerly=True under parameter servers."""

    def use(model: Any) -> Any:
        return model.fit(X, Y, batch_size=16, epochs=2, verbose=1).history

    compare(lambda: dense(run_eagerly=True), use, strategy)
    assert "4/4" in capsys.readouterr().out


def test_another_program_evaluates_the_checkpoints_of_a_fit(strategy: Any, tmp_path: Path) -> None:
    """KER-25: `sg.Evaluator`, with a Keras model of its own. Variables are found by their paths, so the layers have names."""

    def named() -> Any:
        layers = [keras.layers.Dense(4, name="hidden"), keras.layers.Dense(2, name="classes")]
        made = keras.Sequential([keras.Input((6,)), *layers], name="classifier")
        made.compile(optimizer="adam", **classifier())
        return made

    with strategy.scope():
        model = named()
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path) as manager:
        save = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: manager.save(epoch + 1, final=epoch == 1)
        )
        fit(model, callbacks=[save])
    evaluator = sg.Evaluator(
        tmp_path,
        named,
        lambda own: own.evaluate(X, Y, verbose=0, return_dict=True),
        tensorboard=False,
    )
    [result] = evaluator.run()
    assert result.step == 2
    assert_close(result.metrics, model.evaluate(X, Y, verbose=0, return_dict=True))
