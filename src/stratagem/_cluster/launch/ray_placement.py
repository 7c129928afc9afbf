"""`RayPlacement`: the resources of a Ray cluster that tasks have reserved, and the nodes they are on."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Final, final

from typing_extensions import override

from stratagem._owner import Owner
from stratagem.errors import StartupError

_log = logging.getLogger("stratagem.cluster")

STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

NOTICE_S: Final = 5.0
"""A reservation that takes longer is logged: Ray itself waits without a word."""

LOOK_S: Final = 0.1
"""How often a reservation is looked at; one look takes a millisecond."""

Resources = Mapping[str, float]


def import_ray() -> Any:
    """Return the module ``ray``.

    Raises:
        ImportError: it is not installed; how to install it.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "RayCluster needs Ray, which is not installed: pip install 'stratagem[ray]'"
        ) from error
    return ray


@final
class RayPlacement(Owner):
    """Placement groups of one cluster. Every task has a bundle: resources that Ray reserves on one node."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._groups: list[Any] = []
        self._bundles: dict[
            str, tuple[Any, int]
        ] = {}  # by task: its group, its number in the group
        self._spare: list[tuple[Any, int, Resources]] = []  # of removed tasks, in groups that go on
        self._sizes: dict[str, Resources] = {}

    def reserve(
        self, tasks: Mapping[str, Resources], strategy: str, began: float, timeout_s: float
    ) -> None:
        """Reserve a bundle for each task, in one placement group, until `timeout_s` after `began`.

        Raises:
            StartupError: not all of them were free in time; asked for and available resources.
        """
        if len(tasks) == 1 and self._use_spare(*next(iter(tasks.items()))):
            return
        group = self.request(list(tasks.values()), strategy)
        told = False
        try:
            while not self.is_reserved(group):
                waited_s = time.monotonic() - began
                if waited_s > timeout_s:
                    raise StartupError(
                        f"Ray could not reserve the resources of the cluster within {timeout_s:g} s: "
                        f"{self._shortage(tasks, strategy)} Free resources, add nodes, or ask for less."
                    )
                if waited_s > NOTICE_S and not told:
                    told = True
                    _log.warning("waiting for resources: %s", self._shortage(tasks, strategy))
                time.sleep(LOOK_S)  # Ray's own wait counts whole seconds and holds up Ctrl-C
        except BaseException:  # Ctrl-C too: Ray would reserve them later
            self.cancel(group)
            raise
        for number, (task, resources) in enumerate(tasks.items()):
            self._bundles[task] = (group, number)
            self._sizes[task] = resources

    def request(self, bundles: list[Resources], strategy: str = "PACK") -> Any:
        """Ask Ray for a placement group and return it without waiting."""
        group = self._ray.util.placement_group([dict(one) for one in bundles], strategy=strategy)
        self._groups.append(group)
        return group

    def is_reserved(self, group: Any) -> bool:
        """Return whether Ray has reserved all bundles of a group."""
        return bool(self._table(group).get("state") == "CREATED")

    def cancel(self, group: Any) -> None:
        """Return a group to Ray, whether or not it was reserved yet."""
        self._groups.remove(group)
        if self._ray.is_initialized():
            self._ray.util.remove_placement_group(group)

    def assign(self, task: str, group: Any, resources: Resources) -> None:
        """Give a task the only bundle of a group of `request`."""
        self._bundles[task] = (group, 0)
        self._sizes[task] = resources

    def node_of(self, task: str) -> str:
        """Return the node that a task's bundle is on; empty while Ray has no node for it."""
        group, number = self._bundles[task]
        return str(self._table(group).get("bundles_to_node_id", {}).get(number, ""))

    def free(self, task: str) -> None:
        """Free the bundle of a task. Ray cannot shrink a group: a bundle of a larger group is kept for a later task."""
        found = self._bundles.pop(task, None)
        if found is None:
            return
        group, number = found
        resources = self._sizes.pop(task)
        if group.bundle_count == 1:
            self.cancel(group)
        else:
            self._spare.append((group, number, resources))

    @override
    def close(self) -> None:
        """Return everything to Ray. May be called again."""
        self._bundles.clear()
        while self._groups:
            self.cancel(self._groups[-1])

    def _table(self, group: Any) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._ray.util.placement_group_table(group)
        return found

    def _use_spare(self, task: str, resources: Resources) -> bool:
        for place, (group, number, size) in enumerate(self._spare):
            if size == resources:
                del self._spare[place]
                self._bundles[task] = (group, number)
                self._sizes[task] = resources
                return True
        return False

    def _shortage(self, tasks: Mapping[str, Resources], strategy: str) -> str:
        asked: dict[str, int] = {}
        for task, resources in tasks.items():
            text = f"{task.partition(':')[0]} {dict(resources)!r}"
            asked[text] = asked.get(text, 0) + 1
        wanted = ", ".join(f"{count} × {text}" for text, count in asked.items())
        alive = sum(bool(node["Alive"]) for node in self._ray.nodes())
        spread = f", each on a node of its own ({strategy})" if strategy == "STRICT_SPREAD" else ""
        packed = f", all on one node ({strategy})" if strategy == "STRICT_PACK" else ""
        return (
            f"asked for {wanted}{spread}{packed}; available {_without_labels(self._ray.available_resources())} "
            f"of {_without_labels(self._ray.cluster_resources())} on {alive} nodes."
        )


def _without_labels(resources: Mapping[str, float]) -> dict[str, float]:
    """Leave out the resources by which Ray names nodes and the bundles of placement groups."""
    return {
        name: value
        for name, value in sorted(resources.items())
        if not name.startswith("node:") and "_group_" not in name
    }
