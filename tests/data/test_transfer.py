"""Parts of a batch reach their replica's device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import stratagem as sg
from stratagem._data.distribute import distribute_dataset, distribute_datasets_from_function
from stratagem._data.transfer import DeviceTransfer
from stratagem.data import Dataset

CPU, META = torch.device("cpu"), torch.device("meta")  # meta: a second device every machine has


def devices(step):
    return [part.device.type for part in step.values]


def test_each_part_is_moved_to_its_replicas_device():
    dataset = Dataset.from_tensor_slices({"x": torch.ones(4, 2), "t": ["a", "b", "c", "d"]}).batch(
        4
    )
    (step,) = distribute_dataset(dataset, [CPU, META])
    assert devices(step["x"]) == ["cpu", "meta"]
    assert [list(part) for part in step["t"].values] == [["a", "b"], ["c", "d"]]
    (left,) = distribute_dataset(dataset, [CPU, META], sg.InputOptions(fetch_to_device=False))
    assert devices(left["x"]) == ["cpu", "cpu"]


def test_one_replica_too():
    """INP-1: moved to the compute device, unwrapped."""
    (element,) = distribute_dataset(Dataset.range(2).batch(2), [META])
    assert element.device.type == "meta"
    (dealt,) = distribute_datasets_from_function(lambda c: Dataset.range(2).batch(2), [META])
    assert dealt.device.type == "meta"


def test_functions_added_by_map_see_the_part_on_its_device():
    seen = []
    dataset = distribute_dataset(Dataset.range(4).batch(4), [CPU, META])
    list(dataset.map(lambda part: seen.append(part.device.type) or part))
    assert seen == ["cpu", "meta"]


def test_positions_hold_host_data_only():
    """What was read ahead is saved as it was before it went to a device."""
    options = sg.InputOptions(per_replica_buffer_size=2)
    with iter(distribute_dataset(Dataset.range(8).batch(2), [META], options)) as iterator:
        next(iterator)
        state = iterator.state_dict()
    for element in state["cursor"]["ready"]:
        assert element.device.type == "cpu"
    with iter(distribute_dataset(Dataset.range(8).batch(2), [CPU])) as resumed:
        resumed.load_state_dict(state)
        assert [x.tolist() for x in resumed] == [[2, 3], [4, 5], [6, 7]]


def test_host_parts_are_views_and_stay_where_they_are():
    """Logical CPU devices are all host memory: nothing is copied."""
    batch = torch.arange(4)
    transfer = DeviceTransfer([CPU, CPU])
    assert transfer.idle
    assert transfer.move(batch, 1) is batch
    text = np.array(["a"], dtype=object)
    assert DeviceTransfer([META]).move(text, 0) is text


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_cut_parts_share_the_batchs_memory(rows):
    batch = torch.arange(rows)
    from stratagem._data import batch_rows

    parts = batch_rows.cut(batch, batch_rows.split_sizes(rows, 3))
    assert [len(p) for p in parts] == batch_rows.split_sizes(rows, 3)
    assert all(p.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr() for p in parts)
