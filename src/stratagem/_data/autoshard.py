"""Divide a dataset among workers so that together they read every row once.

Pure functions that rewrite pipelines: the share of a worker is a pipeline too.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Final

from stratagem._data.combining import ZipNode
from stratagem._data.file_source import FileSource
from stratagem._data.iteration import outline
from stratagem._data.node import Node, walk
from stratagem._data.options import AutoShardPolicy
from stratagem._data.ray_source import RayDataNode, SharedRayNode
from stratagem._data.row_ranges import RangeSource
from stratagem._data.transforms import ShardNode
from stratagem.errors import NotFoundError, ShardingError

SHARED_SEED: Final = 0x5747_5241
"""Base seed of unseeded shuffles if every worker reads everything and keeps its share. All workers must see one
order, or rows would be lost. The orders still differ from epoch to epoch."""


@dataclass(frozen=True)
class Share:
    """Share of one worker.

    Attributes:
        node: pipeline that yields the share.
        policy: policy in force, with AUTO resolved.
        one_order: whether the workers must agree on the orders of unseeded shuffles.
    """

    node: Node
    policy: AutoShardPolicy
    one_order: bool


def share(node: Node, policy: AutoShardPolicy, *, num_workers: int, index: int) -> Share:
    """Return the share of worker `index` of `num_workers`.

    Raises:
        NotFoundError: FILE for a dataset that reads no files.
        ShardingError: a Ray dataset that is read by each worker, FILE with fewer files than workers, or files read side by side.
        ValueError: `index` or `num_workers` out of range.
    """
    if num_workers < 1 or not 0 <= index < num_workers:
        raise ValueError(
            f"worker index={index!r} of num_workers={num_workers!r} is out of range: expected "
            "0 <= index < num_workers"
        )
    if num_workers == 1 and policy is not AutoShardPolicy.HINT:
        return Share(node, policy, one_order=False)
    if any(isinstance(each, SharedRayNode) for each in walk(node)):
        return Share(node, AutoShardPolicy.OFF, one_order=False)  # Ray's actor shares it
    if any(isinstance(each, RayDataNode) for each in walk(node)):
        raise ShardingError(
            "a Ray dataset has no fixed order, so workers cannot share it by number. Give the dataset itself to "
            "coordinator.create_per_worker_dataset()."
        )
    automatic = policy is AutoShardPolicy.AUTO
    if automatic:
        policy = _choose(node, num_workers)
    if policy is AutoShardPolicy.OFF:
        return Share(node, policy, one_order=False)
    if policy is AutoShardPolicy.FILE:
        if not automatic:
            _check_files(node, num_workers)
        return Share(_by_file(node, num_workers, index), policy, one_order=False)
    if policy is AutoShardPolicy.HINT:
        return Share(_fill_hints(node, num_workers, index), policy, one_order=True)
    return Share(ShardNode(node, num_workers, index), policy, one_order=True)


def _choose(node: Node, num_workers: int) -> AutoShardPolicy:
    """Resolve AUTO: by file if that gives every row once, else by data."""
    sources = [each for each in walk(node) if not each.inputs]
    if not all(isinstance(source, FileSource) for source in sources):
        return AutoShardPolicy.DATA
    # A step such as take(): ten rows of every worker's files are not ten rows of the dataset.
    if not all(each.keeps_rows for each in walk(node) if each.inputs):
        return AutoShardPolicy.DATA
    fewest = min(len(source.files) for source in sources if isinstance(source, FileSource))
    if all(isinstance(source, RangeSource) for source in sources):
        return AutoShardPolicy.FILE  # by ranges of rows, if there are fewer files than workers
    if fewest < num_workers:
        warnings.warn(
            f"the dataset reads {fewest} file(s), fewer than its {num_workers} workers, so it is "
            "shared by data instead of by file: every worker reads everything and keeps its share. "
            "Write more files, or set AutoShardPolicy.DATA to confirm.",
            stacklevel=2,
        )
        return AutoShardPolicy.DATA
    return AutoShardPolicy.FILE


def _check_files(node: Node, num_workers: int) -> None:
    sources = [each for each in walk(node) if not each.inputs]
    for source in sources:
        if not isinstance(source, FileSource):
            raise NotFoundError(
                f"AutoShardPolicy.FILE: {outline(node)} has a source that reads no files "
                f"({outline(source)}). Use AutoShardPolicy.DATA, or from_files()."
            )
        if len(source.files) < num_workers:
            raise ShardingError(
                f"AutoShardPolicy.FILE: {len(source.files)} file(s) cannot be shared by "
                f"{num_workers} workers. Write at least {num_workers} files, or use "
                "AutoShardPolicy.DATA."
            )
    if any(isinstance(each, ZipNode) for each in walk(node)):
        raise ShardingError(
            "AutoShardPolicy.FILE: files read side by side by zip() may hold different numbers of "
            "rows, so sharing them by file could pair wrong rows. Use AutoShardPolicy.DATA."
        )


def _by_file(node: Node, num_workers: int, index: int) -> Node:
    if isinstance(node, RangeSource):
        return node.shared(num_workers, index)
    if isinstance(node, FileSource):
        return node.with_files(node.files[index::num_workers])
    return node.with_inputs([_by_file(each, num_workers, index) for each in node.inputs])


def _fill_hints(node: Node, num_workers: int, index: int) -> Node:
    if not node.inputs:
        return node
    node = node.with_inputs([_fill_hints(each, num_workers, index) for each in node.inputs])
    if isinstance(node, ShardNode) and node.is_hint:
        return ShardNode(node.input, num_workers, index)
    return node
