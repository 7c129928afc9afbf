"""Stratagem: tf.distribute's strategies for PyTorch.

Create a model and its optimizer under the scope of a strategy, such as `OneDeviceStrategy`, and pass the training step
to ``strategy.run_steps``.

This module only has the table of public names. A name is loaded on first use, so that ``import stratagem`` is fast and a
program that trains on one device never loads the cluster packages.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem import cluster_resolver as cluster_resolver
    from stratagem import compat as compat
    from stratagem import config as config
    from stratagem import data as data
    from stratagem import errors as errors
    from stratagem import integrations as integrations
    from stratagem import metrics as metrics
    from stratagem import nn as nn
    from stratagem import optim as optim
    from stratagem import partitioners as partitioners
    from stratagem import testing as testing
    from stratagem._checkpoint.checkpoint import Checkpoint as Checkpoint
    from stratagem._checkpoint.evaluator import Evaluator as Evaluator
    from stratagem._checkpoint.manager import CheckpointManager as CheckpointManager
    from stratagem._cluster.coordinator.coordinator import ClusterCoordinator as ClusterCoordinator
    from stratagem._cluster.coordinator.remote_values import PerWorkerValues as PerWorkerValues
    from stratagem._cluster.coordinator.remote_values import RemoteValue as RemoteValue
    from stratagem._cluster.coordinator.shared_dataset import InputLedger as InputLedger
    from stratagem._cluster.coordinator.shared_dataset import LeasedRows as LeasedRows
    from stratagem._cluster.coordinator.shared_dataset import SharedDataset as SharedDataset
    from stratagem._cluster.discovery.cluster_spec import ClusterSpec as ClusterSpec
    from stratagem._cluster.launch.detached_cluster import DetachedCluster as DetachedCluster
    from stratagem._cluster.launch.local_cluster import LocalCluster as LocalCluster
    from stratagem._cluster.launch.ray_cluster import RayCluster as RayCluster
    from stratagem._cluster.launch.task_server import Server as Server
    from stratagem._core.context import get_current_worker_index as get_current_worker_index
    from stratagem._core.context import get_replica_context as get_replica_context
    from stratagem._core.context import get_strategy as get_strategy
    from stratagem._core.context import has_strategy as has_strategy
    from stratagem._core.context import in_cross_replica_context as in_cross_replica_context
    from stratagem._core.context import set_strategy as set_strategy
    from stratagem._core.reduction import ReduceOp as ReduceOp
    from stratagem._core.user_contexts import InputContext as InputContext
    from stratagem._core.user_contexts import ReplicaContext as ReplicaContext
    from stratagem._core.user_contexts import ValueContext as ValueContext
    from stratagem._core.values import DistributedValues as DistributedValues
    from stratagem._core.values import Mirrored as Mirrored
    from stratagem._core.values import PerReplica as PerReplica
    from stratagem._core.values import convert_to_tensor as convert_to_tensor
    from stratagem._core.variables import Variable as Variable
    from stratagem._core.variables import VariableAggregation as VariableAggregation
    from stratagem._core.variables import VariableSynchronization as VariableSynchronization
    from stratagem._monitor.dashboard import Dashboard as Dashboard
    from stratagem._monitor.dashboard import dashboard as dashboard
    from stratagem._ps.tables.sharded_variable import ShardedVariable as ShardedVariable
    from stratagem._strategies.base import Strategy as Strategy
    from stratagem._strategies.central_storage import (
        CentralStorageStrategy as CentralStorageStrategy,
    )
    from stratagem._strategies.mirrored import MirroredStrategy as MirroredStrategy
    from stratagem._strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
    from stratagem._strategies.parameter_server import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from stratagem._wire.tls import TlsFiles as TlsFiles
    from stratagem.config import InputOptions as InputOptions
    from stratagem.errors import StratagemError as StratagemError
    from stratagem.launch import auto_strategy as auto_strategy

__version__ = "0.1.0"

# Name -> module that defines it; "" marks a public module of the package itself.
_MODULE_OF = {
    # strategies
    "Strategy": "_strategies.base",
    "OneDeviceStrategy": "_strategies.one_device",
    "CentralStorageStrategy": "_strategies.central_storage",
    "MirroredStrategy": "_strategies.mirrored",
    "ParameterServerStrategy": "_strategies.parameter_server",
    "auto_strategy": "launch",
    # contexts
    "ReplicaContext": "_core.user_contexts",
    "ValueContext": "_core.user_contexts",
    "InputContext": "_core.user_contexts",
    "get_strategy": "_core.context",
    "has_strategy": "_core.context",
    "get_replica_context": "_core.context",
    "in_cross_replica_context": "_core.context",
    "set_strategy": "_core.context",
    "get_current_worker_index": "_core.context",
    # values, variables, reductions
    "DistributedValues": "_core.values",
    "PerReplica": "_core.values",
    "Mirrored": "_core.values",
    "convert_to_tensor": "_core.values",
    "Variable": "_core.variables",
    "VariableAggregation": "_core.variables",
    "VariableSynchronization": "_core.variables",
    "ShardedVariable": "_ps.tables.sharded_variable",
    "ReduceOp": "_core.reduction",
    # checkpoints
    "Checkpoint": "_checkpoint.checkpoint",
    "CheckpointManager": "_checkpoint.manager",
    "Evaluator": "_checkpoint.evaluator",
    # clusters
    "ClusterCoordinator": "_cluster.coordinator.coordinator",
    "RemoteValue": "_cluster.coordinator.remote_values",
    "PerWorkerValues": "_cluster.coordinator.remote_values",
    "SharedDataset": "_cluster.coordinator.shared_dataset",
    "InputLedger": "_cluster.coordinator.shared_dataset",
    "LeasedRows": "_cluster.coordinator.shared_dataset",
    "LocalCluster": "_cluster.launch.local_cluster",
    "DetachedCluster": "_cluster.launch.detached_cluster",
    "RayCluster": "_cluster.launch.ray_cluster",
    "ClusterSpec": "_cluster.discovery.cluster_spec",
    "Server": "_cluster.launch.task_server",
    "TlsFiles": "_wire.tls",
    # monitoring
    "dashboard": "_monitor.dashboard",
    "Dashboard": "_monitor.dashboard",
    # options and errors
    "InputOptions": "config",
    "StratagemError": "errors",
    # public modules
    "cluster_resolver": "",
    "compat": "",
    "config": "",
    "data": "",
    "errors": "",
    "integrations": "",
    "metrics": "",
    "nn": "",
    "optim": "",
    "partitioners": "",
    "testing": "",
}

__all__ = sorted([*_MODULE_OF, "__version__"])

_NO_DDP = ". For synchronous training on several machines use PyTorch's DistributedDataParallel, or ParameterServerStrategy with staleness=0"
_TF_NAMES = {
    "experimental": ". Use sg.compat.experimental, or the name itself, such as sg.ParameterServerStrategy",
    "coordinator": ". Use sg.ClusterCoordinator",
    "distribute": ". Its names are attributes of stratagem, such as sg.MirroredStrategy",
    "function": ". PyTorch needs none: remove it, or use sg.compat.function, which returns its argument",
    "MultiWorkerMirroredStrategy": _NO_DDP,
    "TPUStrategy": ". There is no TPU backend",
}
"""What to use instead of names of tf.distribute, for error messages."""


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        hint = _TF_NAMES.get(name, "")
        raise AttributeError(f"module 'stratagem' has no attribute {name!r}{hint}")
    if module == "":
        return importlib.import_module(f"stratagem.{name}")
    value = getattr(importlib.import_module(f"stratagem.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
