"""Objects and decorators that are accepted for tf.distribute and have no effect."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from stratagem.errors import WrongArgumentType

_F = TypeVar("_F", bound=Callable[..., Any])


def function(fn: _F) -> _F:
    """Return the argument: nothing needs tracing in PyTorch. Stands for ``tf.function``.

    Example:
        >>> import stratagem as sg
        >>> @sg.compat.function
        ... def double(x):
        ...     return 2 * x
        >>> double(4)
        8
    """
    return fn


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `Strategy.run`; all are accepted and ignored.

    Attributes:
        dynamic_batch_size: PyTorch needs no static batch size.
        bucketizing: nothing is padded to buckets.
        xla_options: there is no XLA here.

    Example:
        >>> import stratagem as sg
        >>> sg.compat.RunOptions()
        RunOptions(dynamic_batch_size=True, bucketizing=False, xla_options=None)
    """

    dynamic_batch_size: bool = True
    bucketizing: bool = False
    xla_options: object = None


class CommunicationImplementation(enum.Enum):
    """Names of tf.distribute's collective implementations.

    Example:
        >>> import stratagem as sg
        >>> sg.compat.CommunicationImplementation("AUTO")
        <CommunicationImplementation.AUTO: 'AUTO'>
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True, kw_only=True)
class CommunicationOptions:
    """Options of collectives; checked, and otherwise without effect in one process.

    Attributes:
        bytes_per_pack: ignored: the replicas of one process exchange references.
        timeout_seconds: ignored: see ``STRATAGEM_REPLICA_TIMEOUT_S``.
        implementation: ignored; a name in any letter case, or the enumeration.

    Example:
        >>> import stratagem as sg
        >>> sg.compat.CommunicationOptions(implementation="ring").implementation
        <CommunicationImplementation.RING: 'RING'>
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise ValueError(
                f"bytes_per_pack={self.bytes_per_pack!r} is negative: expected a number of bytes, "
                "or 0 to let the strategy choose."
            )
        given = self.implementation
        name = given.value if isinstance(given, CommunicationImplementation) else str(given).upper()
        known = [one.value for one in CommunicationImplementation]
        if name not in known:
            raise ValueError(
                f"implementation={given!r} is not known: expected one of {', '.join(known)}."
            )
        object.__setattr__(self, "implementation", CommunicationImplementation(name))


class ClusterDeviceFilters:
    """Container of device filters, for code that sets them; they have no effect.

    Workers and parameter servers of Stratagem never connect to tasks of their own kind.

    Example:
        >>> import stratagem as sg
        >>> filters = sg.compat.ClusterDeviceFilters()
        >>> filters.set_device_filters("worker", 0, ["/job:ps", "/job:worker/task:0"])
        >>> filters.device_filters("worker", 0)
        ('/job:ps', '/job:worker/task:0')
    """

    def __init__(self) -> None:
        self._filters: dict[tuple[str, int], tuple[str, ...]] = {}

    def set_device_filters(
        self, job_name: str, task_index: int, device_filters: Iterable[str]
    ) -> None:
        """Replace the filters of one task."""
        filters = tuple(device_filters)
        for entry in filters:
            if not isinstance(entry, str):
                raise WrongArgumentType(f"device filter {entry!r} is not a string.")
        self._filters[job_name, task_index] = filters

    def device_filters(self, job_name: str, task_index: int) -> tuple[str, ...]:
        """Return the filters of one task; an empty tuple means that it sees everything."""
        return self._filters.get((job_name, task_index), ())
