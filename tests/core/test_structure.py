"""What is told to a watch, and what a look at an attribute shows."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stratagem._core.torch_patches.change_notes import ChangeWatch, NotedParts
from stratagem._ps.coordinator.attribute_snapshot import MOST_VALUES, AttributeSnapshot


class Settings:
    """An object of the user's."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def watched(**objects: object) -> ChangeWatch:
    watch = ChangeWatch()
    watch.keys.update({id(one): key for key, one in objects.items()})
    return watch


def look(value: Any) -> AttributeSnapshot:
    return AttributeSnapshot(value, lambda obj: isinstance(obj, nn.Linear))


# ------------------------------------------------------------------ watches


def test_attributes_set_and_deleted_are_told_by_name() -> None:
    layer, other = nn.Dropout(), nn.Dropout()
    watch = watched(layer=layer)
    other.p = 0.1
    layer.p = 0.25
    layer.note = "new"
    del layer.note
    assert sorted(watch.take()) == [("layer", "note"), ("layer", "p")]
    assert watch.take() == []


def test_an_assignment_torch_refuses_changes_nothing() -> None:
    layer = nn.Linear(1, 1)
    watch = watched(layer=layer)
    with pytest.raises(TypeError, match="cannot assign"):
        layer.weight = 3
    with pytest.raises(AttributeError):
        del layer.nothing
    assert watch.take() == []


def test_hooks_that_come_and_go_are_told_by_their_dict() -> None:
    layer, weight = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    watch = watched(forward=layer._forward_hooks, step=optimizer._optimizer_step_pre_hooks)
    handle = layer.register_forward_hook(print)
    assert watch.take() == [("forward", "")]
    handle.remove()
    assert watch.take() == [("forward", "")]
    with optimizer.register_step_pre_hook(print):
        assert watch.take() == [("step", "")]
    assert watch.take() == [("step", "")]
    layer.register_forward_pre_hook(print)
    assert watch.take() == []


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


def test_a_watch_nobody_has_hears_nothing() -> None:
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
    assert watch.take() == [("layer", "p")]


def test_changes_from_many_threads_all_arrive() -> None:
    layers = [nn.Dropout() for _ in range(8)]
    watch = watched(**{str(n): one for n, one in enumerate(layers)})
    heard: set[Any] = set()

    def change(layer: nn.Dropout) -> None:
        for n in range(200):
            setattr(layer, f"a{n % 20}", n)

    threads = [threading.Thread(target=change, args=(one,)) for one in layers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        heard.update(watch.take())
    heard.update(watch.take())
    assert heard == {(str(n), f"a{k}") for n in range(8) for k in range(20)}


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts.__setitem__("c", 3),
        lambda parts: parts.__delitem__("a"),
        lambda parts: parts.pop("a"),
        lambda parts: parts.popitem(),
        lambda parts: parts.setdefault("c", 3),
        lambda parts: parts.update(c=3),
        lambda parts: parts.__ior__({"c": 3}),
        lambda parts: parts.clear(),
    ],
)
def test_every_way_to_change_the_parts_of_a_module_is_told(change: Any) -> None:
    parts, plain = NotedParts(a=1, b=2), {"a": 1, "b": 2}
    watch = watched(parts=parts)
    change(parts)
    change(plain)
    assert watch.take() == [("parts", "")]
    assert parts == plain


def test_a_watched_module_pickles_and_copies_as_a_plain_one() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
    model._modules = NotedParts(model._modules)
    model.whole = [model]  # leads back
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        assert type(twin._modules) is dict
        assert list(twin._modules) == ["0", "1"]
        assert twin.whole[0] is twin
        assert torch.equal(twin[0].weight, model[0].weight)


def test_a_watched_module_compiles_and_what_it_sets_is_told() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(x) + self.calls

    model = Counting()
    model._modules = NotedParts(model._modules)
    watch = watched(model=model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.ones(1, 2)
    for calls in (1, 2, 3):
        torch.testing.assert_close(compiled(x), model.inner(x) + calls)
        assert ("model", "calls") in watch.take()


# ------------------------------------------------------------------ glimpses

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(nested)
def test_a_value_is_what_was_seen_of_it_until_it_changes(value: Any) -> None:
    seen = look(value)
    assert seen.is_of(value)
    assert not seen.is_of([value, 1])


@given(nested, nested)
def test_what_looks_the_same_is_the_same(one: Any, other: Any) -> None:
    """By value and type, all the way down: True, 1 and 1.0 are three things, 0.0 and -0.0 are two."""
    if look(one).is_of(other):
        assert repr(one) == repr(other)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1, 2], lambda v: v.append(3)),
        ({"a": [1]}, lambda v: v["a"].append(2)),
        ({1, 2}, lambda v: v.add(3)),
        (OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
        (([1],), lambda v: v[0].append(2)),
        (torch.zeros(2), lambda v: v.add_(1)),
        ([torch.zeros(2)], lambda v: v[0].add_(1)),
        (np.zeros(3), lambda v: v.fill(1)),
        (Settings(a=Settings(b=1)), lambda v: setattr(v.a, "b", 2)),
        ([nn.Dropout(0.5)], lambda v: setattr(v[0], "p", 0.25)),
    ],
)
def test_a_change_inside_is_seen(value: Any, change: Any) -> None:
    seen = look(value)
    assert seen.is_of(value)
    assert seen.may_change
    assert not seen.is_opaque
    change(value)
    assert not seen.is_of(value)


@pytest.mark.parametrize(
    "value", [3, "x", 1.5, None, torch.float32, (1, (2, "x")), print, nn.Linear, frozenset({1})]
)
def test_what_cannot_change_inside_needs_no_look(value: Any) -> None:
    seen = look(value)
    assert not seen.may_change
    assert not seen.is_opaque


@pytest.mark.parametrize(
    "value", [list(range(MOST_VALUES)), np.zeros(1000), threading.Lock(), torch.Generator()]
)
def test_what_is_not_looked_into_is_said_to_be(value: Any) -> None:
    seen = look(value)
    assert seen.is_opaque
    assert not seen.may_change
    assert seen.is_of(value)


def test_objects_with_views_of_their_own_count_by_identity() -> None:
    layer = nn.Linear(1, 1)
    seen = look([layer])
    layer.extra = 1
    assert seen.is_of([layer])
    assert not seen.is_of([nn.Linear(1, 1)])


def test_a_glimpse_keeps_no_object_alive_and_mistakes_none_for_it() -> None:
    """Another object may get the id of one that is gone."""
    value = Settings(a=1)
    value.itself = value
    assert look(value).is_opaque  # without end
    holder = [nn.Linear(1, 1)]
    seen, reference = look(holder), weakref.ref(holder[0])
    found = AttributeSnapshot(holder, lambda obj: True)
    holder.clear()
    gc.collect()
    assert reference() is None
    assert not seen.is_same(found)
