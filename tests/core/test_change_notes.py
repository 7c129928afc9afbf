"""Notes of changes of modules and hooks (`_core/torch_patches/change_notes.py`)."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from stratagem._core.torch_patches.change_notes import ChangeWatch


def watched(**objects: object) -> ChangeWatch:
    watch = ChangeWatch()
    watch.keys.update({id(one): key for key, one in objects.items()})
    return watch


def test_attributes_set_and_deleted_are_noted() -> None:
    layer, other = nn.Dropout(), nn.Dropout()
    watch = watched(layer=layer)
    other.p = 0.1
    layer.p = 0.25
    layer.note = "new"
    del layer.note
    assert watch.take() == {"layer"}
    assert watch.take() == set()


def test_an_assignment_torch_refuses_changes_nothing() -> None:
    layer = nn.Linear(1, 1)
    watch = watched(layer=layer)
    with pytest.raises(TypeError, match="cannot assign"):
        layer.weight = 3
    with pytest.raises(AttributeError):
        del layer.nothing
    assert watch.take() == set()


def test_hooks_registered_and_removed_are_noted_by_their_dict() -> None:
    layer, weight = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    watch = watched(forward=layer._forward_hooks, step=optimizer._optimizer_step_pre_hooks)
    handle = layer.register_forward_hook(print)
    assert watch.take() == {"forward"}
    handle.remove()
    assert watch.take() == {"forward"}
    with optimizer.register_step_pre_hook(print):
        assert watch.take() == {"step"}
    assert watch.take() == {"step"}
    layer.register_forward_pre_hook(print)
    assert watch.take() == set()


def test_handles_work_as_torchs_do() -> None:
    layer = nn.Linear(1, 1)
    handle = layer.register_forward_hook(print)
    hooks, twin = pickle.loads(pickle.dumps((layer._forward_hooks, handle)))
    assert (list(hooks), twin.id) == ([handle.id], handle.id)
    twin.remove()
    assert not hooks
    assert handle.id in layer._forward_hooks
    del layer
    handle.remove()  # its dict is gone


def test_a_watch_without_owner_is_dropped() -> None:
    layer = nn.Dropout()
    reference = weakref.ref(watched(layer=layer))
    gc.collect()
    assert reference() is None
    layer.p = 0.1


def test_a_watch_keeps_nothing_alive() -> None:
    layer = nn.Dropout()
    watch = watched(layer=layer)
    layer.p = 0.1
    reference = weakref.ref(layer)
    del layer
    assert reference() is None
    assert watch.take() == {"layer"}


def test_changes_from_many_threads_all_arrive() -> None:
    layers = [nn.Dropout() for _ in range(8)]
    watch = watched(**{str(n): one for n, one in enumerate(layers)})
    noted: set[Any] = set()

    def change(layer: nn.Dropout) -> None:
        for n in range(200):
            setattr(layer, f"a{n % 20}", n)

    threads = [threading.Thread(target=change, args=(one,)) for one in layers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        noted.update(watch.take())
    noted.update(watch.take())
    assert noted == {str(n) for n in range(8)}


def test_a_watched_module_compiles_and_attributes_that_it_sets_are_noted() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(x) + self.calls

    model = Counting()
    watch = watched(model=model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.ones(1, 2)
    for calls in (1, 2, 3):
        torch.testing.assert_close(compiled(x), model.inner(x) + calls)
        assert watch.take() == {"model"}
