"""`sg.cluster_resolver`: ways to find a cluster and this task's place in it.

Only names; the classes live in `_cluster/resolvers.py`, `platforms.py` and `spec.py`.
"""

from stratagem._cluster.platforms import (
    ExecutableLocation,
    GCEClusterResolver,
    KubernetesClusterResolver,
    SageMakerClusterResolver,
    SlurmClusterResolver,
)
from stratagem._cluster.resolvers import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)
from stratagem._cluster.spec import ClusterDeviceFilters, ClusterSpec

__all__ = [
    "ClusterDeviceFilters",
    "ClusterResolver",
    "ClusterSpec",
    "ExecutableLocation",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
]
