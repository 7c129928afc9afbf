"""``stratagem cluster``: start, list and stop local clusters that outlive the scripts that use them."""

from __future__ import annotations

import argparse
import sys

from stratagem._cluster.launch import detached_cluster


def run(options: argparse.Namespace) -> int:
    """Run one action; return the exit code."""
    name = options.name
    if options.action == "stop":
        ended = detached_cluster.stop(name)
        sys.stdout.write(f"{name}: {'stopped' if ended else 'not running'}\n")
        return int(not ended)
    if options.action == "run":
        detached_cluster.own_cluster(name, options.workers, options.ps)
        return 0
    names = [name]
    if options.action == "start":
        detached_cluster.DetachedCluster(name, options.workers, options.ps)
    else:
        names = detached_cluster.names()
    lines = [detached_cluster.describe(one) for one in names]
    sys.stdout.write("\n".join(lines or ["no cluster runs"]) + "\n")
    return 0
