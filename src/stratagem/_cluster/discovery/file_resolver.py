"""`FileResolver`: reads the cluster from a JSON file, which may change during training."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._cluster.discovery.resolvers import ClusterResolver, Found


@final
class FileResolver(ClusterResolver):
    """Resolver that reads the cluster from a JSON file at every access.

    The file holds a cluster specification, ``{"worker": [...], "ps": [...]}``, or the content of
    ``TF_CONFIG``, ``{"cluster": {...}, "task": {...}}``. A running coordinator follows the workers in the file.
    List workers by index, ``{"worker": {"0": "a:1", "4": "b:1"}}``, so that the other workers keep their indices
    when one leaves. Replace the file by renaming: a coordinator that reads half a file ignores it and logs a warning.

    Args:
        path: the file.
        task_type: job of this task; by default from the file.
        task_id: index of this task; by default from the file.
        rpc_layer: name that `master` puts before addresses.

    Raises:
        FileNotFoundError: there is no such file (at an access).
        ValueError: the file holds no JSON object (at an access).

    Example:
        >>> import json, tempfile
        >>> import stratagem as sg
        >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        ...     json.dump({"worker": {"0": "a:1", "4": "b:1"}, "ps": ["c:1"]}, file)
        ...     file.flush()
        ...     sg.cluster_resolver.FileResolver(file.name).cluster_spec().task_indices("worker")
        [0, 4]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        super().__init__(task_type=task_type, task_id=task_id, rpc_layer=rpc_layer)
        self._path = Path(path)

    @override
    def cluster_spec(self) -> ClusterSpec:
        found = self._read()
        cluster = found.get("cluster")
        return ClusterSpec(found if cluster is None else cluster)

    @override
    def _found(self) -> Found:
        found = self._read()
        task = found.get("task") if "cluster" in found else None
        if not isinstance(task, dict) or "type" not in task or "index" not in task:
            return Found()
        return Found(str(task["type"]), int(task["index"]))

    def _read(self) -> dict[str, Any]:
        text = self._path.read_text(encoding="utf-8")
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{str(self._path)!r} is not valid JSON: {error}.") from error
        if not isinstance(found, dict):
            raise ValueError(
                f"{str(self._path)!r} holds {found!r}: expected an object such as "
                '{"worker": ["host:2222"], "ps": ["host:2223"]}.'
            )
        return found
