"""``stratagem cluster``: start, list and stop local clusters that outlive the scripts that use them."""

from __future__ import annotations


def start(name: str, *, workers: int, ps: int) -> list[str]:
    """Start a cluster, unless it runs; return what to print."""
    from stratagem._cluster.launch.detached_cluster import DetachedCluster, describe

    DetachedCluster(name, workers=workers, ps=ps)
    return [describe(name)]


def run(name: str, *, workers: int, ps: int) -> None:
    """Own a cluster in this process until SIGTERM or Ctrl-C."""
    from stratagem._cluster.launch.detached_cluster import own_cluster

    own_cluster(name, workers, ps)


def list_clusters() -> list[str]:
    """Return one line for each cluster of this user that runs."""
    from stratagem._cluster.launch.detached_cluster import describe, names

    return [describe(name) for name in names()]


def stop(name: str) -> bool:
    """End a cluster; return False if none of this name runs."""
    from stratagem._cluster.launch import detached_cluster

    return detached_cluster.stop(name)
