"""Restore the newest intact checkpoint of a directory."""

from __future__ import annotations

import logging
from typing import Any

from stratagem._checkpoint.checkpoint import Restored, restore_objects
from stratagem._checkpoint.directory import CheckpointDirectory
from stratagem.errors import CheckpointCorrupt

_log = logging.getLogger("stratagem.checkpoint")


def restore_newest(
    directory: CheckpointDirectory,
    objects: dict[str, Any],
    *,
    strict: bool,
    allow_pickle: bool,
    damaged: set[str],
    points: list[Any],
) -> Restored | None:
    """Restore objects from the newest intact checkpoint and return it; None if there are no checkpoints.

    Damaged ones are skipped with a warning and added to `damaged`. What lost servers can be restored from is added
    to `points`.

    Raises:
        CheckpointMismatch: the checkpoint does not match the objects.
        CheckpointCorrupt: there are checkpoints, but none is intact.
    """
    failure: CheckpointCorrupt | None = None
    changed = False
    found = directory.scan()
    for unreadable in directory.damaged.values():
        _log.warning("skipping a checkpoint: %s", unreadable)
        failure = failure or unreadable
    for saved in reversed(found):
        made: list[Any] = []
        try:
            restored = restore_objects(
                objects, saved, strict=strict, allow_pickle=allow_pickle, points=made
            )
        except CheckpointCorrupt as error:
            damaged.add(saved.path.name)
            _log.warning("skipping checkpoint %s: %s", saved.path, error)
            failure = failure or error
            changed = changed or error.objects_changed
            continue
        points += made
        _log.info("restored step %d from %s", restored.step, saved.path)
        return restored
    if failure is not None:
        state = " The objects are partly restored." if changed else ""
        raise CheckpointCorrupt(
            f"no checkpoint in {directory.path} can be read; the newest: {failure}{state} To start anew, "
            "use another directory.",
            path=failure.path,
            objects_changed=changed,
        ) from failure
    return None
