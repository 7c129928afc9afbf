"""``stratagem top``: show the state of every task of a running cluster, in the terminal or on a page."""

from __future__ import annotations

import argparse
import functools
import sys
import time

from stratagem import config
from stratagem._cluster.discovery.announced_clusters import AnnouncedCluster, find_clusters
from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._cluster.launch.cluster_file import owner_of
from stratagem._cluster.launch.detached_cluster import path_of
from stratagem._commands.serve import cluster_from
from stratagem._monitor.advice import advise
from stratagem._monitor.cluster_view import ClusterView
from stratagem._monitor.monitor import Monitor
from stratagem._monitor.sample_sources import ClusterSource
from stratagem._monitor.terminal_view import TerminalView, picture_of

_TITLE = "stratagem top"


def run(options: argparse.Namespace) -> int:
    """Show the cluster until Ctrl-C, or once; return 1 if no task answers at first."""
    if options.web:
        return _serve_page(options)
    if not options.interval > 0:
        raise ValueError(f"--interval {options.interval!r}: expected a positive number of seconds")
    with Monitor(source_of(options.cluster)) as monitor:
        first = monitor.look()
        gone = _is_gone(first)
        if options.once and any(worker.state == "running" for worker in first.workers):
            time.sleep(options.interval)  # rates need two samples
            first = monitor.look()
        with TerminalView() as view:
            view.show(picture_of(first, title=_TITLE))
            while not (options.once or gone):
                time.sleep(options.interval)
                view.show(picture_of(monitor.look(), title=_TITLE))
    return int(gone)


def _serve_page(options: argparse.Namespace) -> int:
    """Serve the live page of the cluster until Ctrl-C; return 1 if no task answers at first."""
    from stratagem._monitor.dashboard import Dashboard, require_bokeh

    require_bokeh()
    with Dashboard(source_of(options.cluster), address=options.address) as page:
        sys.stdout.write(f"live page: {page.url}\n")
        sys.stdout.flush()
        if _is_gone(page.view):
            advice = "".join(f"\n{one}" for one in advise(page.view)[:1])
            sys.stdout.write(f"no task answers{advice}\n")
            return 1
        while True:
            time.sleep(1.0)


def source_of(text: str | None) -> ClusterSource:
    """Return the source for ``--cluster``: addresses as JSON, a process number or a name; else the cluster that runs here.

    Raises:
        ValueError: there is no such cluster, or there are several and none was chosen.
    """
    if text is None and config.environment("TF_CONFIG"):
        return ClusterSource(cluster_from(None))
    if text is not None and text.lstrip().startswith("{"):
        return ClusterSource(cluster_from(text))
    found = _choose(text, find_clusters())
    return ClusterSource(functools.partial(_newest_spec, found), found.key, found.tls)


def _choose(text: str | None, found: list[AnnouncedCluster]) -> AnnouncedCluster:
    listed = "".join(f"\n  {one.describe()}" for one in found)
    if text is None:
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(
                f"you have {len(found)} clusters on this machine. Choose one with --cluster and its process number:"
                f"{listed}"
            )
        raise ValueError(
            "no cluster of yours runs on this machine. Start one, or give the addresses of one elsewhere with "
            "--cluster JSON or TF_CONFIG, and its key with STRATAGEM_CLUSTER_KEY."
        )
    number = int(text) if text.isdecimal() else owner_of(path_of(text))
    for one in found if number else []:  # 0: no such name, or tasks that no process owns
        if number in (one.owner, *one.pids):
            return one
    raise ValueError(
        f"--cluster {text!r}: expected a JSON object of jobs and addresses, or the process number or the name of a "
        f"cluster of yours on this machine, of which there {'are' if found else 'is none'}{':' if found else '.'}{listed}"
    )


def _newest_spec(cluster: AnnouncedCluster) -> ClusterSpec:
    """Return the present addresses of a cluster: a task that is started again has another one."""
    return next((one.spec for one in find_clusters() if one.is_same(cluster)), cluster.spec)


def _is_gone(view: ClusterView) -> bool:
    """Return whether no task answers."""
    return len(view.lost) == len(view.workers) + len(view.servers)
