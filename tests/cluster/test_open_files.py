"""A limit of open files that is too low is named, at the start and later."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator

import pytest

import stratagem as sg
from stratagem.errors import StartupError


@pytest.fixture
def limit_files() -> Iterator[Callable[[int], None]]:
    """Set the limit of open files of this process; restore it after the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda count: resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("start", ["cluster", "server"])
def test_too_few_open_files_are_an_error_at_the_start(
    limit_files: Callable[[int], None], start: str
) -> None:
    """The error has the limit and the command that raises it."""
    limit_files(31)
    with pytest.raises(StartupError, match=r"may have 31 files.*ulimit -n"):
        if start == "cluster":
            sg.LocalCluster(workers=1, ps=1, in_process=True)
        else:
            sg.Server({"ps": ["127.0.0.1:0"]})


class NeedsAFile:
    """An argument that opens a file when it is pickled."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        with open("/proc/self/status") as file:
            return str, (file.read(6),)


def test_descriptors_that_run_out_are_not_called_a_failure_to_pickle(
    limit_files: Callable[[int], None],
) -> None:
    """Neither for arguments nor for functions."""
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy, sg.ClusterCoordinator(strategy) as coordinator:
            needs = NeedsAFile()
            assert coordinator.schedule(len, args=(needs,)).fetch(timeout_s=60) == 6
            limit_files(3)
            with pytest.raises(OSError, match="Too many open files"):
                coordinator.schedule(len, args=(needs,))
            with pytest.raises(OSError, match="Too many open files"):
                coordinator.schedule(lambda: needs)
            limit_files(1024)
