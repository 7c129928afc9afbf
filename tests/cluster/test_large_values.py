"""Large and awkward things that closures take, return, raise and print do not cost a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import stratagem as sg
from stratagem._wire.codec import Outgoing, pack, unpack_from
from stratagem._wire.failures import exception_from, failure_from

LARGE = 20 << 20
"""More than a message may have; a byte string is inside the pickle."""


@pytest.fixture
def coordinator() -> Iterator[sg.ClusterCoordinator]:
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with sg.ClusterCoordinator(strategy) as made:
            yield made


def test_large_byte_strings_are_arguments_results_and_captured(
    coordinator: sg.ClusterCoordinator,
) -> None:
    captured = b"c" * LARGE
    argument = b"a" * LARGE
    value = coordinator.schedule(lambda given: captured[:1] + given, args=(argument,))
    coordinator.join(timeout_s=60)
    assert value.get(timeout_s=60) == b"c" + argument
    assert coordinator.workers[0].incarnation == 1


class WithoutTextError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def raise_without_text() -> None:
    raise WithoutTextError


def raise_large() -> None:
    error = ValueError("large")
    error.__dict__["data"] = b"x" * LARGE
    raise error


def test_exceptions_without_text_or_with_much_data_arrive(
    coordinator: sg.ClusterCoordinator,
) -> None:
    coordinator.schedule(raise_without_text)
    with pytest.raises(Exception, match="WithoutTextError"):
        coordinator.join(timeout_s=60)
    coordinator.schedule(raise_large)
    with pytest.raises(ValueError, match="large"):
        coordinator.join(timeout_s=60)
    assert coordinator.workers[0].incarnation == 1


def test_a_large_pickle_is_a_buffer_beside_the_message() -> None:
    outgoing = Outgoing()
    packed = pack([b"x" * LARGE], outgoing)
    assert len(packed.payload) == 0
    assert unpack_from(packed, outgoing.buffers) == [b"x" * LARGE]


def test_failures_of_exceptions_without_text() -> None:
    failure = failure_from(WithoutTextError(), with_pickle=True)
    assert "str() failed" in failure.text
    assert isinstance(exception_from(failure), Exception)
