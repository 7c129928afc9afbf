"""The page answers only who has its token, changes nothing, and shows every value as text."""

from __future__ import annotations

import asyncio
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.websocket import websocket_connect

import stratagem as sg
from stratagem._monitor import markup
from stratagem._monitor.cluster_view import (
    ClusterView,
    ScalarView,
    ServerView,
    TableView,
    WorkerView,
)
from stratagem._monitor.page import write_report
from stratagem._monitor.view_tables import server_rows, table_rows, worker_rows
from stratagem._snapshots import Event

SCRIPT = "<script>window.pwned=1</script>"


@pytest.fixture(scope="module")
def page() -> Iterator[sg.Dashboard]:
    with sg.OneDeviceStrategy("cpu:0") as strategy, sg.dashboard(strategy) as page:
        yield page


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):  # type: ignore[no-untyped-def]
        return None


def ask(url: str, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    """Return status, text and headers of an answer; follow no redirection."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, method=method, headers=named)
    opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), dict(error.headers)


def base(page: sg.Dashboard) -> str:
    return page.url.split("/?")[0]


def cookie(page: sg.Dashboard) -> str:
    status, _, headers = ask(page.url)
    assert status == 302
    return headers["Set-Cookie"].split(";")[0]


PATHS = ("/", "/ws", "/autoload.js", "/metadata", "/metrics", "/static/js/bokeh.min.js", "/nothing")


@pytest.mark.parametrize("path", PATHS)
def test_no_token_and_a_wrong_token_are_refused_everywhere(page, path) -> None:
    """Every path of the server is behind the check."""
    assert ask(base(page) + path)[0] == 403
    assert ask(f"{base(page)}{path}?token=wrong")[0] == 403
    assert ask(base(page) + path, Authorization="Bearer wrong")[0] == 403
    name = cookie(page).split("=")[0]
    assert ask(base(page) + path, Cookie=f"{name}=wrong")[0] == 403


def test_the_link_sets_a_cookie_and_hides_the_token(page) -> None:
    """The token leaves the address; scripts cannot read the cookie, and other sites cannot use it."""
    status, _, headers = ask(page.url)
    assert (status, headers["Location"]) == (302, "/")
    assert "HttpOnly" in headers["Set-Cookie"]
    assert "SameSite=Lax" in headers["Set-Cookie"]
    status, text, _ = ask(base(page) + "/", Cookie=cookie(page))
    assert status == 200
    assert "Where the workers" in text
    assert page.token not in text
    assert cookie(page).split("=")[1] not in text


def test_only_this_machine_reaches_the_page_by_default(page) -> None:
    """Loopback unless an address is given; tokens differ between pages."""
    assert page.url.startswith("http://127.0.0.1:")
    with sg.OneDeviceStrategy("cpu:0") as strategy, sg.dashboard(strategy) as other:
        assert other.token != page.token
        assert len(other.token) >= 32


def test_requests_of_other_origins_are_refused(page) -> None:
    """Also with the right cookie: a page of another site, and a name that points here."""
    ticket = cookie(page)
    assert ask(base(page) + "/", Cookie=ticket, Origin=base(page))[0] == 200
    assert ask(base(page) + "/", Cookie=ticket, Origin="http://evil.example")[0] == 403
    assert ask(base(page) + "/", Cookie=ticket, Origin="null")[0] == 403
    port = base(page).rpartition(":")[2]
    assert ask(base(page) + "/", Cookie=ticket, Host=f"evil.example:{port}")[0] == 403
    assert ask(base(page) + "/", Cookie=ticket, Host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_requests_that_could_change_something_are_refused(page, method) -> None:
    """The page only shows."""
    assert ask(base(page) + "/", method, Cookie=cookie(page))[0] == 405
    assert ask(base(page) + "/metrics", method, Authorization=f"Bearer {page.token}")[0] == 405


def test_the_websocket_needs_the_cookie_and_the_same_origin(page) -> None:
    """The connection that carries the data is behind the same check."""
    ticket = cookie(page)

    async def status(**headers: str) -> int:
        url = base(page).replace("http", "ws") + "/ws"
        try:
            connection = await websocket_connect(
                HTTPRequest(url, headers=headers), subprotocols=["bokeh", "x.y"]
            )
        except HTTPClientError as error:
            return error.code
        connection.close()
        while await connection.read_message() is not None:
            pass
        return 101

    async def all_of_them() -> list[int]:
        return [
            await status(),
            await status(Cookie=ticket, Origin="http://evil.example"),
            await status(Cookie="a=b", Origin=base(page)),
            await status(Cookie=ticket, Origin=base(page)),
        ]

    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(asyncio.run(all_of_them())))
    thread.start()
    thread.join(60)
    assert found == [403, 403, 403, 101]


def test_an_address_that_is_none_is_refused_with_an_example() -> None:
    """The error shows the form that is expected, and nothing is left behind."""
    with sg.OneDeviceStrategy("cpu:0") as strategy:
        with pytest.raises(ValueError, match=r"address='8000': expected host:port"):
            sg.dashboard(strategy, address="8000")
        with sg.dashboard(strategy) as page:
            port = base(page).rpartition(":")[2]
            with pytest.raises(OSError, match="in use"):
                sg.dashboard(strategy, address=f"127.0.0.1:{port}")


def hostile_view() -> ClusterView:
    """A view with a script in every text."""
    return ClusterView(
        time_s=1.0,
        workers=(WorkerView(name=SCRIPT, state=SCRIPT),),
        servers=(ServerView(name=SCRIPT, state=SCRIPT),),
        tables=(TableView(name=SCRIPT, ids=3, rows=2),),
        scalars=(ScalarView(name=SCRIPT, last=1.0, not_finite=1, points=((1.0, 1.0),)),),
        events=(Event(time_s=1.0, source=SCRIPT, name=SCRIPT, facts={SCRIPT: SCRIPT}),),
    )


def test_no_text_of_the_cluster_becomes_html(tmp_path) -> None:
    """A script in the name of a metric, a table, a task or an event is shown as text."""
    view = hostile_view()
    for shown in (
        markup.summary(view),
        markup.advice_list(view),
        markup.table(worker_rows(view)),
        markup.table(server_rows(view)),
        markup.table(table_rows(view)),
        markup.event_list(view.events),
    ):
        assert "<script" not in shown
        assert "&lt;script" in shown
    report = write_report(view, tmp_path / "report.html", title=SCRIPT)
    assert "<script>window" not in report.read_text()


def test_the_report_is_one_file_without_addresses(tmp_path) -> None:
    """It can be sent to a colleague: no other file and no network is needed."""
    with sg.OneDeviceStrategy("cpu:0") as strategy, sg.dashboard(strategy, title="Mine") as page:
        sg.metrics.log("test_report.loss", 0.5)
        path = page.save(tmp_path / "deep" / "report.html")
    text = path.read_text()
    assert "<title>Mine</title>" in text
    assert "test_report.loss" in text
    loads = re.findall(r'<(?:script|link|iframe)\b[^<>]*\b(?:src|href)="([^"]*)"', text)
    assert loads == ["data:,"]
    assert page.token not in text
