"""`sg.cluster_resolver`: ways to find a cluster and this task's place in it.

Only names; the classes live in `_cluster/discovery/resolvers.py`, `platforms.py` and `spec.py`.
"""

from stratagem._cluster.discovery.cluster_spec import ClusterDeviceFilters, ClusterSpec
from stratagem._cluster.discovery.platform_resolvers import (
    ExecutableLocation,
    GCEClusterResolver,
    KubernetesClusterResolver,
    SageMakerClusterResolver,
    SlurmClusterResolver,
)
from stratagem._cluster.discovery.resolvers import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)

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
