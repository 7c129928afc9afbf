"""Rows of the table that ``make bench`` measures. ``curves.py`` has those that ``make bench-all`` adds.

Targets are those of the design page and of the issues; a target that is missed stays as it is.
"""

from __future__ import annotations

from benchmarks import reading, work
from benchmarks.row import Row, Side, Target, point

OURS = Side(kind="ours", label="Stratagem")
PEER = Side(kind="peer", label="TensorFlow")
LIMIT = Side(kind="limit", label="limit")
PYARROW = Side(kind="limit", label="plain pyarrow")
BARE = Side(kind="bare", label="bare program", size={"form": "bare"})
BOUND = Side(kind="bound", label="bound", size={"form": "every core"})
START = Side(kind="limit", label="start of Python with torch")
NEW_MEMORY = Side(kind="bound", label="read into new memory", size={"form": "new memory"})
COPY = Side(kind="bound", label="memcpy", size={"form": "copy"})
TRACED = Side(kind="peer", label="TF, tf.function", size={"form": "tf.function"})
EAGER = Side(kind="peer", label="TF, eager", size={"form": "eager"})

CLUSTER = {"workers": 2, "servers": 2}
SOCKETS = {**CLUSTER, "sockets": True}
ONE_WORKER = {"workers": 1}
MLP = {**work.MLP_SIZE, "check_steps": 200}
EMBEDDING = {**work.EMBEDDING_SIZE, "check_steps": 60}
# At the larger tables a few steps only: the program is the same there.
HOT = {**work.HOT_SIZE, "check_steps": 16}
# Each of two workers sees all 16 batches three times, the limit sees them six times. The last loss is then, as a multiple of
# the limit's: 1.0 to 1.2 with other orders of batches, 1.4 to 1.9 with gradients one update old (which two workers give: 1.5 to
# 2.1 measured for ours and for TensorFlow), up to 2.3 with two; but 4 or more with half the updates lost, half the
# learning rate, half the table untrained or repeated ids counted once, and 0.5 or less with updates applied twice.
HOT_CHECK_STEPS = 96
HOT_LAST_LOSS = (0.7, 3.0)
_BYTES = work.BYTES_SIZE
# 512 MB of rows and as many of Adagrad's sums.
_CHECKPOINT = {"rows": 8_000_000, "width": 16}

ON_ONE_HOST = "Parameter servers on one host"
OVER_SOCKETS = "Parameter servers over sockets"
ONE_MACHINE = "Strategies of one machine"
FAILURES = "Start and recovery"
CHECKPOINTS = "Checkpoints"
INPUT = "Input"

TABLE = (
    Row(
        name="empty",
        section=ON_ONE_HOST,
        front=True,
        title="empty step: add 1 to a variable",
        unit="steps/s",
        sides=(OURS, PEER),
        points=(point(CLUSTER),),
        targets=(Target(against="peer", factor=15),),
    ),
    Row(
        name="mlp",
        section=ON_ONE_HOST,
        front=True,
        title="MLP 784-256-10, batch 64, SGD",
        unit="steps/s",
        sides=(OURS, PEER, LIMIT, BOUND, BARE),
        points=(point(CLUSTER, MLP),),
        targets=(Target(against="peer", factor=7.5), Target(against="bare", factor=0.75)),
        parity=ONE_WORKER,
    ),
    Row(
        name="embedding",
        section=ON_ONE_HOST,
        front=True,
        title="embedding 1 M × 16, batch 1024 × 26, Adagrad",
        unit="steps/s",
        sides=(OURS, PEER, LIMIT, BOUND),
        points=(point(CLUSTER, EMBEDDING),),
        targets=(Target(against="peer", factor=6),),
        parity=ONE_WORKER,
    ),
    Row(
        name="read",
        section=ON_ONE_HOST,
        front=True,
        title="read 64 MB of parameters in a step",
        unit="GB/s",
        sides=(OURS, PEER, LIMIT),
        points=(point(CLUSTER, _BYTES),),
        targets=(Target(against="peer", factor=15),),
    ),
    Row(
        name="add",
        section=ON_ONE_HOST,
        front=True,
        title="add 64 MB to parameters in a step",
        unit="GB/s",
        sides=(OURS, PEER, LIMIT, BOUND),
        points=(point(CLUSTER, _BYTES),),
        targets=(Target(against="peer", factor=4),),
    ),
    *(
        Row(
            name=f"{name}_sockets",
            section=OVER_SOCKETS,
            front=name in ("mlp", "embedding"),
            title=f"over sockets: {title}",
            unit=unit,
            sides=(OURS, PEER, BARE),
            points=(point(SOCKETS, size),),
            targets=(Target(against="peer", factor=factor), Target(against="bare", factor=0.7)),
            parity=ONE_WORKER if "check_steps" in size else None,
        )
        for name, title, unit, size, factor in (
            ("empty", "empty step", "steps/s", {}, 10),
            ("mlp", "MLP", "steps/s", MLP, 4),
            ("embedding", "embedding", "steps/s", EMBEDDING, 2.5),
            ("read", "read 64 MB that have changed", "GB/s", {**_BYTES, "changed": True}, 2),
            ("add", "add 64 MB", "GB/s", _BYTES, 2),
        )
    ),
    Row(
        name="one_device",
        section=ONE_MACHINE,
        front=True,
        title="one device, the MLP step",
        unit="steps/s",
        sides=(OURS, TRACED, EAGER, LIMIT),
        points=(point(MLP),),
        targets=(Target(against="limit", factor=0.97),),
        parity={},
        # Differences of three per cent must be visible: many short turns average out the noise.
        repetitions=15,
        seconds=0.5,
    ),
    Row(
        name="central",
        section=ONE_MACHINE,
        front=True,
        title="central storage, 2 CPU replicas, the MLP step",
        unit="steps/s",
        sides=(OURS, TRACED, EAGER, LIMIT, BOUND, BARE),
        points=(point(MLP, replicas=2),),
        targets=(Target(against="peer", factor=1), Target(against="bare", factor=0.85)),
        parity={},
    ),
    Row(
        name="central_parallel",
        section=ONE_MACHINE,
        title="central storage, `parallel_replicas=True`, the MLP step",
        unit="steps/s",
        sides=(OURS, TRACED, LIMIT, BARE),
        points=(point(MLP, replicas=2, parallel=True),),
        targets=(Target(against="peer", factor=1), Target(against="bare", factor=0.85)),
        parity={},
    ),
    Row(
        name="replicas_empty",
        section=ONE_MACHINE,
        title="`run` of an empty function on 2 CPU replicas",
        unit="µs",
        better="less",
        sides=(OURS,),
        points=(point(replicas=2),),
        targets=(Target(against="most", factor=150),),
        checked=False,
    ),
    Row(
        name="replicas_layers",
        section=ONE_MACHINE,
        title="a step with 100 parameters on 2 CPU replicas (limit: two backward passes of plain PyTorch)",
        unit="ms",
        better="less",
        sides=(OURS, LIMIT),
        points=(point(work.LAYERS_SIZE, replicas=2, check_steps=40),),
        targets=(Target(against="above", factor=1.5),),
        parity={},
    ),
    Row(
        name="keras_fit",
        section=ONE_MACHINE,
        title="Keras on torch: `fit` of the MLP, one device (limit: plain Keras)",
        unit="steps/s",
        sides=(OURS, LIMIT),
        points=(point(MLP),),
        targets=(Target(against="limit", factor=0.97),),
        parity={},
        repetitions=15,
        seconds=0.5,
    ),
    Row(
        name="startup",
        section=FAILURES,
        title="start a cluster (2 + 2) and do the first step",
        unit="s",
        better="less",
        sides=(OURS, PEER),
        points=(point(CLUSTER),),
        checked=False,
        repetitions=2,
    ),
    Row(
        name="recovery",
        section=FAILURES,
        front=True,
        title="from a killed worker to its successor's first step",
        unit="s",
        better="less",
        sides=(OURS, PEER),
        points=(point(CLUSTER),),
        checked=False,
        repetitions=3,
    ),
    Row(
        name="save",
        section=CHECKPOINTS,
        front=True,
        title="save a table and Adagrad's state, 1 GB, to memory (tmpfs)",
        unit="GB/s",
        sides=(OURS, PEER, LIMIT, COPY),
        points=(point(_CHECKPOINT, place="/dev/shm"),),
        targets=(Target(against="bound", factor=0.5),),
        checked=False,
    ),
    Row(
        name="save_disk",
        section=CHECKPOINTS,
        title="the same to disk",
        unit="GB/s",
        sides=(OURS, PEER, LIMIT),
        points=(point(_CHECKPOINT, place="/var/tmp"),),
        targets=(Target(against="limit", factor=0.9),),
        checked=False,
    ),
    Row(
        name="restore",
        section=CHECKPOINTS,
        title="restore it from memory (tmpfs)",
        unit="GB/s",
        sides=(OURS, PEER, LIMIT),
        points=(point(_CHECKPOINT, place="/dev/shm"),),
        targets=(Target(against="limit", factor=0.5),),
        checked=False,
    ),
    Row(
        name="save_gap",
        section=CHECKPOINTS,
        title="longest gap between two steps during a save of 1 GB on 2 servers",
        unit="ms",
        better="less",
        sides=(OURS,),
        points=(point(CLUSTER, _CHECKPOINT, place="/var/tmp"),),
        targets=(Target(against="most", factor=20),),
        checked=False,
        repetitions=3,
    ),
    Row(
        name="save_slowdown",
        section=CHECKPOINTS,
        title="steps lost during such a save",
        unit="%",
        better="less",
        sides=(OURS,),
        points=(point(CLUSTER, _CHECKPOINT, place="/var/tmp"),),
        targets=(Target(against="most", factor=15),),
        checked=False,
        figure_of=("save_gap", "slowdown_percent"),
        repetitions=3,
    ),
    Row(
        name="save_memory",
        section=CHECKPOINTS,
        title="additional memory of the servers during such a save",
        unit="%",
        better="less",
        sides=(OURS,),
        points=(point(CLUSTER, _CHECKPOINT, place="/var/tmp"),),
        targets=(Target(against="most", factor=10),),
        checked=False,
        figure_of=("save_gap", "memory_percent"),
        repetitions=3,
    ),
    Row(
        name="delta",
        section=CHECKPOINTS,
        title="delta after 60 s of training on Zipf ids, as a part of a full save",
        unit="× full",
        better="less",
        sides=(OURS,),
        points=(point(CLUSTER, _CHECKPOINT, place="/dev/shm", delta_s=60),),
        targets=(Target(against="most", factor=0.3),),
        checked=False,
        repetitions=1,
    ),
    Row(
        name="restore_servers",
        section=CHECKPOINTS,
        title="restore 1 GB, saved on 2 servers, on 3 servers",
        unit="GB/s",
        sides=(OURS, LIMIT, NEW_MEMORY),
        points=(point(CLUSTER, _CHECKPOINT, place="/dev/shm"),),
        targets=(Target(against="limit", factor=0.5),),
        checked=False,
        repetitions=3,
    ),
    *(
        Row(
            name=f"{name}_recovery",
            section=FAILURES,
            title=f"steps lost to recovery while nothing fails: {title}",
            unit="%",
            better="less",
            sides=(OURS,),
            points=(point(CLUSTER, size, work=work_class, place="/dev/shm"),),
            targets=(Target(against="most", factor=3),),
            checked=False,
            # Differences of three per cent must be visible: many short turns average out the noise.
            repetitions=9,
            seconds=2,
        )
        for name, title, work_class, size in (
            ("empty", "empty step", "Empty", {}),
            ("mlp", "MLP", "Mlp", MLP),
            ("embedding", "embedding", "Embedding", EMBEDDING),
        )
    ),
    Row(
        name="server_recovery",
        section=FAILURES,
        title="from a killed server (100 MB) to the next step, from a checkpoint",
        unit="s",
        better="less",
        sides=(OURS,),
        points=(point(CLUSTER, _CHECKPOINT, rows=800_000, place="/dev/shm"),),
        targets=(Target(against="most", factor=3),),
        checked=False,
        repetitions=3,
    ),
    Row(
        name="coordinator_recovery",
        section=FAILURES,
        title="from a killed coordinator to the next step of its successor",
        unit="s",
        better="less",
        sides=(OURS, START),
        points=(point(CLUSTER, place="/dev/shm"),),
        targets=(Target(against="above", factor=0.5),),
        checked=False,
        repetitions=3,
    ),
    Row(
        name="input",
        section=INPUT,
        title="26 columns, shuffle, repeat, batch(1024)",
        unit="M rows/s",
        sides=(OURS, PEER, LIMIT),
        points=(point(work.INPUT_SIZE),),
        targets=(Target(against="least", factor=1),),
        seconds=0.7,
    ),
    Row(
        name="parquet",
        section=INPUT,
        front=True,
        title="read Parquet, 40 columns (TensorFlow: the rows as TFRecord)",
        unit="k rows/CPU s",
        sides=(OURS, PEER, PYARROW),
        points=(point(reading.FILES_SIZE),),
        targets=(Target(against="least", factor=500), Target(against="peer", factor=3)),
        seconds=0.7,
    ),
    Row(
        name="csv",
        section=INPUT,
        title="read CSV, 40 columns",
        unit="k rows/CPU s",
        sides=(OURS, PEER, PYARROW),
        points=(point(reading.FILES_SIZE),),
        targets=(Target(against="least", factor=250), Target(against="peer", factor=3)),
        seconds=0.7,
    ),
    *(
        Row(
            name=name,
            section=INPUT,
            title="train from Parquet, 26 ids a row (TensorFlow: TFRecord)",
            unit=unit,
            sides=(OURS, PEER),
            points=(point(CLUSTER, work.EMBEDDING_SIZE, reading.FILES_SIZE),),
            checked=False,
            repetitions=3,
            figure_of=figure_of,
        )
        for name, unit, figure_of in (
            ("files", "k rows/s", None),
            ("files_cpu", "k rows/CPU s", ("files", "per_processor_s")),
        )
    ),
    Row(
        name="tfrecord",
        section=INPUT,
        title="read TFRecord, 40 features",
        unit="k rows/CPU s",
        sides=(OURS, PEER),
        points=(point(reading.FILES_SIZE, batches=32),),
        seconds=0.7,
    ),
)

ON_REQUEST = (
    Row(
        name="save_minutes",
        title="steps lost over 10 minutes with a save of 1 GB every 60 s",
        unit="%",
        better="less",
        sides=(OURS,),
        points=(point(CLUSTER, _CHECKPOINT, place="/var/tmp", long_s=600, every_s=60),),
        targets=(Target(against="most", factor=2),),
        checked=False,
        repetitions=1,
        # The harness waits this much longer for the sample.
        seconds=900,
    ),
)
"""Rows that a full run leaves out because they take too long: ``make bench ONLY=save_minutes``."""
