"""Random numbers of a closure depend on the job's seed and the closure's number, and on nothing else."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from waiting import wait_until
from warm_start import run_program

import stratagem as sg
from stratagem import LocalCluster

pytestmark = pytest.mark.process

SRC = str(Path(__file__).parents[2] / "src")


def draw() -> tuple[float, ...]:
    """Runs on a worker: a number of each generator, through functions and modules."""
    drop = nn.functional.dropout(torch.arange(1.0, 65.0).sqrt()).sum()
    return (
        float(torch.rand(())),
        float(drop),
        random.random(),
        random.gauss(0.0, 1.0),
        float(random.choice(range(10**9))),
        float(np.random.rand()),  # noqa: NPY002 - the global state is meant
        float(np.random.permutation(1000)[0]),  # noqa: NPY002
    )


def draws(cluster: LocalCluster, connect: Any, function: Any, seed: int, count: int) -> list[Any]:
    """Results of `count` closures of a new coordinator."""
    torch.manual_seed(seed)
    coordinator = connect(cluster)
    values = [coordinator.schedule(function) for _ in range(count)]
    coordinator.join(timeout_s=60)
    found = coordinator.fetch(values)
    coordinator.close()
    return found


def test_a_job_with_the_same_seed_draws_the_same_numbers(
    cluster: LocalCluster, connect: Any
) -> None:
    """Whichever worker runs a closure, and whatever it has drawn before."""
    first = draws(cluster, connect, draw, 7, 20)
    assert draws(cluster, connect, draw, 7, 20) == first
    other = draws(cluster, connect, draw, 8, 20)
    for column in range(len(first[0])):
        numbers = [row[column] for row in first + other]
        assert len(set(numbers)) > 30, "closures, or jobs, draw the same numbers"


def test_a_closure_that_is_repeated_draws_the_same_numbers(
    cluster: LocalCluster, connect: Any, tmp_path: Path
) -> None:
    """Its first worker dies after the draw, in the middle of the closure."""
    torch.manual_seed(3)
    coordinator = connect(cluster)

    def draw_and_die(path: str) -> tuple[float, ...]:
        import os

        numbers = draw()
        with open(path, "a+") as file:
            file.write(repr(numbers) + "\n")
            file.seek(0)
            first = len(file.readlines()) == 1
        if first:
            os._exit(1)
        return numbers

    path = tmp_path / "drawn"
    value = coordinator.schedule(draw_and_die, args=(str(path),))
    for _ in range(10):
        coordinator.schedule(draw)
    coordinator.join(timeout_s=60)
    first, second = path.read_text().splitlines()
    assert first == second
    assert repr(value.fetch()) == first


def test_seeding_inside_a_closure_counts(cluster: LocalCluster, connect: Any) -> None:
    """A function may seed for itself, before it draws or after."""

    def seeded() -> tuple[float, ...]:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        return draw()

    def late() -> tuple[float, ...]:
        draw()
        return seeded()

    (expected,) = {tuple(row) for row in draws(cluster, connect, seeded, 1, 10)}
    assert {tuple(row) for row in draws(cluster, connect, late, 2, 10)} == {expected}
    random.seed(5)
    assert expected[2] == random.random()


def test_a_closure_that_draws_only_sometimes_is_seeded_all_the_same(
    cluster: LocalCluster, connect: Any
) -> None:
    def sometimes() -> float:
        import builtins

        count = getattr(builtins, "calls_so_far", 0)
        builtins.calls_so_far = count + 1  # type: ignore[attr-defined]
        return random.random() if count % 3 else -1.0

    first = draws(cluster, connect, sometimes, 7, 30)
    again = draws(cluster, connect, sometimes, 7, 30)
    both = [(a, b) for a, b in zip(first, again, strict=True) if -1.0 not in (a, b)]
    assert both
    assert all(a == b for a, b in both)


def test_functions_of_the_generators_may_be_imported_by_name(
    cluster: LocalCluster, connect: Any
) -> None:
    """`from random import random`: the function means the worker's generator, not a copy of ours."""
    from random import random as one
    from random import randrange

    from numpy.random import rand

    def named() -> tuple[float, float, float]:
        return one(), float(randrange(10**9)), float(rand())  # noqa: NPY002

    first = draws(cluster, connect, named, 7, 20)
    assert len(set(first)) == 20
    assert draws(cluster, connect, named, 7, 20) == first


def test_iterators_shuffle_alike_when_they_are_built_again(
    cluster: LocalCluster, connect: Any
) -> None:
    """CCO-31: differently on each worker, and the same way after a loss."""
    torch.manual_seed(11)
    coordinator = connect(cluster)

    def dataset() -> list[tuple[int, int]]:
        return list(enumerate(torch.randperm(100_000).tolist()))

    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    def take(it: Any) -> tuple[int, list[tuple[int, int]]]:
        return sg.get_current_worker_index(), [next(it) for _ in range(5)]

    def first_of(workers: set[int]) -> dict[int, list[tuple[int, int]]]:
        """Return the first elements of each worker; its closures may run in any order."""
        found: dict[int, list[tuple[int, int]]] = {}
        while set(found) != workers:
            values = [coordinator.schedule(take, args=(iterator,)) for _ in range(4)]
            found.update({w: rows for w, rows in coordinator.fetch(values) if rows[0][0] == 0})
        return found

    before = first_of({0, 1})
    assert before[0] != before[1]
    old = cluster.pid("worker", 0)
    cluster.kill_worker(0)
    cluster.wait_restarted(0, old)
    wait_until(lambda: coordinator.workers[0].connected and coordinator.workers[0].incarnation > 1)
    assert first_of({0})[0] == before[0]


def test_the_users_own_process_is_left_alone(connect: Any) -> None:
    """Workers in this process draw from its generators, which nobody seeds."""
    with LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        coordinator = connect(cluster)
        drawn = [coordinator.schedule(lambda: float(torch.rand(()))).fetch() for _ in range(3)]
        assert drawn == [pytest.approx(float(one)) for one in expected]
        coordinator.close()


STREAMS = """
import random
import numpy as np
import torch
from stratagem._cluster.worker.coordinator_session import ClosureRandom

stream = ClosureRandom(9)
seen = set()
for closure in (*range(1, 2000), *(-(resource << 20 | worker) for resource in range(1, 30) for worker in range(30))):
    stream.begin(closure)
    drawn = float(torch.rand((), dtype=torch.float64)), random.random(), float(np.random.rand())
    assert len(set(drawn)) == 3
    assert not seen & set(drawn), closure
    seen |= set(drawn)
stream.begin(1)
draws = {"random": random.random(), "rand": np.random.rand(), "shuffled": random.sample(range(100), 5)}
stream.begin(2)
random.random()
stream.begin(1)
assert {"random": random.random(), "rand": np.random.rand(), "shuffled": random.sample(range(100), 5)} == draws
assert random.Random(3).random() == random.Random(3).random()
assert np.random.default_rng(3).random() == np.random.default_rng(3).random()
print("all is well")
"""


def test_streams_of_closures_resources_and_generators_are_distinct() -> None:
    """In a process of its own: the global generators are seeded."""
    done = run_program(
        [sys.executable, "-c", STREAMS],
        env={"PYTHONPATH": SRC, "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.stdout == "all is well\n", done.stderr
