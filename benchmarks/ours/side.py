"""Our side's process. Run by the harness: ``python -m benchmarks.ours.side``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch

from benchmarks.protocol import Work, serve

# Row -> module and class; loaded on use, so that a row does not wait for the imports of others.
WORK = {
    "one_device": "single:OneDevice",
    "central": "single:Central",
    "central_parallel": "single:Central",
    "replicas_empty": "single:EmptyReplicas",
    "replicas_layers": "single:ReplicatedLayers",
    "keras_fit": "benchmarks.keras_fit:OneDeviceFit",
    "empty": "cluster:Empty",
    "mlp": "cluster:Mlp",
    "workers": "cluster:Mlp",
    "servers": "cluster:Mlp",
    "closures": "cluster:Mlp",
    "embedding": "cluster:Embedding",
    "table": "cluster:Embedding",
    "hot_table": "cluster:Embedding",
    "read": "cluster:Read",
    "add": "cluster:Add",
    "message": "cluster:Add",
    "variables": "cluster:Variables",
    "mlp_backups": "cluster:Mlp",
    "embedding_backups": "cluster:Embedding",
    "failover": "cluster:Failover",
    "startup": "cluster:StartUp",
    "recovery": "cluster:Recovery",
    "save": "checkpoints:Save",
    "save_disk": "checkpoints:Save",
    "restore": "checkpoints:Restore",
    "save_gap": "server_saves:SaveWhileTraining",
    "save_slowdown": "server_saves:SaveWhileTraining",
    "save_memory": "server_saves:SaveWhileTraining",
    "save_minutes": "server_saves:SaveEveryMinute",
    "delta": "server_saves:Delta",
    "restore_servers": "server_saves:RestoreOnOthers",
    "empty_recovery": "recovery_price:RecoveryPrice",
    "mlp_recovery": "recovery_price:RecoveryPrice",
    "embedding_recovery": "recovery_price:RecoveryPrice",
    "server_recovery": "server_saves:ServerRecovery",
    "coordinator_recovery": "server_saves:CoordinatorRecovery",
    "input": "pipelines:Input",
    "loader": "pipelines:Loader",
    "parquet": "reading:Parquet",
    "csv": "reading:Csv",
    "files": "from_files:FromParquet",
    "files_cpu": "from_files:FromParquet",
    "tfrecord": "reading:TFRecord",
    "wire": "pipelines:Wire",
    "quality": "quality:Quality",
    "scaling_probe": "benchmarks.scaling.steps:Probe",
    "scaling_mlp": "benchmarks.scaling.steps:MlpSteps",
    "scaling_embedding": "benchmarks.scaling.steps:EmbeddingSteps",
}


def make(row: str, size: dict[str, Any]) -> Work:
    """Return our work of a row."""
    if size.get("sockets"):
        os.environ["STRATAGEM_SHARED_MEMORY"] = "0"
    if size.get("wire_dtype"):
        os.environ["STRATAGEM_WIRE_DTYPE"] = size["wire_dtype"]
    for suffix in ("_sockets", "_torch", "_16"):
        row = row.removesuffix(suffix)
    module, name = WORK[row].split(":")
    path = module if "." in module else f"benchmarks.ours.{module}"
    made: Work = getattr(importlib.import_module(path), name)(size)
    return made


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(serve(make))
