"""Position of a named job: the step, the number of the next closure, and the coordinator's state.

`CheckpointManager.step` takes marks, and `CheckpointManager.restore_or_initialize` restores the newest safe one (docs/design/0009).
The servers keep the bytes of one mark, the *record*, and do not decode it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from stratagem import config
from stratagem._checkpoint.closure_positions import ClosurePosition
from stratagem._checkpoint.directory import CheckpointDirectory
from stratagem._checkpoint.encoding import TakenApart, decode, from_torch_bytes, torch_bytes
from stratagem._checkpoint.live_state import kind_of, live_in
from stratagem._checkpoint.newest_checkpoint import points_of_job
from stratagem._checkpoint.random_state import read_random_state, set_random_state
from stratagem._checkpoint.rewinding import Points
from stratagem._checkpoint.server_group import ServerGroup, layout_of, strategies_of
from stratagem._checkpoint.server_state import kept_state
from stratagem._core.values import convert_to_tensor
from stratagem._ps.coordinator.named_job import NamedJob
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
                f"{', '.join(one._variables.job.name for one in named)}: use a checkpoint for each job."
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
        name, other = self._job.name, "" if newest is None else newest.manifest.job
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
        if self._caught_up or self._progress(went_on=False)[1] > self._job.last_closure:
            self._caught_up = True
        return not self._caught_up

    @property
    def predecessor(self) -> str:
        """Host and process of the coordinator that this one has replaced; empty if there was none."""
        return self._job.predecessor

    # ------------------------------------------------------------------ taking marks

    def suspend(self) -> None:
        """Make the job one that cannot be adopted: its variables are about to be replaced."""
        self._job.before_beat(None)
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
            following = max(self._progress(went_on=True)[0], self._job.last_closure + 1)
            self._continue_at(following)
        self._caught_up, self._base = True, base
        self._job.check()
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

        self._job.before_beat(publish)

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
            if isinstance(value, Optimizer) and any(self._tensors_on_servers(value)):
                self._group.optimizers.create(value)

    def _tensors_on_servers(self, optimizer: Optimizer) -> Iterator[bool]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield self._is_on_servers(parameter)

    def _is_on_servers(self, value: Any) -> bool:
        return layout_of(self._group, value) is not None

    def _record(self, step: int, closure: int) -> bytes:
        apart = TakenApart(self._allow_pickle)
        states = [(name, apart.encode(state, (name,))) for name, state in self._local_states()]
        content = {
            "step": step,
            "closure": closure,
            "base": self._base,
            "states": states,
            "tensors": {name: tensor.detach().cpu() for name, tensor in apart.tensors.items()},
            "random": read_random_state(),
        }
        return torch_bytes(content)

    def _local_states(self) -> Iterator[tuple[str, Any]]:
        """Yield name and state of everything that lives on the coordinator."""
        for name, _, _, value in _leaves(self._objects):
            yield name, self._state_of(value) if kind_of(value) else value

    def _state_of(self, value: Any) -> Any:
        kind = kind_of(value)
        if isinstance(value, nn.Module):
            with self._group.frozen():
                state = kept_state(value)
            return {
                key: one.detach() if isinstance(one, Tensor) else one
                for key, one in state.items()
                if not (isinstance(one, Tensor) and self._is_on_servers(one))
            }
        if isinstance(value, Optimizer):
            if any(self._tensors_on_servers(value)):
                return [
                    {key: one for key, one in group.items() if key != "params"}
                    for group in value.param_groups
                ]
            return value.state_dict()
        if kind in ("variable", "assignable"):
            return None if self._is_on_servers(value) else convert_to_tensor(value).detach()
        if kind == "generator":
            return value.get_state()
        if isinstance(value, ClosurePosition):
            return value.state_dict_when_finished()  # a mark counts when its closures have finished
        return value.state_dict()

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
            self._job.record,
            f"the record of job {self._job.name!r}",
            allow_pickle=self._allow_pickle,
        )
        found = {name: decode(one, content["tensors"]) for name, one in content["states"]}
        here = [name for name, _ in self._local_states()]
        differences = [
            *(
                f"{name!r} of the checkpoint's objects is not in the live job"
                for name in here
                if name not in found
            ),
            *(
                f"{name!r} of the live job is not among the checkpoint's objects"
                for name in found
                if name not in here
            ),
        ]
        if differences:
            raise JobMismatch(
                f"the objects of the checkpoint are not those of the live job {self._job.name!r}: "
                + "; ".join(differences),
                differences=differences,
            )
        self._put_back(found)
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
            instance=self._job.instance,
            base=self._base,
        )

    def _continue_at(self, closure: int) -> None:
        """Give this number to the next closure."""
        self._job.first_closure = closure
        engine = self._engine()
        if engine is not None:
            with engine.lock:
                engine.closures.continue_at(closure)

    def _put_back(self, states: Mapping[str, Any]) -> None:
        for name, holder, key, value in list(_leaves(self._objects)):
            if kind_of(value):
                self._load(value, states[name])
            elif not isinstance(holder, tuple):
                holder[key] = states[name]

    def _load(self, value: Any, state: Any) -> None:
        kind = kind_of(value)
        if isinstance(value, nn.Module):
            if state:
                value.load_state_dict(state, strict=False)
        elif isinstance(value, Optimizer):
            if isinstance(state, list):
                for group, saved in zip(value.param_groups, state, strict=True):
                    group.update(saved)
            else:
                value.load_state_dict(state)
        elif kind in ("variable", "assignable"):
            if state is not None:
                value.assign(state)
        elif kind == "generator":
            value.set_state(state)
        else:
            value.load_state_dict(state)

    @override
    def __repr__(self) -> str:
        return f"<JobPosition of {self._job!r}, {len(self._marks)} marks wait>"


def _leaves(holder: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield name, container, key and value of live objects, and of the largest nests without any."""
    items = holder.items() if isinstance(holder, Mapping) else enumerate(holder)
    for key, value in items:
        here = (*path, str(key))
        if kind_of(value) or next(live_in(value), None) is None:
            yield ".".join(here), holder, key, value
        else:
            yield from _leaves(value, here)
