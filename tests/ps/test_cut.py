"""A cut of a store keeps rows as they were, whatever is written while they are read."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem._ps.server import cut as cuts
from stratagem._ps.server import kept_rows
from stratagem._ps.server.cut import Cut
from stratagem._ps.server.store import VariableStore
from stratagem._ps.types import Gradient, GroupSpec

ROWS = 1000


@pytest.fixture(params=["kernels", "numpy"])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in many blocks, made by the kernels or without them."""
    monkeypatch.setattr(kept_rows, "BLOCK_BYTES", 2000)
    if request.param == "numpy":
        monkeypatch.setattr(kept_rows, "kernels", None)


def filled_store(columns: int) -> VariableStore:
    store = VariableStore()
    store.create(1, "table", (ROWS, columns), torch.float32).normal_()
    store.create(2, "dense", (7, 3), torch.float32).normal_()
    groups = [GroupSpec(variables=(1, 2), settings={"lr": 0.1})]
    store.create_optimizer(1, "torch.optim.Adagrad", groups)
    push(store, random.Random(0))
    return store


def push(store: VariableStore, chance: random.Random) -> None:
    ids = torch.tensor(sorted(chance.sample(range(ROWS), 50)))
    columns = store.read(1).shape[1]
    sparse = Gradient(variable=1, values=torch.randn(50, columns), ids=ids)
    store.push(1, [sparse, Gradient(variable=2, values=torch.randn(7, 3))])


def state_of(store: VariableStore) -> dict[tuple[int, int, str], Tensor]:
    found = {(number, 0, ""): store.read(number).clone() for number in (1, 2)}
    for entry in store.optimizer_state(1):
        assert isinstance(entry.value, Tensor)
        found[entry.variable, 1, entry.key] = entry.value.clone()
    return found


@pytest.mark.parametrize("columns", [1, 3, 16, 40])
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_of_the_cut(small_blocks: None, columns: int, seed: int) -> None:
    """Sparse pushes, scatters, whole assignments and row writes between reads: none shows."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    store = filled_store(columns)
    expected = state_of(store)
    cut = store.begin_cut([1, 2])
    writes = [
        lambda: push(store, chance),
        lambda: push(store, chance),
        lambda: store.scatter(1, "add", torch.tensor([5, 999, 5]), torch.ones(3, columns)),
        lambda: store.write_rows(1, 10, torch.zeros(4, columns)),
        lambda: store.assign(1, "add", torch.ones(ROWS, columns)),
    ]
    # A whole assignment copies everything at once: let most runs be sparse for long.
    weights = [20, 20, 20, 0, 0] if seed % 2 else [20, 20, 20, 1, 1]
    for key, tensor in cut.tensors.items():
        count = tensor.shape[0] if tensor.shape else 1
        first = 0
        while first < count:
            for _ in range(chance.randrange(4)):
                chance.choices(writes, weights)[0]()
            last = min(count, first + chance.randrange(1, 120))
            rows = tensor.read(first, last).clone()
            want = expected[key] if expected[key].dim() else expected[key].reshape(1)
            assert torch.equal(rows, want[first:last]), (key, first, last)
            first = last
    assert not torch.equal(store.read(1), expected[1, 0, ""])
    store.end_cut()


def test_copies_have_a_limit(monkeypatch: pytest.MonkeyPatch, small_blocks: None) -> None:
    """Beyond the limit a write waits for the thread that reads; copies are freed as it goes on."""
    monkeypatch.setattr(cuts, "LEAST_ASIDE_BYTES", 0)
    value = torch.zeros(100_000, 4)
    cut = Cut({(1, 0, ""): value})
    cut.begin_reading()
    done = threading.Event()

    def write() -> None:
        for start in range(98_000, -1, -2000):
            ids = torch.arange(start, start + 2000)
            cut.before_write(1, ids)
            value[ids] += 1
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    tensor = cut.tensors[1, 0, ""]
    assert not done.wait(0.2)  # most rows must be read first
    for first in range(0, 100_000, 1000):
        assert not tensor.read(first, first + 1000).any()
    writer.join(60)
    assert done.is_set()
    assert 0 < cut.most_aside_bytes <= value.nbytes // 10
    assert bool((value == 1).all())


def test_the_places_of_copies_are_used_again(small_blocks: None) -> None:
    """A save of any length needs memory for the copies of one moment."""
    value, sums = torch.zeros(4096, 16), torch.ones(4096, 16)
    cut = Cut({(1, 0, ""): value, (1, 1, "sum"): sums})
    cut.begin_reading()
    [(kept, _)] = cut._groups[1]
    chance = random.Random(1)
    for first in range(0, 4096, 64):
        ids = torch.tensor(sorted(chance.sample(range(first, 4096), 64)))
        cut.before_write(1, ids)
        value[ids] += 1
        sums[ids] += 1
        assert not cut.tensors[1, 0, ""].read(first, first + 64).any()
        assert (cut.tensors[1, 1, "sum"].read(first, first + 64) == 1).all()
    places = len(kept._blocks) << kept._block_bits
    assert places < 4096 * 2 // 3  # all 64 rounds together wrote more rows than there are
    assert kept.nbytes == kept._places.nbytes  # type: ignore[union-attr]
    cut.close()


def test_rows_that_nobody_reads_are_not_copied() -> None:
    """A checkpoint of a model without its optimizer: the state must not fill the memory for copies."""
    value, sums = torch.zeros(1000, 4), torch.zeros(1000, 4)
    cut = Cut({(1, 0, ""): value, (1, 1, "sum"): sums})
    cut.begin_reading({(1, 0, "")})
    cut.before_write(1, torch.arange(10))
    cut.tensors[1, 0, ""].read(0, 1000)
    cut.before_write(1, None)
    assert cut.tensors[1, 1, "sum"]._rest is None
    [(kept, _)] = cut._groups[1]
    assert kept.keep(torch.arange(1000), room=0).numel() == 0  # none is needed
    cut.close()


def test_optimizer_state_with_another_number_of_rows(small_blocks: None) -> None:
    """Ids of the table mean nothing there: such state is copied as a whole."""
    value, other = torch.zeros(100, 4), torch.zeros(7, 4)
    cut = Cut({(1, 0, ""): value, (1, 1, "factors"): other})
    cut.begin_reading()
    cut.before_write(1, torch.tensor([50, 99]))
    value[[50, 99]] += 1
    other += 1
    assert not cut.tensors[1, 1, "factors"].read(0, 7).any()
    assert not cut.tensors[1, 0, ""].read(0, 100).any()
    cut.close()


def test_closing_lets_a_waiting_write_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "LEAST_ASIDE_BYTES", 0)
    cut = Cut({(1, 0, ""): torch.zeros(1000, 4)})
    cut.begin_reading()
    writer = threading.Thread(target=cut.before_write, args=(1, None))
    writer.start()
    writer.join(0.1)
    assert writer.is_alive()
    cut.close()
    writer.join(60)
    assert not writer.is_alive()


def test_before_a_thread_reads_no_write_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message that starts the thread comes after the writes: waiting would never end."""
    monkeypatch.setattr(cuts, "LEAST_ASIDE_BYTES", 0)
    value = torch.zeros(1000, 4)
    cut = Cut({(1, 0, ""): value})
    cut.before_write(1, None)
    value.fill_(1.0)
    assert not cut.tensors[1, 0, ""].read(0, 1000).any()


def test_a_deleted_variable_is_still_saved() -> None:
    store = filled_store(4)
    expected = state_of(store)
    cut = store.begin_cut([1, 2])
    value = store.read(1)
    store.delete(1)
    value.zero_()  # its memory is used again
    assert torch.equal(cut.tensors[1, 0, ""].read(0, ROWS), expected[1, 0, ""])
    assert torch.equal(cut.tensors[1, 1, "sum"].read(0, ROWS), expected[1, 1, "sum"])


@pytest.mark.parametrize("columns", [1, 16])
@pytest.mark.parametrize("by_ids", [False, True])
def test_rows_are_those_of_the_cut_while_another_thread_writes(
    small_blocks: None, columns: int, by_ids: bool
) -> None:
    """The reading thread puts copies back while the working thread makes further ones, and at last copies the rest."""
    rows = 20_000
    value = torch.randn(rows, columns)
    expected = value.clone()
    cut = Cut({(1, 0, ""): value})
    cut.begin_reading()
    tensor = cut.tensors[1, 0, ""]
    wanted = torch.arange(0, rows, 3) if by_ids else torch.arange(rows)
    found: list[Tensor] = []
    begun = threading.Event()

    def read() -> None:
        assert begun.wait(120)
        for first in range(0, len(wanted), 50):
            last = min(len(wanted), first + 50)
            if by_ids:
                found.append(tensor.read_ids(wanted[first:last], is_last=last == len(wanted)))
            else:
                found.append(tensor.read(first, last).clone())

    thread = threading.Thread(target=read)
    thread.start()
    chance = random.Random(columns)
    while thread.is_alive():
        ids = torch.tensor(sorted(chance.sample(range(rows), 200)))
        is_dense = len(found) > 300
        cut.before_write(1, None if is_dense else ids)
        value[slice(None) if is_dense else ids] += 1
        begun.set()  # so that at least one write comes before the end
    thread.join()
    assert torch.equal(torch.cat(found), expected[wanted])
    cut.close()


@pytest.mark.parametrize("by_ids", [False, True])
@pytest.mark.parametrize("is_dense", [False, True])
def test_a_write_does_not_wait_for_rows_that_are_being_read(by_ids: bool, is_dense: bool) -> None:
    """A step waits for no copy of the reading thread, and the rows that it changes meanwhile are those of the cut."""
    value = torch.zeros(1000, 4)
    cut = Cut({(1, 0, ""): value})
    cut.begin_reading()
    tensor = cut.tensors[1, 0, ""]
    wanted = torch.arange(0, 100)
    writes = []

    def write() -> None:
        ids = torch.tensor([3, 50, 500])
        cut.before_write(1, None if is_dense else ids)
        value[slice(None) if is_dense else ids] += 1
        writes.append(True)

    reader = threading.current_thread()

    def write_meanwhile() -> None:
        if not writes and threading.current_thread() is reader:
            writer = threading.Thread(target=write)
            writer.start()
            writer.join(60)
            assert writes, "the write waited for the copy"

    class Watched(Tensor):
        """Rows whose copies are interrupted by a write."""

        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function.__name__ in ("index_select", "__getitem__", "copy_"):
                write_meanwhile()
            return super().__torch_function__(function, types, args, kwargs or {})

    tensor.rows = value.as_subclass(Watched)
    if by_ids:
        found = tensor.read_ids(wanted, is_last=False)
    else:
        found = tensor.read(0, 100)
    assert writes
    assert not found.as_subclass(Tensor).any()
    rest = tensor.read(100, 1000)
    assert not rest.as_subclass(Tensor).any()
    cut.close()
