"""``stratagem checkpoint``: list, show, verify, convert and compare checkpoints.

Every action returns the lines to print, and whether all is well.
"""

from __future__ import annotations

import argparse
import datetime as dt
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from stratagem._checkpoint import evaluations
from stratagem._checkpoint.checkpoint import read_content, read_tensors
from stratagem._checkpoint.directory import CheckpointDirectory, SavedCheckpoint, chain_of, find
from stratagem._checkpoint.encoding import decode
from stratagem._checkpoint.progress import shown_progress
from stratagem._monitor.view_tables import size
from stratagem._ps.blocks.block_reader import check_frames
from stratagem._ps.blocks.manifest import NAME, StoredTensor
from stratagem.errors import CheckpointCorrupt, CheckpointError

Outcome = tuple[list[str], bool]

_SHOWN_DIFFERENCES: Final = 50


def run(options: argparse.Namespace) -> int:
    """Run one action and print what it found; return 1 if not all is well."""
    takes_two = options.action in ("to-torch", "diff")
    if takes_two != (options.other is not None):
        options.parser.error(f"{options.action} takes {'two paths' if takes_two else 'one path'}")
    path = Path(options.path)
    try:
        if options.action == "to-torch":
            lines, well = to_torch(path, Path(options.other), allow_pickle=options.allow_pickle)
        elif options.action == "diff":
            lines, well = diff(path, Path(options.other))
        else:
            actions = {"ls": list_checkpoints, "show": show, "verify": verify}
            lines, well = actions[options.action](path)
    except CheckpointCorrupt as error:
        directory = Path(error.path).parent.parent
        raise CheckpointCorrupt(
            f"{error} Use another checkpoint: `stratagem checkpoint verify {directory}` says which ones are good.",
            path=error.path,
        ) from error
    sys.stdout.write("\n".join(lines) + "\n")
    return int(not well)


def list_checkpoints(path: Path) -> Outcome:
    """List the checkpoints of a directory, oldest save first."""
    found, damaged = _all_in(path)
    results = {one.identity: one.metrics for one in evaluations.read(path)}
    rows = [("NAME", "STEP", "KIND", "SIZE", "SAVED", "METRICS")]
    for saved in found:
        manifest = saved.manifest
        metrics = {**manifest.metrics, **results.get(manifest.identity, {})}
        kind = f"delta of {manifest.parent}" if manifest.is_delta else "full"
        rows.append(
            (
                saved.path.name,
                str(saved.step),
                f"{kind}, final" if manifest.final else kind,
                size(manifest.bytes),
                _time(manifest.created),
                " ".join(f"{name}={value:.6g}" for name, value in metrics.items()),
            )
        )
    lines = _table(rows)
    lines += [f"damaged: {error}" for error in damaged.values()]
    return lines, not damaged


def _all_in(path: Path) -> tuple[list[SavedCheckpoint], dict[str, CheckpointCorrupt]]:
    """Return the checkpoints of a directory, or the one at the path, and the damaged ones."""
    directory = CheckpointDirectory(path)
    found = [find(path)] if (path / NAME).exists() else directory.scan()
    if not found and not directory.damaged:
        raise CheckpointError(f"{path} holds no checkpoint.")
    return found, directory.damaged


def show(path: Path) -> Outcome:
    """Describe one checkpoint: its facts, files and tensors."""
    saved = find(path)
    manifest = saved.manifest
    lines = [
        f"path:     {saved.path}",
        f"step:     {saved.step}" + (" (final)" if manifest.final else ""),
        f"saved:    {_time(manifest.created)}, save number {manifest.serial}",
        f"identity: {manifest.identity}",
        f"kind:     {f'delta of {manifest.parent}' if manifest.is_delta else 'full'}",
        *(f"metric:   {name} = {value:.6g}" for name, value in manifest.metrics.items()),
        "",
        *_table(
            [("FILE", "SIZE", "BLOCKS")]
            + [
                (name, size(file.bytes), str(sum(b.file == name for b in manifest.blocks)))
                for name, file in manifest.files.items()
            ]
        ),
        "",
        *_table(
            [("TENSOR", "TYPE", "SHAPE", "SIZE", "BLOCKS")]
            + [
                (name, each.dtype, str(list(each.shape)), size(each.bytes), _blocks(saved, name))
                for name, each in manifest.tensors.items()
            ]
        ),
    ]
    return lines, True


def verify(path: Path) -> Outcome:
    """Read every byte of a checkpoint, or of all in a directory, and compare checksums."""
    found, damaged = _all_in(path)
    lines, well = [], not damaged
    for saved in found:
        try:
            with shown_progress(f"verifying {saved.path.name}", saved.bytes) as progress:
                saved.verify(progress)
            lines.append(f"{saved.path.name}: good, {size(saved.bytes)}")
        except CheckpointCorrupt as error:
            lines.append(f"{saved.path.name}: DAMAGED: {error}")
            well = False
    lines += [f"{name}: DAMAGED: {error}" for name, error in damaged.items()]
    return lines, well


def to_torch(path: Path, output: Path, *, allow_pickle: bool) -> Outcome:
    """Write a checkpoint as one file that ``torch.load`` reads, deltas resolved."""
    if output.exists():
        raise CheckpointError(f"{output} exists. Choose a path that does not exist.")
    saved = _find_intact(path)
    content = read_content(saved.path, allow_pickle=allow_pickle)
    tensors = read_tensors(chain_of(saved), list(saved.manifest.tensors), "reading")
    nest = {name: decode(entry, tensors) for name, entry in content["objects"].items()}
    try:
        torch.save(nest, output)
    except (OSError, RuntimeError) as error:  # torch raises both for files that it cannot write
        if output.is_file():
            output.unlink()
        reason = str(error).removesuffix(".")  # some of torch's errors end with one
        raise CheckpointError(
            f"{output} cannot be written: {reason}. Give a path whose directory exists, may be written and has "
            "enough space."
        ) from error
    written = size(output.stat().st_size)
    return [f"wrote step {saved.step} to {output} ({written}): {', '.join(nest)}"], True


def diff(first: Path, second: Path) -> Outcome:
    """Compare two checkpoints, tensor by tensor and value by value; well means equal."""
    before, after = _find_intact(first), _find_intact(second)
    lines = [f"--- {before.path} (step {before.step})", f"+++ {after.path} (step {after.step})"]
    found = _different_tensors(before, after)
    old = dict(_plain_values(read_content(before.path, allow_pickle=False)["objects"]))
    new = dict(_plain_values(read_content(after.path, allow_pickle=False)["objects"]))
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in new:
            found.append(f"- {name} = {old[name]!r:.60}")
        elif name not in old:
            found.append(f"+ {name} = {new[name]!r:.60}")
        elif repr(old[name]) != repr(new[name]):  # values may be tensors of odd kinds
            found.append(f"  {name}: {old[name]!r:.60} -> {new[name]!r:.60}")
    if not found:
        return [*lines, "no difference"], True
    more = len(found) - _SHOWN_DIFFERENCES
    return [
        *lines,
        *found[:_SHOWN_DIFFERENCES],
        *([f"… and {more} more differences"] if more > 0 else []),
    ], False


def _find_intact(path: Path) -> SavedCheckpoint:
    """Return a checkpoint whose bytes outside rows are verified; reading verifies the rows."""
    saved = find(path)
    for place, manifest in chain_of(saved):
        check_frames(place, manifest)
    return saved


def _different_tensors(before: SavedCheckpoint, after: SavedCheckpoint) -> list[str]:
    old, new = before.manifest.tensors, after.manifest.tensors
    found = [f"- {name} {_described(old[name])}" for name in old if name not in new]
    found += [f"+ {name} {_described(new[name])}" for name in new if name not in old]
    chains = chain_of(before), chain_of(after)
    for name in old:
        if name not in new:
            continue
        if _described(old[name]) != _described(new[name]):
            found.append(f"  {name}: {_described(old[name])} -> {_described(new[name])}")
            continue
        # One tensor at a time: two whole checkpoints may not fit into memory.
        a, b = (read_tensors(chain, [name], "comparing")[name] for chain in chains)
        text = _numbers_differ(a, b)
        if text:
            found.append(f"  {name}: {text}")
    return found


def _numbers_differ(before: Tensor, after: Tensor) -> str:
    """Say how many numbers of two tensors of one shape differ, and by how much; "" if none."""
    if before.dtype.is_floating_point:
        before, after = before.double(), after.double()
    a, b = before.numpy(), after.numpy()
    different = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    count = int(different.sum())
    if not count:
        return ""
    largest = "" if a.dtype.kind != "f" else f", by at most {np.abs(a - b)[different].max():.3g}"
    return f"{count} of {a.size} numbers differ{largest}"


def _plain_values(skeleton: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the values of a skeleton that are no tensors, by dotted name."""
    if isinstance(skeleton, dict):
        if "$tensor" in skeleton or "$array" in skeleton:
            return []
        if "$object" in skeleton:
            return _plain_values(skeleton["state"], path)
        inside = [(str(key), each) for key, each in skeleton.items()]
    elif isinstance(skeleton, list | tuple) and any(
        isinstance(each, dict | list | tuple) for each in skeleton
    ):
        inside = [(str(place), each) for place, each in enumerate(skeleton)]
    else:
        return [(path, skeleton)]
    return [
        pair
        for key, each in inside
        for pair in _plain_values(each, f"{path}.{key}" if path else key)
    ]


def _described(tensor: StoredTensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _blocks(saved: SavedCheckpoint, name: str) -> str:
    tensor = saved.manifest.tensors[name]
    if tensor.same_as:
        return f"those of {tensor.same_as}"
    return str(len(saved.manifest.blocks_of.get(name, ())))


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _time(seconds: float) -> str:
    when = dt.datetime.fromtimestamp(seconds, tz=dt.UTC).astimezone()
    return when.strftime("%Y-%m-%d %H:%M:%S")
