"""The threads replicas run on: what they take over from the caller, and how they come and go. Replica 0 has the caller's."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from meeting import me, meet
from waiting import wait_until

import stratagem as sg
from stratagem._core.devices import Device
from stratagem._core.replica_threads import ReplicaThreads
from stratagem._core.replicas import ReplicaGroup

LIMIT_S = 60.0


def replica_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if "-replica-" in t.name]


# ------------------------------------------------------------------ settings taken over


def test_grad_and_inference_mode_are_taken_over(two):
    """The replica threads compute as the caller would, and replica 0 leaves nothing behind on the caller's thread."""

    def modes():
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    assert two.run(modes) == (True, False)
    with torch.no_grad():
        assert two.run(modes) == (False, False)
    with torch.inference_mode():
        assert two.run(modes) == (False, True)
    assert two.run(modes) == (True, False)
    two.run(lambda: torch._C._set_grad_enabled(False))
    assert modes() == two.run(modes) == (True, False), "what a step forgot to restore does not stay"


def test_autocast_is_taken_over(two):
    """Autocast with its dtype, and nothing of it afterwards."""

    def product():
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert two.run(product) is torch.bfloat16
    assert two.run(product) is torch.float32


def test_default_dtype_is_taken_over(two):
    """Process-wide settings need no help, but must hold."""
    torch.set_default_dtype(torch.float64)
    try:
        assert two.run(lambda: torch.ones(1).dtype) is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_device_scopes(two):
    """RUN-10: an outer device scope does not reach replicas, an inner one does."""
    for strategy in (two, sg.OneDeviceStrategy("cpu")):
        with torch.device("meta"):
            assert strategy.run(lambda: torch.ones(1).device.type) == "cpu"

        def inner():
            with torch.device("meta"):
                return torch.ones(1).device.type

        assert strategy.run(inner) == "meta"


def test_replicas_that_take_turns_use_all_cores(two):
    """One replica computes at a time."""
    assert two.run(torch.get_num_threads) == torch.get_num_threads()


def test_parallel_replicas_share_the_cores(two_parallel):
    """R replicas get an R-th of torch's own threads each; the caller's number stays."""
    two = two_parallel
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert two.run(torch.get_num_threads) == 2
        torch.set_num_threads(2)
        assert two.run(torch.get_num_threads) == 1
        assert torch.get_num_threads() == 2, "replica 0 has limited this thread for the run only"
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert seen == [2], "threads started later begin with the caller's number"
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------ threads come and go


def test_close_ends_the_threads_and_a_closed_strategy_can_run_again():
    """Whoever creates, closes; closing twice is fine."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    before = len(replica_threads())
    strategy.run(lambda: None)
    assert len(replica_threads()) == before + 1, "replica 0 runs on this thread"
    strategy.close()
    strategy.close()
    assert len(replica_threads()) == before
    assert strategy.run(lambda: 3) == 3
    strategy.close()


def test_a_forgotten_strategy_takes_its_threads_along():
    """No cycle keeps it: the threads end when the last reference goes."""
    gc.collect()
    gc.disable()
    try:
        before = set(replica_threads())
        strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        strategy.run(lambda: sg.get_replica_context().all_reduce("sum", torch.ones(1)))
        gone = weakref.ref(strategy)
        assert len(set(replica_threads()) - before) == 1
        del strategy
        assert gone() is None
        assert set(replica_threads()) == before
    finally:
        gc.enable()


def test_runs_leave_no_garbage():
    """A run frees what it made by counting references; the collector has nothing to do."""
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as two, sg.OneDeviceStrategy("cpu") as one:
        for strategy in (one, two):
            for _ in range(20):  # they may release objects of other tests, such as compiled code
                strategy.run(lambda: sg.get_replica_context())
            gc.collect()
            gc.disable()
            try:
                for _ in range(20):
                    strategy.run(lambda: sg.get_replica_context())
                assert gc.collect() < 20
            finally:
                gc.enable()


def test_the_last_reference_may_go_on_a_replica_thread():
    """The finalizer then runs on a lane's own thread, and must not wait for it."""
    holder = [sg.MirroredStrategy(["cpu:0", "cpu:1"])]
    gone = weakref.ref(holder[0])
    run = holder[0].run

    def step():
        holder.clear()

    run(step)
    del run
    wait_until(lambda: gone() is None)  # a thread may still be at its end


def test_runs_of_several_threads_take_turns(two):
    """One strategy used by two threads: no deadlock, nothing mixed up."""
    results = {}

    def work(name):
        results[name] = [
            two.run(lambda i=i: meet((name, i), lambda brought: [set(brought)] * 2))
            for i in range(30)
        ]

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    for name in "ab":
        assert [r.values[0] if isinstance(r, sg.PerReplica) else r for r in results[name]] == [
            {(name, i)} for i in range(30)
        ]


@pytest.mark.process
def test_interpreter_exit_is_not_held_up():
    """Idle lanes end with the program, quietly."""
    code = (
        "import stratagem as sg\n"
        "strategy = sg.MirroredStrategy(['cpu:0', 'cpu:1'])\n"
        "print(strategy.run(lambda: 7))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "7", "")


@pytest.mark.process
def test_a_forked_child_gets_threads_of_its_own(two):
    """Threads do not survive a fork: the child's first run makes new ones."""
    two.run(lambda: None)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if two.run(me).values == (0, 1) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_representations():
    """Groups and lanes show their state."""
    threads = ReplicaThreads("x")
    assert repr(threads) == "<ReplicaThreads x [0 threads, 0 busy]>"
    assert repr(ReplicaGroup(None, [Device()])) == "<ReplicaGroup of 1>"
    two = ReplicaGroup(None, [Device(), Device()])
    assert repr(two._rendezvous) == "<Rendezvous of 2 [0 waiting at None, 0 ended, 0 failed]>"
