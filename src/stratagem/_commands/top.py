"""``stratagem top``: show the state of every task of a running cluster, in the terminal or on a page."""

from __future__ import annotations

import sys
import time

from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._commands.serve import cluster_from
from stratagem._demo.observer import picture_of
from stratagem._demo.view import open_view
from stratagem._monitor.cluster_view import ClusterView
from stratagem._monitor.monitor import Monitor
from stratagem._monitor.sample_sources import ClusterSource

__all__ = ["serve_page", "watch"]

_TITLE = "stratagem top"


def watch(*, cluster: str | None, once: bool, interval_s: float) -> int:
    """Show the cluster until Ctrl-C; return 1 if no task answers at first."""
    if not interval_s > 0:
        raise ValueError(f"--interval {interval_s!r}: expected a positive number of seconds")
    with Monitor(ClusterSource(ClusterSpec(cluster_from(cluster)))) as monitor:
        first = monitor.look()
        gone = _is_gone(first)
        if once and any(worker.state == "running" for worker in first.workers):
            time.sleep(interval_s)  # rates need two samples
            first = monitor.look()
        with open_view() as view:
            view.show(picture_of(first, title=_TITLE))
            if once or gone:
                return int(gone)
            while True:
                time.sleep(interval_s)
                view.show(picture_of(monitor.look(), title=_TITLE))


def serve_page(*, cluster: str | None, address: str) -> int:
    """Serve the live page of the cluster until Ctrl-C; return 1 if no task answers at first."""
    from stratagem._monitor.dashboard import Dashboard, require_bokeh

    require_bokeh()
    source = ClusterSource(ClusterSpec(cluster_from(cluster)))
    with Dashboard(source, address=address, title="Stratagem") as page:
        sys.stdout.write(f"live page: {page.url}\n")
        sys.stdout.flush()
        if _is_gone(page.view):
            sys.stdout.write("no task answers\n")
            return 1
        while True:
            time.sleep(1.0)


def _is_gone(view: ClusterView) -> bool:
    """Return whether no task answers."""
    return len(view.lost) == len(view.workers) + len(view.servers)
