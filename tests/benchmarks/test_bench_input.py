"""The input benchmark runs, and its figures are what they claim to be."""

from __future__ import annotations

import torch

from benchmarks import bench_input


def test_every_figure_is_measured_at_tiny_size() -> None:
    """Positive times, and ratios made of them."""
    threads = torch.get_num_threads()
    try:
        found = bench_input.measure(tiny=True)
    finally:
        torch.set_num_threads(threads)
    rows = found["rows"]
    assert rows["ours_rows_per_s"] > 0
    assert (
        abs(rows["ratio"] - rows["ours_rows_per_s"] / rows["loader_rows_per_s"])
        < 1e-6 * rows["ratio"]
    )
    assert found["distributing"]["plain_us"] > 0
    ahead = found["ahead"]
    assert ahead["without_s"] >= 8 * 2 * 0.005  # eight steps, each a slow map and a slow step
    assert abs(ahead["ratio"] - ahead["without_s"] / ahead["ahead_s"]) < 1e-9
