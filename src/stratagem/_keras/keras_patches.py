"""All changes to Keras' own behaviour, installed by one function.

Keras 3 knows nothing of strategies, so these methods are replaced, once per process, when a program uses both. Outside a
strategy every one of them does what Keras' does.

| group | module | what is patched | why |
|---|---|---|---|
| strategy | `model_strategies` | ``Model.__new__``, ``compile`` | a model belongs to the strategy current at its construction (KER-1) |
| strategy | `model_strategies` | ``fit``, ``evaluate``, ``predict`` and their ``…_on_batch`` forms | they run under the model's strategy, wherever they are called |
| strategy | `tensorboard_files` | ``TensorBoard.summary``, ``_write_keras_model_summary`` | the callback needs no TensorFlow |
| replicas | `split_calls` | ``make_…_function``; ``Layer.__call__``, ``add_loss``, ``_clear_losses`` | inside a step the outermost call of a layer runs on all replicas |
| replicas | `replica_variables` | ``Variable.value``, ``_direct_assign`` | a replica reads and writes its own values |
| replicas | `server_steps` | ``reset_metrics``, ``_get_metrics_result_or_logs`` | under parameter servers metrics come from workers |
| replicas | `backups` | ``BackupAndRestore`` | under parameter servers the servers write the backups |
| replicas | `replica_patches` | ``BatchNormalization._moments``, ``BaseOptimizer.apply``, ``Loss.__call__`` | statistics of the whole batch; one update for all replicas; replicas without rows |

With another backend than torch, only ``Model.__new__`` is patched: under a scope it raises an error with the remedy.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Collection

_MODULES = {
    "strategy": ("model_strategies", "tensorboard_files"),
    "replicas": (
        "split_calls",
        "replica_variables",
        "replica_patches",
        "server_steps",
        "backups",
    ),
}
_installed: set[str] = set()
_installing = threading.Lock()


def install(groups: Collection[str]) -> None:
    """Apply groups of patches, each once per process. Keras is loaded by now."""
    from stratagem._keras import model_strategies

    with _installing:
        if not model_strategies.is_torch_backend():
            if "refusal" not in _installed:
                model_strategies.refuse_other_backends()
                _installed.add("refusal")
            return
        for group, modules in _MODULES.items():
            if group in groups and group not in _installed:
                for name in modules:
                    importlib.import_module(f"stratagem._keras.{name}").apply_patch()
                _installed.add(group)
