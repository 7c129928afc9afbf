"""Keras: `fit` of a click model on two workers and two parameter servers, with callbacks.

The same model as in examples/parameter_server.py. `fit` schedules the steps on the workers; each reads its own dataset. The
servers store the table in two shards. Validation, checkpoint files and the backup work as in plain Keras: stop
the program at any time and start it again. The saved model needs no cluster.

    python examples/keras_clicks.py
    python examples/keras_clicks.py --epochs 6 --directory /tmp/clicks
"""

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")  # before Keras is imported

import keras
import numpy as np

import stratagem as sg

# Settings.
EPOCHS = 4
STEPS_PER_EPOCH = 60
BATCH = 64
ITEMS = 500
WIDTH = 8
LEARNING_RATE = 0.5


def build() -> keras.Model:
    """Return a model that predicts whether a pair of items is liked."""
    pairs = keras.Input((2,), dtype="int64", name="pairs")
    rows = keras.layers.Embedding(ITEMS, WIDTH, name="items")(pairs)
    hidden = keras.layers.Dense(16, activation="relu")(keras.layers.Flatten()(rows))
    model = keras.Model(pairs, keras.layers.Dense(1)(hidden), name="clicks")
    model.compile(
        optimizer=keras.optimizers.Adagrad(LEARNING_RATE),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )
    return model


def clicks(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of items; a pair is liked if the sum of its hidden scores is positive."""
    scores = np.random.default_rng(1).normal(size=ITEMS)
    pairs = np.random.default_rng(seed).integers(0, ITEMS, (count, 2))
    return pairs, (scores[pairs].sum(1, keepdims=True) > 0).astype("float32")


def dataset_fn(context: sg.InputContext) -> sg.data.Dataset:
    """Return the dataset of one worker, without end. Runs on each worker."""
    rows = clicks(4096, seed=2 + context.input_pipeline_id)
    return sg.data.Dataset.from_tensor_slices(rows).shuffle().repeat().batch(BATCH)


def main(
    epochs: int = EPOCHS, steps: int = STEPS_PER_EPOCH, directory: str | None = None
) -> dict[str, float]:
    folder = Path(directory or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(0)
    validation = clicks(1000, seed=1000)
    with sg.LocalCluster(workers=2, ps=2) as cluster:
        partitioner = sg.partitioners.MinSizePartitioner(min_shard_bytes=4 << 10, max_shards=2)
        with sg.ParameterServerStrategy(cluster.resolver, partitioner) as strategy:
            with strategy.scope():
                model = build()
            model.fit(
                dataset_fn,
                steps_per_epoch=steps,
                epochs=epochs,
                validation_data=validation,
                verbose=2,
                callbacks=[
                    keras.callbacks.BackupAndRestore(str(folder / "backup")),
                    keras.callbacks.ModelCheckpoint(
                        str(folder / "best.keras"),
                        monitor="val_auc",
                        mode="max",
                        save_best_only=True,
                    ),
                    keras.callbacks.ReduceLROnPlateau("val_loss", patience=2),
                    keras.callbacks.CSVLogger(str(folder / "log.csv")),
                ],
            )
            found = model.evaluate(*validation, verbose=0, return_dict=True)
    # Plain Keras reads the file: no strategy, no cluster.
    best = keras.saving.load_model(folder / "best.keras")
    again = best.evaluate(*validation, verbose=0, return_dict=True)
    print(f"AUC at the end {found['auc']:.3f}, of the best epoch {again['auc']:.3f}")
    return again


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--steps", type=int, default=STEPS_PER_EPOCH)
    parser.add_argument("--directory", default=None)
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.steps, arguments.directory)
