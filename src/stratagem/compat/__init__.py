"""tf.distribute's historical names, for ported programs. New programs need none of them.

- `RunOptions`, `CommunicationOptions`, `ClusterDeviceFilters`, `function`: accepted for tf.distribute's spelling, without effect (`options`);
- `experimental_set_strategy`: the older name of `stratagem.set_strategy`;
- `experimental`: the names of ``tf.distribute.experimental``;
- `v1`: the classes of ``tf.compat.v1``;
- `StrategyExtended`: the class of ``strategy.extended``.

The ``experimental_*`` methods are attributes of every strategy (`spelling`). docs/coming-from-tf-distribute.md has the
whole table.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stratagem._core.context import set_strategy as experimental_set_strategy
from stratagem.compat.inert_options import ClusterDeviceFilters as ClusterDeviceFilters
from stratagem.compat.inert_options import (
    CommunicationImplementation as CommunicationImplementation,
)
from stratagem.compat.inert_options import CommunicationOptions as CommunicationOptions
from stratagem.compat.inert_options import RunOptions as RunOptions
from stratagem.compat.inert_options import function as function

if TYPE_CHECKING:
    from stratagem.compat import experimental as experimental
    from stratagem.compat import v1 as v1
    from stratagem.compat.extended import StrategyExtended as StrategyExtended

__all__ = [
    "ClusterDeviceFilters",
    "CommunicationImplementation",
    "CommunicationOptions",
    "RunOptions",
    "StrategyExtended",
    "experimental",
    "experimental_set_strategy",
    "function",
    "v1",
]


def __getattr__(name: str) -> Any:
    # Imported when used: `experimental` imports the cluster packages.
    if name in ("v1", "experimental"):
        return importlib.import_module(f"stratagem.compat.{name}")
    if name == "StrategyExtended":
        from stratagem.compat.extended import StrategyExtended

        return StrategyExtended
    raise AttributeError(f"module 'stratagem.compat' has no attribute {name!r}")
