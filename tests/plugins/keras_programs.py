"""Keras programs as their authors write them: each builds models under a scope, trains them, and returns numbers.

``scope`` is ``strategy.scope``, or a context manager that does nothing for plain Keras.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch

Scope = Callable[[], AbstractContextManager[Any]]

ROWS = 50


def numbers(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return normal numbers, always the same."""
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def labels(classes: int, seed: int = 1) -> np.ndarray:
    """Return random classes, always the same."""
    return np.random.default_rng(seed).integers(0, classes, ROWS)


def logits_loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def wide_and_deep(scope: Scope) -> Any:
    """A functional model with two inputs of different kinds, and one shared layer."""
    numeric, items = numbers((ROWS, 5)), labels(20)[:, None]
    with scope():
        normalize = keras.layers.Normalization()
        normalize.adapt(numeric)
        a = keras.Input((5,), name="numeric")
        b = keras.Input((1,), dtype="int32", name="item")
        deep = keras.layers.Flatten()(keras.layers.Embedding(20, 4)(b))
        wide = keras.layers.Flatten()(keras.layers.CategoryEncoding(20, "one_hot")(b))
        shared = keras.layers.Dense(4, activation="relu")
        joined = keras.layers.Concatenate()([shared(normalize(a)[:, :4]), shared(deep), wide])
        model = keras.Model([a, b], keras.layers.Dense(1, activation="sigmoid")(joined))
        model.compile(
            "adam", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")]
        )
    x = {"numeric": numeric, "item": items}
    history = model.fit(x, labels(2), batch_size=16, epochs=2, verbose=0, validation_split=0.2)
    return [history.history, model.predict(x, verbose=0), model.get_weights()]


class Autoencoder(keras.Model):
    """The custom ``train_step`` of Keras' guide for torch, with its own trackers and no ``compile`` losses."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.layers.Dense(3, activation="tanh")])
        self.decoder = keras.Sequential([keras.layers.Dense(6)])
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")

    def call(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.zero_grad()
        found = self(x, training=True)
        loss = keras.losses.mean_squared_error(y, found).mean()
        loss.backward()
        weights = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        self.loss_tracker.update_state(loss)
        self.error.update_state(y, found)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> Any:
        x, y = data
        self.error.update_state(y, self(x, training=False))
        return {"mae": self.error.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker, self.error]


def autoencoder(scope: Scope) -> Any:
    """A subclassed model with steps of its own."""
    x = numbers((48, 6))  # the mean of the batches' losses is Keras' own, so all batches are equal
    with scope():
        model = Autoencoder()
        model.compile(optimizer=keras.optimizers.RMSprop(0.01))
    history = model.fit(x, x, batch_size=16, epochs=2, verbose=0, validation_data=(x[:9], x[:9]))
    return [history.history, model.evaluate(x, x, verbose=0), model.predict(x, verbose=0)]


def transfer_learning(scope: Scope) -> Any:
    """A model from a file, frozen, under a new head; then unfrozen and fine-tuned."""
    images = numbers((ROWS, 8, 8, 1))
    keras.utils.set_random_seed(3)
    base = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.GlobalAveragePooling2D(),
        ],
        name="base",
    )
    results: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base.keras"
        base.save(path)
        with scope():
            loaded = keras.saving.load_model(path)
            loaded.trainable = False
            x = keras.Input((8, 8, 1))
            model = keras.Model(x, keras.layers.Dense(2)(loaded(x, training=False)))
            model.compile(keras.optimizers.Adam(0.01), logits_loss(), metrics=["accuracy"])
        results.append(model.fit(images, labels(2), batch_size=16, epochs=2, verbose=0).history)
        frozen = [weight.numpy() for weight in loaded.weights]
        loaded.trainable = True
        model.compile(keras.optimizers.Adam(0.001), logits_loss(), metrics=["accuracy"])
        results.append(model.fit(images, labels(2), batch_size=16, epochs=2, verbose=0).history)
        model.save(path)
        results.append(keras.saving.load_model(path).predict(images, verbose=0))
    return [results, frozen, model.get_weights()]


def convolutions(scope: Scope, rate: float = 0.0) -> Any:
    """Batch normalization and dropout; augmentation of the input data."""
    images = numbers((ROWS, 8, 8, 3))
    with scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                keras.layers.Rescaling(0.5),
                keras.layers.Conv2D(4, 3, padding="same", use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
                keras.layers.MaxPooling2D(),
                keras.layers.SpatialDropout2D(rate, seed=1),
                keras.layers.DepthwiseConv2D(3),
                keras.layers.GroupNormalization(2),
                keras.layers.Flatten(),
                keras.layers.Dropout(rate, seed=2),
                keras.layers.Dense(3, kernel_regularizer="l2"),
            ]
        )
        model.compile(
            keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10), momentum=0.9),
            logits_loss(),
            metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top 2")],
        )
    weights = {0: 1.0, 1: 2.0, 2: 0.5}
    y = labels(3)
    history = model.fit(images, y, batch_size=16, epochs=2, verbose=0, class_weight=weights)
    return [history.history, model.evaluate(images, y, verbose=0), model.get_weights()]


def text_classifier(scope: Scope) -> Any:
    """A bidirectional LSTM over padded sequences, with masks."""
    ids = np.random.default_rng(0).integers(1, 30, (ROWS, 7)).astype("int32")
    for row, length in enumerate(np.random.default_rng(1).integers(2, 8, ROWS)):
        ids[row, length:] = 0
    with scope():
        model = keras.Sequential(
            [
                keras.Input((7,), dtype="int32"),
                keras.layers.Embedding(30, 6, mask_zero=True),
                keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True)),
                keras.layers.LSTM(3),
                keras.layers.Dense(1, activation="sigmoid"),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.01, clipnorm=1.0), "binary_crossentropy", metrics=["accuracy"]
        )
    y = labels(2)[:, None]
    history = model.fit(ids, y, batch_size=16, epochs=2, verbose=0, validation_split=0.2)
    return [history.history, model.predict(ids, verbose=0), model.get_weights()]


class Gan(keras.Model):
    """A generator and a discriminator, each with its own optimizer; random input in ``train_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(6)])
        self.discriminator = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8),
                keras.layers.LeakyReLU(),
                keras.layers.Dense(1),
            ]
        )
        self.seeds = keras.random.SeedGenerator(5)
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.built = True

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        d_optimizer.build(self.discriminator.trainable_variables)
        g_optimizer.build(self.generator.trainable_variables)

    def call(self, x: Any) -> Any:
        return self.generator(x)

    def train_step(self, real: Any) -> Any:
        real = real[0] if isinstance(real, (tuple, list)) else real
        count = real.shape[0]
        latent = keras.random.normal((count, 3), seed=self.seeds)
        both = torch.cat([self.generator(latent), torch.as_tensor(real)])
        truth = torch.cat([torch.ones(count, 1), torch.zeros(count, 1)])
        self.zero_grad()
        d_loss = self.loss_fn(truth, self.discriminator(both))
        d_loss.backward()
        weights = self.discriminator.trainable_variables
        with torch.no_grad():
            self.d_optimizer.apply([weight.value.grad for weight in weights], weights)
        latent = keras.random.normal((count, 3), seed=self.seeds)
        self.zero_grad()
        g_loss = self.loss_fn(torch.zeros(count, 1), self.discriminator(self.generator(latent)))
        g_loss.backward()
        weights = self.generator.trainable_variables
        with torch.no_grad():
            self.g_optimizer.apply([weight.value.grad for weight in weights], weights)
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


def gan(scope: Scope) -> Any:
    """Two optimizers, no ``get_config``."""
    with scope():
        model = Gan()
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02, beta_1=0.5))
    history = model.fit(numbers((48, 6)), batch_size=16, epochs=2, verbose=0, shuffle=False)
    return [history.history, model.get_weights(), model.predict(numbers((5, 3)), verbose=0)]


class Pieces(keras.utils.PyDataset):
    """Batches by number, in another order in each epoch, with weights of their rows."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.epoch = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        rows = np.roll(np.arange(ROWS), self.epoch)[16 * index : 16 * (index + 1)]
        return numbers((ROWS, 6))[rows], labels(2)[rows], np.linspace(0, 2, ROWS)[rows]

    def on_epoch_end(self) -> None:
        self.epoch += 1


def pieces(scope: Scope) -> Any:
    """A PyDataset that threads read, with sample weights and weighted metrics."""
    with scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(2)])
        model.compile("nadam", logits_loss(), weighted_metrics=["accuracy"])
    data = Pieces(workers=2, max_queue_size=4)
    history = model.fit(data, epochs=3, verbose=0, shuffle=False)
    return [history.history, model.evaluate(Pieces(), verbose=0), model.get_weights()]


class Distiller(keras.Model):
    """A student that learns from a frozen teacher, by ``compute_loss``."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        self.teacher.trainable = False
        self.student = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])

    def call(self, x: Any) -> Any:
        return self.student(x)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        hard = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
        softened = [keras.ops.softmax(each / 3) for each in (self.teacher(x), y_pred)]
        return hard + keras.ops.mean(keras.losses.kl_divergence(*softened))


def distillation(scope: Scope) -> Any:
    """A loss of one's own that calls another model."""
    with scope():
        model = Distiller()
        model.compile(keras.optimizers.AdamW(0.01), logits_loss(), metrics=["accuracy"])
    x, y = numbers((ROWS, 6)), labels(3)
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, validation_data=(x, y))
    return [history.history, model.get_weights()]


class Positions(keras.layers.Layer):
    """Adds a trained vector for each position."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="uniform")

    def call(self, x: Any) -> Any:
        return x + self.table


class Block(keras.layers.Layer):
    """A Transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 3)
        self.first, self.second = (
            keras.layers.LayerNormalization(),
            keras.layers.LayerNormalization(),
        )
        self.mlp = keras.Sequential([keras.layers.Dense(8, "gelu"), keras.layers.Dense(6)])

    def call(self, x: Any) -> Any:
        x = self.first(x + self.attention(x, x, use_causal_mask=True))
        return self.second(x + self.mlp(x))


def transformer(scope: Scope) -> Any:
    """Attention with a layer class of the program, trained batch by batch."""
    ids = np.random.default_rng(0).integers(0, 20, (ROWS, 6))
    with scope():
        tokens = keras.Input((6,), dtype="int64")
        x = Positions()(keras.layers.Embedding(20, 6)(tokens))
        model = keras.Model(tokens, keras.layers.Dense(20)(Block()(Block()(x))))
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), logits_loss(), metrics=["accuracy"])
    results = []
    for _ in range(2):
        for first in range(0, ROWS, 16):
            part = ids[first : first + 16]
            results.append(model.train_on_batch(part, np.roll(part, -1, 1), return_dict=True))
        model.reset_metrics()
    return [results, model.predict(ids, verbose=0), model.get_weights()]


PROGRAMS: dict[str, Callable[[Scope], Any]] = {
    "wide and deep": wide_and_deep,
    "autoencoder": autoencoder,
    "transfer learning": transfer_learning,
    "convolutions": convolutions,
    "text classifier": text_classifier,
    "GAN": gan,
    "PyDataset": pieces,
    "distillation": distillation,
    "transformer": transformer,
}
