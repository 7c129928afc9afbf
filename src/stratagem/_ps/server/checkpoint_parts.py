"""A session's part of a checkpoint: the server writes its rows to a file, or reads them.

`SessionCheckpoints` answers the messages. Files are written and read by a thread, while the working thread serves
requests; one transfer of a session runs at a time. The format is the business of `BlockFiles`, which the
starter of the server provides: checkpoints are a higher layer.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem import _faults as faults
from stratagem._owner import Owner
from stratagem._ps.server.cut import Cut, CutTensor
from stratagem._ps.server.save_pace import SavePace
from stratagem._ps.server.store import VariableStore
from stratagem._ps.store_records import LedgerRecord
from stratagem._ps.types import StateEntry
from stratagem._wire import codec, messages
from stratagem._wire.messages import PartRef, StateRecord
from stratagem.errors import CheckpointCorrupt, CheckpointError

_log = logging.getLogger("stratagem.ps")

GIVE_UP_S: Final = 10.0
"""How long a transfer that was given up may take to end: a thread looks after each piece of a megabyte."""

_Written: TypeAlias = tuple[int, int, Sequence[messages.BlockRef]]
"""Size of a file, its checksum, and its blocks."""

_BLOCK_FILE: Final = re.compile(r"__[0-9]+_0\.distcp")


@dataclass(frozen=True)
class RowsToWrite:
    """Rows of one tensor that go into a file; ``read(first, last)`` counts rows of the shard.

    With `ids` (ascending) only these rows of the shard, and ``read`` counts positions in `ids`.
    """

    tensor: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    rows: int
    per_shard: bool
    read: Callable[[int, int], Tensor]
    ids: Tensor | None = None
    part: int = 0
    """Number of the part that the rows belong to."""
    variable: int = 0
    """Number of the variable that they belong to."""

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        count = 1 if self.per_shard else self.rows if self.ids is None else len(self.ids)
        return count * self.dtype.itemsize * math.prod(self.shape[1:])


@dataclass(frozen=True)
class RowsToRead:
    """Rows of one tensor that a file holds, and the memory they go into; None to verify them only.

    A number kept per shard (`per_shard`) is read into a tensor without axes.
    """

    tensor: str
    start: int
    rows: int
    per_shard: bool
    into: Tensor | None


class BlockFiles(Protocol):
    """Writes and reads the files of checkpoints."""

    def write(
        self, path: Path, parts: Sequence[RowsToWrite], progress: Callable[[int], None]
    ) -> _Written:
        """Write a file and flush it; return its size, its checksum, and its blocks."""

    def read(
        self,
        chain: Sequence[tuple[str, str]],
        parts: Sequence[RowsToRead],
        progress: Callable[[int], None],
    ) -> None:
        """Read rows of a checkpoint, given by the directories and identities of it and its parents."""


@dataclass(frozen=True)
class CheckpointAccess:
    """Directories below which checkpoints may be written and read, and how."""

    directories: tuple[str, ...] = ()
    files: BlockFiles | None = None

    def refusal(self, directory: str) -> str:
        """Return why a directory may not be used; empty if it may."""
        if self.files is None or not self.directories:
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
            "ledger": plain_ledger(described.ledger),
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
        files, cut = self._access.files, self._cut
        assert files is not None
        parts = []
        for number, part in enumerate(message.parts):
            one = cut.tensors[part.variable, part.optimizer, part.key]
            ids = self._changed.get(part.variable) if part.changed_only else None
            whole = RowsToWrite(
                part.tensor,
                one.dtype,
                part.shape,
                part.start,
                part.rows,
                part.per_shard,
                one.read if ids is None else _reader_of(one, ids),
                ids,
                number,
                part.variable,
            )
            of_rows = one.shape[:1] == cut.tensors[part.variable, 0, ""].shape[:1]
            used = self._used.get(part.variable) if of_rows and ids is None else None
            parts += [whole] if used is None else [_range_of(whole, *each) for each in used]
        cut.begin_reading({(one.variable, one.optimizer, one.key) for one in message.parts})

        def write(progress: Callable[[int], None]) -> _Written:
            try:
                return files.write(path, parts, progress)
            except OSError as error:
                raise CheckpointError(
                    f"its rows could not be written to {path.parent}: {error}. Checkpoints saved before are "
                    "untouched. Free disk space, or use another directory."
                ) from error
            finally:
                cut.close()  # writes that wait go on

        pace = SavePace(cut, sum(part.nbytes for part in parts))
        self._transfer = _Transfer(write, "server.in_block", pace=pace)

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
        files, chain, self._undo = self._access.files, message.chain, []
        assert files is not None
        found = {part.variable: self._store.find_unread(part.variable) for part in message.parts}
        unwritten = {number for number, one in found.items() if one.is_unwritten}
        if message.verify:
            # What nobody has written is verified while it is read: `undo` puts it back.
            some = [part for part in message.parts if part.variable not in unwritten]
            wanted = [self._to_read(part, into=False) for part in some]
            self._transfer = _Transfer(
                lambda progress: files.read(chain, wanted, progress), "server.in_restore"
            )
            return
        self._make_state(message.parts, message.state, unwritten)
        parts = [self._to_read(part, into=True) for part in message.parts]
        pending = [found[part.variable] for part in message.parts if not part.key]
        pending = [one for one in pending if one.pending]

        def read(progress: Callable[[int], None]) -> None:
            try:
                files.read(chain, parts, progress)
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

    def _to_read(self, part: PartRef, *, into: bool) -> RowsToRead:
        memory: Tensor | None = None
        if into:
            memory = self._store.tensor_of(part.variable, part.optimizer, part.key)
            rows = memory.shape[0] if memory.dim() else 1
            if rows != part.rows and not part.per_shard:
                raise ValueError(
                    f"{part.rows} rows are to be read into {part.tensor!r}, which has {rows} here."
                )
        return RowsToRead(part.tensor, part.start, part.rows, part.per_shard, memory)

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


def _range_of(whole: RowsToWrite, first: int, last: int) -> RowsToWrite:
    """Return a range of the rows of a part."""
    read = whole.read
    return replace(
        whole,
        start=whole.start + first,
        rows=last - first,
        read=lambda begin, end: read(begin + first, end + first),
    )


def _reader_of(one: CutTensor, ids: Tensor) -> Callable[[int, int], Tensor]:
    """Return a function that reads changed rows by their positions in `ids`."""
    return lambda first, last: one.read_ids(ids[first:last], is_last=last == len(ids))


@final
class _Transfer:
    """A thread that writes or reads files."""

    def __init__(
        self,
        work: Callable[[Callable[[int], None]], _Written | None],
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
                moved=self.moved, done=True, size=size, crc32=crc32, blocks=tuple(blocks)
            )


def ledger_from(plain: Mapping[str, Any]) -> LedgerRecord:
    """Return the record that `plain_ledger` was given."""
    applied, duplicates, fenced = plain["counts"]
    return LedgerRecord(
        {worker: (pair[0], pair[1]) for worker, pair in plain["last"].items()},
        dict(plain["lowest"]),
        tuple((closure, block, bytes.fromhex(bits)) for closure, block, bits in plain["closures"]),
        tuple((one[0], one[1]) for one in plain["finished"]),
        (applied, duplicates, fenced),
    )


def plain_ledger(record: LedgerRecord) -> dict[str, Any]:
    """Return a ledger's record as JSON can hold it."""
    return {
        "last": {worker: list(pair) for worker, pair in record.last.items()},
        "lowest": dict(record.lowest),
        "closures": [[closure, block, bits.hex()] for closure, block, bits in record.closures],
        "finished": [list(one) for one in record.finished],
        "counts": list(record.counts),
    }
