"""A session's part of a checkpoint: the server writes its rows to a file, or reads them.

`SessionCheckpoints` answers the messages. Files are written and read by a thread, while the working thread serves
requests; one transfer of a session runs at a time.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem import _faults as faults
from stratagem._owner import Owner
from stratagem._ps.blocks.block_file import BlockFileWriter, Progress, TensorPart
from stratagem._ps.blocks.block_reader import BlockReader, RowsWanted, load_manifest
from stratagem._ps.blocks.manifest import Manifest
from stratagem._ps.server.cut import Cut
from stratagem._ps.server.save_pace import SavePace
from stratagem._ps.server.store import VariableStore
from stratagem._ps.types import StateEntry
from stratagem._wire import codec, messages
from stratagem._wire.messages import PartRef, StateRecord, StoredBlock
from stratagem.errors import CheckpointCorrupt, CheckpointError

_log = logging.getLogger("stratagem.ps")

GIVE_UP_S: Final = 10.0
"""How long a transfer that was given up may take to end: a thread looks after each piece of a megabyte."""

_Written: TypeAlias = tuple[int, int, tuple[StoredBlock, ...]]
"""Size of a file, its checksum, and its blocks."""

_BLOCK_FILE: Final = re.compile(r"__[0-9]+_0\.distcp")


@dataclass(frozen=True)
class CheckpointAccess:
    """Directories below which checkpoints may be written and read."""

    directories: tuple[str, ...] = ()

    def refusal(self, directory: str) -> str:
        """Return why a directory may not be used; empty if it may."""
        if not self.directories:
            return "no directory for checkpoints was allowed when the server was started"
        place = os.path.realpath(directory)
        for allowed in map(os.path.realpath, self.directories):
            if os.path.commonpath([place, allowed]) == allowed:
                return ""
        return f"{directory!r} is not below {', '.join(self.directories)}"


@final
class SessionCheckpoints(Owner):
    """Saves and restores of one session. All methods are called by the working thread."""

    def __init__(self, store: VariableStore, access: CheckpointAccess) -> None:
        self._store = store
        self._access = access
        self._cut: Cut | None = None
        self._changed: dict[int, Tensor] = {}  # rows written since the base of the cut
        self._used: dict[int, list[tuple[int, int]]] = {}  # rows in use of dynamic tables
        # At random, so that a number of an earlier process is not taken for one of this one.
        self._number = secrets.randbits(48)
        self._transfer: _Transfer | None = None
        self._undo: list[Callable[[], None]] = []  # see `undo_read`

    @property
    def is_active(self) -> bool:
        """True if a cut is open or a transfer runs."""
        return self._cut is not None or self._transfer is not None

    def make_cut(self, message: messages.MakeCut) -> messages.CutMade:
        """Make a cut, or say why not."""
        refused = self._access.refusal(message.directory)
        if not refused and not (Path(message.directory) / message.probe).exists():
            refused = f"{message.directory!r} is not on a file system shared with the coordinator"
        if refused:
            return messages.CutMade(refused=refused)
        self.end_cut()
        wanted = set(message.variables)
        self._cut = self._store.begin_cut(wanted)
        self._number += 1
        self._note_changes(message)
        ranges = {one: self._store.keyed.ranges(one) for one in wanted}
        self._used = {one: found for one, found in ranges.items() if found is not None}
        if faults.active is not None:
            faults.active.at("server.in_cut")
        described = self._store.describe()
        items = tuple(one for one in described.state if one.variable in wanted)
        facts = {
            "versions": {str(number): v for number, v in self._store.versions(wanted).items()},
            "ledger": described.ledger.text(),
        }
        changed = {variable: len(ids) for variable, ids in self._changed.items()}
        used = {one: sum(last - first for first, last in r) for one, r in self._used.items()}
        return messages.CutMade(
            cut=self._number, items=items, facts=facts, changed=changed, used=used
        )

    def _note_changes(self, message: messages.MakeCut) -> None:
        rows = self._store.changed_rows
        self._changed = {}
        if message.base:
            rows.forget_before(message.base)
            for variable in message.variables:
                ids = rows.since(message.base, variable)
                if ids is not None:
                    self._changed[variable] = ids
        if message.track:
            rows.begin(self._number, message.variables)

    def write_cut(self, message: messages.WriteCut) -> None:
        """Begin to write a cut.

        Raises:
            CheckpointError: the cut was given up, or the path is not allowed.
        """
        if self._cut is None or message.cut != self._number or self._transfer is not None:
            raise CheckpointError(f"cut {message.cut} is not open here: save again.")
        path = Path(message.path)
        self._check(str(path.parent))
        if not _BLOCK_FILE.fullmatch(path.name):
            raise CheckpointError(
                f"{path.name!r} is not a valid name of a block file of a checkpoint."
            )
        cut = self._cut
        # Together: the same rows of a variable and of its optimizer state. A step changes them at the same time, and need not
        # copy any of them once they have been read.
        together: dict[tuple[Any, ...], list[TensorPart]] = {}
        for part in message.parts:
            for one in self._parts_of(part, cut):
                key = part.variable, one.start, one.rows, one.per_shard, one.ids is None
                together.setdefault(key, []).append(one)
        cut.begin_reading({(one.variable, one.optimizer, one.key) for one in message.parts})

        def write(progress: Progress) -> _Written:
            try:
                return write_file(path, together.values(), progress)
            except OSError as error:
                raise CheckpointError(
                    f"its rows could not be written to {path.parent}: {error}. Checkpoints saved before are "
                    "untouched. Free disk space, or use another directory."
                ) from error
            finally:
                cut.close()  # writes that wait go on

        pace = SavePace(cut, sum(one.bytes for some in together.values() for one in some))
        self._transfer = _Transfer(write, "server.in_block", pace=pace)

    def _parts_of(self, part: PartRef, cut: Cut) -> Iterator[TensorPart]:
        """Yield the rows to write of a part: all, those in use of a dynamic table, or those that have changed."""
        one, start = cut.tensors[part.variable, part.optimizer, part.key], part.start
        shape = () if part.per_shard else part.shape
        make = partial(TensorPart, part.tensor, one.dtype, shape, per_shard=part.per_shard)
        ids = self._changed.get(part.variable) if part.changed_only else None
        of_rows = one.shape[:1] == cut.tensors[part.variable, 0, ""].shape[:1]
        if part.per_shard:
            yield make(start=start, rows=part.rows, read=lambda *_: one.read(0, 1))
        elif ids is not None:
            yield make(
                start=start,
                rows=len(ids),
                ids=ids + start,
                read=lambda i, j: one.read_ids(ids[i:j], is_last=j == len(ids)),
            )
        else:
            used = self._used.get(part.variable) if of_rows else None
            for low, high in [(0, part.rows)] if used is None else used:
                yield make(
                    start=start + low,
                    rows=high - low,
                    read=lambda first, last: one.read(first - start, last - start),
                )

    def end_cut(self) -> None:
        """Give up the cut, if there is one."""
        if self._cut is not None:
            self._store.end_cut()
            self._cut = None
            if self._transfer is not None:
                self._transfer.give_up()
                self._transfer = None

    def begin_read(self, message: messages.ReadParts) -> None:
        """Begin to read (or verify) rows of a checkpoint.

        Raises:
            CheckpointError: a directory is not allowed.
        """
        for directory, _ in message.chain:
            self._check(directory)
        # A thread that still reads would overwrite rows later.
        if self._transfer is not None and not self._transfer.give_up():
            raise CheckpointError(
                f"the transfer before has not ended within {GIVE_UP_S:g} s: its disk does not answer. "
                "Repair the disk or restart this parameter server, and restore again."
            )
        chain, self._undo = message.chain, []
        found = {part.variable: self._store.find_unread(part.variable) for part in message.parts}
        unwritten = {number for number, one in found.items() if one.is_unwritten}
        if message.verify:
            # What nobody has written is verified while it is read: `undo_read` puts it back.
            wanted = [(part, None) for part in message.parts if part.variable not in unwritten]
            self._transfer = _Transfer(partial(read_rows, chain, wanted), "server.in_restore")
            return
        self._make_state(message.parts, message.state, unwritten)
        into = [(part, self._memory_of(part)) for part in message.parts]
        pending = [found[part.variable] for part in message.parts if not part.key]
        pending = [one for one in pending if one.pending]

        def read(progress: Progress) -> None:
            try:
                read_rows(chain, into, progress)
                for one in pending:
                    one.pending = ()
            finally:
                for one in pending:  # after a failure the first use computes initial values
                    one.is_read_into = False

        for variable, one in found.items():
            self._store.keyed.clear(variable)
            self._store.touch(variable)
            if one in pending:
                one.is_read_into = True
                self._undo.append(partial(setattr, one, "pending", one.pending))
        self._transfer = _Transfer(read, "server.in_restore", tuple(found))

    def undo_read(self) -> None:
        """Put back what the last read replaced and nobody had written before."""
        undo, self._undo = self._undo, []
        for put_back in undo:
            put_back()

    def progress(self, *, hurry: bool = False) -> tuple[messages.Transfer, list[int]]:
        """Return how far the transfer is, and the variables whose rows have just been read.

        Args:
            hurry: whether a caller waits for the transfer.
        """
        transfer = self._transfer
        if hurry and transfer is not None and transfer.pace is not None:
            transfer.pace.hurries = True
        if transfer is None:
            return messages.Transfer(moved=0, done=True, failure="there is no transfer"), []
        if not transfer.is_done:
            return messages.Transfer(moved=transfer.moved), []
        self._transfer = None
        self.end_cut()
        return transfer.result(), [*transfer.touched]

    @override
    def close(self) -> None:
        """Give everything up. May be called again."""
        self.end_cut()
        if self._transfer is not None:
            self._transfer.give_up()
            self._transfer = None

    def _check(self, directory: str) -> None:
        refused = self._access.refusal(directory)
        if refused:
            raise CheckpointError(
                f"this parameter server may not use {directory!r}: {refused}. Start it with "
                "--checkpoint-dir."
            )

    def _memory_of(self, part: PartRef) -> Tensor:
        memory = self._store.tensor_of(part.variable, part.optimizer, part.key)
        rows = memory.shape[0] if memory.dim() else 1
        if rows != part.rows and not part.per_shard:
            raise ValueError(
                f"{part.rows} rows are to be read into {part.tensor!r}, which has {rows} here."
            )
        return memory

    def _make_state(
        self, parts: Sequence[PartRef], plain: Sequence[StateRecord], unwritten: Collection[int]
    ) -> None:
        """Replace optimizer state by the state that is to be read, its tensors undefined."""
        entries: dict[int, list[StateEntry]] = {}
        for item in plain:
            value: Any = item.value
            if item.dtype:
                dtype = codec.dtype_from(item.dtype)
                value = torch.empty(item.shape, dtype=dtype, device="meta")
            entry = StateEntry(variable=item.variable, key=item.key, value=value)
            entries.setdefault(item.optimizer, []).append(entry)
        try:
            for optimizer, some in entries.items():
                replaced = {one.variable for one in some}.intersection(unwritten)
                self._undo.append(self._store.take_states(optimizer, replaced))
                self._store.load_optimizer_state(optimizer, some)
            for part in parts:  # raises if one is missing
                self._store.tensor_of(part.variable, part.optimizer, part.key)
        except BaseException:
            self.undo_read()
            raise


def write_file(path: Path, parts: Iterable[Sequence[TensorPart]], progress: Progress) -> _Written:
    """Write a file and flush it, parts that belong together in turns; return its size, its checksum, and its blocks."""
    with BlockFileWriter(path, progress) as file:
        for some in parts:
            file.add(*some)
        stored = file.finish()
        return stored.bytes, stored.crc32, tuple(file.blocks)


def read_rows(
    chain: Sequence[tuple[str, str]],
    parts: Sequence[tuple[PartRef, Tensor | None]],
    progress: Progress,
) -> None:
    """Read parts of a checkpoint, or verify those without memory; `chain`: its directory and identity, then its parents'.

    Raises:
        CheckpointCorrupt: a file is missing or damaged, or the checkpoint was replaced.
    """
    opened = [(Path(path), _manifest(Path(path), identity)) for path, identity in chain]
    with BlockReader(opened, progress) as reader:
        rows: list[RowsWanted] = []
        for part, into in parts:
            if part.per_shard:
                number = reader.read_number(part.tensor, part.start, part.rows)
                if into is not None:
                    into.copy_(number)
            elif into is not None:
                rows.append(RowsWanted(part.tensor, part.start, into))
            else:
                reader.verify_rows(part.tensor, part.start, part.rows)
        reader.read(rows)


def _manifest(path: Path, identity: str) -> Manifest:
    manifest = load_manifest(path)
    if manifest.identity != identity:
        raise CheckpointCorrupt(
            f"{path} is another checkpoint than the one to restore: it was replaced meanwhile.",
            path=str(path),
        )
    return manifest


@final
class _Transfer:
    """A thread that writes or reads files."""

    def __init__(
        self,
        work: Callable[[Progress], _Written | None],
        point: str,
        touched: Sequence[int] = (),
        pace: SavePace | None = None,
    ) -> None:
        self.moved = 0
        self.pace = pace
        self.touched = touched
        self._work = work
        self._point = point
        self._given_up = False
        self._result: messages.Transfer | None = None
        self._thread = threading.Thread(
            target=self._run, name="stratagem-ps-checkpoint", daemon=True
        )
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> messages.Transfer:
        assert self._result is not None
        return self._result

    def give_up(self) -> bool:
        """End the thread; return False if it has not ended in time: its disk does not answer."""
        self._given_up = True
        self._thread.join(GIVE_UP_S)
        if self._thread.is_alive():
            _log.warning(
                "a transfer of a checkpoint did not end within %g s: the disk hangs", GIVE_UP_S
            )
        return not self._thread.is_alive()

    def _progress(self, nbytes: int) -> None:
        self.moved += nbytes
        if faults.active is not None:
            faults.active.at(self._point)
        if self._given_up:
            raise CheckpointError("the coordinator gave the transfer up")
        if self.pace is not None:
            self.pace.rest(self.moved)

    def _run(self) -> None:
        try:
            size, crc32, blocks = self._work(self._progress) or (0, 0, ())
        except Exception as error:  # noqa: BLE001 - sent to the coordinator
            damaged = error.path if isinstance(error, CheckpointCorrupt) else ""
            text = str(error) or type(error).__name__
            self._result = messages.Transfer(
                moved=self.moved, done=True, failure=text, damaged=damaged
            )
        else:
            self._result = messages.Transfer(
                moved=self.moved, done=True, size=size, crc32=crc32, blocks=blocks
            )
