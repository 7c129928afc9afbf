"""Descriptions of the steps that are measured, compared and predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from benchmarks import work
from benchmarks.scaling.cluster_model import Machines
from benchmarks.scaling.costs import Step

TRANSPORTS: Final = {"shared memory": {}, "sockets": {"sockets": True}}

_BASE: dict[str, Any] = {
    "workers": 1,
    "servers": 1,
    "tensors": 1,
    "tensor_bytes": 4096,
    "rows": 0,
    "table": 1_000_000,
}
PROBES: Final[dict[str, dict[str, Any]]] = {
    "base": _BASE,
    "several": {**_BASE, "per_closure": 8},
    "tensors": {**_BASE, "tensors": 17},
    "servers": {**_BASE, "tensors": 2, "servers": 2},
    "bytes": {**_BASE, "tensor_bytes": 4_000_000 + 4096},
    "few rows": {**_BASE, "rows": 1000},
    "rows": {**_BASE, "rows": 25_000},
}
"""Small steps; each differs from another one in one unit (`costs.unit_costs`)."""

COMPARED: Final[dict[str, dict[str, Any]]] = {
    "MLP": {"row": "scaling_mlp", "size": work.MLP_SIZE},
    "MLP, 8 steps per closure": {
        "row": "scaling_mlp",
        "size": {**work.MLP_SIZE, "per_closure": 8},
    },
    "embedding": {"row": "scaling_embedding", "size": work.EMBEDDING_SIZE},
}
"""Steps whose rates are measured and predicted."""

WORKERS: Final = (1, 2, 4, 8)
SERVERS: Final = (1, 2)

# A data centre: 25 Gbit/s, and 100 µs for a small message there and back. Assumed, not measured.
HOSTS: Final = Machines(shared=False, cores=2, latency_s=50e-6, sockets=True, bytes_per_s=25e9 / 8)

# (workers, servers, steps per closure): a small cluster, more workers alone, then what helps.
CLUSTERS: Final = (
    (10, 2, 1),
    (100, 2, 1),
    (100, 16, 1),
    (1000, 16, 1),
    (1000, 32, 1),
    (1000, 32, 4),
)


def future_steps(mlp: Step, embedding: Step) -> tuple[Step, ...]:
    """Return the steps that are predicted for real hosts: measured ones, and the same with a longer computation."""
    return (
        mlp,
        embedding,
        replace(embedding, name="embedding and 50 ms of computation", compute_s=0.05),
        Step(
            name="16 MB dense and 50 ms of computation",
            compute_s=0.05,
            tensor_bytes=(125_000,) * 128,
        ),
    )
