"""Prometheus' metrics: conventions of names and units, labels, and exact histograms."""

from __future__ import annotations

import json
import re
import urllib.request
from itertools import pairwise
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_until

import stratagem as sg
from stratagem import metrics
from stratagem._monitor.cluster_view import ClusterView, ProgramView, WorkerView
from stratagem._monitor.prometheus import exposition


def families(view: ClusterView) -> dict[str, object]:
    text, _ = exposition(view)
    return {one.name: one for one in text_string_to_metric_families(text.decode())}


def worker_with(values: list[float], staleness: list[float]) -> WorkerView:
    registry = metrics.Registry()
    for value in values:
        registry.timer("ps.read").record(value)
    for value in staleness:
        registry.distribution("ps.staleness").record(value)
    seen = registry.snapshot()
    return WorkerView(
        name="worker 3",
        state="running",
        steps=5,
        timers=seen.timers,
        staleness=seen.distributions["ps.staleness"],
    )


def test_histograms_count_exactly_what_is_below_their_bounds() -> None:
    """Buckets are cumulative, and their counts equal those of the values themselves."""
    durations = [1e-9, 3e-6, 0.0009, 0.7, 0.8, 3.0, 1000.0]
    stale = [0, 0, 1, 1, 2, 3, 4, 7, 8, 100]
    found = families(ClusterView(time_s=0.0, workers=(worker_with(durations, stale),)))
    for name, values in (
        ("stratagem_read_seconds", durations),
        ("stratagem_staleness_updates", stale),
    ):
        samples = found[name].samples
        buckets = [(one.labels["le"], one.value) for one in samples if one.name.endswith("_bucket")]
        assert [one.labels["task"] for one in samples] == ["worker-3"] * len(samples)
        for bound, count in buckets:
            assert count == sum(value <= float(bound) for value in values), (name, bound)
        assert all(low[1] <= high[1] for low, high in pairwise(buckets))
        assert buckets[-1] == ("+Inf", len(values))
        (total,) = [one.value for one in samples if one.name.endswith("_sum")]
        assert abs(total - sum(values)) < 1e-6


def test_names_and_units_follow_the_conventions() -> None:
    """One prefix, base units, ``_total`` for counters and no colon, capital or second label set."""
    found = families(
        ClusterView(time_s=0.0, workers=(worker_with([1.0], [1]),), program=ProgramView())
    )
    assert len(found) > 25
    for name, family in found.items():
        assert name.startswith("stratagem_"), name
        assert name == name.lower()
        assert not name.endswith(("_ms", "_us", "_mb", "_percent")), name
        assert family.documentation.endswith("."), name
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
    assert found["stratagem_read_seconds"].type == "histogram"
    assert found["stratagem_memory_bytes"].type == "gauge"


def test_a_hostile_name_stays_inside_its_label() -> None:
    """Quotes and line breaks in a logged name cannot add metrics."""
    with sg.OneDeviceStrategy("cpu:0") as strategy, sg.dashboard(strategy) as page:
        name = 'x"} 1\nstratagem_up{task="fake'
        sg.metrics.log(name, 2.5)
        wait_until(lambda: any(one.name == name for one in page.view.scalars))
        request = urllib.request.Request(
            page.metrics_url, headers={"Authorization": f"Bearer {page.token}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            text = answer.read().decode()
    found = {one.name: one for one in text_string_to_metric_families(text)}
    logged = {one.labels["name"]: one.value for one in found["stratagem_logged_value"].samples}
    assert logged[name] == 2.5
    assert [one.labels["task"] for one in found["stratagem_up"].samples] == ["coordinator"]


def test_the_grafana_board_asks_for_metrics_that_exist() -> None:
    """Every name in the board's queries is one that `/metrics` has."""
    page = Path(__file__).parents[2] / "docs" / "grafana.json"
    board = json.loads(page.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"stratagem_\w+", query)}
    view = ClusterView(time_s=0.0, workers=(worker_with([1.0], [1]),), program=ProgramView())
    offered = set()
    for name, family in families(view).items():
        endings = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
        offered |= {name + ending for ending in endings[family.type]}
    assert len(asked) > 12
    assert asked - offered == set()
