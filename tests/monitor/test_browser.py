"""The page and the report in a real browser: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from waiting import wait_until

import stratagem as sg

CHROMIUM = Path("/usr/bin/chromium")
# `STRATAGEM_SCREENSHOTS=docs/images` keeps the screenshots and waits for longer curves: README shows one of them.
SCREENSHOTS = "STRATAGEM_SCREENSHOTS"
SCRIPT = "script <script>window.pwned=1</script>"

pytestmark = [
    pytest.mark.process,
    pytest.mark.browser,
    pytest.mark.skipif(
        not CHROMIUM.exists(), reason="there is no /usr/bin/chromium: apt-get install chromium"
    ),
]

LIMIT_MS = 120_000


class Training(threading.Thread):
    """Steps on a cluster of two workers, until `stop`."""

    def __init__(self, cluster: sg.LocalCluster, coordinator: sg.ClusterCoordinator) -> None:
        super().__init__(name="test-browser-training", daemon=True)
        self.cluster = cluster
        self.coordinator = coordinator
        self.stop = threading.Event()
        self.error: BaseException | None = None
        with coordinator.strategy.scope():
            model = nn.Sequential(nn.EmbeddingBag(5000, 16), nn.Linear(16, 1))
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

        def step() -> None:
            ids = torch.randint(0, 5000, (64, 8))
            optimizer.zero_grad()
            loss = (model(ids) - 1).square().mean()
            loss.backward()
            optimizer.step()
            sg.metrics.log("loss", loss)

        self._step = step

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                for _ in range(20):
                    self.coordinator.schedule(self._step)
                self.coordinator.join(timeout_s=100)
        except BaseException as error:
            self.error = error


@pytest.fixture(scope="module")
def training() -> Iterator[Training]:
    with (
        sg.LocalCluster(workers=2, ps=2) as cluster,
        sg.ParameterServerStrategy(
            cluster.resolver, sg.partitioners.FixedShardsPartitioner(2)
        ) as strategy,
    ):
        training = Training(cluster, sg.ClusterCoordinator(strategy))
        training.start()
        yield training
        training.stop.set()
        training.join(100)
        assert training.error is None


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page in the browser, and what its console says."""

    def __init__(self, browser, *, scheme: str = "light", width: int = 1280) -> None:
        size = {"width": width, "height": 900}
        self.context = browser.new_context(color_scheme=scheme, viewport=size)
        self.page = self.context.new_page()
        self.page.set_default_timeout(LIMIT_MS)
        self.errors: list[str] = []
        self.page.on(
            "console",
            lambda line: self.errors.append(line.text) if line.type == "error" else None,
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def points(self) -> int:
        """Return the number of points of the curves that the browser has."""
        return self.page.evaluate(
            """() => { const doc = window.Bokeh && Bokeh.documents[0];
                       if (!doc) return 0;
                       const plot = doc.roots().find(root => root.name == "steps");
                       return plot.renderers.length
                         ? plot.renderers[0].data_source.data["time"].length : 0; }"""
        )

    def until(self, expression: str) -> None:
        self.page.wait_for_function(expression, timeout=LIMIT_MS)

    def close(self) -> None:
        self.context.close()


def test_the_page_moves_and_shows_a_killed_worker(training: Training, browser, tmp_path) -> None:
    """It opens, curves grow, a killed worker appears as an event; nothing is wrong in the console."""
    with sg.dashboard(training.coordinator, title="Stratagem") as page:
        visit = Visit(browser)
        visit.page.goto(page.url)
        assert "token" not in visit.page.url
        visit.page.locator("#summary").get_by_text("healthy").wait_for()
        wait_until(lambda: (page.view.steps_per_s or 0) > 0 and page.view.tables)
        before = visit.points()
        visit.until(POINTS_ABOVE % (before + 2))
        visit.page.locator("#workers").get_by_text("worker 1").wait_for()
        visit.page.locator("#servers").get_by_text("ps 1").wait_for()
        visit.page.locator("#tables").get_by_text("weight").first.wait_for()

        training.cluster.kill_worker(0)
        visit.page.locator("#events").get_by_text("worker lost").first.wait_for()
        visit.page.locator("#events").get_by_text("worker back").first.wait_for()

        kept = sg.config.environment(SCREENSHOTS)
        visit.until(POINTS_ABOVE % (60 if kept else 4))
        for scheme, width in (("light", 1280), ("dark", 1280), ("dark", 400), ("light", 400)):
            visit.page.emulate_media(color_scheme=scheme)
            visit.page.set_viewport_size({"width": width, "height": 900})
            visit.until(f"document.querySelector('main').getBoundingClientRect().width <= {width}")
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
            shade = visit.page.evaluate(
                "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
            )
            assert (shade < 60) == (scheme == "dark")
            for card in ("summary", "advice", "steps", "phases", "events", "workers", "servers"):
                box = visit.page.locator(f"#{card}").bounding_box()
                assert box is not None
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= width
                assert box["height"] > 20
            place = Path(kept or tmp_path)
            shown = visit.page.screenshot(full_page=width == 400)
            (place / f"page-{scheme}-{width}.png").write_bytes(shown)
            assert len(shown) > 10_000

        sg.metrics.log(SCRIPT, 1.0)  # the page draws the name as text
        wait_until(lambda: any(one.name == SCRIPT for one in page.view.scalars))
        visit.until(POINTS_ABOVE % (visit.points() + 2))
        assert visit.page.evaluate("window.pwned") is None
        assert visit.errors == []
        visit.close()


POINTS_ABOVE = """() => { const plot = Bokeh.documents[0].roots().find(root => root.name == "steps");
  return plot.renderers[0].data_source.data["time"].length >= %d; }"""


def test_the_report_opens_without_a_server(training: Training, browser, tmp_path) -> None:
    """The saved file shows the run from disk, without any request to a network."""
    with sg.dashboard(training.coordinator, title="A run") as page:
        sg.metrics.log(SCRIPT, 1.0)
        wait_until(lambda: any(one.name == SCRIPT for one in page.view.scalars))
        wait_until(lambda: len(page.view.series.times) > 2)
        report = page.save(tmp_path / "report.html")
    visit = Visit(browser)
    asked: list[str] = []
    visit.page.on("request", lambda request: asked.append(request.url))
    visit.page.goto(report.as_uri())
    visit.page.locator("#summary").get_by_text("healthy").wait_for()
    visit.page.locator("#workers").get_by_text("worker 1").wait_for()
    assert visit.points() > 2
    assert visit.page.evaluate("window.pwned") is None
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert visit.errors == []
    visit.close()


def test_a_visitor_without_the_token_sees_nothing(training: Training, browser) -> None:
    """The address without its token gives a refusal in plain words."""
    with sg.dashboard(training.coordinator) as page:
        visit = Visit(browser)
        answer = visit.page.goto(page.url.split("?")[0])
        assert answer is not None
        assert answer.status == 403
        assert "token" in visit.page.inner_text("body")
        visit.close()
