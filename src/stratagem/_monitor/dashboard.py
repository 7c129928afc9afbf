"""The public `dashboard`: a live page and a report of a running cluster."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import final

from typing_extensions import override

from stratagem._monitor.cluster_view import ClusterView
from stratagem._monitor.monitor import Monitor
from stratagem._monitor.sample_sources import ProgramSource, SampleSource
from stratagem._owner import Owner


@final
class Dashboard(Owner):
    """Live page of a cluster; `dashboard` creates it.

    Example:
        >>> import stratagem as sg
        >>> strategy = sg.OneDeviceStrategy("cpu:0")
        >>> with sg.dashboard(strategy) as page:
        ...     isinstance(page, sg.Dashboard), page.url.startswith("http://127.0.0.1:")
        (True, True)
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        address: str = "127.0.0.1:0",
        title: str = "Stratagem",
        tensorboard: str | os.PathLike[str] | None = None,
    ) -> None:
        from stratagem._monitor.web_server import WebServer

        self._title = title
        with ExitStack() as opened:
            self.monitor = opened.enter_context(Monitor(source, tensorboard=tensorboard))
            self.monitor.start()
            self._server = WebServer(self.monitor, address=address, title=title)
            opened.push(self._server)
            self._opened = opened.pop_all()

    @property
    def url(self) -> str:
        """Link to the page. It has a random token: give it only to people who may see the cluster."""
        return f"{self._server.base_url}/?token={self.token}"

    @property
    def metrics_url(self) -> str:
        """Address for Prometheus, which sends `token` as its bearer token."""
        return f"{self._server.base_url}/metrics"

    @property
    def token(self) -> str:
        """Random secret of this page."""
        return self._server.token

    @property
    def view(self) -> ClusterView:
        """The contents of the page, as plain data; about a second old."""
        return self.monitor.view

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a report of the run so far: one HTML file that needs no server and no network."""
        from stratagem._monitor.page import write_report

        return write_report(self.monitor.look(), path, title=self._title)

    @override
    def close(self) -> None:
        """End the page and its threads. The report can still be saved. May be called again."""
        self._opened.close()

    @override
    def __repr__(self) -> str:
        return f"<Dashboard {self._server.base_url}>"


def dashboard(
    subject: object,
    *,
    address: str = "127.0.0.1:0",
    title: str = "Stratagem",
    tensorboard: str | os.PathLike[str] | None = None,
) -> Dashboard:
    """Serve a live page of a running cluster. It needs ``pip install 'stratagem[dashboard]'``.

    The page shows speed, the workers' time by phase, staleness, servers, tables, logged values, events, and advice.
    It can be opened only from this machine, unless you pass another address, and only with the link's token.

    Args:
        subject: a `ClusterCoordinator`, or any strategy.
        address: ``host:port`` to listen on; port 0 takes a free one.
        title: title of the page and of the report.
        tensorboard: directory for TensorBoard; by default none is written.

    Returns:
        An object with `url`, `save(path)` and `close()`; also a context manager.

    Raises:
        ImportError: Bokeh is not installed.

    Example:
        >>> import stratagem as sg
        >>> with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        ...     with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        ...         coordinator = sg.ClusterCoordinator(strategy)
        ...         with sg.dashboard(coordinator) as page:
        ...             coordinator.schedule(sg.metrics.log, args=("loss", 0.5)).fetch()
        ...             print(page.url.startswith("http://127.0.0.1:"))
        True
    """
    require_bokeh()
    return Dashboard(ProgramSource(subject), address=address, title=title, tensorboard=tensorboard)


def require_bokeh() -> None:
    """Raise an error with the remedy if Bokeh is not installed."""
    try:
        import bokeh  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "the page and the report need Bokeh, which is not installed: pip install "
            "'stratagem[dashboard]'"
        ) from error
