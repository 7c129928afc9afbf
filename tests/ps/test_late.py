"""What a write returns inside a scheduled function."""

from __future__ import annotations

import copy
import pickle

import torch

from stratagem._ps.client.remote_storage import LazyReadTensor


class Source:
    """Counts how often it is read."""

    def __init__(self) -> None:
        self.value = torch.tensor([1.0, 2.0])
        self.reads = 0

    def read(self) -> torch.Tensor:
        self.reads += 1
        return self.value.clone()

    def late(self) -> LazyReadTensor:
        return LazyReadTensor(self.value.shape, self.value.dtype, self.read)


def test_it_is_read_once_when_used_and_stays() -> None:
    source = Source()
    late = source.late()
    assert isinstance(late, torch.Tensor)
    assert source.reads == 0
    source.value.add_(1)
    assert (late * 2).tolist() == [4.0, 6.0]
    source.value.add_(1)
    assert late.tolist() == [2.0, 3.0]
    assert source.reads == 1


def test_it_is_a_tensor_to_everybody() -> None:
    late = Source().late()
    assert type(late + 1) is torch.Tensor
    assert torch.stack([late, late]).shape == (2, 2)
    assert float(late.sum()) == 3.0
    assert late.numpy().tolist() == [1.0, 2.0]
    assert torch.as_tensor(late).tolist() == [1.0, 2.0]
    assert torch.ones(2).add_(late).tolist() == [2.0, 3.0]
    assert repr(late) == "tensor([1., 2.])"
    assert (late.shape, late.dtype, late.device.type) == ((2,), torch.float32, "cpu")


def test_copies_and_pickles_are_plain_tensors() -> None:
    for copied in (copy.deepcopy(Source().late()), pickle.loads(pickle.dumps(Source().late()))):
        assert type(copied) is torch.Tensor
        assert copied.tolist() == [1.0, 2.0]
