"""What tests of replicas share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import stratagem as sg


@pytest.fixture
def two() -> Iterator[sg.MirroredStrategy]:
    """Two replicas, with threads of their own for each test."""
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        yield made


@pytest.fixture
def two_parallel() -> Iterator[sg.MirroredStrategy]:
    """Two replicas that run at the same time."""
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], parallel_replicas=True) as made:
        yield made
