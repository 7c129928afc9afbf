"""Threads and processes of the pipeline end when they should, and wait no longer than told."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import traceback
import weakref

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

import stratagem as sg
from stratagem.data import Dataset, as_dataset


def ours():
    return [t.name for t in threading.enumerate() if t.name.startswith("stratagem-")]


PIPELINES = {
    "prefetch": lambda d: d.prefetch(2),
    "map": lambda d: d.map(lambda x: x, 3),
    "both": lambda d: d.map(lambda x: x, 2).prefetch(2).repeat(2).prefetch(1),
    "interleave": lambda d: d.interleave(
        lambda x: Dataset.from_tensors(x).repeat(3), 3, num_parallel_calls=2
    ),
}


@pytest.fixture(params=sorted(PIPELINES))
def dataset(request):
    return PIPELINES[request.param](Dataset.range(50))


def test_after_the_last_element(dataset):
    iterator = iter(dataset)
    next(iterator)
    assert ours(), "no thread: nothing is tested"
    list(iterator)
    assert not ours()


def test_after_close(dataset):
    iterator = iter(dataset)
    next(iterator)
    assert ours()
    iterator.close()
    iterator.close()
    assert not ours()


def test_after_a_with_block(dataset):
    with iter(dataset) as iterator:
        next(iterator)
        assert ours()
    assert not ours()


def test_after_the_iterator_was_dropped(dataset):
    iterator = iter(dataset)
    next(iterator)
    assert ours()
    gone = weakref.ref(iterator)
    del iterator
    gc.collect()
    assert gone() is None
    assert not ours()


def test_after_load_state_dict(dataset):
    iterator = iter(dataset)
    next(iterator)
    state = iterator.state_dict()
    before = len(ours())
    iterator.load_state_dict(state)
    next(iterator)
    assert len(ours()) <= before
    iterator.close()
    assert not ours()


@pytest.mark.parametrize("parallel", [None, 2])
@pytest.mark.parametrize("ahead", [0, 2])
def test_after_an_exception_in_the_users_function(parallel, ahead):
    def broken(x):
        if x == 5:
            raise ZeroDivisionError("five")
        return x

    iterator = iter(Dataset.range(50).map(broken, parallel).prefetch(ahead))
    found = []
    with pytest.raises(ZeroDivisionError, match="five") as caught:
        found.extend(int(x) for x in iterator)
    assert not ours()
    shown = "".join(traceback.format_exception(caught.value))
    assert "in broken" in shown
    assert "in the function given to map(), " in shown
    assert "at element 5" in shown
    with pytest.raises(sg.errors.DataError, match="ZeroDivisionError: five"):
        next(iterator)


def test_elements_before_an_error_are_delivered():
    def source():
        yield from range(3)
        raise OSError("disk")

    iterator = iter(Dataset.from_generator(source).prefetch(2))
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="disk"):
        next(iterator)
    assert not ours()


@pytest.mark.parametrize("parallel", [None, 2])
def test_stop_iteration_in_the_users_function_does_not_end_the_data_silently(parallel):
    def stop(x):
        if x == 2:
            raise StopIteration
        return x

    with pytest.raises(RuntimeError, match=r"raised StopIteration at element 2"):
        list(Dataset.range(5).map(stop, parallel))


def test_a_slow_function_meets_the_time_limit(monkeypatch):
    """No wait without a limit."""
    monkeypatch.setenv("STRATAGEM_INPUT_TIMEOUT_S", "0.05")
    release = threading.Event()
    init = sg.errors.InputTimeout.__init__

    def raised(self, *words, **facts):
        release.set()  # close() waits for the running call
        init(self, *words, **facts)

    monkeypatch.setattr(sg.errors.InputTimeout, "__init__", raised)
    for dataset, text in (
        (Dataset.range(3).map(lambda x: release.wait(120) or x, 2), "took longer than 0.05 s"),
        (
            Dataset.range(3).map(lambda x: (release.wait(120) if x else None, x)[1]).prefetch(1),
            "'stratagem-prefetch' took longer than 0.05 s",
        ),
    ):
        release.clear()
        iterator = iter(dataset)
        with pytest.raises(sg.errors.InputTimeout, match=text):
            list(iterator)
        assert not ours()


def test_a_users_own_timeout_error_is_not_ours():
    def fails(x):
        raise TimeoutError("theirs")

    with pytest.raises(TimeoutError, match="theirs") as caught:
        list(Dataset.range(3).map(fails, 2))
    assert not isinstance(caught.value, sg.errors.StratagemError)


class Rows(TorchDataset):
    def __init__(self, bad=-1):
        self.bad = bad

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError("bad row")
        return index


@pytest.mark.process
def test_loader_processes_are_gone_after_close_error_and_end():
    loader = DataLoader(Rows(), batch_size=2, num_workers=2)
    iterator = iter(as_dataset(loader).prefetch(1))
    next(iterator)
    assert len(multiprocessing.active_children()) == 2
    iterator.close()
    gc.collect()
    assert not multiprocessing.active_children()
    list(as_dataset(loader))
    assert not multiprocessing.active_children()
    broken = DataLoader(Rows(bad=7), batch_size=2, num_workers=1)
    with pytest.raises(ValueError, match="bad row"):
        list(as_dataset(broken).prefetch(1))
    gc.collect()
    assert not multiprocessing.active_children()


def test_the_first_element_is_read_in_the_callers_thread():
    """So that sources which draw from torch's generator when they begin do so at a fixed moment."""
    names = []

    def source():
        for i in range(4):
            names.append(threading.current_thread().name)
            yield i

    with iter(Dataset.from_generator(source).prefetch(1)) as iterator:
        list(iterator)
    assert names[0] == threading.current_thread().name
    assert set(names[1:]) == {"stratagem-prefetch-0"}


def test_prefetch_runs_ahead_and_no_further():
    made = []
    reached = threading.Event()

    def source():
        for i in range(10):
            made.append(i)
            if i == 3:
                reached.set()
            yield i

    with iter(Dataset.from_generator(source).prefetch(3)) as iterator:
        next(iterator)
        assert reached.wait(120)  # 0 delivered, 1 to 3 ahead
        assert iterator.state_dict()["cursor"]["children"][0]["position"] == 4
        assert made == [0, 1, 2, 3]


def test_parallel_calls_really_overlap():
    """Two calls meet at a barrier: impossible one after the other."""
    barrier = threading.Barrier(2, timeout=120)

    def meet(x):
        barrier.wait()
        return x

    assert [int(x) for x in Dataset.range(6).map(meet, 2)] == list(range(6))


def test_torch_settings_of_threads_do_not_leak():
    """A map function may change grad mode in its thread only."""

    def no_grad(x):
        torch.set_grad_enabled(False)
        return x

    list(Dataset.range(3).map(no_grad, 2))
    assert torch.is_grad_enabled()
