"""What the seed pages find under ``tf.distribute.experimental``: the same objects, under old names.

Only re-exports. ``experimental.coordinator.ClusterCoordinator`` and
``experimental.partitioners.FixedShardsPartitioner`` read as on the pages.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Final

from stratagem import partitioners
from stratagem._cluster.coordinator import ClusterCoordinator
from stratagem._strategies.central_storage import CentralStorageStrategy
from stratagem._strategies.parameter_server import ParameterServerStrategy
from stratagem.config import CommunicationOptions

__all__ = [
    "CentralStorageStrategy",
    "CommunicationOptions",
    "ParameterServerStrategy",
    "coordinator",
    "partitioners",
]

coordinator: Final = SimpleNamespace(ClusterCoordinator=ClusterCoordinator)
"""``tf.distribute.experimental.coordinator``."""
