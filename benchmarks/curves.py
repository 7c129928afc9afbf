"""Rows that ``make bench-all`` adds: the same work at several sizes, other PyTorch programs, and further measurements of ours."""

from __future__ import annotations

from benchmarks.row import Row, Side, Target, point
from benchmarks.rows import (
    CLUSTER,
    EMBEDDING,
    HOT,
    HOT_CHECK_STEPS,
    HOT_LAST_LOSS,
    LIMIT,
    MLP,
    ONE_WORKER,
    OURS,
    PEER,
    SOCKETS,
)

_COUNTS = (1, 2, 4)
_TABLES = (("10k", 10**4), ("100k", 10**5), ("1M", 10**6), ("10M", 10**7))
_QUALITY = {"steps": 1200, "batch": 256, "test_rows": 20_000, "parts": 12}
# Four small parameters: nearly all of a step is fixed cost.
_SMALL = {"inputs": 16, "hidden": 16, "classes": 4, "batch": 16, "batches": 32, "check_steps": 64}
_CLOSURES = (1, 4, 16)
#: on the wire
DTYPES = tuple(
    Side(kind="ours", label=label, size={"wire_dtype": dtype})
    for label, dtype in (("float32", ""), ("bfloat16", "bfloat16"), ("float16", "float16"))
)
TORCH = (
    OURS,
    Side(kind="torch", label="DDP, gloo", size={"form": "ddp"}),
    Side(kind="torch", label="RPC parameter servers", size={"form": "rpc"}),
    Side(kind="torch", label="Hogwild", size={"form": "hogwild"}),
)

CURVES = (
    *(
        Row(
            name=f"{name}_torch",
            title=f"{title}, 2 processes",
            unit="steps/s",
            sides=TORCH,
            points=(point(CLUSTER, size),),
        )
        for name, title, size in (("mlp", "MLP", MLP), ("embedding", "embedding", EMBEDDING))
    ),
    *(
        Row(
            name=f"{name}_16",
            title=f"over sockets, 16 bits on the wire: {title}",
            unit="steps/s",
            sides=DTYPES,
            points=(point(SOCKETS, size),),
        )
        for name, title, size in (("mlp", "MLP", MLP), ("embedding", "embedding", EMBEDDING))
    ),
    Row(
        name="quality_16",
        title="over sockets, 16 bits on the wire: click model",
        unit="AUC",
        sides=DTYPES,
        # One worker, so that two runs with the same seed differ in nothing but the type.
        points=(point(_QUALITY, SOCKETS, workers=1, parts=1, new_seeds=True),),
        checked=False,
        repetitions=5,
    ),
    Row(
        name="closures",
        title="small step, several in one function",
        unit="steps/s",
        sides=(OURS, LIMIT),
        points=tuple(point(CLUSTER, _SMALL, label=str(n), per_closure=n) for n in _CLOSURES),
        repetitions=5,
        seconds=0.8,
        parity=ONE_WORKER,
        axis="steps in one function",
    ),
    Row(
        name="workers",
        title="MLP step, more workers",
        unit="steps/s",
        sides=(OURS,),
        points=tuple(point(CLUSTER, MLP, label=str(n), workers=n) for n in _COUNTS),
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
        points=tuple(point(CLUSTER, MLP, label=str(n), servers=n) for n in _COUNTS),
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
        points=tuple(point(CLUSTER, MLP, label=str(n), backups=n) for n in (0, 1)),
        checked=False,
    ),
    Row(
        name="embedding_backups",
        title="embedding step, with backups of the servers",
        unit="steps/s",
        sides=(OURS,),
        points=tuple(point(CLUSTER, EMBEDDING, label=str(n), backups=n) for n in (0, 1)),
        checked=False,
    ),
    Row(
        name="failover",
        title="from a killed parameter server with a backup to the next step",
        unit="s",
        better="less",
        sides=(OURS,),
        points=(point(CLUSTER, backups=1, megabytes=100),),
        targets=(Target(against="most", factor=1),),
        checked=False,
        repetitions=3,
    ),
    Row(
        name="table",
        title="embedding step, ids from the whole table",
        unit="steps/s",
        sides=(OURS, LIMIT),
        points=tuple(
            point(CLUSTER, EMBEDDING, label=label, rows=rows, same_start=False)
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
            point(
                CLUSTER,
                HOT,
                {"check_steps": HOT_CHECK_STEPS} if label == "10k" else {},
                label=label,
                rows=rows,
                fingerprints=label == "10k",
            )
            for label, rows in _TABLES
            if label != "100k"
        ),
        parity=ONE_WORKER,
        last_loss=HOT_LAST_LOSS,
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
            point(CLUSTER, label=str(n), variables=n, megabytes=4) for n in (1, 10, 100, 1000)
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
            point(CLUSTER, label=label, variables=1, megabytes=size)
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
        points=(point(tiny=False),),
        targets=(Target(against="least", factor=5),),
        checked=False,
        repetitions=1,
    ),
    Row(
        name="wire",
        title="a small message there and back",
        unit="µs",
        better="less",
        sides=(OURS,),
        points=(point(),),
        checked=False,
        repetitions=1,
    ),
    Row(
        name="quality",
        title="click model, AUC at the end",
        unit="AUC",
        sides=(OURS,),
        points=tuple(
            point(_QUALITY, label=label, workers=n)
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
