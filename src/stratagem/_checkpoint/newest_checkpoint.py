"""Find the newest intact checkpoint of a directory, to restore objects or lost servers from it."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from stratagem._checkpoint.checkpoint import Restored, read_content, restore_objects
from stratagem._checkpoint.directory import CheckpointDirectory, SavedCheckpoint, chain_of
from stratagem._checkpoint.live_state import live_in
from stratagem._checkpoint.matching import Match
from stratagem._checkpoint.rewinding import Points
from stratagem._checkpoint.server_reads import ServerReads
from stratagem._ps.blocks.block_reader import check_frames
from stratagem.errors import CheckpointCorrupt, CheckpointError

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
            f"no checkpoint in {directory.path} can be read; the newest: {failure}{state} To start a new run, "
            "use another directory.",
            path=failure.path,
            objects_changed=changed,
        ) from failure
    return None


def points_of_job(
    directory: CheckpointDirectory,
    objects: MutableMapping[str, Any],
    *,
    allow_pickle: bool,
    instance: str,
    base: str,
) -> Points:
    """Return what lost servers of a live job can be restored from: its newest intact checkpoint; or nothing.

    Args:
        directory: the checkpoints.
        objects: the live objects, whose variables are those of the job.
        allow_pickle: accept values of any class in states.
        instance: identity of this start of the job.
        base: name of the checkpoint that this start of the job began with, or empty.
    """
    for saved in reversed(directory.scan()):
        known = {file.facts.get("instance", "") for file in saved.manifest.files.values()}
        if instance not in known and saved.path.name != base:
            break  # older ones belong to an earlier start of the job, too
        try:
            return _points(saved, objects, allow_pickle=allow_pickle, instance=instance)
        except CheckpointError as error:
            _log.warning("lost servers cannot be restored from %s: %s", saved.path, error)
    return ()


def _points(
    saved: SavedCheckpoint, objects: MutableMapping[str, Any], *, allow_pickle: bool, instance: str
) -> Points:
    chain = chain_of(saved)
    for path, manifest in chain:
        check_frames(path, manifest)
    content = read_content(saved.path, allow_pickle=allow_pickle)
    with ServerReads([value for _, value in live_in(dict(objects))], saved.path) as servers:
        match = Match(objects, content["objects"], saved.manifest.tensors, servers)
        match.check(str(saved.path), strict=True)
        return servers.points_of_job(chain, instance)
