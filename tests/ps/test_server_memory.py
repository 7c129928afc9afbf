"""The memory of a parameter server: what it counts, reuses, returns and refuses."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest
import torch

from stratagem._ps.server.store import VariableStore
from stratagem._ps.types import Gradient, GroupSpec, StateEntry
from stratagem._wire.arenas import Arena, Budget, Segment, memory_limit

MIB = 1 << 20


def held(segments: set[Segment]) -> int:
    """Bytes of pages that the kernel holds for these segments."""
    return sum(os.stat(f"/proc/self/fd/{one.ref().fd}").st_blocks * 512 for one in segments)


def test_small_variables_do_not_keep_the_memory_of_large_ones() -> None:
    """Forty small variables, made beside large ones that are gone, hold their own memory only."""
    with Arena(Budget(1 << 40)) as arena:
        small = set()
        for _ in range(40):
            segment, offset = arena.place(8 * MIB)
            segment.tensor(offset, (8 * MIB,), torch.uint8).fill_(1)
            small.add(arena.place(4)[0])
            arena.free(segment, offset, 8 * MIB)
        assert held(small) <= MIB
        assert arena.used_bytes <= MIB


def test_freed_space_is_used_again() -> None:
    """Beside a variable that stays, others come and go in the same memory."""
    with Arena(Budget(1 << 40)) as arena:
        arena.place(1000)
        for _ in range(10_000):
            segment, offset = arena.place(1000)
            assert segment.counter(offset) == 0
            segment.publish(offset, 3)
            arena.free(segment, offset, 1000)
        assert arena.used_bytes == 2 * (64 + 1024)
        assert "in 1 segments" in repr(arena)


def test_random_orders_of_creation_and_deletion() -> None:
    """Entries never overlap, the budget is never below what is live, and everything comes back."""
    draw = random.Random(5)
    budget = Budget(1 << 40)
    with Arena(budget) as arena:
        live: list[tuple[Segment, int, int]] = []
        for _ in range(4000):
            if live and draw.random() < 0.5:
                arena.free(*live.pop(draw.randrange(len(live))))
            else:
                size = draw.choice([0, 1, 64, 100, 5000, 70_000, 300_000])
                live.append((*arena.place(size), size))
            assert budget.used_bytes >= sum(size for *_, size in live)
        places = sorted((one.number, offset - 64, offset + size) for one, offset, size in live)
        for before, after in itertools.pairwise(places):
            assert before[0] < after[0] or before[2] <= after[1]
        for entry in live:
            arena.free(*entry)
        assert (budget.used_bytes, repr(arena)) == (0, "<Arena 0 bytes in 0 segments>")


def test_many_middle_sized_variables_need_few_descriptors() -> None:
    """Segments grow with the number of variables: each is one open file."""
    with Arena(Budget(1 << 40)) as arena:
        segments = {arena.place(200_000)[0] for _ in range(10_000)}
        assert len(segments) < 100


def store_with(budget: Budget, optimizer: str, **settings: float) -> VariableStore:
    store = VariableStore(budget=budget)
    store.create(1, "w", (1000,), torch.float32).zero_()
    store.create_optimizer(
        1, f"torch.optim.{optimizer}", [GroupSpec((1,), {"lr": 0.1, **settings})]
    )
    return store


@pytest.mark.parametrize(
    ("optimizer", "tensors"), [("Adam", 2), ("Adagrad", 1), ("RMSprop", 1), ("Adadelta", 2)]
)
def test_optimizer_state_counts_in_the_budget(optimizer: str, tensors: int) -> None:
    """When it is made by the first step or by the constructor, and until its variable is deleted."""
    budget = Budget(1 << 30)
    store = store_with(budget, optimizer)
    for _ in range(3):
        store.push(1, [Gradient(variable=1, values=torch.ones(1000))])
    assert tensors * 4000 <= budget.used_bytes < tensors * 4000 + 100
    store.create_optimizer(1, f"torch.optim.{optimizer}", [GroupSpec((1,), {"lr": 0.2})])
    assert tensors * 4000 <= budget.used_bytes < tensors * 4000 + 100
    store.delete(1)
    assert budget.used_bytes == 0


def test_a_step_without_memory_for_its_state_is_refused_before_it_changes_anything() -> None:
    store = store_with(Budget(7999), "Adam")
    for _ in range(2):
        with pytest.raises(MemoryError, match="STRATAGEM_SERVER_MEMORY_BYTES"):
            store.push(1, [Gradient(variable=1, values=torch.ones(1000))])
    assert store.optimizer_state(1) == []
    assert store.read(1).sum() == 0
    assert store.version(1) == 0


def test_loaded_state_and_adagrad_are_refused_without_memory() -> None:
    with pytest.raises(MemoryError, match="4000 bytes do not fit"):
        store_with(Budget(3999), "Adagrad")
    store = store_with(Budget(7999), "Adam")
    state = [
        StateEntry(variable=1, key=key, value=torch.zeros(1000))
        for key in ("exp_avg", "exp_avg_sq")
    ]
    with pytest.raises(MemoryError, match="8000 bytes do not fit"):
        store.load_optimizer_state(1, state)


def test_closing_a_store_returns_the_bytes_of_its_state() -> None:
    budget = Budget(1 << 30)
    store = store_with(budget, "Adam")
    store.push(1, [Gradient(variable=1, values=torch.ones(1000))])
    store.close()
    assert budget.used_bytes == 0


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "123456\n"},
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/memory.max": "123456\n",
        },
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "123456\n"},
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/1\n0::/\n",
            "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": "123456\n",
        },
        {  # a container that sees the host's path
            "proc/self/cgroup": "4:memory:/docker/1\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "123456\n",
        },
    ],
    ids=["v2", "v2, a parent's", "v2, at the top", "v1", "v1 in a container"],
)
def test_the_limit_of_a_cgroup_is_respected(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)
    assert memory_limit(tmp_path) == 123456


def test_without_a_cgroup_the_limit_is_the_machines_memory(tmp_path: Path) -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_limit(tmp_path) == machine
    write(tmp_path / "proc/self/cgroup", "0::/a\n")
    write(tmp_path / "sys/fs/cgroup/a/memory.max", "max\n")
    assert memory_limit(tmp_path) == machine
