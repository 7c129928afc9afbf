"""Position of a named job: the step, the number of the next closure, and the coordinator's state.

`CheckpointManager.step` takes marks, and `CheckpointManager.restore_or_initialize` restores the newest safe one (docs/design/0009).
The servers keep the bytes of one mark, the *record*, and do not decode it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from torch.optim import Optimizer
from typing_extensions import override

from stratagem import config
from stratagem._checkpoint.directory import CheckpointDirectory
from stratagem._checkpoint.encoding import from_torch_bytes, torch_bytes
from stratagem._checkpoint.live_state import collect, live_in
from stratagem._checkpoint.matching import Match
from stratagem._checkpoint.newest_checkpoint import points_of_job
from stratagem._checkpoint.random_state import read_random_state, set_random_state
from stratagem._checkpoint.rewinding import Points
from stratagem._checkpoint.server_group import ServerGroup, frozen, layout_of, strategies_of
from stratagem._ps.blocks.manifest import StoredTensor
from stratagem._ps.coordinator.named_job import NamedJob
from stratagem._ps.placement import Description
from stratagem.errors import CheckpointError, JobMismatch

if TYPE_CHECKING:
    from stratagem._strategies.parameter_server import ParameterServerStrategy

_log = logging.getLogger("stratagem.checkpoint")

EVERY_S: Final = 0.05
"""Shortest time between two marks; what a new coordinator repeats is bounded by it and by the queue."""

EVERY_STEPS: Final = 1024
"""Steps after which a mark is taken in any case: a loop may schedule much faster than workers work."""

COST: Final = 0.01
"""Largest part of the time that marks take."""

MARKS: Final = 4096
"""Marks kept while their closures run; beyond it every second one is dropped."""


@final
class _LiveRows:
    """Rows of a live job: no record has them, and they stay as they are when a coordinator continues the job."""

    takes_all: Final = True

    def __init__(self, group: ServerGroup) -> None:
        self.group = group
        self.names: set[str] = set()

    def optimizer_state(self, where: Description, optimizer: int) -> dict[str, Any]:
        return {}

    def frozen(self) -> AbstractContextManager[None]:
        return frozen([self.group])

    def take(self, value: Any, name: str, stored: StoredTensor) -> bool:
        if layout_of(self.group, value) is None:
            return False
        self.names.add(name)
        return True

    def take_state(self, *_: Any) -> set[str]:
        return set()


class _Mark(NamedTuple):
    step: int
    closure: int  # number of the next one
    record: bytes


@final
class JobPosition:
    """The position of the named job that holds some of a checkpoint's objects.

    Args:
        objects: of the checkpoint; plain values in it are replaced by `resume`.
        strategy: the strategy of the job.
        allow_pickle: accept values of any class in states.
        rewinds: see `NamedJob.rewinds`.
    """

    def __init__(
        self,
        objects: MutableMapping[str, Any],
        strategy: ParameterServerStrategy,
        *,
        allow_pickle: bool,
        rewinds: bool = False,
    ) -> None:
        self._objects = objects
        self._strategy = strategy
        self._group = ServerGroup(strategy)
        self._rows = _LiveRows(self._group)
        job = strategy._variables.job
        assert job is not None, "the manager has found it"
        self._job: NamedJob = job
        job.rewinds = rewinds
        self._allow_pickle = allow_pickle
        self._lock = threading.Lock()
        self._marks: list[_Mark] = []
        self._is_established = False  # whether the servers have a record
        self._caught_up = True  # see `is_behind`
        self._base = ""  # name of the checkpoint that this start of the job began with
        self._next_at = 0.0
        self._steps = 0  # since the last mark

    @classmethod
    def of(
        cls, objects: MutableMapping[str, Any], *, allow_pickle: bool, rewinds: bool = False
    ) -> JobPosition | None:
        """Return the position of the job that holds some of the objects; None if no named job does.

        Raises:
            ValueError: the objects belong to several named jobs.
        """
        live = [value for _, value in live_in(dict(objects))]
        named = [one for one in strategies_of(live) if one._variables.job is not None]
        if len(named) > 1:
            raise ValueError(
                f"the objects of one checkpoint belong to the jobs "
                f"{', '.join(one._variables.job.connection.job for one in named)}: use a checkpoint for each job."
            )
        if not named:
            return None
        return cls(objects, named[0], allow_pickle=allow_pickle, rewinds=rewinds)

    def checked_name(self, directory: CheckpointDirectory) -> str:
        """Return the job's name.

        Raises:
            CheckpointError: another job has saved into this directory.
        """
        newest = directory.latest()
        name, other = self._job.connection.job, "" if newest is None else newest.manifest.job
        if newest is not None and other not in ("", name):
            raise CheckpointError(
                f"{directory.path} has checkpoints of job {other!r} (the newest: {newest.path.name}), and this is "
                f"job {name!r}, which would replace them. Use another directory for this job. To begin with the values of the "
                f"other one, call checkpoint.restore({str(newest.path)!r})."
            )
        return name

    @property
    def is_live(self) -> bool:
        """True if the servers hold a job that this coordinator has not resumed yet."""
        return self._job.is_attaching

    @property
    def is_behind(self) -> bool:
        """True if the variables contain closures of an earlier coordinator that this one has not repeated yet.

        A checkpoint would have them twice: in its variables, and again in the steps after it.
        """
        if self._caught_up or self._progress(went_on=False)[1] > self._job.state.last_closure:
            self._caught_up = True
        return not self._caught_up

    @property
    def predecessor(self) -> str:
        """Host and process of the coordinator that this one has replaced; empty if there was none."""
        return self._job.state.coordinator

    # ------------------------------------------------------------------ taking marks

    def suspend(self) -> None:
        """Make the job one that cannot be adopted: its variables are about to be replaced."""
        self._job.connection.before_beat = None
        self._marks.clear()
        if self._is_established:
            self._is_established = False
            self._job.suspend(timeout_s=config.wire_timeout_s())

    def establish(self, step: int, base: str = "") -> None:
        """Make the job one that can be adopted: send every value and this position to the servers.

        `base`: name of the checkpoint that the values come from, or empty.
        """
        if not self._caught_up:
            # Servers would take new closures for those of the coordinator before, which the checkpoint may lack.
            following = max(self._progress(went_on=True)[0], self._job.state.last_closure + 1)
            self._continue_at(following)
        self._caught_up, self._base = True, base
        self._job.connection.check()
        self._group.variables.flush()
        self._create_optimizers()
        self._group.variables.client.wait_for_writes()
        closure = self._progress(went_on=True)[0]
        record = self._record(step, closure)
        self._job.note_and_wait(record, timeout_s=config.wire_timeout_s())
        self._is_established = True
        self._watch()

    def take(self, step: int) -> None:
        """Take a mark if one is due: this many steps have been scheduled."""
        self._steps += 1
        now = time.monotonic()
        if (now < self._next_at and self._steps < EVERY_STEPS) or not self._is_established:
            return
        closure, unfinished, failed = self._progress(went_on=True)
        if unfinished < closure and self._strategy._cluster_views().has_advances:
            return  # closures that run will change a scheduler or scaler here, when they have finished
        mark = _Mark(step, closure, self._record(step, closure))
        with self._lock:
            if failed is not None:  # the program has gone on after an error
                self._marks = [one for one in self._marks if one.closure <= failed]
            if len(self._marks) >= MARKS:
                del self._marks[1::2]
            self._marks.append(mark)
        self._publish(unfinished)
        self._steps = 0
        self._next_at = now + max(EVERY_S, (time.monotonic() - now) / COST)

    def _publish(self, unfinished: int) -> None:
        """Send the newest mark all of whose closures have finished."""
        with self._lock:
            safe = [one for one in self._marks if one.closure <= unfinished]
            if safe:
                del self._marks[: self._marks.index(safe[-1]) + 1]
                self._job.note(safe[-1].record)

    def _watch(self) -> None:
        """Publish marks also while the program waits, in `join` for example."""

        def publish() -> bool:
            if self._marks:
                self._publish(self._progress(went_on=False)[1])
            return bool(self._marks)

        self._job.connection.before_beat = publish

    def _engine(self) -> Any:
        """Return the engine of the strategy's coordinator; None if that has not connected yet."""
        coordinator = self._strategy._cluster_coordinator
        return None if coordinator is None else coordinator._running

    def _progress(self, *, went_on: bool) -> tuple[int, int, int | None]:
        """See `ClosureTable.progress`. `went_on`: the program calls, so that it knows about errors."""
        engine = self._engine()
        if engine is None:
            return self._job.first_closure, self._job.first_closure, None
        with engine.lock:
            found: tuple[int, int, int | None] = engine.closures.progress(
                went_on=went_on and not engine.queue.stopped
            )
            return found

    def _create_optimizers(self) -> None:
        for _, value in live_in(dict(self._objects)):
            if isinstance(value, Optimizer):
                parameters = (one for group in value.param_groups for one in group["params"])
                if any(layout_of(self._group, one) is not None for one in parameters):
                    self._group.optimizers.create(value)

    def _record(self, step: int, closure: int) -> bytes:
        # A mark counts when its closures have finished.
        apart = collect(
            self._objects, allow_pickle=self._allow_pickle, rows=[self._rows], when_finished=True
        )
        stored = {name: (one.dtype, one.shape) for name, one in apart.elsewhere.items()}
        content = {
            "step": step,
            "closure": closure,
            "base": self._base,
            "objects": apart.skeleton,
            "elsewhere": stored,
            "tensors": {name: tensor.detach().cpu() for name, tensor in apart.tensors.items()},
            "random": read_random_state(),
        }
        return torch_bytes(content)

    # ------------------------------------------------------------------ going on

    def resume(self) -> int:
        """Adopt the live job: bind the variables, put the position back; return the step.

        Raises:
            JobMismatch: the script's variables, optimizers or objects are not those of the job.
        """
        variables = self._group.variables
        variables.adopt()
        self._create_optimizers()
        content = from_torch_bytes(
            self._job.state.record,
            f"the record of job {self._job.connection.job!r}",
            allow_pickle=self._allow_pickle,
        )
        here = {name: (one.dtype, one.shape) for name, one in content["tensors"].items()}
        stored = {
            name: StoredTensor(str(dtype).removeprefix("torch."), tuple(shape))
            for name, (dtype, shape) in {**here, **content["elsewhere"]}.items()
        }
        match = Match(self._objects, content["objects"], stored, self._rows)
        differences = [
            *(f"{n!r} of the checkpoint's objects is not in the live job" for n in match.missing),
            *(
                f"{n!r} of the live job is not among the checkpoint's objects"
                for n in match.unexpected
            ),
            *match.different,
            *match.doubtful,
        ]
        if differences:
            raise JobMismatch(
                f"the objects of the checkpoint are not those of the live job {self._job.connection.job!r}: "
                + "; ".join(differences),
                differences=differences,
            )
        match.apply(content["tensors"], strict=True)
        set_random_state(content["random"])
        variables.client.discards_writes = False
        self._job.resumed(content["closure"])
        self._continue_at(content["closure"])
        self._is_established, self._caught_up, self._base = True, False, content["base"]
        self._watch()
        step: int = content["step"]
        return step

    def points(self, directory: CheckpointDirectory) -> Points:
        """Return what lost servers of the job can be restored from, before this coordinator has saved."""
        return points_of_job(
            directory,
            self._objects,
            allow_pickle=self._allow_pickle,
            instance=self._job.connection.instance,
            base=self._base,
        )

    def _continue_at(self, closure: int) -> None:
        """Give this number to the next closure."""
        self._job.first_closure = closure
        engine = self._engine()
        if engine is not None:
            with engine.lock:
                engine.closures.continue_at(closure)

    @override
    def __repr__(self) -> str:
        return f"<JobPosition of {self._job!r}, {len(self._marks)} marks wait>"
