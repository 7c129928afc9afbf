"""Public classes that find a cluster and the task of this process in it."""

from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._cluster.discovery.platform_resolvers import (
    ExecutableLocation,
    GCEClusterResolver,
    KubernetesClusterResolver,
    SlurmClusterResolver,
)
from stratagem._cluster.discovery.resolvers import (
    ClusterResolver,
    FileResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "ExecutableLocation",
    "FileResolver",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
]
