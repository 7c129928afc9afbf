"""The heap in shared memory: tensors lie in it, keep their values, and survive fork; nothing else changes.

It is one per process and for good, so every test has a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping

import pytest
import torch

from stratagem._wire import shared_heap

LIMIT_S = 120.0

BEGIN = """
import gc, os, random, threading, torch
from stratagem._wire import shared_heap, shm
torch.set_num_threads(1)
heap = shared_heap.install()
MB = 1 << 18  # numbers in a megabyte
"""

LATER = BEGIN.replace("heap = shared_heap.install()\n", "")


def run(script: str, environment: Mapping[str, str] | None = None, *, begin: str = BEGIN) -> str:
    done = subprocess.run(
        [sys.executable, "-c", begin + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, **(environment or {})},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_is_built_here() -> None:
    """`make test` needs a compiler anyway; without this every test of lending would test copying."""
    assert shared_heap.is_built()


def test_large_tensors_of_a_thread_that_asks_lie_in_it_and_a_peer_reads_them() -> None:
    script = """
    heap.enter()
    made = torch.arange(2.0 * MB)
    small = torch.ones(16)
    offset = heap.offset_of(made)
    peer = shm.open_segment(heap.ref(), shared=True)
    print(torch.equal(peer.tensor(offset, (2 * MB,), torch.float32), made), heap.offset_of(small))
    print(heap.offset_of(made[16:]) == offset + 64, heap.offset_of(made[1:]), heap.offset_of(made[::2]))
    """
    assert run(script) == "True None\nTrue None None"


def test_who_does_not_ask_gets_memory_as_always() -> None:
    script = """
    print(heap.offset_of(torch.ones(MB)))
    heap.enter()
    found = []
    other = threading.Thread(target=lambda: found.append(heap.offset_of(torch.ones(MB))))
    other.start(); other.join()
    heap.leave()
    print(found, heap.offset_of(torch.ones(MB)), heap.used_bytes)
    """
    assert run(script) == "None\n[None] None 0"


def test_the_same_steps_find_the_same_places() -> None:
    """So that a step's message is the same as the last step's."""
    script = """
    def step():
        hidden = torch.ones(MB)
        gradients = [torch.ones(3 * MB), torch.ones(MB // 2)]
        return [heap.offset_of(one) for one in (hidden, *gradients)]
    heap.enter()
    print(len({tuple(step()) for _ in range(50)}), heap.used_bytes)
    """
    assert run(script) == "1 0"


def test_blocks_never_overlap_and_keep_their_values() -> None:
    """Thousands of tensors of all sizes, freed in any order, by other threads as well."""
    script = """
    random.seed(1)
    heap.enter()
    alive, made = {}, 0
    for number in range(6000):
        if random.random() < 0.55 or not alive:
            size = random.choice([1 << 15, 40_000, 1 << 16, 100_003, 1 << 18])
            alive[number] = torch.full((size,), float(number))
            made += heap.offset_of(alive[number]) is not None
            if len(alive) > 120:
                alive.pop(random.choice(list(alive)))
        else:
            gone = [alive.pop(random.choice(list(alive)))]
            if random.random() < 0.2:
                thread = threading.Thread(target=gone.clear)
                thread.start(); thread.join()
            del gone
        if number % 50 == 0:
            for tag, tensor in alive.items():
                assert tensor.min() == tensor.max() == float(tag), (tag, number)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in alive.values())
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:]))
    assert made > 2000, made
    alive.clear(); tensor = None
    print(heap.used_bytes)
    """
    assert run(script) == "0"


def test_freed_memory_is_kept_for_the_next_step_and_given_back_on_demand() -> None:
    """Steps that need more than is kept in any case do not fetch it from the kernel every time."""
    script = """
    import resource
    def faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    def step():
        return [torch.ones(8 * MB) for _ in range(48)]  # 384 MB
    heap.enter()
    step()
    before = faults()
    step()
    print(heap.kept_bytes >= 384 << 20, faults() - before < 1000)
    heap.trim()
    print(heap.kept_bytes)
    """
    assert run(script) == "True True\n0"


def test_freed_memory_nobody_needed_for_a_while_is_kept_up_to_a_limit() -> None:
    script = """
    def resident():
        with open("/proc/self/status") as status:
            (line,) = [line for line in status if line.startswith("RssShmem")]
        return int(line.split()[1]) >> 10
    shared_heap.KEPT_S = 0
    heap = shared_heap.install()
    heap.enter()
    many = [torch.ones(8 * MB) for _ in range(64)]  # 512 MB
    full = resident()
    random.shuffle(many)
    while many:
        many.pop()
    limit = shared_heap.KEPT_BYTES
    print(full >= 512, heap.kept_bytes <= limit + (8 << 20))
    print(resident() <= (heap.kept_bytes >> 20) + 16)
    heap.trim()
    print(heap.kept_bytes, resident() <= 16)
    """
    assert run(script, begin=LATER) == "True True\nTrue\n0 True"


def test_a_forked_child_has_a_copy_of_its_own() -> None:
    """As with private memory: neither sees what the other writes, frees or makes afterwards."""
    script = """
    heap.enter()
    mine, gone = torch.full((4 * MB,), 3.0), torch.full((MB,), 5.0)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(told, 1)  # the parent has written over everything
        try:
            assert mine.sum() == 12 * MB and gone.sum() == 5 * MB
            mine.zero_()
            made = torch.ones(MB)
            assert heap.offset_of(made) is None
            del mine, gone
            if os.fork() == 0:
                os._exit(int(made.sum() != MB))
            os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
        except BaseException:
            os._exit(9)
    mine.fill_(7.0)
    del gone
    again = [torch.full((MB,), 8.0) for _ in range(8)]
    os.write(tell, b"x")
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), float(mine.mean()), {float(one.mean()) for one in again})
    """
    assert run(script) == "0 7.0 {8.0}"


def test_a_forked_child_lends_nothing_and_has_no_heap() -> None:
    """What it inherited is private to it: under the same offset servers would find the parent's tensors."""
    script = """
    heap.enter()
    mine = torch.ones(MB)
    assert heap.offset_of(mine) is not None
    if os.fork() == 0:
        told = heap.offset_of(mine), shared_heap.installed(), shared_heap.install(), shared_heap.why_not()
        print(*told, float(mine.sum()) == MB, flush=True)
        del mine
        os._exit(0)
    assert os.wait()[1] == 0
    assert heap.offset_of(mine) is not None and shared_heap.install() is heap
    """
    assert run(script) == (
        "None None None this process was forked from one that has a heap "
        "(torch " + torch.__version__ + ") True"
    )


def test_children_of_a_dataloader_read_what_they_inherit() -> None:
    script = """
    from torch.utils.data import DataLoader, TensorDataset
    heap.enter()
    rows = torch.arange(4.0 * MB).view(-1, 1024)
    assert heap.offset_of(rows) is not None
    loader = DataLoader(TensorDataset(rows), batch_size=64, num_workers=2, multiprocessing_context="fork")
    total = sum(float(batch.double().sum()) for (batch,) in loader)
    print(total == float(rows.double().sum()))
    """
    assert run(script) == "True"


def test_it_is_given_up_with_its_last_user_and_can_be_made_again() -> None:
    """While tensors lie in it, it stays."""
    script = """
    def mapped():
        return sum("memfd:stratagem" in line for line in open("/proc/self/maps"))
    for _ in range(3):
        assert shared_heap.install() is shared_heap.installed()
        shared_heap.release()
        heap = shared_heap.installed()
        heap.enter()
        kept = torch.ones(MB)
        heap.leave()
        shared_heap.release()
        assert shared_heap.installed() is heap and mapped()
        assert shared_heap.install() is heap
        del kept
        shared_heap.release()
        assert shared_heap.installed() is None and not mapped()
        heap.enter()
        assert heap.offset_of(torch.ones(MB)) is None
        heap.leave()
        if os.fork() == 0:
            os._exit(0)
        assert os.wait()[1] == 0
        heap = shared_heap.install()
    print("well")
    """
    assert run(script) == "well"


def test_other_programs_are_started_as_always() -> None:
    script = """
    import subprocess
    heap.enter()
    kept = torch.ones(MB)
    print(subprocess.run(["echo", "hello"], capture_output=True, text=True).stdout.strip(), os.system("true"))
    """
    assert run(script) == "hello 0"


@pytest.mark.parametrize("switch", ["STRATAGEM_SHARED_HEAP", "STRATAGEM_SHARED_MEMORY"])
def test_it_can_be_switched_off(switch: str) -> None:
    assert run("print(heap, shared_heap.why_not())", {switch: "0"}).startswith(
        "None it is switched"
    )


def test_without_its_c_part_there_is_none() -> None:
    script = """
    shared_heap._library_path = lambda: None
    print(shared_heap.install(), shared_heap.why_not())
    """
    assert (
        run(script, begin=LATER)
        == "None its C part was not built: there was no compiler at installation"
    )


def test_a_torch_that_gets_its_memory_otherwise_is_left_alone() -> None:
    """A library of another name stands for one that does not import what is replaced."""
    script = """
    shared_heap._LIBRARY = b"libc10-of-another-kind.so"
    print(shared_heap.install())
    print(shared_heap.why_not().split(" (torch")[0], float(torch.ones(MB).sum()) == MB)
    """
    assert run(script, begin=LATER) == "None\nthis torch does not free memory by free() True"


def test_where_addresses_are_limited_there_is_none() -> None:
    script = """
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    print(shared_heap.install(), shared_heap.why_not()[:21], float(torch.ones(MB).sum()) == MB)
    """
    assert run(script, begin=LATER) == "None addresses are limited True"
