"""Rows of the benchmark: work, sides, sizes and targets.

This file contains descriptions only. ``full`` rows are the ones of ``make bench``; ``tiny`` makes the same rows small enough
for the test suite, where only the harness is tested.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from benchmarks import reading, work

Better = Literal["more", "less"]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a row: the program that does the work, and its form."""

    kind: Literal["ours", "peer", "limit", "bound", "bare"]
    label: str
    size: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Target of a row: a multiple of the fastest peer, a fraction of the limit or of the bare program, or a largest value."""

    against: Literal["peer", "limit", "bare", "value"]
    factor: float

    def __str__(self) -> str:
        if self.against == "value":
            return f"≤ {self.factor:g}"
        return f"≥ {self.factor:g} × {'TF' if self.against == 'peer' else self.against}"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One size of a row."""

    label: str
    size: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table, or one curve of a plot if it has several points."""

    name: str
    title: str
    unit: str
    sides: tuple[Side, ...]
    points: tuple[Point, ...]
    better: Better = "more"
    targets: tuple[Target, ...] = ()
    checked: bool = True
    #: our side's size for a run that must end with exactly the limit's parameters; at the first point only
    parity: dict[str, Any] | None = None
    #: each side's last loss as a multiple of the limit's, least and most; at the first point only
    last_loss: tuple[float, float] | None = None
    repetitions: int = 5
    seconds: float = 1.5
    #: axis of the plot
    axis: str = ""
    #: the row in whose picture this one is drawn, at its right
    beside: str = ""


OURS = Side(kind="ours", label="Stratagem")
PEER = Side(kind="peer", label="TensorFlow")
LIMIT = Side(kind="limit", label="limit")
PYARROW = Side(kind="limit", label="plain pyarrow")
BARE = Side(kind="bare", label="bare program", size={"form": "bare"})
BOUND = Side(kind="bound", label="bound", size={"form": "every core"})
START = Side(kind="limit", label="start of Python with torch")
COPY = Side(kind="bound", label="memcpy", size={"form": "copy"})
TRACED = Side(kind="peer", label="TF, tf.function", size={"form": "tf.function"})
EAGER = Side(kind="peer", label="TF, eager", size={"form": "eager"})

_CLUSTER = {"workers": 2, "servers": 2}
_SOCKETS = {**_CLUSTER, "sockets": True}
_ONE_WORKER = {"workers": 1}
_MLP = {**work.MLP_SIZE, "check_steps": 200}
_EMBEDDING = {**work.EMBEDDING_SIZE, "check_steps": 60}
# At the larger tables a few steps only: the program is the same there.
_HOT = {**work.HOT_SIZE, "check_steps": 16}
# Each of two workers sees all 16 batches three times, the limit sees them six times. The last loss is then, as a multiple of
# the limit's: 1.0 to 1.2 with other orders of batches, 1.4 to 1.9 with gradients one update old (which two workers give: 1.5 to
# 2.1 measured for ours and for TensorFlow), up to 2.3 with two; but 4 or more with half the updates lost, half the
# learning rate, half the table untrained or repeated ids counted once, and 0.5 or less with updates applied twice.
_HOT_CHECK_STEPS = 96
_HOT_LAST_LOSS = (0.7, 3.0)
_BYTES = work.BYTES_SIZE
# 512 MB of rows and as many of Adagrad's sums.
_CHECKPOINT = {"rows": 8_000_000, "width": 16}


def _point(*sizes: dict[str, Any], label: str = "", **more: Any) -> Point:
    merged: dict[str, Any] = {}
    for size in sizes:
        merged.update(size)
    return Point(label=label, size={**merged, **more})


TABLE = (
    Row(
        name="empty",
        title="empty step: add 1 to a variable",
        unit="steps/s",
        sides=(OURS, PEER),
        points=(_point(_CLUSTER),),
        targets=(Target(against="peer", factor=10),),
    ),
    Row(
        name="mlp",
        title="MLP 784-256-10, batch 64, SGD",
        unit="steps/s",
        sides=(OURS, PEER, LIMIT, BOUND, BARE),
        points=(_point(_CLUSTER, _MLP),),
        targets=(Target(against="peer", factor=7.5), Target(against="bare", factor=0.75)),
        parity=_ONE_WORKER,
    ),
    Row(
        name="embedding",
        title="embedding 1 M × 16, batch 1024 × 26, Adagrad",
        unit="steps/s",
        sides=(OURS, PEER, LIMIT),
        points=(_point(_CLUSTER, _EMBEDDING),),
        targets=(Target(against="peer", factor=3),),
        parity=_ONE_WORKER,
    ),
    Row(
        name="read",
        title="read 64 MB of parameters in a step",
        unit="GB/s",
        sides=(OURS, PEER, LIMIT),
        points=(_point(_CLUSTER, _BYTES),),
        targets=(Target(against="peer", factor=10),),
    ),
    Row(
        name="add",
        title="add 64 MB to parameters in a step",
        unit="GB/s",
        sides=(OURS, PEER, LIMIT, BOUND),
        points=(_point(_CLUSTER, _BYTES),),
        targets=(Target(against="peer", factor=5),),
    ),
    *(
        Row(
            name=f"{name}_sockets",
            title=f"over sockets: {title}",
            unit=unit,
            sides=(OURS, PEER, BARE),
            points=(_point(_SOCKETS, size),),
            targets=(Target(against="peer", factor=factor), Target(against="bare", factor=0.7)),
            parity=_ONE_WORKER if "check_steps" in size else None,
        )
        for name, title, unit, size, factor in (
            ("empty", "empty step", "steps/s", {}, 10),
            ("mlp", "MLP", "steps/s", _MLP, 4),
            ("embedding", "embedding", "steps/s", _EMBEDDING, 2.5),
            ("read", "read 64 MB that have changed", "GB/s", {**_BYTES, "changed": True}, 2),
            ("add", "add 64 MB", "GB/s", _BYTES, 2),
        )
    ),
    Row(
        name="one_device",
        title="one device, the MLP step",
        unit="steps/s",
        sides=(OURS, TRACED, EAGER, LIMIT),
        points=(_point(_MLP),),
        targets=(Target(against="limit", factor=0.97),),
        parity={},
        # Differences of three per cent must be visible: many short turns average out the noise.
        repetitions=15,
        seconds=0.5,
    ),
    Row(
        name="central",
        title="central storage, 2 CPU replicas, the MLP step",
        unit="steps/s",
        sides=(OURS, TRACED, EAGER, LIMIT, BOUND, BARE),
        points=(_point(_MLP, replicas=2),),
        targets=(Target(against="peer", factor=1), Target(against="bare", factor=0.85)),
        parity={},
    ),
    Row(
        name="keras_fit",
        title="Keras on torch: `fit` of the MLP, one device (limit: plain Keras)",
        unit="steps/s",
        sides=(OURS, LIMIT),
        points=(_point(_MLP),),
        targets=(Target(against="limit", factor=0.97),),
        parity={},
        repetitions=15,
        seconds=0.5,
    ),
    Row(
        name="startup",
        title="start a cluster (2 + 2) and do the first step",
        unit="s",
        better="less",
        sides=(OURS, PEER),
        points=(_point(_CLUSTER),),
        checked=False,
        repetitions=2,
    ),
    Row(
        name="recovery",
        title="from a killed worker to its successor's first step",
        unit="s",
        better="less",
        sides=(OURS, PEER),
        points=(_point(_CLUSTER),),
        checked=False,
        repetitions=3,
    ),
    Row(
        name="save",
        title="save a table and Adagrad's state, 1 GB, to memory (tmpfs)",
        unit="GB/s",
        sides=(OURS, PEER, LIMIT, COPY),
        points=(_point(_CHECKPOINT, place="/dev/shm"),),
        targets=(Target(against="limit", factor=0.5),),
        checked=False,
    ),
    Row(
        name="save_disk",
        title="the same to disk",
        unit="GB/s",
        sides=(OURS, PEER, LIMIT),
        points=(_point(_CHECKPOINT, place="/var/tmp"),),
        targets=(Target(against="limit", factor=0.9),),
        checked=False,
    ),
    Row(
        name="restore",
        title="restore it from memory (tmpfs)",
        unit="GB/s",
        sides=(OURS, PEER, LIMIT),
        points=(_point(_CHECKPOINT, place="/dev/shm"),),
        targets=(Target(against="limit", factor=0.5),),
        checked=False,
    ),
    Row(
        name="save_gap",
        title="longest gap between two steps during a save of 1 GB on 2 servers",
        unit="ms",
        better="less",
        sides=(OURS,),
        points=(_point(_CLUSTER, _CHECKPOINT, place="/dev/shm", figure="gap_ms"),),
        targets=(Target(against="value", factor=20),),
        checked=False,
        repetitions=3,
    ),
    Row(
        name="save_slowdown",
        title="steps lost during such a save",
        unit="%",
        better="less",
        sides=(OURS,),
        points=(_point(_CLUSTER, _CHECKPOINT, place="/dev/shm", figure="slowdown_percent"),),
        targets=(Target(against="value", factor=15),),
        checked=False,
        repetitions=3,
    ),
    Row(
        name="save_memory",
        title="additional memory of the servers during such a save",
        unit="%",
        better="less",
        sides=(OURS,),
        points=(_point(_CLUSTER, _CHECKPOINT, place="/dev/shm", figure="memory_percent"),),
        targets=(Target(against="value", factor=10),),
        checked=False,
        repetitions=3,
    ),
    Row(
        name="delta",
        title="delta after 60 s of training on Zipf ids, as a part of a full save",
        unit="× full",
        better="less",
        sides=(OURS,),
        points=(_point(_CLUSTER, _CHECKPOINT, place="/dev/shm", delta_s=60),),
        targets=(Target(against="value", factor=0.3),),
        checked=False,
        repetitions=1,
    ),
    Row(
        name="restore_servers",
        title="restore 1 GB, saved on 2 servers, on 3 servers",
        unit="GB/s",
        sides=(OURS, LIMIT),
        points=(_point(_CLUSTER, _CHECKPOINT, place="/dev/shm"),),
        targets=(Target(against="limit", factor=0.5),),
        checked=False,
        repetitions=3,
    ),
    Row(
        name="server_recovery",
        title="from a killed server (100 MB) to the next step, from a checkpoint",
        unit="s",
        better="less",
        sides=(OURS,),
        points=(_point(_CLUSTER, _CHECKPOINT, rows=800_000, place="/dev/shm"),),
        targets=(Target(against="value", factor=3),),
        checked=False,
        repetitions=3,
    ),
    Row(
        name="coordinator_recovery",
        title="from a killed coordinator to the next step of its successor",
        unit="s",
        better="less",
        sides=(OURS, START),
        points=(_point(_CLUSTER, place="/dev/shm"),),
        checked=False,
        repetitions=3,
    ),
    Row(
        name="input",
        title="26 columns, shuffle, repeat, batch(1024)",
        unit="M rows/s",
        sides=(OURS, PEER, LIMIT),
        points=(_point(work.INPUT_SIZE),),
        seconds=0.7,
    ),
    Row(
        name="parquet",
        title="read Parquet, 40 columns (TensorFlow: the rows as TFRecord)",
        unit="k rows/CPU s",
        sides=(OURS, PEER, PYARROW),
        points=(_point(reading.FILES_SIZE),),
        targets=(Target(against="peer", factor=3),),
        seconds=0.7,
    ),
    Row(
        name="csv",
        title="read CSV, 40 columns",
        unit="k rows/CPU s",
        sides=(OURS, PEER, PYARROW),
        points=(_point(reading.FILES_SIZE),),
        targets=(Target(against="peer", factor=3),),
        seconds=0.7,
    ),
    Row(
        name="tfrecord",
        title="read TFRecord, 40 features",
        unit="k rows/CPU s",
        sides=(OURS, PEER),
        points=(_point(reading.FILES_SIZE, batches=32),),
        seconds=0.7,
    ),
)

_COUNTS = (1, 2, 4)
_TABLES = (("10k", 10**4), ("100k", 10**5), ("1M", 10**6), ("10M", 10**7))
_QUALITY = {"steps": 1200, "batch": 256, "test_rows": 20_000, "parts": 12}

CURVES = (
    Row(
        name="workers",
        title="MLP step, more workers",
        unit="steps/s",
        sides=(OURS,),
        points=tuple(_point(_CLUSTER, _MLP, label=str(n), workers=n) for n in _COUNTS),
        checked=False,
        repetitions=3,
        seconds=0.8,
        axis="workers",
    ),
    Row(
        name="servers",
        title="MLP step, more parameter servers",
        unit="steps/s",
        sides=(OURS,),
        points=tuple(_point(_CLUSTER, _MLP, label=str(n), servers=n) for n in _COUNTS),
        checked=False,
        repetitions=3,
        seconds=0.8,
        axis="parameter servers",
    ),
    Row(
        name="mlp_backups",
        title="MLP step, with backups of the servers",
        unit="steps/s",
        sides=(OURS,),
        points=tuple(_point(_CLUSTER, _MLP, label=str(n), backups=n) for n in (0, 1)),
        checked=False,
        axis="backups",
    ),
    Row(
        name="embedding_backups",
        title="embedding step, with backups of the servers",
        unit="steps/s",
        sides=(OURS,),
        points=tuple(_point(_CLUSTER, _EMBEDDING, label=str(n), backups=n) for n in (0, 1)),
        checked=False,
        axis="backups",
        beside="mlp_backups",
    ),
    Row(
        name="failover",
        title="from a killed parameter server with a backup to the next step",
        unit="s",
        better="less",
        sides=(OURS,),
        points=(_point(_CLUSTER, backups=1, megabytes=100),),
        checked=False,
        repetitions=3,
    ),
    Row(
        name="table",
        title="embedding step, ids from the whole table",
        unit="steps/s",
        sides=(OURS, LIMIT),
        points=tuple(
            _point(_CLUSTER, _EMBEDDING, label=label, rows=rows, same_start=False)
            for label, rows in _TABLES
        ),
        checked=False,
        repetitions=3,
        seconds=0.8,
        axis="rows of the table",
    ),
    Row(
        name="hot_table",
        title="embedding step, ids from 8,192 rows of it",
        unit="steps/s",
        sides=(OURS, PEER, LIMIT),
        # Three sizes only, parameters compared at the smallest: TensorFlow's largest takes a minute to begin.
        points=tuple(
            _point(
                _CLUSTER,
                _HOT,
                {"check_steps": _HOT_CHECK_STEPS} if label == "10k" else {},
                label=label,
                rows=rows,
                fingerprints=label == "10k",
            )
            for label, rows in _TABLES
            if label != "100k"
        ),
        parity=_ONE_WORKER,
        last_loss=_HOT_LAST_LOSS,
        repetitions=3,
        seconds=0.5,
        axis="rows of the table",
        beside="table",
    ),
    Row(
        name="variables",
        title="4 MB of parameters in more variables, SGD",
        unit="steps/s",
        sides=(OURS, LIMIT),
        points=tuple(
            _point(_CLUSTER, label=str(n), variables=n, megabytes=4) for n in (1, 10, 100, 1000)
        ),
        checked=False,
        repetitions=3,
        seconds=0.8,
        axis="variables",
    ),
    Row(
        name="message",
        title="add to one variable, larger messages",
        unit="GB/s",
        sides=(OURS, LIMIT),
        points=tuple(
            _point(_CLUSTER, label=label, variables=1, megabytes=size)
            for label, size in (
                ("4 KB", 2**-8),
                ("64 KB", 2**-4),
                ("1 MB", 1),
                ("16 MB", 16),
                ("64 MB", 64),
            )
        ),
        checked=False,
        repetitions=3,
        seconds=0.8,
        axis="bytes added in a step",
    ),
    Row(
        name="loader",
        title="the same pipeline, as a multiple of torch's DataLoader",
        unit="×",
        sides=(OURS,),
        points=(_point(tiny=False),),
        checked=False,
        repetitions=1,
    ),
    Row(
        name="wire",
        title="a small message there and back",
        unit="µs",
        better="less",
        sides=(OURS,),
        points=(_point(),),
        checked=False,
        repetitions=1,
    ),
    Row(
        name="quality",
        title="click model, AUC at the end,",
        unit="AUC",
        sides=(OURS,),
        points=tuple(
            _point(_QUALITY, label=label, workers=n)
            for label, n in (
                ("one device", 0),
                ("async, 1 worker", 1),
                ("async, 2 workers", 2),
                ("async, 4 workers", 4),
            )
        ),
        checked=False,
        repetitions=1,
        axis="examples",
    ),
)

_TINY: dict[str, Any] = {
    "inputs": 12,
    "hidden": 8,
    "classes": 3,
    "batch": 6,
    "batches": 4,
    "rows": 64,
    "hot": 24,
    "width": 2,
    "columns": 3,
    "variables": 2,
    "megabytes": 0.125,
    "check_steps": 8,
    "steps": 8,
    "parts": 2,
    "test_rows": 64,
    "tiny": True,
    "delta_s": 0.2,
}


def tiny(row: Row) -> Row:
    """Return the same row at a small size, for tests of the harness."""
    points = tuple(
        replace(point, size={**point.size, **{k: v for k, v in _TINY.items() if k in point.size}})
        for point in row.points[:1]
    )
    # What losses are expected depends on the size.
    return replace(row, points=points, repetitions=2, seconds=0.05, last_loss=None)
