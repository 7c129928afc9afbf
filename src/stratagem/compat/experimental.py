"""What the seed pages find under ``tf.distribute.experimental``: the same objects, under old names.

Only re-exports, loaded when asked for, as at the front door: central storage does not load the cluster
parts. ``experimental.coordinator.ClusterCoordinator`` and
``experimental.partitioners.FixedShardsPartitioner`` read as on the pages.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import stratagem as sg

if TYPE_CHECKING:
    from stratagem import partitioners as partitioners
    from stratagem._strategies.central_storage import (
        CentralStorageStrategy as CentralStorageStrategy,
    )
    from stratagem._strategies.parameter_server import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from stratagem.config import CommunicationOptions as CommunicationOptions

    coordinator: SimpleNamespace

_SAME_NAME = (
    "CentralStorageStrategy",
    "CommunicationOptions",
    "ParameterServerStrategy",
    "partitioners",
)

__all__ = [*_SAME_NAME, "coordinator"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _SAME_NAME:
        return getattr(sg, name)
    if name == "coordinator":
        return SimpleNamespace(ClusterCoordinator=sg.ClusterCoordinator)
    raise AttributeError(f"module 'stratagem.compat.experimental' has no attribute {name!r}")
