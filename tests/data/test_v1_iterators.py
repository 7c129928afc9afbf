"""`make_dataset_iterator`, `make_input_fn_iterator` (INP-40, INP-41)."""

from __future__ import annotations

import pytest
import torch

import stratagem as sg
from stratagem._data.v1_iterators import make_dataset_iterator, make_input_fn_iterator
from stratagem.config import InputReplicationMode
from stratagem.data import Dataset

ONE = [torch.device("cpu")]
TWO = ONE * 2


def parts(step):
    return [part.tolist() for part in step.values]


def test_inp_40_usable_at_once_and_initialize_restarts():
    iterator = make_dataset_iterator(Dataset.range(3).batch(2), TWO)
    assert parts(iterator.get_next()) == [[0], [1]]
    assert parts(iterator.get_next()) == [[2], []]
    with pytest.raises(sg.errors.EndOfData):
        iterator.get_next()
    assert not iterator.get_next_as_optional().has_value()
    iterator.initialize()
    assert [parts(s) for s in iterator] == [[[0], [1]], [[2], []]]
    _ = iterator.initializer
    assert parts(next(iterator)) == [[0], [1]]
    iterator.close()


def test_inp_41_datasets_and_functions():
    contexts = []

    def input_fn(context):
        contexts.append(context.num_replicas_in_sync)
        return Dataset.range(3).batch(1)

    iterator = make_input_fn_iterator(input_fn, TWO)
    assert [parts(s) for s in iterator] == [[[0], [1]], [[2], []]]  # 13.1: nothing lost
    assert contexts == [2]
    values = iter(range(3))
    counted = make_input_fn_iterator(lambda c: lambda: torch.tensor([next(values)]), TWO)
    assert [parts(s) for s in counted] == [[[0], [1]], [[2], []]]


def test_inp_41_errors():
    with pytest.raises(ValueError, match="PER_WORKER"):
        make_input_fn_iterator(lambda c: Dataset.range(3), TWO, InputReplicationMode.PER_REPLICA)
    with pytest.raises(ValueError, match="a dataset or a function"):
        make_input_fn_iterator(lambda c: 5, TWO)
