"""The names of Keras that this package uses, found once.

Public names come from ``keras``. The others are private (``keras.src``) and may move: they are looked up here only, and an
error names the one that is missing.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

from stratagem.errors import StratagemError

TESTED = "3.15.1"
"""The version of Keras that the tests use."""


_PRIVATE = {
    "tree": ("keras.src.tree", ""),
    "Variable": ("keras.src.backend.torch.core", "Variable"),
    "Layer": ("keras.src.layers.layer", "Layer"),
    "Model": ("keras.src.models.model", "Model"),
    "Trainer": ("keras.src.backend.torch.trainer", "TorchTrainer"),
    "BaseTrainer": ("keras.src.trainers.trainer", "Trainer"),
    "BaseOptimizer": ("keras.src.optimizers.base_optimizer", "BaseOptimizer"),
    "BatchNormalization": (
        "keras.src.layers.normalization.batch_normalization",
        "BatchNormalization",
    ),
    "global_state": ("keras.src.backend.common.global_state", ""),
    "backend": ("keras.src.backend", ""),
    "EpochIterator": ("keras.src.backend.torch.trainer", "TorchEpochIterator"),
    "Saveable": ("keras.src.saving.keras_saveable", "KerasSaveable"),
    "DynamicBackend": ("keras.src.utils.backend_utils", "DynamicBackend"),
    "Node": ("keras.src.ops.node", "Node"),
    "Tracker": ("keras.src.utils.tracking", "Tracker"),
    "TrackedList": ("keras.src.utils.tracking", "TrackedList"),
    "TrackedDict": ("keras.src.utils.tracking", "TrackedDict"),
    "TrackedOrderedDict": ("keras.src.utils.tracking", "TrackedOrderedDict"),
    "TrackedSet": ("keras.src.utils.tracking", "TrackedSet"),
    "class_weight_to_sample_weights": (
        "keras.src.trainers.data_adapters.data_adapter_utils",
        "class_weight_to_sample_weights",
    ),
    "DataAdapter": ("keras.src.trainers.data_adapters.data_adapter", "DataAdapter"),
}
"""Module and attribute by the name used here; an empty attribute is the module itself."""


class UnknownKeras(StratagemError, ImportError):
    """The installed Keras lacks a name that Stratagem needs."""


@functools.cache
def names() -> Any:
    """Return the names; Keras must have been imported.

    Raises:
        UnknownKeras: this version of Keras has moved one of them.
    """
    keras = importlib.import_module("keras")
    found: dict[str, Any] = {}
    for name, (module, attribute) in _PRIVATE.items():
        try:
            loaded = importlib.import_module(module)
            found[name] = getattr(loaded, attribute) if attribute else loaded
        except (ImportError, AttributeError) as error:
            raise UnknownKeras(
                f"Keras {keras.__version__} has no {module}.{attribute}: Stratagem cannot train its models. "
                f"It is tested with Keras {TESTED}: pip install 'keras=={TESTED}'."
            ) from error
    return SimpleNamespace(keras=keras, **found)
