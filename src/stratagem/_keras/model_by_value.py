"""A Keras model as data: the classes and attributes of its objects, from which a worker rebuilds it.

Keras pickles a model as its configuration and weights. That loses everything that ``get_config()`` does not describe, and copies the
weights. Here every object of the model is sent as its class and its attributes. The objects refer to each other by number, so
that deep models need no deep recursion. Parameters on the servers, torch modules and optimizers are numbers in lists of their own: the
coordinator sends those as it sends them in any function.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stratagem._core.managed import find_managed
from stratagem._keras.keras_names import names
from stratagem._wire.codec import Outgoing, digest_of, pack, unpack_from
from stratagem._wire.message_base import Packed

_HERE = {
    "_compiled_call_impl",
    "_stratagem_on_servers",
    "_stratagem_strategy",
    "_torch_params",  # Keras makes it again from the variables
    "history",
}
"""Attributes that stay on the coordinator."""


def _at_start() -> dict[str, Any]:
    """Return attributes that a worker's layer has as a new layer has them; each layer has its own lists."""
    return {
        "train_function": None,
        "test_function": None,
        "predict_function": None,
        "_eval_epoch_iterator": None,
        "_losses": [],
        "_loss_ids": set(),
    }


_MEMBERS = ("_parameters", "_buffers", "_modules")
_WRAPPED = ("build", "quantize")
"""Methods that Keras wraps in each layer; a built layer needs the wrappers no more."""


@functools.cache
def _by_value() -> tuple[type, ...]:
    """Return the classes of Keras whose objects are sent as their attributes."""
    found = names()
    return (found.Saveable, found.Variable, found.Node, found.Tracker, found.TrackedList, found.TrackedDict,
            found.TrackedOrderedDict, found.TrackedSet, found.DynamicBackend)  # fmt: skip


@dataclass(frozen=True)
class PackedModel:
    """A model that can be sent.

    Attributes:
        classes: of all objects, in order; the first is the model's.
        states: contents and attributes of all objects, in order.
        buffers: bytes beside these.
        digest: equal if the model has not changed.
    """

    classes: Packed
    states: Packed
    buffers: Sequence[bytes]
    digest: bytes


class ModelParts:
    """The objects of a model, in the order in which they are found.

    Attributes:
        parameters: those on the servers.
        modules: torch modules in its layers.
        optimizers: Keras optimizers.
    """

    def __init__(self, model: Any) -> None:
        self.parameters: list[Tensor] = []
        self.modules: list[nn.Module] = []
        self.optimizers: list[Any] = []
        self._objects: list[Any] = [model]
        self._numbers: dict[tuple[str, int], int] = {("object", id(model)): 0}

    def pack(self) -> PackedModel:
        """Return the model as data.

        Raises:
            TypeError: an attribute cannot be pickled; the error names it.
        """
        known = 0
        while known < len(self._objects):  # packing finds more of them
            known = len(self._objects)
            outgoing = Outgoing()
            try:
                classes = pack([type(each) for each in self._objects], outgoing)
                states = pack(
                    [_state_of(each) for each in self._objects], outgoing, describe=self._describe
                )
            except Exception as error:  # pickling runs the users' own code
                raise TypeError(
                    f"Keras model {self._objects[0].name!r} cannot be sent to the workers: {error}, at {self._culprit()}. Create "
                    "values that cannot be pickled in call() or train_step(), which run on the workers."
                ) from error
        buffers = [bytes(memoryview(each)) for each in outgoing.buffers]
        digest = digest_of(classes) + digest_of(states, buffers)
        return PackedModel(classes, states, buffers, digest)

    def _culprit(self) -> str:
        """Return the attribute that cannot be pickled."""
        for obj in self._objects:
            for name, value in _state_of(obj)[1].items():
                try:
                    pack(value, Outgoing(), describe=self._describe)
                except Exception:  # noqa: BLE001 - the same error again
                    return (
                        f"attribute {name!r} of {type(obj).__name__} {getattr(obj, 'name', '')!r}"
                    )
        return "a class of the model"

    def _describe(self, obj: object) -> tuple[str, int] | None:
        keras = names()
        if isinstance(obj, Tensor):
            found = find_managed(obj)
            return None if found is None else self._number("parameter", obj, self.parameters)
        if isinstance(obj, keras.BaseOptimizer):
            return self._number("optimizer", obj, self.optimizers)
        if isinstance(obj, _by_value()):
            return self._number("object", obj, self._objects)
        if isinstance(obj, nn.Module):
            return self._number("module", obj, self.modules)
        return None

    def _number(self, kind: str, obj: Any, kept: list[Any]) -> tuple[str, int]:
        number = self._numbers.get((kind, id(obj)))
        if number is None:
            number = self._numbers[kind, id(obj)] = len(kept)
            kept.append(obj)
        return kind, number


def _state_of(obj: Any) -> tuple[Any, dict[str, Any]]:
    """Return the items of a collection (None for other objects), and the attributes."""
    items: Any = None
    if isinstance(obj, dict):
        items = list(dict.items(obj))
    elif isinstance(obj, list | set):
        items = list(obj)
    state = {name: value for name, value in vars(obj).items() if name not in _HERE}
    if isinstance(obj, names().Tracker):
        del state["stored_ids"]
    if isinstance(obj, names().Layer):
        state.update({name: value for name, value in _at_start().items() if name in state})
        for kind in _MEMBERS:
            members = dict.items(state[kind])
            state[kind] = {name: each for name, each in members if name not in _HERE}
        if obj.built:
            state = {name: value for name, value in state.items() if name not in _WRAPPED}
    return items, state


def unpack_model(
    packed: PackedModel,
    parameters: Sequence[Tensor],
    modules: Sequence[nn.Module],
    optimizers: Sequence[Any],
) -> Any:
    """Return the model.

    Args:
        packed: the model as data.
        parameters: for those on the servers.
        modules: for the torch modules in its layers.
        optimizers: for the Keras optimizers.
    """
    objects = [_bare(kind) for kind in unpack_from(packed.classes, packed.buffers)]
    lists: dict[str, Sequence[Any]] = {
        "parameter": parameters,
        "module": modules,
        "optimizer": optimizers,
        "object": objects,
    }
    states = unpack_from(
        packed.states, packed.buffers, rebuild=lambda token: lists[token[0]][token[1]]
    )
    for obj, (items, state) in zip(objects, states, strict=True):
        _fill(obj, items)
        vars(obj).update(state)
    for obj in objects:
        if isinstance(obj, names().Tracker):
            obj.stored_ids = {
                name: {id(each) for each in kept} for name, (_, kept) in obj.config.items()
            }
    return objects[0]


def _bare(kind: Any) -> Any:
    """Return an object without contents, for which no code of its class has run."""
    return (kind if issubclass(kind, list | dict | set) else object).__new__(kind)


def _fill(obj: Any, items: Any) -> None:
    """Put items into a collection, past the methods of its class."""
    if isinstance(obj, dict):
        put = OrderedDict.__setitem__ if isinstance(obj, OrderedDict) else dict.__setitem__
        for key, value in items:
            put(obj, key, value)
    elif isinstance(obj, list):
        list.extend(obj, items)
    elif isinstance(obj, set):
        set.update(obj, items)
