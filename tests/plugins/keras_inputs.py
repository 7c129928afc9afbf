"""Every kind of input that ``fit``, ``evaluate`` and ``predict`` of a Keras model accept, over the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pandas as pd
import torch
from keras_models import rows

import stratagem as sg

X, Y = rows()


def fit(model: Any, x: Any = X, y: Any = Y, **arguments: Any) -> Any:
    """Train for two epochs with batches of 16; return the history."""
    if y is not None:
        arguments.setdefault("batch_size", 16)
    return model.fit(x, y, epochs=2, verbose=0, **arguments).history


class Shards(keras.utils.PyDataset):
    """Batches by number."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return X[16 * index : 16 * (index + 1)], Y[16 * index : 16 * (index + 1)]


def loader() -> Any:
    """Return a DataLoader of batches in order."""
    tensors = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(tensors, batch_size=16)


def dataset() -> Any:
    """Return a dataset of ours of batches in order."""
    return sg.data.Dataset.from_tensor_slices((torch.from_numpy(X), torch.from_numpy(Y))).batch(16)


def generator() -> Iterator[Any]:
    """Yield batches in order, again and again."""
    while True:
        for number in range(4):
            yield Shards()[number]


INPUTS: dict[str, Any] = {
    "arrays": lambda model: fit(model),
    "tensors": lambda model: fit(model, torch.from_numpy(X), torch.from_numpy(Y)),
    "dataframes": lambda model: fit(model, pd.DataFrame(X), pd.Series(Y)),
    "generator": lambda model: fit(model, generator(), None, steps_per_epoch=3, shuffle=False),
    "validation data": lambda model: fit(
        model, validation_data=(X[:9], Y[:9]), validation_freq=2, initial_epoch=0
    ),
    "validation with weights": lambda model: fit(
        model, validation_data=(X[:9], Y[:9], np.linspace(0, 2, 9).astype("float32"))
    ),
    "validation split": lambda model: fit(model, validation_split=0.3),
    "DataLoader": lambda model: fit(model, loader(), None, shuffle=False, validation_data=loader()),
    "PyDataset": lambda model: fit(model, Shards(), None, class_weight={0: 0.2, 1: 3.0}),
    "class weights": lambda model: fit(model, class_weight={0: 0.2, 1: 3.0}),
    "sample weights": lambda model: fit(
        model, sample_weight=np.linspace(0, 2, len(X)).astype("float32")
    ),
    "one batch": lambda model: [
        model.train_on_batch(X[:7], Y[:7]),
        model.train_on_batch(X[:1], Y[:1]),
        model.train_on_batch(X[:5], Y[:5], class_weight={0: 0.2, 1: 3.0}),
        model.test_on_batch(X[:5], Y[:5], sample_weight=np.arange(5.0), return_dict=True),
        model.predict_on_batch(X[:5]),
    ],
    "evaluate and predict": lambda model: [
        model.evaluate(X, Y, batch_size=16, verbose=0),
        model.evaluate(X, Y, sample_weight=np.linspace(0, 2, len(X)), verbose=0),
        model.evaluate(loader(), verbose=0, steps=2),
        model.predict(X, batch_size=16, verbose=0),
        model.predict(X[:1], verbose=0),
        model.predict(Shards(), verbose=0),
    ],
}
