"""``fit``, ``evaluate`` and ``predict`` of Keras models on workers and parameter servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras_inputs import INPUTS
from keras_models import assert_close, classifier, dense, rows

import stratagem as sg

X, Y = rows()


@pytest.fixture
def strategy(cluster: Any) -> Iterator[Any]:
    with sg.ParameterServerStrategy(cluster.resolver) as made:
        yield made


def compare(strategy: Any, build: Any, use: Any) -> Any:
    """Assert that one worker gives the weights and results of plain Keras, to 1e-5; return the model."""
    results = []
    for scope in (torch.enable_grad(), strategy.scope()):
        keras.utils.set_random_seed(7)
        with scope:
            model = build()
        results.append((use(model), model.get_weights()))
    assert_close(results[1], results[0])
    return model


def fit(model: Any, **arguments: Any) -> Any:
    arguments = {"batch_size": 16, "epochs": 2, "verbose": 0, **arguments}
    return model.fit(X, Y, **arguments).history


def use_everything(model: Any) -> Any:
    return [
        fit(model, validation_split=0.2),
        model.evaluate(X, Y, batch_size=16, verbose=0),
        model.predict(X, batch_size=7, verbose=0),
        model.train_on_batch(X[:5], Y[:5]),
        model.test_on_batch(X[:5], Y[:5]),
        model.predict_on_batch(X[:5]),
        [float(variable.numpy().sum()) for variable in model.optimizer.variables],
    ]


# ------------------------------------------------------------------ one worker equals plain Keras

SETTINGS: dict[str, Any] = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "Adam, clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.1),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "RMSprop, clipvalue": lambda: keras.optimizers.RMSprop(0.01, clipvalue=0.01),
    "AdamW with EMA": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.9),
    "momentum, global_clipnorm": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, nesterov=True, global_clipnorm=0.1
    ),
    "accumulation, decay": lambda: keras.optimizers.Lion(
        0.01, gradient_accumulation_steps=3, weight_decay=0.1
    ),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True)
    ),
    "loss scale": lambda: keras.optimizers.Adam(0.01, loss_scale_factor=8.0),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_one_worker_gives_the_numbers_of_plain_keras(strategy: Any, setting: str) -> None:
    compare(strategy, lambda: dense(optimizer=SETTINGS[setting]()), use_everything)


@pytest.mark.parametrize("kind", INPUTS)
def test_every_input_gives_the_numbers_of_plain_keras(strategy: Any, kind: str) -> None:
    """KER-21: also generators, and arrays without steps_per_epoch."""
    compare(strategy, lambda: dense(weighted_metrics=["accuracy"]), INPUTS[kind])


def deep() -> Any:
    """Batch normalization, a constraint, regularizers, two outputs."""
    x = keras.Input((6,))
    hidden = keras.layers.Dense(
        5,
        use_bias=False,
        kernel_constraint=keras.constraints.MaxNorm(0.5),
        kernel_regularizer="l2",
        activity_regularizer=keras.regularizers.L1(0.1),
    )(x)
    hidden = keras.layers.BatchNormalization()(hidden)
    outputs = [keras.layers.Dense(2, name="a")(hidden), keras.layers.Dense(1, name="b")(hidden)]
    model = keras.Model(x, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=[keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"],
        metrics=[["accuracy"], ["mae"]],
    )
    return model


class Residual(keras.Model):
    """A class of the program, built at its first call, with a training step of its own."""

    def __init__(self, units: int = 6) -> None:
        super().__init__()
        self.units = units
        self.first = keras.layers.Dense(units, activation=double_tanh)
        self.last = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.last(x + self.first(x))

    def get_config(self) -> Any:
        return {"units": self.units}

    def train_step(self, data: Any) -> Any:
        x, y = data[0], data[1]
        self.zero_grad()
        loss = self.compute_loss(y=y, y_pred=(y_pred := self(x, training=True)))
        loss.backward()
        variables = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in variables], variables)
        return self.compute_metrics(x, y, y_pred) | {"twice": 2 * loss.detach()}


def double_tanh(x: Any) -> Any:
    return 2 * keras.ops.tanh(x)


def test_models_of_every_kind_are_built_on_workers(strategy: Any) -> None:
    compare(
        strategy,
        deep,
        lambda model: model.fit(X, [Y, X[:, :1]], batch_size=16, epochs=2, verbose=0).history,
    )

    def own() -> Any:
        model = Residual()
        model.compile(optimizer=keras.optimizers.Adam(0.01), **classifier())
        return model

    compare(strategy, own, fit)


class Hits(keras.metrics.Metric):
    """A metric with an update of its own, whose state does not begin at 0."""

    def __init__(self) -> None:
        super().__init__(name="hits")
        self.hits = self.add_variable((), "ones")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        right = keras.ops.argmax(y_pred, axis=-1) == keras.ops.cast(y_true, "int64")
        self.hits.assign_add(keras.ops.sum(keras.ops.cast(right, "float32")))

    def result(self) -> Any:
        return self.hits

    def reset_state(self) -> None:
        self.hits.assign(1.0)


class Adversaries(keras.Model):
    """Two optimizers, no get_config, a torch module, logs under other names than their metrics'."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale
        self.normalize = keras.layers.Normalization()
        self.normalize.adapt(X)
        self.first = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        self.second = keras.layers.TorchModuleWrapper(torch.nn.Linear(4, 2))
        self.hidden = self.first.layers[0]
        self.tracker = keras.metrics.Mean(name="mean of the loss")
        self.optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.5)]
        for part, optimizer in zip((self.first, self.second), self.optimizers, strict=True):
            optimizer.build(part.trainable_variables)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.second(self.scale(self.first(self.normalize(x))))

    def train_step(self, data: Any) -> Any:
        x, y = data
        for part, optimizer in zip((self.first, self.second), self.optimizers, strict=True):
            self.zero_grad()
            loss = torch.nn.functional.cross_entropy(self(x, training=True), torch.as_tensor(y))
            loss.backward()
            variables = part.trainable_variables
            optimizer.apply([v.value.grad for v in variables], variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "rows": len(x)}


def test_a_model_is_sent_with_everything_in_it(strategy: Any) -> None:
    """Lambdas, adapted layers, torch modules, metrics and losses of the program; changes between epochs."""
    factor = 3.0

    def own() -> Any:
        model = Adversaries(lambda x: factor * x)
        model.compile()
        return model

    def use(model: Any) -> Any:
        return [fit(model), [int(optimizer.iterations) for optimizer in model.optimizers]]

    compare(strategy, own, use)

    def with_lambdas() -> Any:
        x = keras.Input((6,))
        y = keras.layers.Lambda(lambda t: t * factor)(keras.ops.relu(x))
        model = keras.Model(x, keras.layers.Dense(2)(y))

        def loss(y_true: Any, y_pred: Any) -> Any:
            return factor * keras.losses.sparse_categorical_crossentropy(y_true, y_pred, True)

        model.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss, metrics=[Hits()])
        return model

    def change(model: Any) -> Any:
        layer = next(layer for layer in model.layers if isinstance(layer, keras.layers.Lambda))

        def double(epoch: int, logs: Any) -> None:
            layer.function = lambda t: t * 2 * epoch

        return fit(model, callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=double)])

    compare(strategy, with_lambdas, change)


def test_an_optimizer_without_variables_is_refused(strategy: Any) -> None:
    with strategy.scope():
        model = dense(optimizer=None)
        model.other = keras.optimizers.Adam()
    with pytest.raises(sg.errors.UnsupportedOptimizer, match=r"optimizer\.build\(variables\)"):
        fit(model)


def test_an_attribute_that_cannot_be_sent_is_named(strategy: Any) -> None:
    with strategy.scope():
        model = dense()
        model.layers[0].lock = threading.Lock()
    with pytest.raises(TypeError, match="attribute 'lock' of Dense 'dense"):
        fit(model)


def deepest() -> Any:
    x = y = keras.Input((6,))
    for _ in range(400):
        y = y + 0.0
    model = keras.Model(x, keras.layers.Dense(2)(y))
    model.compile(optimizer="sgd", **classifier())
    return model


def test_a_model_of_many_layers_is_sent(strategy: Any) -> None:
    compare(strategy, deepest, lambda model: model.evaluate(X, Y, verbose=0))


def embeddings() -> Any:
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(1000, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adagrad(0.1, global_clipnorm=0.5), **classifier())
    return model


IDS = (np.arange(3 * len(X)).reshape(-1, 3) * 37 % 1000).astype("int32")


def use_embeddings(model: Any) -> Any:
    history = model.fit(IDS, Y, batch_size=16, epochs=2, verbose=0).history
    return [history, model.predict(IDS, verbose=0)]


def test_rows_of_embeddings_are_looked_up_and_updated(cluster: Any) -> None:
    """In two shards. The servers run torch's Adagrad on the rows in use: 1e-6 relative."""
    partitioner = sg.partitioners.FixedShardsPartitioner(2)
    with sg.ParameterServerStrategy(cluster.resolver, partitioner) as strategy:
        model = compare(strategy, embeddings, use_embeddings)
        on_servers = model.optimizer._stratagem_on_servers.on_servers
        assert isinstance(on_servers, torch.optim.Adagrad)


# ------------------------------------------------------------------ callbacks


def callbacks(folder: Path) -> list[Any]:
    return [
        keras.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1.0),
        keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.9),
        keras.callbacks.CSVLogger(str(folder / "log.csv")),
        keras.callbacks.ModelCheckpoint(str(folder / "best.keras"), save_best_only=True),
        keras.callbacks.BackupAndRestore(str(folder / "backup")),
    ]


def test_callbacks_of_epochs_see_the_numbers_of_plain_keras(strategy: Any, tmp_path: Path) -> None:
    """Files that ModelCheckpoint writes on the coordinator have the servers' values, and load in plain Keras."""

    def use(model: Any) -> Any:
        folder = tmp_path / str(id(model))
        folder.mkdir()
        history = fit(model, epochs=4, validation_split=0.2, callbacks=callbacks(folder))
        saved = keras.models.load_model(folder / "best.keras")
        state = [variable.numpy() for variable in saved.optimizer.variables]
        return [history, saved.get_weights(), state, (folder / "log.csv").read_text().count("\n")]

    compare(strategy, lambda: dense(optimizer=keras.optimizers.Adam(0.05)), use)


def test_averages_on_the_servers_are_swapped_for_evaluation(strategy: Any) -> None:
    """A callback that reads and writes the variables of the optimizer between epochs."""

    def use(model: Any) -> Any:
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        return [
            fit(model, callbacks=[swap], validation_split=0.2),
            [variable.numpy() for variable in model.optimizer.variables],
        ]

    compare(
        strategy,
        lambda: dense(optimizer=keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.5)),
        use,
    )


def test_training_continues_from_a_backup(strategy: Any, tmp_path: Path) -> None:
    """KER-7: a fit that failed resumes at the next epoch, with the weights and the optimizer's state.

    The servers write the backups, which are gone after a fit that succeeds.
    """

    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise OSError("no power")

    def adam() -> Any:
        return dense(optimizer=keras.optimizers.Adam(0.05))

    def use(model: Any) -> Any:
        folder = tmp_path / str(id(model))
        backup = keras.callbacks.BackupAndRestore(str(folder))
        with pytest.raises(OSError, match="no power"):
            fit(model, epochs=4, callbacks=[backup, Fail()], shuffle=False)
        is_remote = hasattr(model, "_stratagem_strategy")
        assert bool(list(folder.glob("servers/*/*"))) == is_remote
        with strategy.scope() if is_remote else torch.enable_grad():
            resumed = adam()
        backup = keras.callbacks.BackupAndRestore(str(folder), save_freq=3, double_checkpoint=True)
        history = fit(resumed, epochs=4, callbacks=[backup], shuffle=False)
        assert len(history["loss"]) == 2
        assert not folder.exists()
        state = [variable.numpy() for variable in resumed.optimizer.variables]
        return [history, resumed.get_weights(), state]

    compare(strategy, adam, use)


def test_a_backup_of_plain_keras_continues_on_servers(strategy: Any, tmp_path: Path) -> None:
    plain = dense(optimizer=keras.optimizers.Adam(0.05))
    backup = keras.callbacks.BackupAndRestore(str(tmp_path), delete_checkpoint=False)
    fit(plain, epochs=2, callbacks=[backup], shuffle=False)
    with strategy.scope():
        model = dense(optimizer=keras.optimizers.Adam(0.05))
    history = fit(model, epochs=3, callbacks=[backup], shuffle=False)
    assert_close(history["loss"], fit(plain, epochs=1, shuffle=False)["loss"])


def test_callbacks_of_batches_get_the_values_of_finished_steps(strategy: Any) -> None:
    class Record(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.batches: list[int] = []
            self.counts: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches.append(batch)
            self.counts.append(float(self.model._loss_tracker.count))
            assert np.isfinite(float(logs["loss"]))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            assert float(self.model._loss_tracker.count) == len(X)

    record = Record()
    with strategy.scope():
        model = dense()
    fit(model, callbacks=[record], batch_size=5, epochs=1)
    assert record.batches == list(range(10))
    assert record.counts == sorted(record.counts)
    assert record.counts[0] > 0


# ------------------------------------------------------------------ values


def test_weights_on_the_coordinator_are_current_and_may_be_set(strategy: Any) -> None:
    with strategy.scope():
        model = dense()
    before = model.get_weights()
    fit(model)
    trained = model.get_weights()
    assert not np.array_equal(before[0], trained[0])
    model.set_weights(before)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    assert model.evaluate(X, Y, verbose=0) == model.evaluate(X, Y, verbose=0)
    plain = dense()
    plain.set_weights(before)
    np.testing.assert_allclose(
        model.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(model(X)), plain.predict(X, verbose=0), rtol=1e-5, atol=1e-6
    )


def test_a_model_compiled_again_trains_with_the_new_optimizer(strategy: Any) -> None:
    def use(model: Any) -> Any:
        fit(model)
        model.layers[0].trainable = False
        model.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse", metrics=["mae"])
        return model.fit(X, X[:, :2], batch_size=16, verbose=0).history

    compare(strategy, dense, use)


def test_a_new_optimizer_alone_reaches_the_workers(strategy: Any) -> None:
    """Nothing else of the model changes."""

    def use(model: Any) -> Any:
        histories = []
        for rate in (0.001, 0.1):
            model.compile(optimizer=keras.optimizers.Adam(rate), **classifier())
            histories.append(fit(model))
        return histories

    compare(strategy, dense, use)


# ------------------------------------------------------------------ refused by name


def refused(strategy: Any, error: Any, words: str, **compile_arguments: Any) -> None:
    with strategy.scope():
        model = dense(**compile_arguments)
    with pytest.raises(error, match=words):
        fit(model)


def test_optimizers_that_servers_cannot_run_raise_with_a_remedy(
    cluster: Any, strategy: Any
) -> None:
    optimizers = keras.optimizers
    unsupported = sg.errors.UnsupportedOptimizer

    class Own(optimizers.SGD):
        """An optimizer of the program."""

    refused(strategy, unsupported, "Own is an optimizer of the program", optimizer=Own(0.1))
    wrapped = optimizers.LossScaleOptimizer(optimizers.Adam())
    refused(strategy, unsupported, "LossScaleOptimizer .*mixed_bfloat16", optimizer=wrapped)
    several = optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(), {}))
    refused(strategy, unsupported, "MultiOptimizer .*train_step of your own", optimizer=several)
    refused(strategy, unsupported, "schedules", optimizer=optimizers.SGD(lambda: 0.1))
    refused(
        strategy,
        unsupported,
        "one of the two",
        optimizer=optimizers.SGD(0.1, clipnorm=1.0, gradient_accumulation_steps=2),
    )

    class Largest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.largest = self.add_variable((), "zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(y_pred)))

        def result(self) -> Any:
            return self.largest

    refused(strategy, TypeError, "not a sum over rows", metrics=[Largest()])
    with strategy.scope():
        model = dense()
    with pytest.raises(ValueError, match="needs steps_per_epoch"):
        model.fit(lambda: None, verbose=0)
    with strategy.scope():
        model = keras.Sequential([keras.layers.SpectralNormalization(keras.layers.Dense(2))])
        model.compile(optimizer="sgd", **classifier())
    with pytest.raises(NotImplementedError, match="is a SpectralNormalization"):
        fit(model)
    devices = ["cpu:0", "cpu:1"]
    with sg.ParameterServerStrategy(cluster.resolver, worker_devices=devices) as wide:
        refused(wide, NotImplementedError, "Start more workers")
    with sg.ParameterServerStrategy(cluster.resolver, staleness=0) as synchronous:
        refused(synchronous, NotImplementedError, "staleness=1 or more")


def test_a_keras_model_in_a_scheduled_function_is_refused(strategy: Any) -> None:
    """A worker would train a private copy."""
    with strategy.scope():
        model = dense()
    coordinator = sg.ClusterCoordinator(strategy)
    with pytest.raises(sg.errors.ForeignParameterError, match="private copy"):
        coordinator.schedule(lambda: model(X))


def test_an_error_of_a_step_is_raised_and_the_model_stays_usable(strategy: Any) -> None:
    with strategy.scope():
        model = dense()
    with pytest.raises(Exception, match=r"shape|size|dimension"):
        model.fit(X[:, :3], Y, batch_size=16, verbose=0)
    fit(model)
    assert model.predict(X, verbose=0).shape == (len(X), 2)


def test_workers_share_one_dataset_row_by_row(strategy: Any) -> None:
    """Every row is trained and evaluated once in each epoch; one worker reads them in order."""
    tensors = torch.from_numpy(X), torch.from_numpy(Y)

    def share(per_closure: int) -> Any:
        coordinator = sg.ClusterCoordinator(strategy)
        dataset = sg.data.Dataset.from_tensor_slices(tensors).batch(16)
        repeated = dataset.repeat() if per_closure > 1 else dataset
        return coordinator.create_shared_dataset(repeated, per_closure=per_closure)

    def use(model: Any) -> Any:
        if not hasattr(model, "_stratagem_strategy"):
            return fit(model, shuffle=False, validation_data=(X, Y), validation_batch_size=16)
        data = share(2)
        history = model.fit(data, epochs=2, verbose=0, validation_data=share(1)).history
        assert data.ledger.rows_trained == 2 * len(X)
        assert not data.ledger.lost
        with pytest.raises(ValueError, match="no fixed order"):
            model.predict(data, verbose=0)
        with pytest.raises(ValueError, match="sample_weight"):
            model.fit(data, Y, verbose=0)
        return history

    compare(strategy, dense, use)


# ------------------------------------------------------------------ several workers, in processes


@pytest.fixture(scope="module")
def processes() -> Iterator[Any]:
    with sg.LocalCluster(workers=2, ps=2) as made:
        yield made


def batches(context: sg.InputContext) -> Any:
    """Return the dataset of one worker, without end."""
    tensors = torch.from_numpy(X), torch.from_numpy(Y)
    dataset = sg.data.Dataset.from_tensor_slices(tensors).shuffle(
        50, seed=context.input_pipeline_id
    )
    return dataset.repeat().batch(10)


def workers_lost() -> int:
    return int(sg.metrics.snapshot().counters.get("coordinator.workers_lost", 0))


@pytest.mark.slow
def test_two_workers_train_evaluate_and_predict_every_row(processes: Any) -> None:
    """Also after a worker was killed in the middle of an epoch (KER-20 … KER-24)."""

    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (self.epoch, batch) == (1, 20):
                processes.kill_worker(0)

    before = workers_lost()
    with sg.ParameterServerStrategy(processes.resolver) as strategy:
        with strategy.scope():
            model = dense(optimizer=keras.optimizers.Adam(0.02))
        history = model.fit(
            batches,
            steps_per_epoch=60,
            epochs=3,
            verbose=0,
            callbacks=[Kill()],
            validation_data=(X, Y),
        ).history
        assert history["loss"][-1] < history["loss"][0]
        assert int(model.optimizer.iterations) == 180
        assert workers_lost() > before
        plain = dense()
        plain.set_weights(model.get_weights())
        found = model.evaluate(X, Y, batch_size=3, verbose=0)
        assert float(model._loss_tracker.count) == len(X)
        np.testing.assert_allclose(found, plain.evaluate(X, Y, batch_size=3, verbose=0), rtol=1e-5)
        np.testing.assert_allclose(history["val_loss"][-1], found[0], rtol=1e-5)
        np.testing.assert_allclose(
            model.predict(X, batch_size=3, verbose=0),
            plain.predict(X, verbose=0),
            rtol=1e-5,
            atol=1e-6,
        )


def clicks(context: sg.InputContext) -> Any:
    """Return the dataset of one worker for `embeddings`, without end."""
    rows_of = torch.from_numpy(IDS), torch.from_numpy(Y)
    dataset = sg.data.Dataset.from_tensor_slices(rows_of).shuffle(
        50, seed=context.input_pipeline_id
    )
    return dataset.repeat().batch(10)


@pytest.mark.slow
def test_a_click_model_survives_a_killed_worker_and_a_killed_server(
    processes: Any, tmp_path: Path
) -> None:
    """As in plain training with a CheckpointManager: fit goes on, and the server has the values of the backup."""

    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (self.epoch, batch) == (0, 5):
                processes.kill_worker(0)
            if (self.epoch, batch) == (1, 5):
                processes.kill_ps(1)

    before = workers_lost()
    partitioner = sg.partitioners.FixedShardsPartitioner(2)
    with sg.ParameterServerStrategy(processes.resolver, partitioner) as strategy:
        with strategy.scope():
            model = embeddings()
        backup = keras.callbacks.BackupAndRestore(str(tmp_path))
        history = model.fit(
            clicks, steps_per_epoch=20, epochs=3, verbose=0, callbacks=[backup, Kill()]
        ).history
        assert len(history["loss"]) == 3
        assert history["loss"][-1] < history["loss"][0]
        assert workers_lost() > before
        assert len(sg.ClusterCoordinator.of(strategy).recoveries) == 1
        assert int(model.optimizer.iterations) == 60
        plain = embeddings()
        plain.set_weights(model.get_weights())
        np.testing.assert_allclose(
            model.evaluate(IDS, Y, batch_size=7, verbose=0),
            plain.evaluate(IDS, Y, batch_size=7, verbose=0),
            rtol=1e-5,
        )
