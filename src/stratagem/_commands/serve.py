"""``stratagem server``: run one task of a cluster in the foreground."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from stratagem import config

__all__ = ["cluster_from", "serve"]


def serve(
    *,
    job: str | None,
    index: int | None,
    cluster: str | None,
    checkpoint_directories: Sequence[str] = (),
    threads: int | None = None,
) -> int:
    """Run the task until it is stopped (Ctrl-C, SIGTERM)."""
    from stratagem import _faults
    from stratagem._cluster.discovery.cluster_spec import ClusterSpec
    from stratagem._cluster.discovery.resolvers import TFConfigClusterResolver
    from stratagem._cluster.launch.task_server import Server

    resolver = TFConfigClusterResolver()
    spec = ClusterSpec(cluster_from(cluster))
    job = job or resolver.task_type
    index = resolver.task_id if index is None else index
    if job not in ("worker", "ps"):
        raise ValueError(
            f"unknown task: job={job!r}. Give --job worker or --job ps, or set TF_CONFIG's task."
        )
    _faults.activate_from_environment(f"/job:{job}/task:{index}")
    with Server(
        spec,
        job_name=job,
        task_index=index,
        checkpoint_directories=checkpoint_directories,
        threads=threads,
    ) as server:
        # The program that started us may wait for this line: the port is open now.
        sys.stdout.write(f"serving /job:{job}/task:{index} at {server.target}\n")
        sys.stdout.flush()
        server.join()
    return 0


def cluster_from(text: str | None) -> dict[str, list[str]]:
    """Return the cluster that ``--cluster`` describes, else TF_CONFIG's.

    Example:
        >>> cluster_from('{"ps": ["localhost:2222"]}')
        {'ps': ['localhost:2222']}
    """
    source = "--cluster"
    if text is None:
        text, source = config.environment("TF_CONFIG"), "TF_CONFIG"
        if not text:
            raise ValueError("no cluster is given. Give --cluster JSON or set TF_CONFIG.")
    try:
        described = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is not JSON ({error}): {text[:80]!r}") from error
    if source == "TF_CONFIG" and isinstance(described, dict):
        described = described.get("cluster", {})
    if not isinstance(described, dict) or not described:
        raise ValueError(
            f"{source} describes no cluster: {text[:80]!r}; expected a JSON object of jobs and lists "
            'of addresses, such as {"ps": ["localhost:2222"], "worker": ["localhost:2223"]}'
        )
    return described
