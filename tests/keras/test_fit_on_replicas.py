"""`fit`, `evaluate` and `predict` of Keras models give the numbers of plain Keras under every strategy of one machine."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras_inputs import INPUTS, X, Y, dataset, fit, loader
from keras_models import STRATEGIES, classifier, compare, dense

import stratagem as sg
from stratagem._keras.model_strategies import strategy_of

# The whole matrix is left to the long tests: the strategies differ in their devices only.
ALL = [
    name if name == "mirrored" else pytest.param(name, marks=pytest.mark.soak)
    for name in STRATEGIES
]


@pytest.fixture(params=ALL)
def strategy(request: pytest.FixtureRequest) -> sg.Strategy:
    return STRATEGIES[request.param]()


# ------------------------------------------------------------------ inputs


@pytest.mark.parametrize("kind", INPUTS)
def test_every_input_gives_the_numbers_of_plain_keras(strategy: sg.Strategy, kind: str) -> None:
    """KER-2, KER-4: also for the last batch, which has fewer rows than there are replicas."""
    compare(lambda: dense(weighted_metrics=["accuracy"]), INPUTS[kind], strategy, kind)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_dataset_of_ours_is_read_once_per_epoch(kind: str) -> None:
    strategy = STRATEGIES[kind]()

    def use(model: Any) -> Any:
        if strategy_of(model) is None:
            return fit(model, loader(), None, shuffle=False, validation_data=loader())
        return fit(model, dataset(), None, validation_data=dataset())

    compare(dense, use, strategy, "dataset of ours")


# ------------------------------------------------------------------ models


def functional(**settings: Any) -> Any:
    """Two inputs, two outputs, regularizers, batch normalization."""
    wide, deep = keras.Input((4,), name="wide"), keras.Input((2,), name="deep")
    hidden = keras.layers.Dense(
        8, use_bias=False, kernel_regularizer="l2", activity_regularizer=keras.regularizers.L1(0.01)
    )(deep)
    hidden = keras.layers.BatchNormalization()(hidden)
    joined = keras.layers.Concatenate()([wide, keras.layers.Activation("relu")(hidden)])
    model = keras.Model(
        {"wide": wide, "deep": deep},
        {
            "a": keras.layers.Dense(2, name="a")(joined),
            "b": keras.layers.Dense(1, name="b")(joined),
        },
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.01, **settings),
        loss={
            "a": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "b": keras.losses.Huber(reduction="sum"),
        },
        loss_weights={"a": 1.0, "b": 0.3},
        metrics={"a": ["accuracy"], "b": ["mae", keras.metrics.RootMeanSquaredError()]},
    )
    return model


def use_functional(model: Any) -> Any:
    x = {"wide": X[:, :4], "deep": X[:, 4:]}
    y = {"a": Y, "b": X[:, :1]}
    return [fit(model, x, y, validation_split=0.2), model.predict(x, verbose=0)]


class Residual(keras.Model):
    """A subclassed model, built at its first call, that adds a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(6, activation="tanh")
        self.norm = keras.layers.BatchNormalization()
        self.last = keras.layers.Dense(2)

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.norm(x + self.first(x), training=training)
        self.add_loss(keras.ops.mean(keras.ops.square(hidden)) * 0.1)
        return self.last(hidden)


class OwnStep(Residual):
    """A subclassed model with its own training step."""

    def train_step(self, data: Any) -> Any:
        x, y = data[0], data[1]
        self.zero_grad()
        y_pred = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=y_pred) + 0.01 * keras.ops.mean(y_pred**2)
        loss.backward()
        variables = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in variables], variables)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def compiled(model: Any) -> Any:
    model.compile(optimizer=keras.optimizers.RMSprop(0.01), **classifier())
    return model


def recurrent() -> Any:
    """Masks of padded sequences reach the loss and the normalization."""
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(9, 4, mask_zero=True),
            keras.layers.BatchNormalization(),
            keras.layers.GRU(3, return_sequences=True),
            keras.layers.Dense(9),
        ]
    )
    return compiled(model)


def use_recurrent(model: Any) -> Any:
    ids = (np.arange(5 * len(X)).reshape(-1, 5) * 7 % 9).astype("int32")
    return [fit(model, ids, (ids + 1) % 9), model.evaluate(ids, (ids + 1) % 9, verbose=0)]


def convolutional() -> Any:
    model = keras.Sequential(
        [
            keras.Input((6, 1)),
            keras.layers.Conv1D(4, 3, activation="relu"),
            keras.layers.BatchNormalization(axis=-1, momentum=0.7),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(2),
        ]
    )
    return compiled(model)


def with_torch_modules() -> Any:
    """The parameters of a torch module, and a trained weight that its layer assigns in every call."""
    return compiled(
        keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.TorchModuleWrapper(torch.nn.Linear(6, 4)),
                keras.layers.SpectralNormalization(keras.layers.Dense(4)),
                keras.layers.Dense(2),
            ]
        )
    )


def recomputed() -> Any:
    """Activations are computed again in the backward pass. It draws no random numbers: shuffling is as in plain Keras."""
    with keras.RematScope(mode="full"):
        return dense()


MODELS: dict[str, Any] = {
    "torch modules": (with_torch_modules, lambda model: fit(model)),
    "recomputed": (recomputed, fit),
    "functional": (functional, use_functional),
    "subclassed": (lambda: compiled(Residual()), lambda model: fit(model)),
    "own train_step": (lambda: compiled(OwnStep()), lambda model: fit(model)),
    "recurrent with masks": (recurrent, use_recurrent),
    "convolutional": (convolutional, lambda model: fit(model, X[..., None])),
    "predict builds it": (
        lambda: Residual(),
        lambda model: model.predict(X, batch_size=16, verbose=0),
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_gives_the_numbers_of_plain_keras(
    strategy: sg.Strategy, kind: str
) -> None:
    build, use = MODELS[kind]
    compare(build, use, strategy, kind)


# ------------------------------------------------------------------ settings

SETTINGS: dict[str, Any] = {
    "clipnorm": lambda: {"clipnorm": 0.1},
    "clipvalue": lambda: {"clipvalue": 0.01},
    "global_clipnorm": lambda: {"global_clipnorm": 0.1},
    "EMA": lambda: {"use_ema": True, "ema_momentum": 0.9},
    "EMA overwrites": lambda: {"use_ema": True, "ema_overwrite_frequency": 3},
    "gradient accumulation": lambda: {"gradient_accumulation_steps": 3},
    "weight decay": lambda: {"weight_decay": 0.1},
    "schedule": lambda: {
        "learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True)
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_of_an_optimizer_applies_to_the_whole_batch(
    strategy: sg.Strategy, setting: str
) -> None:
    """KER-6: clipping, in particular, sees the gradient of the whole batch."""
    compare(
        lambda: dense(
            optimizer=keras.optimizers.SGD(
                **{"learning_rate": 0.1, "momentum": 0.9, **SETTINGS[setting]()}
            )
        ),
        fit,
        strategy,
        setting,
    )


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_policies_train(strategy: sg.Strategy, policy: str) -> None:
    """With float16, ``compile`` scales the loss. Half precision differs with the shape of a product: 1e-2 here."""

    def build() -> Any:
        with_policy = {"dtype": policy}
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh", **with_policy),
                keras.layers.Dense(2, **with_policy),
            ]
        )
        model.dtype_policy = keras.DTypePolicy(policy)
        model.compile(optimizer=keras.optimizers.Adam(0.01), **classifier())
        assert ("LossScale" in type(model.optimizer).__name__) == (policy == "mixed_float16")
        return model

    keras.utils.set_random_seed(7)
    plain = build()
    expected = fit(plain)
    with strategy:
        keras.utils.set_random_seed(7)
        with strategy.scope():
            model = build()
        history = fit(model)
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-2)
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-2)


def test_callbacks_of_every_level_see_the_numbers_of_plain_keras(
    strategy: sg.Strategy, tmp_path: Any
) -> None:
    class Record(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen.append([batch, float(logs["loss"])])

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen.append([batch, float(logs["loss"])])

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.seen.append([epoch, *(float(value) for value in logs.values())])

    def use(model: Any) -> Any:
        record = Record()
        callbacks = [
            record,
            keras.callbacks.EarlyStopping("val_loss", patience=0, min_delta=0.05),
            keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1.0),
            keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.5),
            keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
            keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), save_best_only=True),
            keras.callbacks.BackupAndRestore(str(tmp_path / "backup")),
        ]
        history = model.fit(
            X, Y, batch_size=16, epochs=6, verbose=0, validation_split=0.2, callbacks=callbacks
        ).history
        return [
            record.seen,
            history,
            keras.models.load_model(tmp_path / "best.keras").get_weights(),
        ]

    compare(dense, use, strategy, "callbacks")


class Counter(keras.layers.Layer):
    """Keeps a total over all rows, and the mean of the last batch."""

    def build(self, shape: Any) -> None:
        self.total = self.add_weight(initializer="zeros", trainable=False, aggregation="sum")
        self.mean = self.add_weight(initializer="zeros", trainable=False, aggregation="mean")
        self.calls = self.add_weight(
            initializer="zeros", dtype="int32", trainable=False, aggregation="only_first_replica"
        )

    def call(self, x: Any) -> Any:
        self.total.assign_add(keras.ops.sum(x))
        self.mean.assign(keras.ops.mean(x))
        self.calls.assign_add(1)
        return x


def test_weights_that_a_layer_assigns_are_combined_as_they_say(strategy: sg.Strategy) -> None:
    def build() -> Any:
        model = keras.Sequential([keras.Input((6,)), Counter(), keras.layers.Dense(2)])
        return compiled(model)

    compare(build, fit, strategy)


def test_dropout_gives_every_replica_its_own_mask_and_repeats_with_the_seed(
    strategy: sg.Strategy,
) -> None:
    """Random masks differ from those of one device; docs/keras.md lists them."""

    ones = np.ones((6, 6), "float32")

    def outputs() -> Any:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5, seed=5)])
            model.compile(loss="mse", optimizer="sgd")

        model.train_step = lambda data: {"kept": model(data[0], training=True)}
        return model.train_on_batch(ones, ones, return_dict=True)["kept"]

    with strategy:
        first = np.array(outputs())
        assert len({row.tobytes() for row in first}) > 1
        np.testing.assert_array_equal(first, np.array(outputs()))
