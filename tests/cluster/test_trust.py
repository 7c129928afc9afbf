"""A coordinator decodes results and exceptions as data unless it trusts its workers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

import stratagem as sg
from stratagem import ClusterCoordinator, LocalCluster
from stratagem.config import ClusterOptions


class Call:
    """Pickles as a call, as a compromised worker could send one."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(workers=1, ps=1) as cluster:
        yield cluster


@pytest.mark.process
def test_a_result_that_runs_code_is_refused(cluster: LocalCluster, tmp_path: Any) -> None:
    """Also inside an exception; the coordinator has made no file."""

    def make_file() -> None:
        (tmp_path / str(os.getpid())).touch()

    def attack(as_error: bool) -> object:
        if as_error:
            raise ValueError(Call(make_file))
        return {"loss": [Call(os.mkdir, str(tmp_path / str(os.getpid())))]}

    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with ClusterCoordinator(strategy) as coordinator:
            value = coordinator.schedule(attack, args=(False,))
            with pytest.raises(TypeError, match=r"posix.mkdir.*trust_workers=True"):
                value.get(timeout_s=60)
            assert list(tmp_path.iterdir()) == []
            with pytest.raises(ValueError, match="Call object"):
                coordinator.schedule(attack, args=(True,)).get(timeout_s=60)
        assert not (tmp_path / str(os.getpid())).exists()


@pytest.mark.process
def test_objects_of_any_class_arrive_from_trusted_workers(cluster: LocalCluster) -> None:
    """And they run code here, which is what trust means."""
    options = ClusterOptions(trust_workers=True)
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with ClusterCoordinator(strategy, options=options) as coordinator:
            value = coordinator.schedule(lambda: Call(os.getpid))
            assert value.get(timeout_s=60) == os.getpid()


@pytest.mark.process
def test_classes_of_the_program_arrive_by_default(cluster: LocalCluster) -> None:
    """Dataclasses, named tuples and exceptions that a function defines beside the step."""

    @dataclasses.dataclass
    class Report:
        loss: float

    class Pair(NamedTuple):
        a: int
        b: Report

    class OwnError(Exception):
        def __init__(self, *, code: int) -> None:
            super().__init__(f"code {code}")
            self.code = code

    def step(fails: bool) -> Pair:
        if fails:
            raise OwnError(code=7)
        return Pair(1, Report(0.5))

    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with ClusterCoordinator(strategy) as coordinator:
            pair = coordinator.schedule(step, args=(False,)).get(timeout_s=60)
            assert pair == Pair(1, Report(0.5))
            assert type(pair) is Pair
            with pytest.raises(OwnError) as caught:
                coordinator.schedule(step, args=(True,)).get(timeout_s=60)
            assert caught.value.code == 7
