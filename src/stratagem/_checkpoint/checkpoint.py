"""`Checkpoint`: the objects of a training run that are saved and restored together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor

from stratagem._checkpoint.checkpoint_writer import (
    LocalWriter,
    PartWriter,
    SaveOrder,
    write_checkpoint,
)
from stratagem._checkpoint.delta_base import DeltaBase
from stratagem._checkpoint.directory import (
    CheckpointDirectory,
    SavedCheckpoint,
    chain_of,
    checked_path,
    find,
)
from stratagem._checkpoint.encoding import TakenApart, from_torch_bytes, torch_bytes
from stratagem._checkpoint.live_state import (
    check_objects,
    collect,
    live_in,
    pin_positions,
    remote_tensors,
)
from stratagem._checkpoint.matching import Match, changing_objects
from stratagem._checkpoint.progress import shown_progress
from stratagem._checkpoint.random_state import read_random_state, set_random_state
from stratagem._checkpoint.rewinding import drain
from stratagem._checkpoint.server_group import between_rounds
from stratagem._checkpoint.server_parts import ServerCut, make_cuts
from stratagem._checkpoint.server_reads import ServerReads
from stratagem._core.context import current_replica
from stratagem._ps.blocks.block_file import part_of
from stratagem._ps.blocks.block_plan import stored_name
from stratagem._ps.blocks.block_reader import (
    BlockReader,
    RowsWanted,
    check_frames,
    naming_the_file,
)
from stratagem._ps.blocks.manifest import COORDINATOR, Manifest, StoredTensor
from stratagem._ps.client.transfers import Urgent, always
from stratagem._ps.coordinator.coordinator_variables import CoordinatorVariables
from stratagem._ps.recovery_point import RecoveryPoint
from stratagem.errors import CheckpointCorrupt, CheckpointError, ContextError


@dataclass(frozen=True)
class Restored:
    """Result of a restore.

    Attributes:
        step: the training step of the checkpoint.
        path: the checkpoint.
        missing: names that the objects have and the checkpoint lacks (with ``strict=False``).
        unexpected: names that the checkpoint has and the objects lack (with ``strict=False``).
        seconds: duration of the restore.
    """

    step: int
    path: Path
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    seconds: float


@final
class Checkpoint:
    """The objects of a training run that are saved and restored together.

    It accepts models, optimizers, schedulers, gradient scalers, datasets and their iterators, variables,
    generators, other objects with ``state_dict`` and ``load_state_dict``, plain values and tensors, and nests
    (dictionaries, lists, tuples) of these. A checkpoint always includes the random streams of torch, Python
    and NumPy.

    Read and set a plain value by its name: ``checkpoint["epoch"] = 3``.

    Args:
        **objects: the objects to save, under names of your choice.

    Raises:
        TypeError: an object can be neither saved nor restored.

    Example:
        >>> import tempfile, torch, stratagem as sg
        >>> model = torch.nn.Linear(2, 1)
        >>> checkpoint = sg.Checkpoint(model=model, epoch=3)
        >>> path = checkpoint.save(tempfile.mkdtemp() + "/third").path
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> checkpoint["epoch"] = 0
        >>> _ = checkpoint.restore(path)
        >>> bool(model.weight.any()), checkpoint["epoch"]
        (True, 3)
    """

    def __init__(self, *unnamed: Any, **objects: Any) -> None:
        if unnamed:
            raise TypeError(
                f"Checkpoint got an object of type {type(unnamed[0]).__name__} without a name: expected names, "
                "such as sg.Checkpoint(model=model, optimizer=optimizer)."
            )
        for name, value in objects.items():
            check_objects(value, (name,))
        self._objects = objects

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its objects."""
        return tuple(self._objects)

    def __getitem__(self, name: str) -> Any:
        return self._objects[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._objects:
            raise KeyError(f"{name!r} is not part of the checkpoint, which has {self.names}.")
        check_objects(value, (name,))
        self._objects[name] = value

    def save(
        self,
        path: str | Path,
        *,
        step: int = 0,
        metrics: Mapping[str, float] = MappingProxyType({}),
        allow_pickle: bool = False,
    ) -> SavedCheckpoint:
        """Write one checkpoint and wait for the disk. See `CheckpointManager` for repeated saves.

        Args:
            path: a directory that does not exist.
            step: the training step.
            metrics: numbers to store in the checkpoint.
            allow_pickle: accept values of any class in state dicts; only pickle can save them.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        path = checked_path("path", path)
        if path.exists():
            raise CheckpointError(f"{path} exists. Choose a path that does not exist.")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{path.parent} cannot be created: {error}.") from error
        snapshot = ObjectSnapshot.take(self, None, path.parent, allow_pickle=allow_pickle)
        order = SaveOrder(step=step, serial=1, metrics=metrics, name=path.name)
        return snapshot.write(CheckpointDirectory(path.parent), order, show=True)

    def restore(
        self,
        path: str | Path,
        *,
        strict: bool = True,
        random: bool = True,
        allow_pickle: bool = False,
    ) -> Restored:
        """Restore the objects from a checkpoint.

        All files are verified before the first object is changed. If an error occurs later, its message says so.

        Args:
            path: a checkpoint, or a directory of checkpoints, whose newest one is used.
            strict: raise an error if names are missing or unexpected, or types differ.
            random: also restore the random streams.
            allow_pickle: accept values that only pickle can read. Reading a pickle can run code: use it only
                for checkpoints from sources that you trust.

        Raises:
            CheckpointMismatch: the checkpoint does not fit the objects.
            CheckpointCorrupt: a file is missing or damaged.
        """
        try:
            found = find(checked_path("path", path))
            return restore_objects(
                self._objects, found, strict=strict, random=random, allow_pickle=allow_pickle
            )
        except CheckpointCorrupt as error:
            directory = Path(error.path).parent.parent
            state = "partly restored" if error.objects_changed else "unchanged"
            raise CheckpointCorrupt(
                f"{error} The objects are {state}. Restore another checkpoint: `stratagem checkpoint "
                f"verify {directory}` lists the intact ones.",
                path=error.path,
                objects_changed=error.objects_changed,
            ) from error

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(self._objects) or 'nothing'}>"


# ------------------------------------------------------------------ saving


class HostCopies:
    """Copies of tensors in host memory, made before training continues.

    The memory is used again by the next save: getting new pages costs several times as much as copying.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies; they stay as they are until the next call."""
        for gone in self._buffers.keys() - tensors.keys():
            del self._buffers[gone]
        from_device = False
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                pinned = tensor.is_cuda
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
                self._buffers[name] = buffer
            from_device = from_device or tensor.is_cuda
            buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        if from_device:
            torch.cuda.synchronize()
        return dict(self._buffers)

    def free(self) -> None:
        """Give the memory back."""
        self._buffers.clear()


@dataclass(frozen=True)
class ObjectSnapshot:
    """The state of a checkpoint's objects at one moment, ready to be written."""

    apart: TakenApart
    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    random: Mapping[str, Any]
    cuts: Sequence[ServerCut] = ()
    deltas: DeltaBase | None = None

    @classmethod
    def take(
        cls,
        checkpoint: Checkpoint,
        copies: HostCopies | None,
        directory: Path,
        *,
        allow_pickle: bool,
        deltas: DeltaBase | None = None,
    ) -> ObjectSnapshot:
        """Collect the state; with `copies` training may go on afterwards, else it must wait.

        With `deltas`, `write` may write only the rows that changed since the last checkpoint. Parameter servers that may use `directory` keep their rows as they are now. `write` must follow.
        """
        if current_replica() is not None:
            raise ContextError(
                "a checkpoint was saved inside a replica. Save outside the function given to run()."
            )
        live = [value for _, value in live_in(checkpoint._objects)]
        with between_rounds(live):
            return cls._take(
                checkpoint, copies, directory, allow_pickle=allow_pickle, deltas=deltas
            )

    @classmethod
    def _take(
        cls,
        checkpoint: Checkpoint,
        copies: HostCopies | None,
        directory: Path,
        *,
        allow_pickle: bool,
        deltas: DeltaBase | None,
    ) -> ObjectSnapshot:
        live = [value for _, value in live_in(checkpoint._objects)]
        pins = pin_positions(live)
        try:
            cuts = make_cuts(live, directory, lambda group: remote_tensors(live, group), deltas)
        except BaseException:
            pins.close()
            raise
        try:
            with pins:
                apart = collect(checkpoint._objects, allow_pickle=allow_pickle, rows=cuts)
            own, aliases = _without_twins(apart.tensors)
            if copies is not None:
                held = copies.of(own)
            else:
                held = {name: _in_host_memory(tensor) for name, tensor in own.items()}
            return cls(apart, held, aliases, read_random_state(), cuts, deltas)
        except BaseException:
            for cut in cuts:
                cut.close()
            raise

    def write(
        self, place: CheckpointDirectory, order: SaveOrder, urgent: Urgent = always, *, show: bool
    ) -> SavedCheckpoint:
        """Write a checkpoint and commit it; servers write their own rows, without rests if it is urgent."""
        try:
            return self._write(place, order, urgent, show=show)
        finally:
            self.discard()

    def discard(self) -> None:
        """Let the servers continue without a cut; idempotent."""
        for cut in self.cuts:
            cut.close()

    def points(self, saved: SavedCheckpoint) -> list[tuple[CoordinatorVariables, RecoveryPoint]]:
        """Return what lost parameter servers can be restored from, now that it has been written."""
        return [
            (cut.group.variables, cut.recovery_point(saved, self.apart.elsewhere))
            for cut in self.cuts
        ]

    def _write(
        self, directory: CheckpointDirectory, order: SaveOrder, urgent: Urgent, *, show: bool
    ) -> SavedCheckpoint:
        parts = [part_of(name, tensor) for name, tensor in self.tensors.items()]
        for cut in self.cuts:
            parts += cut.local_parts(self.apart.elsewhere)
        local = LocalWriter(parts, aliases=self.aliases, blobs=self.apart.blobs())
        writers = self._writers(local, urgent, changed_only=False)
        if self.deltas is not None and self.cuts and not order.final:
            changes = self._writers(local, urgent, changed_only=True)
            parent = self.deltas.parent_of(
                {name: one for writer in writers for name, one in writer.tensors.items()},
                delta_bytes=sum(writer.bytes for writer in changes),
                full_bytes=sum(writer.bytes for writer in writers),
            )
            if parent is not None:
                writers, order = changes, replace(order, parent=parent)
        content = {"objects": self.apart.skeleton, "random": dict(self.random)}
        label = f"saving step {order.step}"
        total = sum(writer.bytes for writer in writers)
        with shown_progress(label, total) if show else nullcontext() as progress:
            saved = write_checkpoint(
                directory,
                order,
                writers=writers,
                coordinator=torch_bytes(content),
                paths=self.apart.paths,
                progress=progress,
            )
        if self.deltas is not None:
            cuts = [(cut.group.variables, cut.numbers) for cut in self.cuts]
            self.deltas.note(
                saved, {(one, server): cut for one, made in cuts for server, cut in made.items()}
            )
        return saved

    def _writers(self, own: PartWriter, urgent: Urgent, *, changed_only: bool) -> list[PartWriter]:
        writers = [own]
        for cut in self.cuts:
            writers += cut.writers(self.apart.elsewhere, urgent, changed_only=changed_only)
        return writers


def _without_twins(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors without those that are another's memory, and whose."""
    own: dict[str, Tensor] = {}
    first, aliases = dict[Any, str](), dict[str, str]()
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        other = first.setdefault(key, name) if tensor.numel() else name
        if other == name:
            own[name] = tensor
        else:
            aliases[name] = other
    return own, aliases


def _in_host_memory(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().cpu().contiguous()


# ------------------------------------------------------------------ restoring


def restore_objects(
    objects: dict[str, Any],
    saved: SavedCheckpoint,
    *,
    strict: bool = True,
    random: bool = True,
    allow_pickle: bool = False,
    partial: bool = False,
    points: list[tuple[CoordinatorVariables, RecoveryPoint]] | None = None,
) -> Restored:
    """Put a checkpoint's state back into objects; `partial` ignores objects that are not wanted.

    `points` gets what lost parameter servers can be restored from.
    """
    if current_replica() is not None:
        raise ContextError(
            "a checkpoint was restored inside a replica. Restore outside the function given to run()."
        )
    drain(objects)  # a closure could change rows that were restored, or that will be
    began = time.monotonic()
    chain = chain_of(saved)
    for path, manifest in chain:
        check_frames(path, manifest)
    content = read_content(saved.path, allow_pickle=allow_pickle)
    live = [value for _, value in live_in(objects)]
    with ServerReads(live, saved.path) as servers:
        match = Match(objects, content["objects"], saved.manifest.tensors, servers, partial=partial)
        match.check(str(saved.path), strict=strict)
        servers.verify(chain)
        label = f"restoring step {saved.step}"
        tensors = read_tensors(
            chain, match.needed, label, match.places, before_changes=lambda: servers.read(chain)
        )
        with changing_objects(), servers.frozen():
            match.apply(tensors, strict=strict)
        if points is not None:
            points.extend(servers.points)
    if random:
        set_random_state(content["random"])
    return Restored(
        saved.step,
        saved.path,
        tuple(match.missing),
        tuple(match.unexpected),
        time.monotonic() - began,
    )


def read_content(path: Path, *, allow_pickle: bool) -> dict[str, Any]:
    """Return what ``coordinator.pt`` of a checkpoint holds.

    Raises:
        CheckpointError: it holds values that only pickle can read, which was not allowed.
    """
    file = path / COORDINATOR
    with naming_the_file(file):
        data = file.read_bytes()
    content: dict[str, Any] = from_torch_bytes(data, str(file), allow_pickle=allow_pickle)
    return content


def read_tensors(
    chain: Sequence[tuple[Path, Manifest]],
    names: Sequence[str],
    label: str,
    into: Mapping[str, Tensor] = MappingProxyType({}),
    before_changes: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """Read whole tensors, verified; tied ones come out as one tensor.

    The tensors of `into` are read into the memory given there, when everything else has been verified and read, and
    `before_changes` was called.
    """
    manifest = chain[0][1]
    stored = {name: stored_name(manifest, name) for name in names}
    total = sum(manifest.tensors[name].bytes for name in set(stored.values()))
    in_place = [name for name in dict.fromkeys(stored.values()) if name in into]
    total += sum(into[name].nbytes for name in in_place)
    found: dict[str, Tensor] = {}
    with shown_progress(label, total) as progress, BlockReader(chain, progress) as reader:
        for name in in_place:
            reader.verify_rows(name, 0, manifest.tensors[name].rows)
        for name in (one for one in dict.fromkeys(stored.values()) if one not in into):
            tensor: StoredTensor = manifest.tensors[name]
            if tensor.per_shard:
                found[name] = reader.read_number(name, 0, -1)
            else:
                make = torch.zeros if tensor.has_holes else torch.empty
                found[name] = make(tensor.shape, dtype=tensor.torch_dtype)
        whole = [name for name in found if not manifest.tensors[name].per_shard]
        reader.read([RowsWanted(name, 0, found[name]) for name in whole])
        before_changes()
        with changing_objects():
            reader.read([RowsWanted(name, 0, into[name]) for name in in_place])
        found.update((name, into[name]) for name in in_place)
    return {name: found[other] for name, other in stored.items()}
