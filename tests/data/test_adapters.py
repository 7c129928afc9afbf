"""What users already have works as it is."""

from __future__ import annotations

import sys
import types
import warnings

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

import stratagem as sg
from stratagem.data import UNKNOWN, as_dataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # these libraries warn while they are loaded
    import datasets
    import grain
    import tqdm
    from torchdata.stateful_dataloader import StatefulDataLoader

# Hugging Face's progress bars start a thread and map a lock that stay for the life of the process.
tqdm.tqdm.monitor_interval = 0
tqdm.std.TqdmDefaultWriteLock.create_mp_lock()


class Squares(TorchDataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor(index), torch.tensor(index**2)


class Noisy(TorchDataset):
    """Random transformation in the dataset itself."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor(index) * 1000 + torch.randint(0, 1000, ())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(7).split(2))


class StatefulStream(IterableDataset):
    """Counts how often an element was made, to show that resuming does not replay."""

    def __init__(self):
        self.position = 0
        self.made = 0

    def __iter__(self):
        while self.position < 6:
            self.position += 1
            self.made += 1
            yield self.position
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def plain(element):
    if isinstance(element, dict):
        return {k: plain(v) for k, v in element.items()}
    if isinstance(element, tuple | list):
        return [plain(e) for e in element]
    return element.tolist()


def resumes(build, *, after):
    """The rest after resuming in a fresh source equals the rest without."""
    torch.manual_seed(3)
    with iter(as_dataset(build())) as iterator:
        for _ in range(after):
            next(iterator)
        state = iterator.state_dict()
        rest = [plain(x) for x in iterator]
    torch.manual_seed(99)
    with iter(as_dataset(build())) as resumed:
        before = torch.get_rng_state()
        resumed.load_state_dict(state)
        assert torch.equal(torch.get_rng_state(), before), (
            "resuming must not touch torch's generator"
        )
        assert [plain(x) for x in resumed] == rest
    assert rest
    return rest


def test_map_style_loader():
    loader = DataLoader(Squares(), batch_size=4)
    batches = list(as_dataset(loader))
    assert [plain(b)[0] for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(as_dataset(loader)) == 3


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own_generator", [False, True])
def test_shuffled_loader_resumes(workers, own_generator):
    def build():
        generator = torch.Generator().manual_seed(5) if own_generator else None
        return DataLoader(
            Noisy(), batch_size=2, shuffle=True, num_workers=workers, generator=generator
        )

    resumes(build, after=3)


@pytest.mark.process
def test_iterable_loader_with_workers():
    loader = DataLoader(Stream(), batch_size=None, num_workers=1)
    assert [plain(b) for b in as_dataset(loader)] == [[0, 1], [2, 3], [4, 5], [6]]
    assert as_dataset(loader).cardinality() == UNKNOWN


def test_iterable_dataset():
    assert [plain(b) for b in as_dataset(Stream())] == [[0, 1], [2, 3], [4, 5], [6]]
    resumes(Stream, after=2)


def test_stateful_iterables_are_asked_for_their_position():
    source = StatefulStream()
    iterator = iter(as_dataset(source))
    assert [int(next(iterator)) for _ in range(3)] == [1, 2, 3]
    state = iterator.state_dict()
    fresh = StatefulStream()
    resumed = iter(as_dataset(fresh))
    resumed.load_state_dict(state)
    assert [int(x) for x in resumed] == [4, 5, 6]
    assert fresh.made == 3


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, 1])
def test_stateful_data_loader(workers):
    def build():
        return StatefulDataLoader(Squares(), batch_size=3, num_workers=workers)

    assert resumes(build, after=2) == [[[6, 7, 8], [36, 49, 64]], [[9], [81]]]


def test_tensor_dataset_and_map_style_dataset():
    tensors = TensorDataset(torch.arange(4), torch.arange(4) * 2)
    assert [plain(x) for x in as_dataset(tensors).batch(3)] == [[[0, 1, 2], [0, 2, 4]], [[3], [6]]]
    assert [plain(x) for x in as_dataset(Squares()).shuffle(seed=1).batch(5).take(1)] == [
        plain(x)
        for x in as_dataset(Squares()).map(lambda a, b: (a, b)).shuffle(seed=1).batch(5).take(1)
    ]


@pytest.mark.parametrize("names", [{}, {"Dataset": TorchDataset}])
def test_a_program_may_have_a_module_called_datasets(names, monkeypatch):
    """It is not Hugging Face's, whatever it contains."""
    mine = types.ModuleType("datasets")
    vars(mine).update(names)
    monkeypatch.setitem(sys.modules, "datasets", mine)
    monkeypatch.delitem(sys.modules, "datasets.arrow_dataset")
    assert [plain(x) for x in as_dataset([torch.arange(2)])] == [[0, 1]]
    assert [plain(x) for x in as_dataset(Squares()).batch(3).take(1)] == [[[0, 1, 2], [0, 1, 4]]]


def test_hugging_face_dataset():
    source = datasets.Dataset.from_dict({"x": list(range(6)), "t": list("abcdef")})
    torch_format = source.with_format("torch")
    dataset = as_dataset(torch_format.select_columns("x"))
    assert [plain(b) for b in dataset.batch(4)] == [{"x": [0, 1, 2, 3]}, {"x": [4, 5]}]
    text = next(iter(as_dataset(torch_format).batch(2)))
    assert list(text["t"]) == ["a", "b"]
    unformatted = next(iter(as_dataset(source).shuffle(seed=1).batch(3)))
    assert isinstance(unformatted["x"], torch.Tensor)
    resumes(lambda: as_dataset(torch_format.select_columns("x")).shuffle(seed=2).batch(2), after=1)
    loader = DataLoader(torch_format.select_columns("x"), batch_size=3)
    assert [plain(b) for b in as_dataset(loader)] == [{"x": [0, 1, 2]}, {"x": [3, 4, 5]}]


def test_hugging_face_iterable_dataset():
    source = (
        datasets.Dataset.from_dict({"x": list(range(6))}).to_iterable_dataset().with_format("torch")
    )
    assert [plain(r) for r in as_dataset(source)] == [{"x": i} for i in range(6)]
    resumes(
        lambda: datasets.Dataset.from_dict({"x": list(range(6))}).to_iterable_dataset(), after=2
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_grain_dataset():
    def build():
        return grain.MapDataset.range(12).shuffle(seed=1).map(lambda x: np.array([x, x])).batch(4)

    assert sorted(x for b in as_dataset(build()) for x in plain(b)) == sorted(
        [i, i] for i in range(12)
    )
    resumes(build, after=1)
    resumes(lambda: build().to_iter_dataset(), after=2)


def test_arrays_and_iterables():
    assert [plain(x) for x in as_dataset(np.arange(4).reshape(2, 2))] == [[0, 1], [2, 3]]
    assert [plain(x) for x in as_dataset((np.arange(2), np.ones(2)))] == [[0, 1], [1, 1]]
    batches = [{"x": np.arange(3)}, {"x": np.arange(2)}]
    dataset = as_dataset(batches)
    assert (
        [plain(x) for x in dataset]
        == [plain(x) for x in dataset]
        == [{"x": [0, 1, 2]}, {"x": [0, 1]}]
    )
    assert len(dataset) == 2
    with pytest.raises(TypeError, match="is not a dataset"):
        as_dataset(5)
    with pytest.raises(TypeError, match="is not a dataset"):
        as_dataset("text")


def test_a_generator_object_can_be_iterated_once_and_says_so():
    dataset = as_dataset(i for i in range(3))
    assert [int(x) for x in dataset] == [0, 1, 2]
    with pytest.raises(sg.errors.DataError, match="generator object, which can be iterated once"):
        next(iter(dataset))
    with pytest.raises(sg.errors.DataError, match="once"):
        list(as_dataset(iter([1, 2])).repeat(2))
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        cloudpickle.dumps(dataset)


def test_generators_run_their_finally_when_iteration_stops_half_way():
    closed = []

    def source():
        try:
            yield from range(10)
        finally:
            closed.append(True)

    for _ in sg.data.Dataset.from_generator(source):
        break
    assert closed == [True]


def test_shuffling_and_caching_a_random_loader_resume():
    """What cannot be read again in the same order is kept in the position."""
    for step in (lambda d: d.shuffle(seed=1), lambda d: d.cache()):
        resumes(
            lambda step=step: step(as_dataset(DataLoader(Noisy(), batch_size=2, shuffle=True))),
            after=3,
        )
