"""A directory of checkpoints: list, commit and delete them, and lock it for one writer.

A checkpoint is written in a directory whose name begins with ``.writing-``. When everything is on disk its
manifest is renamed into place, then the directory. A reader therefore sees complete checkpoints only, and
needs no lock. The remains of a killed writer have such a name; the next manager removes them.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import platform
import re
import shutil
import threading
import uuid
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

from stratagem import _faults as faults
from stratagem import metrics
from stratagem._owner import Owner
from stratagem._ps.blocks import manifest as manifests
from stratagem._ps.blocks.block_file import Progress
from stratagem._ps.blocks.block_reader import BlockReader, check_frames, load_manifest
from stratagem._ps.blocks.manifest import Manifest
from stratagem.errors import CheckpointBusy, CheckpointCorrupt, CheckpointError

_log = logging.getLogger("stratagem.checkpoint")

_WRITING, _DELETING, PROBE = ".writing-", ".deleting-", ".probe-"
_LOCK = ".lock"
_NAME = re.compile(r"step_\d{8,}(-\d+)?")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint on disk.

    Attributes:
        path: its directory.
        manifest: its contents.
    """

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The training step it was taken at."""
        return self.manifest.step

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers given with the save."""
        return dict(self.manifest.metrics)

    @property
    def bytes(self) -> int:
        """Its size on disk."""
        return self.manifest.bytes

    def verify(self, progress: Progress | None = None) -> None:
        """Read every byte, of its parents too, and compare checksums.

        Raises:
            CheckpointCorrupt: names the first file that is missing or damaged.
        """
        chain = chain_of(self)
        for place in range(len(chain)):
            check_frames(*chain[place])
            with BlockReader(chain[place:], progress) as reader:
                reader.verify()

    def __repr__(self) -> str:
        kind = f"delta of {self.manifest.parent}" if self.manifest.is_delta else "full"
        return f"<SavedCheckpoint {self.path}: step {self.step}, {kind}, {self.bytes} bytes>"


def load(path: Path) -> SavedCheckpoint:
    """Return the checkpoint in a directory.

    Raises:
        CheckpointCorrupt: its manifest is missing or damaged.
    """
    return SavedCheckpoint(path, load_manifest(path))


def chain_of(saved: SavedCheckpoint) -> list[tuple[Path, Manifest]]:
    """Return a checkpoint, its parent, and so on, as a reader needs them.

    Raises:
        CheckpointCorrupt: a parent is missing, or is another checkpoint than the one built upon.
    """
    chain = [(saved.path, saved.manifest)]
    while (child := chain[-1][1]).is_delta:
        path = saved.path.parent / child.parent
        try:
            parent = load_manifest(path)
        except CheckpointCorrupt as error:
            raise CheckpointCorrupt(
                f"{chain[-1][0]} holds the changes since {path}, which cannot be read: {error}",
                path=str(path),
            ) from error
        if parent.identity != child.parent_identity:
            raise CheckpointCorrupt(
                f"{chain[-1][0]} was built on checkpoint {child.parent_identity}, but {path} is "
                f"checkpoint {parent.identity}.",
                path=str(path),
            )
        chain.append((path, parent))
    return chain


@final
class CheckpointDirectory:
    """A directory that holds checkpoints as ``step_00000120``."""

    def __init__(self, path: Path, lock: DirectoryLock | None = None) -> None:
        self.path = path
        self._right = lock  # to write
        self.damaged: dict[str, CheckpointCorrupt] = {}
        # By name; a name can come to mean another checkpoint, so with the manifest's inode and time.
        self._known: dict[str, tuple[tuple[int, int], SavedCheckpoint]] = {}
        self._lock = threading.Lock()  # a save's thread commits while the caller's looks

    def scan(self) -> list[SavedCheckpoint]:
        """Return the complete checkpoints, oldest save first.

        Those whose manifest cannot be read are in `damaged` afterwards, by name.
        """
        try:
            names = {each.name for each in self.path.iterdir() if _NAME.fullmatch(each.name)}
        except (FileNotFoundError, NotADirectoryError):
            names = set()
        with self._lock:
            self.damaged = {}
            known, self._known = self._known, {}
            for name in sorted(names):
                self._look_at(self.path / name, known.get(name))
            found = [saved for _, saved in self._known.values()]
            return sorted(found, key=lambda saved: saved.manifest.serial)

    def _look_at(self, path: Path, known: tuple[tuple[int, int], SavedCheckpoint] | None) -> None:
        try:
            status = (path / manifests.NAME).stat()
        except OSError:
            return  # another program's directory, or deleted by now
        mark = (status.st_ino, status.st_mtime_ns)
        if known is not None and known[0] == mark:
            self._known[path.name] = known
            return
        try:
            self._known[path.name] = mark, load(path)
        except CheckpointCorrupt as error:
            if path.exists():
                self.damaged[path.name] = error

    def latest(self) -> SavedCheckpoint | None:
        """Return the newest complete checkpoint, or None."""
        found = self.scan()
        return found[-1] if found else None

    # Writing; the caller has the lock.

    def begin(self) -> Path:
        """Make a directory to write a checkpoint in."""
        path = self.path / f"{_WRITING}{uuid.uuid4().hex[:12]}"
        path.mkdir()
        return path

    def commit(self, writing: Path, manifest: Manifest, name: str = "") -> SavedCheckpoint:
        """Make a written checkpoint visible; its files are on disk already.

        A step that is there already gets a name with a number behind it.

        Raises:
            CheckpointBusy: the coordinator that has replaced this one uses the directory.
        """
        self._check_right()
        if faults.active is not None:
            faults.active.at("coordinator.before_manifest")
        temporary = writing / f"{manifests.NAME}.new"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(manifests.to_text(manifest))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(writing / manifests.NAME)
        _flush_directory(writing)
        path = self._rename(writing, name or f"step_{manifest.step:08d}", exact=bool(name))
        metrics.event("checkpoint_committed", step=manifest.step, path=str(path))
        return SavedCheckpoint(path, manifest)

    def _rename(self, writing: Path, name: str, *, exact: bool) -> Path:
        path, number = self.path / name, 0
        while path.exists():
            if exact:
                raise CheckpointError(f"{path} exists. Choose a path that does not exist.")
            number += 1
            path = self.path / f"{name}-{number}"
        if faults.active is not None:
            faults.active.at("coordinator.before_rename")
        writing.rename(path)
        _flush_directory(self.path)
        return path

    def abandon(self, writing: Path) -> None:
        """Remove the files of a checkpoint that failed."""
        shutil.rmtree(writing, ignore_errors=True)

    def delete(self, name: str) -> None:
        """Delete a checkpoint. Readers no longer see it, even while its files are being removed."""
        self._check_right()
        going = self.path / f"{_DELETING}{name}-{uuid.uuid4().hex[:12]}"
        (self.path / name).rename(going)
        shutil.rmtree(going, ignore_errors=True)

    def _check_right(self) -> None:
        if self._right is not None:
            self._right.check()

    def sweep(self) -> list[str]:
        """Remove the remains of killed writers; return the names of unfinished checkpoints."""
        for probe in self.path.glob(f"{PROBE}*"):
            probe.unlink(missing_ok=True)
        left = [each for each in self.path.iterdir() if each.name.startswith((_WRITING, _DELETING))]
        for each in left:
            shutil.rmtree(each, ignore_errors=True)
        return [each.name for each in left]

    def __repr__(self) -> str:
        return f"<CheckpointDirectory {self.path}: {len(self._known)} known>"


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checked_path(name: str, path: object) -> Path:
    """Return a path that a user gave as the argument `name`.

    Raises:
        TypeError, ValueError: it is no path, or empty.
    """
    if not isinstance(path, str | Path):
        raise TypeError(
            f"{name}={path!r} has type {type(path).__name__}: expected a path, such as 'runs/ctr-v3'."
        )
    if not str(path):
        raise ValueError(f"{name}='': expected a path, such as 'runs/ctr-v3'.")
    return Path(path)


def find(path: Path) -> SavedCheckpoint:
    """Return the checkpoint at a path, or the newest one of a directory of checkpoints.

    Raises:
        CheckpointError: there is none.
        CheckpointCorrupt: its manifest is damaged.
    """
    if (path / manifests.NAME).exists():
        return load(path)
    directory = CheckpointDirectory(path)
    try:
        latest = directory.latest()
    except OSError as failure:
        raise CheckpointError(f"{path} cannot be read: {failure}.") from failure
    for error in directory.damaged.values():
        if latest is None:
            raise error
        _log.warning("skipping a checkpoint: %s", error)
    if latest is None:
        raise CheckpointError(
            f"{path} is not a complete checkpoint (it has no {manifests.NAME}) and contains none. `stratagem "
            "checkpoint ls` lists those of a directory."
        )
    return latest


@final
class DirectoryLock(Owner):
    """Exclusive right to write into a directory; the system ends it with the process.

    Args:
        path: the directory.
        holder: description of this manager, for others.
        replaced: process whose lock is taken over: of a coordinator that this one has replaced.

    Raises:
        CheckpointBusy: another manager holds it.
        CheckpointError: the directory cannot be made or written.
    """

    _held: ClassVar[dict[tuple[int, str], str]] = {}
    """Directories locked by a process. The system's locks are per process: they tell other
    processes, but not two managers in one. Children inherit this record, but not the locks."""

    def __init__(self, path: Path, holder: str, *, replaced: str = "") -> None:
        self._descriptor = -1
        self._file = path / _LOCK
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._key = os.getpid(), str(path.resolve())
            if self._key in self._held:
                gc.collect()  # the other manager may be unreachable, but part of a cycle
            if self._key in self._held:
                raise _busy(path, self._held[self._key])
            descriptor = self._open()
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be used for checkpoints: {error}. Give a directory that this process "
                "may create and write."
            ) from error
        if not _lock(descriptor, path):
            found = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
            os.close(descriptor)
            if not (replaced and found.startswith(f"{replaced},")):
                raise _busy(path, found or "a process that does not say who it is")
            # Its coordinator was replaced, but it still runs (stopped, perhaps): `check` will tell it.
            self._file.unlink(missing_ok=True)
            descriptor = self._open()
            if not _lock(descriptor, path):
                os.close(descriptor)
                raise _busy(path, "another process that has replaced the same coordinator")
        self._descriptor = descriptor
        self._held[self._key] = f"this process, {holder}"
        # Of a manager that the program drops without close(). Not at the end of the process, which ends the lock anyway.
        self._release = weakref.finalize(self, _release, self._held, self._key, descriptor)
        self._release.atexit = False
        text = f"process {os.getpid()} on {platform.node()}, {holder}\n".encode()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)

    def _open(self) -> int:
        return os.open(self._file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)

    def check(self) -> None:
        """Raise `CheckpointBusy` if the coordinator that replaced this one has taken the directory over."""
        try:
            is_own = os.fstat(self._descriptor).st_ino == self._file.stat().st_ino
        except OSError:
            is_own = False
        if not is_own:
            raise _busy(self._file.parent, "the coordinator that has replaced this one")

    def close(self) -> None:
        """Let others write."""
        if self._descriptor >= 0:
            self._descriptor = -1
            self._release()

    def __repr__(self) -> str:
        return f"<DirectoryLock {self._key[1]} {'held' if self._descriptor >= 0 else 'given up'}>"


def _lock(descriptor: int, path: Path) -> bool:
    """Lock a file; return False if another process has locked it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        os.close(descriptor)
        raise CheckpointError(
            f"{path} cannot be locked: {error}. A manager locks its directory against a second one: use a file "
            "system with locks (fcntl)."
        ) from error
    return True


def _release(held: dict[tuple[int, str], str], key: tuple[int, str], descriptor: int) -> None:
    os.close(descriptor)
    del held[key]


def _busy(path: Path, holder: str) -> CheckpointBusy:
    return CheckpointBusy(
        f"{path} is in use by {holder}. Two managers on one directory would delete each other's "
        "checkpoints: close the other one, or use another directory for this one.",
        holder=holder,
    )
