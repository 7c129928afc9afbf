"""HTTP server of the live page: a Bokeh server in a separate thread, behind one check of every request.

The check comes before any handler. It accepts GET and HEAD with the secret (in the link, in a cookie or as a
bearer token), for the right host and from no other origin. Requests change nothing: a page has a document of its own,
and data goes from the cluster to the page only.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import threading
from concurrent.futures import Future
from typing import Any, Final, final
from urllib.parse import urlsplit

from bokeh.application import Application
from bokeh.application.handlers import FunctionHandler
from bokeh.server.server import BaseServer
from bokeh.server.tornado import BokehTornado
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPServerRequest
from tornado.ioloop import IOLoop
from tornado.web import HTTPError, RequestHandler
from typing_extensions import override

from stratagem._monitor.monitor import Monitor
from stratagem._monitor.page import CARDS, TEMPLATE, Page
from stratagem._owner import Owner

_log = logging.getLogger("stratagem.monitor")

_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
_START_S: Final = 30.0
_STOP_S: Final = 10.0
_UPDATE_MS: Final = 1000  # between updates of an open page
_MESSAGE_BYTES: Final = 1 << 20  # from a browser, which only reports sizes and clicks
_KEEP_UNUSED_MS: Final = 10_000


@final
class Access:
    """Decides which requests are answered. `address`, `port`: of the server; `token`: the secret in the link."""

    def __init__(self, address: str, port: int, token: str) -> None:
        self._token = token
        self.cookie = f"stratagem-{port}"  # browsers send cookies to every port of a host
        self.ticket = secrets.token_urlsafe(32)
        is_local = address in ("127.0.0.1", "::1", "localhost")
        # A page of another site whose name was made to point here sends that name as the host.
        self._hosts = {f"{host}:{port}" for host in _LOOPBACK} if is_local else None

    def refusal(self, request: HTTPServerRequest) -> tuple[int, str] | None:
        """Return status and reason of a refusal; None if the request is answered."""
        if request.method not in ("GET", "HEAD"):
            return 405, "this page only shows; use GET"
        if self._hosts is not None and request.host.lower() not in self._hosts:
            return 403, "wrong host: use the link that the program printed"
        origin = request.headers.get("Origin") or request.headers.get("Sec-Websocket-Origin")
        if origin is not None and urlsplit(origin).netloc.lower() != request.host.lower():
            return 403, "requests of other sites are refused"
        if self.has_ticket(request) or self.has_token(request):
            return None
        return 403, "no access: use the whole link that the program printed, with its token"

    def has_ticket(self, request: HTTPServerRequest) -> bool:
        """Return whether the request has the cookie that a visit with the token set."""
        found = request.cookies.get(self.cookie)
        return found is not None and _equal(found.value, self.ticket)

    def has_token(self, request: HTTPServerRequest) -> bool:
        """Return whether the request has the token, in its query or as a bearer token."""
        given = [one.decode("utf-8", "replace") for one in request.arguments.get("token", ())]
        kind, _, credentials = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer":
            given.append(credentials.strip())
        return any(_equal(one, self._token) for one in given)


def _equal(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(), secret.encode())


class _Refused(RequestHandler):  # type: ignore[misc]
    """Answer to every request that is not accepted."""

    def initialize(self, status: int, reason: str) -> None:
        self._status, self._why = status, reason

    def prepare(self) -> None:
        self.set_status(self._status)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(f"{self._why}\n")


class _Enter(RequestHandler):  # type: ignore[misc]
    """Visit with the token in the link: sets the cookie and removes the token from the address."""

    def initialize(self, access: Access) -> None:
        self._access = access

    def get(self) -> None:
        access = self._access
        self.set_cookie(access.cookie, access.ticket, httponly=True, samesite="Lax", path="/")
        self.set_header("Referrer-Policy", "no-referrer")
        self.redirect("/")


class _Metrics(RequestHandler):  # type: ignore[misc]
    """The cluster's metrics in the text format of Prometheus."""

    def initialize(self, views: Monitor) -> None:
        self._views = views

    def get(self) -> None:
        try:
            from stratagem._monitor.prometheus import exposition
        except ImportError as error:
            raise HTTPError(501, reason="pip install 'stratagem[dashboard]'") from error
        text, content_type = exposition(self._views.view)
        self.set_header("Content-Type", content_type)
        self.write(text)


class _CheckedTornado(BokehTornado):  # type: ignore[misc]
    """Bokeh's application behind the check."""

    access: Access

    def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> Any:
        refused = self.access.refusal(request)
        if refused is not None:
            arguments = {"status": refused[0], "reason": refused[1]}
            return self.get_handler_delegate(request, _Refused, arguments)
        if request.path == "/" and "token" in request.arguments:
            return self.get_handler_delegate(request, _Enter, {"access": self.access})
        return super().find_handler(request, **kwargs)

    def log_request(self, handler: RequestHandler) -> None:
        """Log without the query, which may have the token."""
        _log.debug("%d %s", handler.get_status(), handler.request.path)


@final
class WebServer(Owner):
    """Server of one cluster's page.

    Args:
        views: has the latest view.
        address: ``host:port``; port 0 takes a free one.
        title: of the page.
    """

    def __init__(self, views: Monitor, *, address: str, title: str) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(
                f"address={address!r}: expected host:port, such as '127.0.0.1:0' (port 0: any free one)"
            )
        self._views = views
        self._title = title
        self._host = host.strip("[]")
        self._port = int(port)
        self.token = secrets.token_urlsafe(24)
        self._ready: Future[None] = Future()  # or the error that ended the thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._serve, name="stratagem-page", daemon=True)
        self._thread.start()
        try:
            self._ready.result(_START_S)
        except TimeoutError as error:
            raise TimeoutError(f"the page's server did not start within {_START_S:g} s") from error
        except BaseException:
            self._thread.join(_STOP_S)
            raise

    @property
    def base_url(self) -> str:
        """Address of the server, without the token."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        if self._host in ("0.0.0.0", "::"):
            host = os.uname().nodename
        return f"http://{host}:{self._port}"

    def _serve(self) -> None:
        try:
            asyncio.run(self._serve_until_closed())
        except BaseException as error:  # noqa: BLE001 - raised by the constructor
            if not self._ready.done():
                self._ready.set_exception(error)

    async def _serve_until_closed(self) -> None:
        loop = IOLoop.current()
        server, http = self._start(loop)
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ready.set_result(None)
        await self._stop.wait()
        server.stop(wait=False)
        await http.close_all_connections()

    def _start(self, loop: IOLoop) -> tuple[BaseServer, HTTPServer]:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, self._port), family=family)
        listener.setblocking(False)
        self._port = listener.getsockname()[1]
        application = Application(FunctionHandler(self._modify, trap_exceptions=False))
        tornado = _CheckedTornado(
            {"/": application},
            extra_websocket_origins=["*"],  # the check has compared origin and host
            extra_patterns=[("/metrics", _Metrics, {"views": self._views})],
            secret_key=secrets.token_bytes(32),
            sign_sessions=True,
            include_headers=[],
            include_cookies=[],
            ico_path="none",
            websocket_max_message_size_bytes=_MESSAGE_BYTES,
            unused_session_lifetime_milliseconds=_KEEP_UNUSED_MS,
            check_unused_sessions_milliseconds=_KEEP_UNUSED_MS,
        )
        tornado.access = Access(self._host, self._port, self.token)
        http = HTTPServer(tornado)
        http.add_sockets([listener])
        server = BaseServer(loop, tornado, http)
        server.start()
        return server, http

    def _modify(self, document: Any) -> None:
        """Fill the document of a visitor."""
        page = Page(self._views.view)
        for root in page.roots:
            document.add_root(root)
        document.template = TEMPLATE
        document.template_variables["cards"] = CARDS
        document.title = self._title
        document.add_periodic_callback(lambda: page.update(self._views.view), _UPDATE_MS)

    @override
    def close(self) -> None:
        """Disconnect every page and end the thread. May be called again."""
        loop, self._loop = self._loop, None
        if loop is not None and self._stop is not None:
            loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_STOP_S)
