"""Strategies for tests of Keras; a test module that wants others has its own fixture of that name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import stratagem as sg


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One worker, so that results do not depend on timing."""
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as made:
        yield made


@pytest.fixture(
    params=[
        "mirrored",
        "servers",
        *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("one device", "central")),
    ]
)
def strategy(request: pytest.FixtureRequest, cluster: Any) -> Iterator[Any]:
    """One strategy of replicas, and servers. Those of one machine differ in their devices only: the others in the long tests."""
    from keras_models import STRATEGIES  # after `user_files` has chosen the backend of Keras

    servers = {"servers": lambda: sg.ParameterServerStrategy(cluster.resolver)}
    with (STRATEGIES | servers)[request.param]() as made:
        yield made
