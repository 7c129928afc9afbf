"""``keras.callbacks.TensorBoard`` under strategies writes its files without TensorFlow."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
from keras_inputs import X, Y, fit
from keras_models import STRATEGIES, dense
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import stratagem as sg


@pytest.fixture(params=["one device", "mirrored", "servers"])
def strategy(request: pytest.FixtureRequest, cluster: Any) -> Iterator[Any]:
    servers = {"servers": lambda: sg.ParameterServerStrategy(cluster.resolver)}
    with (STRATEGIES | servers)[request.param]() as made:
        yield made


def events(folder: Path) -> Any:
    everything = dict.fromkeys(("scalars", "histograms", "images", "tensors"), 0)
    return EventAccumulator(str(folder), everything).Reload()


def scalars(folder: Path, tag: str) -> dict[int, float]:
    return {each.step: each.value for each in events(folder).Scalars(tag)}


def test_the_callback_writes_metrics_histograms_images_and_the_graph(
    strategy: Any, tmp_path: Path
) -> None:
    with strategy.scope():
        model = dense(optimizer=keras.optimizers.Adam(0.01))
    callback = keras.callbacks.TensorBoard(
        log_dir=tmp_path,
        histogram_freq=1,
        write_images=True,
        write_steps_per_second=True,
        update_freq=2,
    )
    history = fit(model, validation_data=(X, Y), callbacks=[callback])
    train, validation = tmp_path / "train", tmp_path / "validation"
    assert scalars(train, "epoch_loss") == pytest.approx(dict(enumerate(history["loss"])))
    assert scalars(train, "epoch_learning_rate") == pytest.approx({0: 0.01, 1: 0.01})
    assert scalars(train, "epoch_steps_per_second").keys() == {0, 1}
    assert scalars(validation, "epoch_accuracy") == pytest.approx(
        dict(enumerate(history["val_accuracy"]))
    )
    assert scalars(train, "batch_loss").keys() == {2, 4, 6, 8}
    assert scalars(validation, "evaluation_loss_vs_iterations") == pytest.approx(
        dict(zip((4, 8), history["val_loss"], strict=True))
    )
    written = events(train)
    kernel = model.layers[0].kernel
    [_, last] = written.Histograms(f"{kernel.path}/histogram")
    assert last.histogram_value.num == kernel.numpy().size
    assert last.histogram_value.sum == pytest.approx(float(kernel.numpy().sum()), rel=1e-4)
    assert written.Images(f"{kernel.path}/image")
    [graph] = written.Tensors("keras")
    assert model.name.encode() in graph.tensor_proto.string_val[0]


def test_epochs_only_by_default(strategy: Any, tmp_path: Path) -> None:
    """A model without a functional graph has none to write."""

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.layer(x)

    with strategy.scope():
        model = Own()
        model.compile(optimizer="sgd", loss="mse")
    fit(model, callbacks=[keras.callbacks.TensorBoard(tmp_path)])
    tags = events(tmp_path / "train").Tags()
    assert set(tags["scalars"]) == {"epoch_loss", "epoch_learning_rate"}
    assert not tags["tensors"]


def test_an_evaluation_alone_is_in_the_file_when_it_ends(strategy: Any, tmp_path: Path) -> None:
    with strategy.scope():
        model = dense()
    callback = keras.callbacks.TensorBoard(tmp_path)
    found = model.evaluate(X, Y, verbose=0, callbacks=[callback], return_dict=True)
    name = "evaluation_loss_vs_iterations"
    assert scalars(tmp_path / "validation", name) == pytest.approx({0: found["loss"]})
    callback._close_writers()  # which Keras does at the end of a fit


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with STRATEGIES["one device"]() as strategy, strategy.scope():
        model = dense()
        with pytest.raises(ModuleNotFoundError, match=r"stratagem\[tensorboard\]"):
            fit(model, callbacks=[keras.callbacks.TensorBoard(tmp_path)])
