"""The names of ``tf.distribute.experimental``, re-exported.

They are imported when used, so that central storage does not import the cluster packages.
``experimental.coordinator.ClusterCoordinator`` and ``experimental.partitioners.FixedShardsPartitioner`` read as in
tf.distribute.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import stratagem as sg
from stratagem.compat.inert_options import CommunicationOptions as CommunicationOptions

if TYPE_CHECKING:
    from stratagem import partitioners as partitioners
    from stratagem._strategies.central_storage import (
        CentralStorageStrategy as CentralStorageStrategy,
    )
    from stratagem._strategies.parameter_server import (
        ParameterServerStrategy as ParameterServerStrategy,
    )

    coordinator: SimpleNamespace

_SAME_NAME = ("CentralStorageStrategy", "ParameterServerStrategy", "partitioners")

__all__ = [*_SAME_NAME, "CommunicationOptions", "coordinator"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _SAME_NAME:
        return getattr(sg, name)
    if name == "coordinator":
        return SimpleNamespace(ClusterCoordinator=sg.ClusterCoordinator)
    raise AttributeError(f"module 'stratagem.compat.experimental' has no attribute {name!r}")
