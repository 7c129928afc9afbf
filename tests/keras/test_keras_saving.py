"""Files that Keras writes under a strategy load in plain Keras, and the other way round (KER-8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from keras_models import dense, rows

import stratagem as sg

X, Y = rows()


def train(model: Any) -> Any:
    model.fit(X, Y, batch_size=16, verbose=0, shuffle=False)
    return model


def assert_same(one: Any, other: Any) -> None:
    """Compare weights, optimizer state and predictions, then one more epoch."""
    for _ in range(2):
        for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        for a, b in zip(one.optimizer.variables, other.optimizer.variables, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            one.predict(X, verbose=0), other.predict(X, verbose=0), rtol=1e-5, atol=1e-6
        )
        train(one), train(other)


def adam() -> Any:
    model = dense(optimizer=keras.optimizers.Adam(0.01))
    model.optimizer.build(model.trainable_variables)
    return model


def test_a_model_saved_under_a_strategy_loads_in_plain_keras(
    strategy: sg.Strategy, tmp_path: Path
) -> None:
    with strategy.scope():
        model = adam()
    train(model).save(tmp_path / "model.keras")
    assert_same(keras.models.load_model(tmp_path / "model.keras"), model)


def test_a_model_saved_by_plain_keras_loads_under_a_strategy(
    strategy: sg.Strategy, tmp_path: Path
) -> None:
    """The loaded model belongs to the strategy: one more epoch runs on its replicas."""
    model = train(adam())
    model.save(tmp_path / "model.keras")
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_same(loaded, model)


def test_weights_go_both_ways(strategy: sg.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        model = adam()
    train(model).save_weights(tmp_path / "a.weights.h5")
    plain = adam()
    plain.load_weights(tmp_path / "a.weights.h5")
    np.testing.assert_array_equal(plain.get_weights()[0], model.get_weights()[0])
    train(plain).save_weights(tmp_path / "b.weights.h5")
    with strategy.scope():
        other = adam()
    other.load_weights(tmp_path / "b.weights.h5")
    np.testing.assert_array_equal(other.get_weights()[0], plain.get_weights()[0])


def test_an_exported_model_computes_the_same(strategy: sg.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        model = adam()
    train(model).export(tmp_path / "model.pt2", format="torch", verbose=False)
    exported = torch.export.load(tmp_path / "model.pt2").module()
    np.testing.assert_allclose(  # Keras exports for batches of one row
        exported(torch.from_numpy(X[:1])).detach().numpy(),
        model.predict(X[:1], verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )
