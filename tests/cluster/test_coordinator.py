"""The coordinator on real worker processes: scheduling, results, errors, per-worker things."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from waiting import Gate, pass_gate, wait_until

import stratagem as sg
from stratagem import ClusterCoordinator, LocalCluster, RemoteValue
from stratagem._cluster.coordinator.coordinator import ClosureRecord
from stratagem._cluster.coordinator.remote_values import PerWorkerValues, RemoteValueStatus
from stratagem.errors import ClosureCancelled, ClosureInputError, DeadlineExceeded

pytestmark = pytest.mark.process


class OwnError(Exception):
    """Defined in a module the workers cannot import."""


def test_constructing_again_gives_the_same_object(coordinator: ClusterCoordinator) -> None:
    """CCO-1."""
    assert ClusterCoordinator(coordinator.strategy) is coordinator
    with pytest.raises(ValueError, match="has no cluster"):
        ClusterCoordinator(object())
    with pytest.raises(TypeError):
        ClusterCoordinator()  # type: ignore[call-arg]


def test_a_per_worker_dataset_without_iter_is_refused(coordinator: ClusterCoordinator) -> None:
    """The error names the iterators, which the function needs."""
    dataset = coordinator.create_per_worker_dataset(lambda: [1, 2])
    with pytest.raises(ValueError, match=r"iterators = iter\(dataset\)"):
        coordinator.schedule(next, args=(dataset,))


def test_any_callable_can_be_scheduled(coordinator: ClusterCoordinator) -> None:
    """CCO-10 as 13.4 has it: lambdas, closures, partials, methods, builtins, callables; nothing else."""
    offset = 10

    class Adder:
        def __init__(self, n: int) -> None:
            self.n = n

        def add(self, m: int) -> int:
            return self.n + m

        __call__ = add

    values = [
        coordinator.schedule(lambda x: x + offset, args=(1,)),
        coordinator.schedule(functools.partial(max, 3), args=(4,)),
        coordinator.schedule(Adder(5).add, args=[6]),
        coordinator.schedule(Adder(7), kwargs={"m": 8}),
        coordinator.schedule(len, args=("abc",)),
    ]
    assert coordinator.fetch(values) == [11, 4, 11, 15, 3]
    with pytest.raises(TypeError, match="expected something callable"):
        coordinator.schedule(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot be sent"):
        lock = threading.Lock()
        coordinator.schedule(lambda: lock)


def test_functions_see_what_the_coordinator_had_at_schedule(
    coordinator: ClusterCoordinator,
) -> None:
    """A captured list, tensor or number that changed between two calls is seen by the second."""
    items, tensor, number = [1], torch.zeros(1), 0

    def look() -> tuple[list[int], float, int]:
        return list(items), float(tensor), number

    first = coordinator.schedule(look)
    items.append(2)
    tensor += 1
    number += 1
    second = coordinator.schedule(look)
    assert first.fetch() == ([1], 0.0, 0)
    assert second.fetch() == ([1, 2], 1.0, 1)


def test_results_are_tensors_or_arrays_in_their_nest(coordinator: ClusterCoordinator) -> None:
    """RMV-2, RMV-4: get gives tensors, fetch gives arrays; None stays None."""

    def make() -> dict[str, Any]:
        return {"a": torch.arange(3), "b": [torch.tensor(1.5), None], "c": ("text", 7)}

    value = coordinator.schedule(make)
    got = value.get(timeout_s=120)
    assert torch.equal(got["a"], torch.arange(3))
    fetched = value.fetch()
    assert isinstance(fetched["a"], np.ndarray)
    assert fetched["b"] == [1.5, None]
    assert fetched["c"] == ("text", 7)
    assert coordinator.schedule(lambda: None).fetch() is None
    bfloat = coordinator.schedule(lambda: torch.ones(2, dtype=torch.bfloat16))
    assert bfloat.fetch().dtype == np.float32
    nest = coordinator.fetch({"x": [value, 3]})
    assert nest["x"][1] == 3
    assert nest["x"][0]["c"] == ("text", 7)


def test_large_results_and_arguments_arrive_whole(coordinator: ClusterCoordinator) -> None:
    """Eight megabytes each way, several at once."""
    big = torch.randn(1 << 20)
    values = [coordinator.schedule(lambda x, k: x * k, args=(big, k)) for k in range(4)]
    coordinator.join(timeout_s=60)
    for k, value in enumerate(values):
        assert torch.equal(value.get(), big * k)


def test_status_goes_from_not_ready_to_ready(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """RMV-1, and a wait with a limit."""
    value = coordinator.schedule(pass_gate, args=(gate.path,))
    assert value.status is RemoteValueStatus.NOT_READY
    with pytest.raises(DeadlineExceeded, match=r"has no result after 0\.01 s"):
        value.get(timeout_s=0.01)
    with pytest.raises(DeadlineExceeded, match="join: not done within"):
        coordinator.join(timeout_s=0.01)
    gate.open()
    coordinator.join()
    assert value.status is RemoteValueStatus.READY
    assert "ready" in repr(value)


def test_nothing_scheduled_is_done(coordinator: ClusterCoordinator) -> None:
    """CCO-15."""
    coordinator.join()
    coordinator.join()
    assert coordinator.done()


def test_remote_values_are_refused_as_arguments(coordinator: ClusterCoordinator) -> None:
    """CCO-11."""
    value = coordinator.schedule(lambda: 1)
    with pytest.raises(ValueError, match="cannot be an argument"):
        coordinator.schedule(lambda x: x, args=([value],))
    with pytest.raises(ValueError, match="cannot be an argument"):
        coordinator.schedule(lambda: value)


def test_an_object_that_cannot_be_sent_is_named(coordinator: ClusterCoordinator) -> None:
    """Arguments at schedule, results when they come back; with a way out."""
    with pytest.raises(TypeError, match=r"args=5 has type int: expected a tuple or list"):
        coordinator.schedule(print, args=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"kwargs=\[\] has type list: expected a dict"):
        coordinator.schedule(print, kwargs=[])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"arguments cannot be sent.*create_per_worker_resource"):
        coordinator.schedule(list, args=((n for n in range(3)),))
    coordinator.schedule(lambda: (n for n in range(3)))
    with pytest.raises(TypeError, match="generator") as caught:
        coordinator.join()
    assert any("its result, a generator, cannot be sent back" in n for n in caught.value.__notes__)


def test_error_is_raised_once_with_its_type_worker_and_traceback(
    coordinator: ClusterCoordinator,
) -> None:
    """CCO-20, CCO-23, 13.8: raised by the next call, then cleared, and kept."""

    def explode_here() -> None:
        raise OwnError("with a message")

    value = coordinator.schedule(explode_here)
    with pytest.raises(OwnError, match="with a message") as caught:
        coordinator.join()
    assert "explode_here" in str(caught.value.__cause__)
    assert any("/job:worker/task:" in note for note in caught.value.__notes__)
    for _ in range(2):
        with pytest.raises(OwnError):
            value.fetch()
    assert coordinator.done()
    (record,) = coordinator.errors
    assert isinstance(record, ClosureRecord)
    assert record.worker.startswith("/job:worker/task:")
    assert "explode_here" in record.function
    assert "with a message" in record.remote_traceback
    assert coordinator.schedule(lambda: 5).fetch() == 5


def test_everything_else_is_cancelled_and_nothing_runs_when_join_raises(
    coordinator: ClusterCoordinator, gate: Gate, tmp_path: Path
) -> None:
    """CCO-22, and 13.8 instead of CCO-21: the queue stops at once; running closures are waited for."""
    mark = tmp_path / "ran"
    path = gate.path

    def slow() -> str:
        pass_gate(path)
        with open(mark, "a") as file:
            file.write("x")
        return "finished"

    def fail(when: str) -> None:
        pass_gate(when)
        raise KeyError("stop")

    with Gate(tmp_path / "fails") as fails:
        running = coordinator.schedule(slow)
        gate.wait_for_arrival()
        coordinator.schedule(fail, args=(fails.path,))
        fails.wait_for_arrival()
        waiting = [coordinator.schedule(slow) for _ in range(50)]
    # The worker of `fail` may have started one; the workers return what was sent ahead.
    wait_until(lambda: sum(v.status is RemoteValueStatus.READY for v in waiting) >= 49)
    gate.open()
    with pytest.raises(KeyError, match="stop"):
        coordinator.join(timeout_s=120)
    ran = mark.read_text()
    cancelled = 0
    for value in [running, *waiting]:
        assert value.status is RemoteValueStatus.READY
        try:
            assert value.fetch() == "finished"
        except ClosureCancelled:
            cancelled += 1
    assert len(ran) + cancelled == 1 + len(waiting)
    assert cancelled >= len(waiting) - 1
    coordinator.join()
    assert mark.read_text() == ran, "something ran after join had raised"


def test_schedule_and_done_raise_the_error_too(coordinator: ClusterCoordinator) -> None:
    """CCO-20: whichever call comes next."""

    def fail() -> None:
        raise ZeroDivisionError

    def failed() -> bool:
        return bool(coordinator.errors)

    coordinator.schedule(fail)
    wait_until(failed)
    with pytest.raises(ZeroDivisionError):
        coordinator.schedule(lambda: 1)
    coordinator.schedule(fail)
    wait_until(lambda: len(coordinator.errors) == 2)
    with pytest.raises(ZeroDivisionError):
        coordinator.done()
    assert coordinator.done()


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt("no"), GeneratorExit()], ids=repr
)
def test_exceptions_that_end_programs_are_ordinary_errors_of_closures(
    coordinator: ClusterCoordinator, cluster: LocalCluster, error: BaseException
) -> None:
    """CCO-20: it arrives with its type, the first time, and the worker lives."""
    pids = [cluster.pid("worker", i) for i in range(2)]
    known = len(coordinator.errors)

    def fail() -> None:
        raise error

    coordinator.schedule(fail)
    with pytest.raises(type(error)) as caught:
        coordinator.join()
    assert caught.value.args == error.args
    assert len(coordinator.errors) == known + 1
    assert [cluster.pid("worker", i) for i in range(2)] == pids


def test_an_interrupt_sent_to_a_worker_ends_it(cluster: LocalCluster, connect: Any) -> None:
    """It is the worker's end, not an error of the closure that runs, which is repeated elsewhere."""
    coordinator = connect(cluster)
    pids = [cluster.pid("worker", i) for i in range(2)]

    def interrupt(pids: list[int]) -> int:
        import os
        import signal

        if os.getpid() in pids:
            os.kill(os.getpid(), signal.SIGINT)
        return os.getpid()

    assert coordinator.schedule(interrupt, args=(pids,)).fetch(timeout_s=60) not in pids
    wait_until(lambda: repr(cluster).count("ready") == 3)


def test_queue_limit_holds_schedule_back(cluster: LocalCluster, connect: Any, gate: Gate) -> None:
    """CCO-12: back-pressure, and nothing is lost."""
    coordinator = connect(cluster, queue_limit=4)

    def pass_it(path: str, n: int) -> int:
        pass_gate(path)
        return n

    values: list[RemoteValue] = []

    def schedule_all() -> None:
        for n in range(200):
            values.append(coordinator.schedule(pass_it, args=(gate.path, n)))

    scheduling = threading.Thread(target=schedule_all)
    scheduling.start()
    scheduling.join(1.0)
    try:
        assert scheduling.is_alive(), "schedule() did not wait"
        assert len(values) < 100, "far more than the queue and two workers' windows hold"
    finally:
        gate.open()
        scheduling.join(30)
    assert coordinator.fetch(values) == list(range(200))


def test_schedule_waits_while_another_thread_joins(
    coordinator: ClusterCoordinator, gate: Gate
) -> None:
    """CCO-14."""
    first = coordinator.schedule(pass_gate, args=(gate.path,))
    thread = threading.Thread(target=coordinator.join)
    thread.start()
    wait_until(lambda: coordinator._joining == 1)
    opener = threading.Timer(0.2, gate.open)
    opener.start()
    second = coordinator.schedule(lambda: None)
    assert first.status is RemoteValueStatus.READY, "schedule returned before join was over"
    thread.join(30)
    opener.join(30)
    second.fetch()


def test_idle_worker_takes_over_what_waits_behind_a_long_closure(
    coordinator: ClusterCoordinator, gate: Gate
) -> None:
    """CCO-12: any idle worker takes the next, also what was sent ahead to another."""

    def pass_it(path: str) -> int:
        pass_gate(path)
        return sg.get_current_worker_index()

    long = coordinator.schedule(pass_it, args=(gate.path,))
    short = [coordinator.schedule(sg.get_current_worker_index) for _ in range(6)]
    workers = coordinator.fetch(short)
    assert long.status is RemoteValueStatus.NOT_READY, "the short ones waited for the long one"
    gate.open()
    assert set(workers) == {1 - long.fetch()}


def test_per_worker_iterators_start_at_their_own_beginning(
    coordinator: ClusterCoordinator,
) -> None:
    """CCO-30, CCO-31, CCO-40: independent datasets; the index tells workers apart."""

    def dataset() -> list[tuple[int, int]]:
        return [(sg.get_current_worker_index(), n) for n in range(1000)]

    per_worker = coordinator.create_per_worker_dataset(dataset)
    iterator = iter(per_worker)
    assert isinstance(iterator, PerWorkerValues)
    with pytest.raises(NotImplementedError, match="pass them to a scheduled function"):
        next(iterator)

    def take(it: Any) -> tuple[int, int, int]:
        return (sg.get_current_worker_index(), *next(it))

    seen = coordinator.fetch([coordinator.schedule(take, args=(iterator,)) for _ in range(40)])
    for worker in range(2):
        # Sorted: a closure may be returned by one worker, and run on the other one after later ones.
        mine = sorted(n for here, owner, n in seen if here == worker)
        assert mine == list(range(len(mine)))
    assert all(here == owner for here, owner, _ in seen)
    again = iter(per_worker)
    assert coordinator.schedule(take, args=(again,)).fetch()[2] == 0
    with pytest.raises(ValueError, match="expected a dataset"):
        coordinator.create_per_worker_dataset(3)


def test_dataset_function_with_a_parameter_receives_an_input_context(
    coordinator: ClusterCoordinator,
) -> None:
    """Worker i of N shards its data by InputContext."""

    def dataset(context: Any) -> range:
        return range(context.input_pipeline_id, 10, context.num_input_pipelines)

    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    def rest(it: Any) -> list[int]:
        return [sg.get_current_worker_index(), *it]

    lists = [coordinator.schedule(rest, args=(iterator,)).fetch() for _ in range(6)]
    for worker, *rows in lists:
        assert rows in ([], list(range(worker, 10, 2)))
    assert any(rows for _, *rows in lists)


def test_exhausted_dataset_is_an_ordinary_error(coordinator: ClusterCoordinator) -> None:
    """CCO-26: StopIteration from join."""
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [1]))
    with pytest.raises(StopIteration) as ended:
        for _ in range(3):
            coordinator.schedule(lambda it: next(it), args=(iterator,))
        coordinator.join()
    assert any("dataset.repeat()" in note for note in ended.value.__notes__)


def test_failed_resource_is_an_input_error_for_its_users_only(
    coordinator: ClusterCoordinator,
) -> None:
    """CCO-25: ClosureInputError with the original; nobody else notices."""

    def broken() -> None:
        raise OSError("no such shelf")

    resource = coordinator.create_per_worker_resource(broken)
    assert coordinator.schedule(lambda: 1).fetch() == 1
    coordinator.join()
    value = coordinator.schedule(lambda r: r, args=(resource,))
    with pytest.raises(ClosureInputError) as caught:
        coordinator.join()
    assert isinstance(caught.value.original_exception, OSError)
    with pytest.raises(ClosureInputError):
        value.fetch()


def test_resources_survive_a_users_error(coordinator: ClusterCoordinator) -> None:
    """CCO-24."""
    resource = coordinator.create_per_worker_resource(lambda: [0])

    def count(box: list[int]) -> int:
        box[0] += 1
        return box[0]

    def fail() -> None:
        raise ValueError

    total = sum(1 for _ in range(10) if coordinator.schedule(count, args=(resource,)).fetch())
    coordinator.schedule(fail)
    with pytest.raises(ValueError):
        coordinator.join()
    counts = coordinator.fetch([coordinator.schedule(count, args=(resource,)) for _ in range(10)])
    assert max(counts) > 1
    assert total == 10


def test_released_resources_are_forgotten_by_the_workers(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    """CCO-32: unreferenced iterators do not pile up."""

    def hold(directory: str) -> Any:
        import weakref

        class Thing:
            pass

        thing = Thing()
        path = f"{directory}/{sg.get_current_worker_index()}"
        open(path, "x").close()
        weakref.finalize(thing, os.unlink, path)
        return thing

    resource = coordinator.create_per_worker_resource(hold, args=(str(tmp_path),))
    wait_until(lambda: len(os.listdir(tmp_path)) == 2)
    coordinator.schedule(lambda r: None, args=(resource,)).fetch()
    assert len(os.listdir(tmp_path)) == 2
    del resource
    wait_until(lambda: not os.listdir(tmp_path))


def test_prints_and_logs_of_workers_reach_this_log(
    coordinator: ClusterCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue 4, section 3: with the worker's name."""

    def talk() -> None:
        print("spoken aloud")
        logging.getLogger("of.user").warning("written down")

    with caplog.at_level(logging.INFO, logger="stratagem.tasks"):
        coordinator.schedule(talk)
        coordinator.join()
        wait_until(lambda: "written down" in caplog.text)
    assert any(
        "spoken aloud" in record.message and "/job:worker/task:" in record.message
        for record in caplog.records
    )


def test_workers_have_random_numbers_of_their_own(coordinator: ClusterCoordinator) -> None:
    """CCO-31: unseeded shuffles differ per worker, although the processes are forks of one."""

    def draw() -> tuple[int, float, float, float]:
        import random

        return (
            sg.get_current_worker_index(),
            float(torch.rand(())),
            random.random(),
            float(np.random.rand()),  # noqa: NPY002 - the global state is meant
        )

    first: dict[int, tuple[float, ...]] = {}
    while len(first) < 2:
        for worker, *numbers in coordinator.fetch([coordinator.schedule(draw) for _ in range(8)]):
            first.setdefault(worker, tuple(numbers))
    assert not set(first[0]) & set(first[1])


def test_closing_cancels_and_the_cluster_serves_the_next(
    cluster: LocalCluster, connect: Any, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """After close() every call says so, waiters are released, and another coordinator works."""
    first = connect(cluster)
    values = [first.schedule(pass_gate, args=(gate.path,)) for _ in range(6)]
    gate.wait_for_arrival(2)
    first.close()
    first.close()
    assert caplog.text.count("Call join() first, which waits for them") == 1
    gate.open()
    with pytest.raises(ClosureCancelled, match="closed"):
        values[-1].fetch()
    with pytest.raises(RuntimeError, match="this coordinator is closed"):
        first.schedule(lambda: 1)
    with pytest.raises(RuntimeError, match="this coordinator is closed"):
        first.join()
    second = connect(cluster)
    assert second.schedule(lambda: "next").fetch(timeout_s=120) == "next"
    second.join()
    second.close()
    assert caplog.text.count("Call join() first, which waits for them") == 1


def test_many_small_closures_all_finish_in_whatever_order(coordinator: ClusterCoordinator) -> None:
    """Three thousand closures, each result its own."""
    values: list[RemoteValue] = [
        coordinator.schedule(lambda n: n * n, args=(n,)) for n in range(3000)
    ]
    coordinator.join(timeout_s=60)
    assert coordinator.fetch(values) == [n * n for n in range(3000)]
    assert "3000 done" in repr(coordinator)


def test_phases_of_closures_are_measured(coordinator: ClusterCoordinator) -> None:
    """Issue 4, section 3: queue, send and compute."""
    before = sg.metrics.snapshot().timers["closure.compute"].count
    coordinator.schedule(lambda: None)
    coordinator.join()
    timers = sg.metrics.snapshot().timers
    assert timers["closure.compute"].count == before + 1
    assert timers["closure.queue"].count == timers["closure.send"].count


def test_coordinators_are_not_copied(coordinator: ClusterCoordinator) -> None:
    """CPY-1."""
    import copy

    with pytest.raises(TypeError, match="one per strategy"):
        copy.deepcopy(coordinator)


def test_a_used_up_dataset_ends_its_workers_part_not_the_run(
    coordinator: ClusterCoordinator,
) -> None:
    """Issue 17, point 2: the other worker finishes its rows before StopIteration is raised."""

    def mine() -> list[int]:
        worker = sg.get_current_worker_index()
        return [1000 * worker + n for n in range(3 if worker == 0 else 60)]

    def take(it: Any) -> int:
        return int(next(it))

    iterator = iter(coordinator.create_per_worker_dataset(mine))
    values = []
    with pytest.raises(StopIteration):
        for _ in range(80):
            values.append(coordinator.schedule(take, args=(iterator,)))
        coordinator.join(timeout_s=120)
    found = []
    for value in values:
        with contextlib.suppress(StopIteration, ClosureCancelled):
            found.append(value.get(timeout_s=120))
    assert sorted(found) == [0, 1, 2, *range(1000, 1060)]
    again = iter(coordinator.create_per_worker_dataset(mine))
    values = [coordinator.schedule(take, args=(again,)) for _ in range(63)]
    coordinator.join(timeout_s=120)
    assert sorted(value.get() for value in values) == [0, 1, 2, *range(1000, 1060)]
    assert coordinator.schedule(lambda: 5).fetch(timeout_s=60) == 5


def test_a_function_that_has_read_something_else_is_not_repeated(
    coordinator: ClusterCoordinator,
) -> None:
    """It has used elements, which another worker could not give back."""
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [1]))
    coordinator.schedule(lambda it: [next(it), next(it)], args=(iterator,))
    with pytest.raises(StopIteration):
        coordinator.join(timeout_s=120)
