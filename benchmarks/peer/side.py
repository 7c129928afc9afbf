"""Process of the peer: answers the harness, or runs one task of the peer's cluster.

Run by the peer's own Python: ``python -m benchmarks.peer.side``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read by the library when it is loaded

from benchmarks.peer import checkpoints, cluster, from_files, pipelines, reading, recovery, single
from benchmarks.protocol import Work, serve

WORK: dict[str, type[Any]] = {
    "empty": cluster.Empty,
    "mlp": cluster.Mlp,
    "embedding": cluster.Embedding,
    "hot_table": cluster.Embedding,
    "read": cluster.Read,
    "add": cluster.Add,
    "startup": cluster.StartUp,
    "recovery": recovery.Recovery,
    "save": checkpoints.Save,
    "save_disk": checkpoints.Save,
    "restore": checkpoints.Restore,
    "input": pipelines.Input,
    "parquet": reading.Records,
    "csv": reading.Csv,
    "files": from_files.FromRecords,
    "files_cpu": from_files.FromRecords,
    "tfrecord": reading.Records,
    "one_device": single.OneDevice,
    "central": single.Central,
    "central_parallel": single.Central,
}


def make(row: str, size: dict[str, Any]) -> Work:
    """Return the peer's work of a row."""
    made: Work = WORK[row.removesuffix("_sockets")](size)
    return made


if __name__ == "__main__":
    if sys.argv[1:2] == ["task"]:
        cluster.serve_task(*sys.argv[2:5])
    else:
        sys.exit(serve(make))
