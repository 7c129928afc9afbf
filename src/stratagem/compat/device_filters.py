"""`ClusterDeviceFilters`: tf.distribute's device filters, without effect."""

from __future__ import annotations

from collections.abc import Iterable

from stratagem.errors import WrongArgumentType


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
