"""Work of all sides: sizes, data and initial parameters.

NumPy only, because the peer's environment imports this file too. How each side computes is in ``ours/``, ``peer/`` and ``limits/``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

MLP_LEARNING_RATE = 0.05
LAYERS_LEARNING_RATE = 1e-3
EMBEDDING_LEARNING_RATE = 0.05
EMBEDDING_EPSILON = 1e-10

MLP_SIZE: dict[str, Any] = {"inputs": 784, "hidden": 256, "classes": 10, "batch": 64, "batches": 32}
EMBEDDING_SIZE: dict[str, Any] = {
    "rows": 1_000_000,
    "width": 16,
    "batch": 1024,
    "columns": 26,
    "batches": 16,
    "shards": 2,
}
# The number of rows in use is constant. The table starts with one value, which servers fill in themselves:
# 640 MB need not be drawn and sent.
HOT_SIZE: dict[str, Any] = {**EMBEDDING_SIZE, "hot": 8192, "start": 0.1}
LAYERS_SIZE: dict[str, Any] = {"layers": 50, "features": 8, "batch": 16}
INPUT_SIZE: dict[str, Any] = {"batch": 1024, "batches": 512, "columns": 26}
BYTES_SIZE: dict[str, Any] = {"variables": 16, "megabytes": 64}


class Batches(NamedTuple):
    """Prepared batches: inputs ``[batches, batch, ...]`` and labels ``[batches, batch, ...]``."""

    inputs: NDArray[Any]
    labels: NDArray[Any]


def mlp_parameters(size: dict[str, Any]) -> list[Floats]:
    """Return initial weights and biases, in PyTorch's layout (``[out, in]``): w1, b1, w2, b2."""
    random = np.random.default_rng(1)
    inputs, hidden, classes = size["inputs"], size["hidden"], size["classes"]
    return [
        (random.standard_normal((hidden, inputs)) / np.sqrt(inputs)).astype(np.float32),
        np.zeros(hidden, np.float32),
        (random.standard_normal((classes, hidden)) / np.sqrt(hidden)).astype(np.float32),
        np.zeros(classes, np.float32),
    ]


def mlp_batches(size: dict[str, Any]) -> Batches:
    """Return inputs with labels from a linear model, which can be learned."""
    random = np.random.default_rng(2)
    shape = (size["batches"], size["batch"], size["inputs"])
    inputs = random.standard_normal(shape).astype(np.float32)
    teacher = random.standard_normal((size["inputs"], size["classes"]))
    labels = (inputs @ teacher).argmax(axis=-1).astype(np.int64)
    return Batches(inputs, labels)


def layers_parameters(size: dict[str, Any]) -> list[Floats]:
    """Return initial weights and biases of many small layers, in order."""
    random, features = np.random.default_rng(7), size["features"]
    shapes = [(features, features), (features,)] * size["layers"]
    scale = np.sqrt(features)
    return [(random.standard_normal(shape) / scale).astype(np.float32) for shape in shapes]


def layers_inputs(size: dict[str, Any]) -> Floats:
    """Return the one batch of the many small layers."""
    random = np.random.default_rng(8)
    return random.standard_normal((size["batch"], size["features"])).astype(np.float32)


def embedding_head(size: dict[str, Any]) -> Floats:
    """Return initial weights of the layer above the table: one output, ``[1, columns * width]``."""
    random = np.random.default_rng(3)
    width = size["columns"] * size["width"]
    head: Floats = (random.standard_normal((1, width)) / np.sqrt(width)).astype(np.float32)
    return head


def embedding_table(size: dict[str, Any]) -> Floats:
    """Return the initial table; all numbers are ``start`` where a row sets it."""
    random = np.random.default_rng(4)
    shape = (size["rows"], size["width"])
    rows: Floats = random.standard_normal(shape, dtype=np.float32)
    rows *= np.float32(0.1)
    return rows


def embedding_batches(size: dict[str, Any]) -> Batches:
    """Return ids drawn evenly from the whole table (the worst case for caches) and labels.

    With ``hot`` they are drawn from so many rows, which lie evenly over the whole table: the same draws, so
    the same number of different rows in every batch and the same bytes in use, whatever the table's size.
    """
    random = np.random.default_rng(5)
    shape = (size["batches"], size["batch"], size["columns"])
    drawn = random.integers(0, size.get("hot", size["rows"]), shape, dtype=np.int64)
    ids = drawn * size["rows"] // size["hot"] if "hot" in size else drawn
    # By what was drawn, not by the row it lies in: the same labels at every size.
    labels = (drawn[..., :1] % 2).astype(np.float32)
    return Batches(ids, labels)


def byte_shapes(size: dict[str, Any]) -> list[tuple[int]]:
    """Return shapes of float32 variables of ``megabytes`` (of 2**20 bytes) in total."""
    count = size["variables"]
    elements = int(size["megabytes"] * 2**20) // 4
    each = elements // count
    return [(each + (1 if index < elements % count else 0),) for index in range(count)]


def gigabytes(size: dict[str, Any]) -> float:
    """Return how much a step of the read and add rows moves, in 10**9 bytes."""
    return sum(shape[0] for shape in byte_shapes(size)) * 4 / 1e9


def input_rows(size: dict[str, Any]) -> Integers:
    """Return the rows of an in-memory dataset, in whole batches."""
    random = np.random.default_rng(6)
    shape = (size["batches"] * size["batch"], size["columns"])
    return random.integers(0, 1000, shape, dtype=np.int64)


_PRINTED = 1 << 20


def fingerprint(value: NDArray[Any]) -> list[float]:
    """Return two numbers that identify parameters: a norm, and a sum that depends on the order."""
    total = ordered = 0.0
    flat = value.ravel()
    for begin in range(0, flat.size, _PRINTED):  # a table is too large for a copy in float64
        piece = np.asarray(flat[begin : begin + _PRINTED], np.float64)
        total += float(np.abs(piece).sum())
        ordered += float(piece @ np.cos(np.arange(begin, begin + piece.size)))
    return [total, ordered]
