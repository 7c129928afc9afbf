"""`CheckpointManager`: saves during training, keeps the newest and the best checkpoints, restores.

One save runs at a time, in a thread of its own. The caller's thread copies the state in memory; the thread
writes it. A save that fails is logged, counted and raised by the next call; earlier checkpoints stay as they are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, final

from stratagem import metrics as counters
from stratagem._checkpoint import manager_arguments as arguments
from stratagem._checkpoint.checkpoint import Checkpoint, HostCopies, ObjectSnapshot
from stratagem._checkpoint.checkpoint_writer import SaveOrder
from stratagem._checkpoint.delta_base import DeltaBase
from stratagem._checkpoint.directory import (
    CheckpointDirectory,
    DirectoryLock,
    SavedCheckpoint,
    checked_path,
)
from stratagem._checkpoint.evaluations import with_evaluations
from stratagem._checkpoint.job_position import JobPosition
from stratagem._checkpoint.newest_checkpoint import restore_newest
from stratagem._checkpoint.retention import Best, Due, to_delete
from stratagem._checkpoint.rewinding import RecoveryPoints, drain, servers_are_busy
from stratagem._checkpoint.save_handle import SAVE_LIMIT_S, SaveHandle
from stratagem._checkpoint.server_group import ServerLostInSave
from stratagem._checkpoint.sigterm import EXIT_CODE, SigtermNote
from stratagem._owner import Owner
from stratagem._ps.blocks.manifest import NAME
from stratagem.errors import CheckpointError, CheckpointTimeout

_log = logging.getLogger("stratagem.checkpoint")

_NO_METRICS: Final[Mapping[str, float]] = MappingProxyType({})

_ATTEMPTS: Final = 3
"""To save, if parameter servers are lost and restored meanwhile."""


@final
class CheckpointManager(Owner):
    """Saver of regular checkpoints that keeps the newest and the best ones and restores them.

    Use it as a context manager, or call `close`, which finishes a running save.

    Args:
        checkpoint: the objects to save.
        directory: directory of the checkpoints; one manager at a time uses it.
        max_to_keep: how many of the newest checkpoints to keep; None keeps all.
        every_s: `step` saves when this many seconds have passed since the last save.
        every_steps: `step` saves when this many steps have been made since the last save.
        keep_best: a metric; the best checkpoints by it are kept, too. ``"-loss"``: smaller is better.
        best_to_keep: how many of the best checkpoints to keep.
        save_on_sigterm: after SIGTERM the next `step` saves, waits, and ends the program with exit code 143.
        allow_pickle: accept values of any class in states; only pickle can save and read them.
        full_every: with parameter servers, one of this many saves contains all rows, and the others only the
            rows that changed (a *delta*). By default (1) every save is full.
        on_server_loss: reaction to the loss of a parameter server. ``"partial"``: its variables return to
            the newest checkpoint of this manager, and training continues. ``"rewind"``: in a loop over
            `steps`, everything returns to the newest checkpoint, and the loop repeats the steps since.
            ``"raise"``: the run ends with `ParameterServerLost`.

    Raises:
        CheckpointBusy: another manager uses the directory.
        CheckpointError: the directory cannot be created or written.

    Example:
        >>> import tempfile, torch, stratagem as sg
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> checkpoint = sg.Checkpoint(model=model, optimizer=optimizer)
        >>> with sg.CheckpointManager(checkpoint, tempfile.mkdtemp(), every_steps=2) as manager:
        ...     first = manager.restore_or_initialize()
        ...     for step in range(first, 5):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(1, 2)).sum().backward()
        ...         optimizer.step()
        ...         _ = manager.step(step + 1)
        ...     _ = manager.save(5, wait=True)
        ...     manager.latest.step
        5
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | Path,
        max_to_keep: int | None = 5,
        *,
        every_s: float | None = None,
        every_steps: int | None = None,
        keep_best: str | None = None,
        best_to_keep: int = 1,
        save_on_sigterm: bool = False,
        allow_pickle: bool = False,
        full_every: int = 1,
        on_server_loss: Literal["partial", "rewind", "raise"] = "partial",
    ) -> None:
        arguments.check_manager_arguments(
            checkpoint,
            keep_best=keep_best,
            on_server_loss=on_server_loss,
            every_s=every_s,
            counts={
                "max_to_keep": max_to_keep,
                "every_steps": every_steps,
                "best_to_keep": best_to_keep,
                "full_every": full_every,
            },
        )
        self._checkpoint = checkpoint
        self._max_to_keep = max_to_keep
        self._due = Due(every_s, every_steps)
        self._best = None if keep_best is None else Best(keep_best, best_to_keep)
        self._allow_pickle = allow_pickle
        self._deltas = DeltaBase(full_every) if full_every > 1 else None
        self._recovers = on_server_loss != "raise"
        self._rewinds = on_server_loss == "rewind"
        self._points = RecoveryPoints(is_active=on_server_loss == "partial")
        path = checked_path("directory", directory)
        if (path / NAME).exists():
            raise CheckpointError(
                f"{path} is a checkpoint. Give the directory it is in: {path.parent}."
            )
        self._position = JobPosition.of(
            checkpoint._objects, allow_pickle=allow_pickle, rewinds=self._rewinds
        )
        replaced = "" if self._position is None else self._position.predecessor
        self._lock = DirectoryLock(path, repr(checkpoint), replaced=replaced)
        self._directory = CheckpointDirectory(path, self._lock)
        try:
            self._job = self._position.checked_name(self._directory) if self._position else ""
            self._sigterm = SigtermNote() if save_on_sigterm else None
        except CheckpointError:
            self._lock.close()
            raise
        left = self._directory.sweep()
        if left:
            _log.warning("removed %d unfinished checkpoint(s) from %s", len(left), path)
        found = self._directory.scan()
        self._serial = max((one.manifest.serial for one in found), default=0)
        # Saving beside an earlier run's checkpoints without having restored one would replace them.
        self._found_steps = [one.step for one in found] + [0] * len(self._directory.damaged)
        self._continues = not self._found_steps
        self._damaged: set[str] = set()
        self._last_step = 0
        self._last_time = time.monotonic()
        self._seen_step: int | None = None
        self._saves_soon = False  # at the next step, so that less is lost with a server
        self._copies = HostCopies()
        self._running: SaveHandle | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    # ------------------------------------------------------------------ looking

    @property
    def directory(self) -> Path:
        """Directory of the checkpoints."""
        return self._directory.path

    @property
    def latest(self) -> SavedCheckpoint | None:
        """The newest complete checkpoint, or None."""
        return self._directory.latest()

    def all(self) -> list[SavedCheckpoint]:
        """Return all complete checkpoints, oldest save first."""
        return self._directory.scan()

    @property
    def best(self) -> SavedCheckpoint | None:
        """The best checkpoint by the metric `keep_best` (also of an evaluator), or None."""
        if self._best is None:
            return None
        return next(iter(self._best.rank(with_evaluations(self._directory))), None)

    # ------------------------------------------------------------------ saving

    def step(self, step: int, metrics: Mapping[str, float] = _NO_METRICS) -> SaveHandle | None:
        """Save if a save is due. Call this after every step; it never waits for the disk.

        If a save is due while another one (also of another manager) is running, a later call makes it.

        Args:
            step: how many steps have been made.
            metrics: numbers to store in the checkpoint.

        Raises:
            CheckpointError: an earlier save failed.
            SystemExit: SIGTERM had arrived; the state has been saved.
        """
        self._check_open()
        self._seen_step = step = arguments.checked_step(step)
        if self._position is not None:
            self._position.take(step)
        if self._sigterm is not None and self._sigterm.arrived:
            if self._running is not None:
                self._running._unseen_error()  # logged already; saving comes first now
            saved = self.save(step, metrics, wait=True)  # an older one of a job that is behind
            _log.warning("SIGTERM: ending; the newest checkpoint is %s", saved.path)
            raise SystemExit(EXIT_CODE)
        self._raise_earlier_failure()
        since_s = time.monotonic() - self._last_time
        is_due = self._due.at(step=step, last_step=self._last_step, since_s=since_s)
        if self._running is not None and not self._running.done:
            self._running._urgent |= is_due  # the next save waits for it
            return None
        is_due |= self._saves_soon and self._due.is_ever
        if not is_due or self._is_behind or (self._rewinds and self._points.is_mixed):
            return None
        if servers_are_busy(self._checkpoint._objects):  # with a save of another manager
            return None
        return self.save(step, metrics)

    def save(
        self,
        step: int | None = None,
        metrics: Mapping[str, float] = _NO_METRICS,
        *,
        wait: bool = False,
        final: bool = False,
        quiet: bool = False,
    ) -> SaveHandle:
        """Save now. Return when the state has been copied; a thread writes it to disk.

        Args:
            step: how many steps have been made; by default the argument of the last `step`, or one more
                than at the last save.
            metrics: numbers to store in the checkpoint.
            wait: return only when the checkpoint is complete.
            final: mark the run's last checkpoint; an `Evaluator` stops after it.
            quiet: wait until all scheduled closures have finished, so that all parameter servers are saved at
                the same point of the run. ``on_server_loss="rewind"`` implies it.

        Raises:
            CheckpointError: this save or an earlier one failed, or the directory has checkpoints of an
                earlier run and none was restored.
        """
        self._check_open()
        self._raise_earlier_failure()
        self._finish_running()
        self._check_continues()
        if step is None:
            step = self._last_step + 1 if self._seen_step is None else self._seen_step
        step = arguments.checked_step(step)
        numbers = arguments.checked_metrics(metrics)
        if quiet or self._rewinds:
            drain(self._checkpoint._objects)
        if self._is_behind and not final:
            why = "the servers already have steps after it, from the coordinator before this one"
            return self._not_saved(step, why)
        for _ in range(_ATTEMPTS - 1 if self._recovers else 0):
            try:
                return self._save_once(step, numbers, wait=wait, final=final)
            except ServerLostInSave as error:
                _log.warning("saving step %d again: %s", step, error)
        return self._save_once(step, numbers, wait=wait, final=final)

    def _save_once(
        self, step: int, numbers: Mapping[str, float], *, wait: bool, final: bool
    ) -> SaveHandle:
        handle = SaveHandle(step, is_urgent=wait)
        number, job = self._serial + 1, self._job
        order = SaveOrder(step=step, serial=number, metrics=numbers, final=final, job=job)
        snapshot = ObjectSnapshot.take(
            self._checkpoint,
            None if wait else self._copies,
            self.directory,
            allow_pickle=self._allow_pickle,
            deltas=self._deltas,
        )
        handle.paused_s = time.monotonic() - handle._began
        if self._rewinds and self._points.is_mixed:
            snapshot.discard()
            return self._not_saved(step, "a parameter server was lost, and the loop goes back")
        self._serial += 1
        self._last_step, self._last_time, self._seen_step = step, time.monotonic(), None
        self._saves_soon = False
        self._running = handle
        if wait:
            self._write(snapshot, order, handle, show=True)
            handle.wait()
        else:
            # No daemon: a program that ends finishes the save first.
            self._thread = threading.Thread(
                target=self._write,
                args=(snapshot, order, handle),
                name="stratagem-checkpoint-save",
                daemon=False,
            )
            self._thread.start()
        return handle

    @property
    def _is_behind(self) -> bool:
        return self._position is not None and self._position.is_behind

    def _not_saved(self, step: int, why: str) -> SaveHandle:
        """Return the handle of a save that is left out; the checkpoint before it stands for it."""
        handle = SaveHandle(step)
        handle._seen = True
        latest = self.latest
        error = CheckpointError(f"step {step} is not saved: {why}.")
        handle._end(latest, None if latest is not None else error)
        _log.info("%s", error)
        return handle

    def _write(
        self, snapshot: ObjectSnapshot, order: SaveOrder, handle: SaveHandle, *, show: bool = False
    ) -> None:
        try:
            saved = snapshot.write(self._directory, order, handle._is_urgent, show=show)
        except Exception as error:  # noqa: BLE001 # the next call raises it
            counters.counter("checkpoint.failed").add()
            handle._seen = self._recovers and isinstance(error, ServerLostInSave)
            if handle._seen:  # the server is restored
                _log.warning("step %d is not saved: %s; the next save follows", order.step, error)
            else:
                trace = None if isinstance(error, CheckpointError) else error  # it says everything
                _log.error("the save of step %d failed: %s", order.step, error, exc_info=trace)
            handle._end(None, error)
            return
        except BaseException as error:  # Ctrl-C: raised here and now
            handle._seen = True
            handle._end(None, error)
            raise
        self._points.set(snapshot.points(saved))
        try:
            self._delete_old()
        except OSError as error:
            _log.warning("old checkpoints in %s could not be deleted: %s", self.directory, error)
        handle._end(saved, None)
        counters.counter("checkpoint.saved").add()
        counters.counter("checkpoint.bytes").add(saved.bytes)
        counters.distribution("checkpoint.seconds").record(handle.seconds)
        _log.info("saved step %d to %s in %.2f s", order.step, saved.path, handle.seconds)

    def _delete_old(self) -> None:
        going = to_delete(
            with_evaluations(self._directory),
            max_to_keep=self._max_to_keep,
            best=self._best,
            damaged=self._damaged,
        )
        for one in going:
            self._directory.delete(one.path.name)

    # ------------------------------------------------------------------ restoring

    def restore_or_initialize(self, *, strict: bool = True) -> int:
        """Continue a live job, else restore the newest intact checkpoint; return the step, or 0 without either.

        A job is live if its coordinator was lost and the parameter servers still have its variables
        (``ParameterServerStrategy(job=…)``). A checkpoint with a missing or damaged file is skipped with a
        warning that names the file.

        Args:
            strict: raise an error if names are missing or unexpected, or types differ.

        Raises:
            JobMismatch: the live job has other variables or objects.
            CheckpointMismatch: the checkpoint does not match the objects.
            CheckpointCorrupt: there are checkpoints, but none is intact.
        """
        self._check_open()
        self._raise_earlier_failure()
        self._finish_running()
        if self._position is not None and self._position.is_live:
            step = self._position.resume()
            self._points.set(self._position.points(self._directory) if self._recovers else ())
            self._continues, self._saves_soon = True, True
            self._last_step, self._last_time = step, time.monotonic()
            _log.warning("continuing the live job at step %d", step)
            return step
        if self._position is not None:
            self._position.suspend()
        step, name = self._restore_newest(strict=strict)
        if self._position is not None:
            self._position.establish(step, name)
        return step

    def _restore_newest(self, *, strict: bool) -> tuple[int, str]:
        points: list[Any] = []
        restored = restore_newest(
            self._directory,
            self._checkpoint._objects,
            strict=strict,
            allow_pickle=self._allow_pickle,
            damaged=self._damaged,
            points=points,
        )
        self._continues = True
        if restored is None:
            return 0, ""
        self._points.set(points)
        self._last_step, self._last_time = restored.step, time.monotonic()
        return restored.step, restored.path.name

    def steps(self, stop: int) -> Iterator[int]:
        """Restore the newest checkpoint, then yield the numbers of the steps to make.

        With ``on_server_loss="rewind"``, the loop repeats steps after the loss of a parameter server: it restores
        the newest checkpoint, and the numbers continue from its step. It saves the first checkpoint at the
        start, and waits for all scheduled closures after the last number. A loss outside the loop raises
        `ParameterServerLost`.

        Args:
            stop: how many steps the run has.

        Raises:
            CheckpointError: the checkpoint could not be restored.

        Example:
            >>> import tempfile, torch, stratagem as sg
            >>> model = torch.nn.Linear(2, 1)
            >>> checkpoint = sg.Checkpoint(model=model)
            >>> with sg.CheckpointManager(checkpoint, tempfile.mkdtemp(), every_steps=2) as manager:
            ...     for step in manager.steps(3):
            ...         _ = manager.step(step + 1)
            ...     step
            2
        """
        step = self.restore_or_initialize()
        if not self._rewinds:
            yield from range(step, stop)
            return
        if self.latest is None:
            self.save(step, wait=True)
        yield from self._points.repeating(
            step, stop, self._checkpoint._objects, self.restore_or_initialize
        )

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Finish a running save and release the directory; idempotent.

        Raises:
            CheckpointError: a save failed and no call has raised its error yet.
            SystemExit: SIGTERM arrived after the last `step`.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._finish_running()
            self._raise_earlier_failure()
        finally:
            self._points.activate(is_active=False)
            self._copies.free()
            self._lock.close()
            if self._sigterm is not None:
                self._sigterm.close()
        if self._sigterm is not None and self._sigterm.arrived:
            raise SystemExit(EXIT_CODE)

    def _finish_running(self) -> None:
        if self._running is not None and not self._running._wait(SAVE_LIMIT_S):
            raise CheckpointTimeout(
                f"the save of step {self._running.step} has not ended after {SAVE_LIMIT_S:g} s."
            )
        if self._thread is not None:
            self._thread.join(SAVE_LIMIT_S)
            self._thread = None

    def _raise_earlier_failure(self) -> None:
        running = self._running
        error = None if running is None else running._unseen_error()
        if running is not None and error is not None:
            raise CheckpointError(f"the save of step {running.step} failed: {error}") from error

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"the manager of {self.directory} is closed.")

    def _check_continues(self) -> None:
        if not self._continues:
            raise CheckpointError(
                f"{self.directory} holds {len(self._found_steps)} checkpoint(s) of an earlier run (the "
                f"newest of step {self._found_steps[-1]}), and this run has not restored one. Call "
                "restore_or_initialize() first to continue from it, or use another directory."
            )

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"last save at step {self._last_step}"
        return f"<CheckpointManager of {self.directory}, {state}>"
