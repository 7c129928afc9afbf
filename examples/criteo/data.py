"""A small click log in the form of Criteo's: 13 numbers and 26 categories in each row, in Parquet files."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch

import stratagem as sg

DENSE = [f"I{number}" for number in range(1, 14)]
CATEGORIES = [f"C{number}" for number in range(1, 27)]
IDS = 2**63 - 1
"""Categories are hashed to all non-negative int64 numbers."""


def write(directory: Path, files: int, rows: int, seed: int = 0) -> None:
    """Write files of clicks. A few categories are frequent, most are rare; some numbers are missing."""
    directory.mkdir(parents=True, exist_ok=True)
    effects = np.random.default_rng(1)
    of_category = effects.normal(0.0, 0.5, (len(CATEGORIES), 5000))
    of_number = effects.normal(0.0, 0.5, len(DENSE))
    for file in range(files):
        random = np.random.default_rng((seed, file))
        dense = random.lognormal(0.0, 1.0, (rows, len(DENSE)))
        chosen = np.minimum(random.zipf(1.3, (rows, len(CATEGORIES))), 5000) - 1
        score = np.log(dense) @ of_number / 4
        score += sum(of_category[n, chosen[:, n]] for n in range(len(CATEGORIES)))
        label = random.random(rows) < 1 / (1 + np.exp(1.0 - score))
        is_missing = random.random(dense.shape) < 0.05
        columns = {"label": label.astype(np.float32)}
        for number, name in enumerate(DENSE):
            columns[name] = pa.array(dense[:, number], mask=is_missing[:, number])
        for number, name in enumerate(CATEGORIES):
            columns[name] = [f"{name}-{one:05x}" for one in chosen[:, number]]
        pa.parquet.write_table(pa.table(columns), directory / f"clicks-{file}.parquet")


def read(directory: Path, batch_size: int) -> sg.data.Dataset:
    """Return batches with "dense" [rows, 13], "ids" [rows, 26] and "label" [rows]."""
    return sg.data.Dataset.from_parquet(
        str(directory / "*.parquet"),
        {"dense": DENSE, "ids": CATEGORIES, "label": "label"},
        batch_size=batch_size,
        dtypes=dict.fromkeys(DENSE, torch.float32),
        fill=dict.fromkeys(DENSE, 0.0),
        hash_buckets=dict.fromkeys(CATEGORIES, IDS),
    )
